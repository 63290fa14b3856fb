"""Golden files: what the reference implementation computed (make_golden.py), read as this package's configs and parameters."""

import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflash_jax.models import family_of

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-5


def cases(family: str) -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob(f"{family}_*.npz"))


def difference(ours: Any, theirs: np.ndarray) -> float:
    """Largest absolute difference over the largest absolute value expected; entries of -inf must be the same ones."""
    ours = np.asarray(ours)
    assert ours.shape == theirs.shape
    finite = np.isfinite(theirs)
    assert np.array_equal(ours[~finite], theirs[~finite])
    return float(np.abs(ours[finite] - theirs[finite]).max() / np.abs(theirs[finite]).max())


@functools.cache
def golden(case: str) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """The config as this package reads it, the file's tensors as parameters, its inputs and its outputs."""
    with np.load(GOLDEN / f"{case}.npz", allow_pickle=False) as file:
        groups = {
            prefix: {key.split(":")[1]: file[key] for key in file if key.startswith(prefix)}
            for prefix in ("tensor:", "in:", "out:")
        }
        hf_config = json.loads(str(file["config"]))
    family = family_of(hf_config)
    tensors = {family.canonical(name): value for name, value in groups["tensor:"].items()}
    config = family.config(hf_config, tensors.keys())
    parameters = family.parameters(config)
    assert {source.name for parameter in parameters for source in parameter.sources} == set(tensors)
    params = {}
    for parameter in parameters:
        rows = np.concatenate([tensors[source.name] for source in parameter.sources])
        params[parameter.name] = jnp.asarray(rows.astype(parameter.dtype or np.float32))
    inputs = {
        name: jnp.asarray(value, jnp.int32 if value.dtype.kind == "i" else jnp.float32)
        for name, value in groups["in:"].items()
    }
    return config, params, inputs, groups["out:"]
