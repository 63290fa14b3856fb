"""Proving that a converted folder holds what its source holds.

`verify_hash` compares every bit; `verify_logits` runs both through the model and compares what comes out.
"""

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_convert.errors import VerificationError
from dflash_convert.write import Progress, silent
from dflash_jax.attention.dense import dense_attend
from dflash_jax.checkpoints.cache_scales import CONVERTED_SCALES
from dflash_jax.checkpoints.converted import Checkpoint, open_converted
from dflash_jax.checkpoints.finite import all_finite
from dflash_jax.checkpoints.huggingface import HuggingFaceCheckpoint, cast
from dflash_jax.checkpoints.mapping import Plan, Step
from dflash_jax.checkpoints.opening import open_checkpoint
from dflash_jax.checkpoints.safetensors import chunks
from dflash_jax.errors import CheckpointError
from dflash_jax.models import bind
from dflash_jax.quantization.kv_formats import CacheScales

# Largest permitted difference of logits over the largest logit, by the dtype that weights were narrowed to. A weight's relative
# rounding error is at most 2**-9 in bfloat16 and 2**-12 in float16; the rest is room for many of them to add up.
NARROWED_TOLERANCE = {"bfloat16": 2.0**-4, "float16": 2.0**-7}
_TOKENS = 16


def verify_hash(folder: Path, source: HuggingFaceCheckpoint, progress: Progress = silent) -> None:
    """Reads the folder back: files against their recorded sha256, parameters and scales bit for bit against the source's tensors.

    Where the plan narrows, the source is narrowed the same way before it is compared.

    Raises:
      VerificationError: names every parameter that differs or holds values that are not finite.
    """
    try:
        converted = open_converted(folder, hashes=True)
    except CheckpointError as error:
        raise VerificationError(str(folder), error.problems) from error
    plan, problems = source.plan, list[str]()
    steps = {step.parameter.name: step for step in plan.steps}
    if not _same_scales(converted.cache_scales, source.cache_scales):
        problems.append(f"{CONVERTED_SCALES} differs from its source; convert again")
    with progress("verifying", plan.nbytes) as advance:
        for arrays in converted.groups():
            for name in list(arrays):
                array = arrays.pop(name)
                problems += _array_problems(steps[name], array)
                advance(array.nbytes)
                # Gone before the next group is read.
                del array
    if problems:
        raise VerificationError(str(folder), problems)


def _same_scales(ours: CacheScales | None, theirs: CacheScales | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return all(np.array_equal(a, b) for a, b in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True))


def _array_problems(step: Step, array: np.ndarray) -> list[str]:
    """Differences of a parameter as read back from its source."""
    name = step.parameter.name
    if array.dtype != jnp.dtype(step.dtype) or array.shape != step.parameter.shape:
        found = f"{array.dtype.name} {list(array.shape)}"
        return [f"{name} is {found}, expected {step.dtype} {list(step.parameter.shape)}"]
    flat, position, different, not_finite = array.reshape(-1), 0, 0, 0
    for tensor in step.tensors:
        for piece in chunks(tensor):
            part = flat[position : position + piece.size]
            bits = np.dtype(f"u{part.dtype.itemsize}")
            different += int(np.count_nonzero(part.view(bits) != cast(piece, part.dtype, tensor).view(bits)))
            if jnp.issubdtype(part.dtype, jnp.floating) and not all_finite(part):
                not_finite += piece.size - int(np.count_nonzero(np.isfinite(part)))
            position += piece.size
    problems = []
    if different:
        problems.append(f"{name} differs from its source in {different:,} of {flat.size:,} values; convert again")
    if not_finite:
        advice = "the source is damaged" if "cast" not in step.op else f"{step.dtype} may be too small for the source"
        problems.append(f"{name} holds {not_finite:,} values that are not finite; {advice}")
    return problems


def verify_logits(folder: Path, source: Path, plan: Plan, dtype: str) -> float:
    """Loads both folders in float32, runs both on the same random tokens, and compares logits.

    Both models are held one after the other, whole. A drafter borrows a random embedding and head where it has none.

    Args:
      folder: the converted folder.
      source: the Hugging Face folder.
      dtype: what was converted to; decides the tolerance when the plan narrows. Otherwise equality is exact.

    Returns:
      The largest difference over the largest value.

    Raises:
      VerificationError: the difference is larger than permitted, or a value is not finite.
    """
    results = []
    for path in (source, folder):
        results.append(np.asarray(_outputs(open_checkpoint(path))))
        gc.collect()
    expected, found = results
    # Ids outside a reduced draft vocabulary are -inf in both.
    usable = np.isfinite(expected)
    if np.isnan(expected).any() or not np.array_equal(usable, np.isfinite(found)):
        raise VerificationError(str(folder), "outputs are not finite where they should be; the source is damaged")
    expected, found = expected[usable], found[usable]
    difference = float(np.abs(expected - found).max()) / (float(np.abs(expected).max()) or 1.0)
    permitted = NARROWED_TOLERANCE[dtype] if plan.narrowed else 0.0
    if not difference <= permitted:
        problem = (
            f"outputs differ by {difference:.3g} of the largest value, permitted is {permitted:.3g}; convert again"
        )
        raise VerificationError(str(folder), problem)
    return difference


def _outputs(checkpoint: Checkpoint) -> jax.Array:
    """The model's outputs for tokens and features drawn from a fixed key, float32."""
    config, params = checkpoint.config, checkpoint.load("float32")
    key = jax.random.key(0)
    positions = jnp.arange(_TOKENS)[None]
    if checkpoint.family.role == "target":
        ids = jax.random.randint(key, positions.shape, 0, config.vocab_size)

        def target(params: dict[str, jax.Array]) -> jax.Array:
            model = bind(config, params)
            return model.logits(model(ids, positions, dense_attend())[0])

        return jax.jit(target)(params)
    width = len(config.target_layer_ids) * config.target_hidden_size
    features = jax.random.normal(key, (1, _TOKENS, width))
    pending = jax.random.randint(key, (1,), 0, config.vocab_size)
    table = jax.random.normal(key, (config.vocab_size, config.hidden_size)) * 0.02

    def draft(params: dict[str, jax.Array]) -> jax.Array:
        model = bind(config, params)
        context = model.context_kv(model.context(features), positions)
        block = model.block_embeddings(pending, table)
        slots = _TOKENS + jnp.arange(config.block_size)[None]
        return model.logits(model(block, slots, dense_attend(context=context))[0], table)

    return jax.jit(draft)(params)
