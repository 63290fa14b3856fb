"""Sampling under filters: the definition against float64, the Hopper kernel interpreted and for real (`-m gpu`)."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import (
    NoImplementationError,
    drawn_candidates,
    drawn_choice,
    drawn_refusal,
    filtered_choice,
    noise_of_all,
)
from dflash_kernels.sampling.mosaic_gpu import best_of_parts, launch
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

INTERPRET = plgpu.InterpretGPUParams()
# Temperature, min_p, top_k and top_p of a row.
LAWS = [
    (0.7, 0.0, 20, 0.8), (0.0, 0.5, 1, 0.1), (1.0, 0.0, 0, 1.0), (1.0, 0.0, 1, 1.0), (1.3, 0.02, 0, 1.0), (0.6, 0.0, 0, 0.95),
    (2.0, 0.001, 300, 0.9), (1e-40, 0.0, 50, 0.9), (1.0, 0.0, 10**9, 0.5), (1.0, 0.0, 0, 1e-30), (0.9, 1.0, 0, 1.0),
    (0.8, 0.0, 128, 0.9), (0.8, 0.0, 129, 0.9), (1.0, 0.3, 0, 0.7),
]  # fmt: skip


def call(rows: int, size: int, dtype: Any = jnp.bfloat16, *, seed: int = 0, spread: float = 3.0) -> dict[str, Any]:
    """Rows of many ties under laws that follow one another."""
    rng = np.random.default_rng(seed)
    of_rows = np.array([LAWS[row % len(LAWS)] for row in range(rows)])
    return {
        "logits": jnp.asarray(rng.normal(size=(rows, size)) * spread + 5, dtype),
        "keys": jnp.asarray(rng.integers(2**32, size=(rows, 2)), jnp.uint32),
        "temperature": jnp.asarray(of_rows[:, 0], jnp.float32), "min_p": jnp.asarray(of_rows[:, 1], jnp.float32),
        "top_k": jnp.asarray(of_rows[:, 2], jnp.int32), "top_p": jnp.asarray(of_rows[:, 3], jnp.float32),
    }  # fmt: skip


def unfiltered(given: dict[str, Any]) -> dict[str, Any]:
    """The same call without filters."""
    off = {"min_p": 0.0, "top_k": 0, "top_p": 1.0}
    return given | {name: jnp.full_like(given[name], value) for name, value in off.items()}


def exact(logits: np.ndarray, noise: np.ndarray, law: tuple[float, float, int, float]) -> tuple[int, np.ndarray]:
    """The choice of one row, by the definitions in float64, and what each place counts for."""
    temperature, min_p, top_k, top_p = law
    if temperature < 1e-38:  # less is 0 in float32 where small numbers are
        return int(logits.argmax()), logits
    scaled = (logits - logits.max()) / temperature
    weights = np.exp(scaled)
    keep = weights >= min_p
    if 0 < top_k < len(logits):
        keep &= logits >= np.sort(logits)[-top_k]
    weights = np.where(keep, weights, 0)
    if top_p < 1:
        numbers = np.unique(logits[keep])[::-1]
        mass = np.cumsum([weights[logits == number].sum() for number in numbers])
        keep &= logits >= numbers[np.argmax(mass >= top_p * mass[-1])]
    noisy = np.where(keep, scaled + noise, -np.inf)
    return int(noisy.argmax()), noisy


def check(found: jax.Array, given: dict[str, Any]) -> None:
    logits = np.asarray(given["logits"], np.float64)
    noise = np.asarray(noise_of_all(given["keys"], logits.shape[1]), np.float64)
    assert found.shape == logits.shape[:1]
    assert found.dtype == jnp.int32
    for row, place in enumerate(np.asarray(found)):
        law = tuple(np.asarray(given[name])[row] for name in ("temperature", "min_p", "top_k", "top_p"))
        best, counts = exact(logits[row], noise[row], law)  # type: ignore[arg-type]
        # Two whose sums differ by a rounding alone may change places.
        assert place == best or counts[place] >= counts[best] - 1e-5, f"row {row}: {law}"


@pytest.mark.few("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_agrees_with_float64(dtype: Any) -> None:
    given = call(44, 3016, dtype)
    check(filtered_choice(**given), given)


@pytest.mark.few("3016")
@pytest.mark.parametrize("size", [1024, 3016])
def test_kernel_interpreted(size: int) -> None:
    """Two warpgroups: chunks that end before a row does, and the last one that begins earlier."""
    given = call(len(LAWS), size, seed=size)
    logits, keys, temperature, *limits = given.values()
    check(launch(logits, keys, temperature, tuple(limits), warpgroups=2, interpret=INTERPRET).places[:, 0], given)
    for parts in (1, 4):
        found = launch(logits, keys, temperature, parts=parts, warpgroups=2, interpret=INTERPRET)
        check(best_of_parts(found, temperature), unfiltered(given))


@pytest.mark.few
def test_kernel_refuses_what_is_refused() -> None:
    """Most of a row is -inf; more are asked for than there are; noise cannot bring back what is out; what lies behind the rows that
    have keys is not read; the first of equal numbers."""
    logits = jnp.full((8, 1032), -jnp.inf, jnp.bfloat16).at[:, jnp.array([7, 1031])].set(1).at[:, 900].set(0.5)
    logits = logits.at[7:].set(jnp.nan)
    keys = jnp.asarray(np.random.default_rng(0).integers(2**32, size=(7, 2)), jnp.uint32)
    temperature, ones = jnp.array([0, 1e-3, 1, 1, 1, 1, 1], jnp.float32), jnp.ones(7)
    limits = 0 * ones, jnp.array([5, 2, 3, 0, 2, 2, 2]), ones.at[3].set(0.5)
    law = dict(zip(("min_p", "top_k", "top_p"), limits, strict=True))
    expected = filtered_choice(logits, keys, temperature=temperature, **law).tolist()
    assert expected[0] == 7
    assert set(expected) <= {7, 900, 1031}
    found = launch(logits, keys, temperature, limits, warpgroups=2, interpret=INTERPRET)
    assert found.places[:, 0].tolist() == expected
    found = best_of_parts(launch(logits, keys, temperature, parts=2, warpgroups=2, interpret=INTERPRET), temperature)
    assert found.tolist() == drawn_choice(logits, keys, temperature).tolist()


def test_candidates_of_the_definition() -> None:
    given = unfiltered(call(11, 3016))
    named = given["logits"], given["keys"], given["temperature"]
    found, listed = drawn_choice(*named), drawn_candidates(*named)
    assert listed.shape == (11, 8)
    assert (listed == found[:, None]).any(axis=1).all()
    assert (np.asarray(listed) % 8 == np.arange(8)).all()
    check(found, given)


def test_wrong_calls() -> None:
    given = call(2, 1024)
    for name, wrong, message in (
        ("keys", jnp.zeros((2, 8), jnp.uint32), "do not fit logits"), ("top_k", jnp.ones(2), "must hold integers"),
        ("top_p", jnp.ones(3), "do not fit logits"), ("logits", jnp.zeros((2, 0)), "one entry or more"),
        ("keys", jnp.zeros((3, 2), jnp.uint32), "do not fit logits"), ("keys", jnp.zeros((2, 2)), "must hold integers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(filtered_choice)(**{**given, name: wrong})  # the test run checks annotations first
    with pytest.raises(NoImplementationError, match="needs a Hopper GPU"):
        filtered_choice(**given, implementation="mosaic_gpu")
    for odd in (call(2, 1000), call(2, 1028), call(2, 1024, jnp.float32)):
        with pytest.raises(NotImplementedError, match="takes bfloat16 rows of a multiple of 8, 1024 at least"):
            launch(odd["logits"], odd["keys"], odd["temperature"], interpret=INTERPRET)
        with h200():
            assert "1024 at least" in (drawn_refusal(odd["logits"]) or "")
    wide = jax.ShapeDtypeStruct((2, 2**24 + 8), jnp.dtype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="takes rows of at most 16777216"):
        jax.eval_shape(launch, wide, given["keys"], given["temperature"])
    assert "needs a Hopper GPU" in (drawn_refusal(given["logits"]) or "")
    with h200():
        assert drawn_refusal(given["logits"]) is None


@pytest.mark.few
def test_lowers_for_a_hopper_gpu() -> None:
    """No table of noise: nothing in float32 is as long as a row."""
    shapes = jax.eval_shape(lambda: call(128, 151_936))
    with h200():
        program = jax.jit(lambda given: filtered_choice(**given)).trace(shapes).lower(lowering_platforms=("cuda",))
    text = program.as_text()
    assert text.count("mosaic_gpu_v2") == 1
    assert "151936xf32" not in text


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "size"), [(1, 151_936), (16, 151_936), (130, 151_936), (11, 1024), (22, 128_256)])
def test_kernel(rows: int, size: int) -> None:
    for seed, spread in ((1, 3.0), (2, 0.3)):
        given = call(rows, size, seed=seed, spread=spread)
        check(filtered_choice(**given, implementation="mosaic_gpu"), given)
        alone = {name: each[-1:] for name, each in given.items()}
        whole = filtered_choice(**given)
        assert filtered_choice(**alone).tolist() == whole[-1:].tolist()
        named = given["logits"], given["keys"], given["temperature"]
        found = drawn_choice(*named, implementation="mosaic_gpu")
        check(found, unfiltered(given))
        assert (drawn_candidates(*named, implementation="mosaic_gpu") == found[:, None]).any(axis=1).all()
