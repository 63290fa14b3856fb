"""Operands that do not belong together are refused by every public op: what its annotation says is what it checks.

In the test run a shape checker stands around each op. Whatever it rejects of a valid call with one operand changed (an axis
longer, an axis more, floating point where integers belong or the other way round), the op itself must reject, with a ValueError or
by having no implementation: users have no shape checker.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import dflash_kernels
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from .plain import ones, zeros
from .test_attention_wrong_calls import CALLS as ATTENTION
from .test_wrong_calls import CALLS as OTHERS

B, T, N, K, H, D, F, W, PAGE = 2, 3, 4, 2, 16, 32, 24, 3, 4
M = B * T
POOL, TABLE = ones((9, K, PAGE, H)), jnp.arange(B * W, dtype=jnp.int32).reshape(B, W)
SLOTS, LENS = jnp.arange(M, dtype=jnp.int32), jnp.full(B, 7, jnp.int32)
TURNS = {"cos": ones((M, H // 2)), "sin": ones((M, H // 2))}
POOLS, NORMS = {"k_pages": POOL, "v_pages": POOL}, {"q_norm": ones(H), "k_norm": ones(H)}
SEQUENCES = {"page_table": TABLE, "seq_lens": LENS, "q_lens": jnp.full(B, T, jnp.int32)}
QKV = {"qkv": ones((M, (N + 2 * K) * H)), **TURNS}
LAYER = {
    "stream": ones((D, 8)),
    "o": ones((D, N * H)),
    "post_norm": ones(D),
    "gate_up": ones((2 * F, D)),
    "down": ones((D, F)),
    "next_norm": ones(D),
    "following": ones((40, D)),
}
FUSED: dict[str, dict[str, Any]] = {
    "cache_write": {**POOLS, "k": ones((M, K, H)), "v": ones((M, K, H)), "slots": SLOTS},
    "latent_write": {"latent_pages": ones((9, 1, PAGE, 24)), "latents": ones((M, 24)), "slots": SLOTS},
    "qkv_write": {**POOLS, **QKV, **NORMS, "slots": SLOTS},
    "mla_write": {
        "latent_pages": ones((9, 1, PAGE, 24)), "rows": ones((M, 24)), "q": ones((M, N, 20)), "slots": SLOTS,
        "cos": ones((M, 4)), "sin": ones((M, 4)), "norm": ones(16),
    },
    "qkv_attention": {**POOLS, **QKV, **NORMS, **SEQUENCES},
    "attention_chain": {**POOLS, **QKV, **NORMS, **SEQUENCES, **LAYER, "exchange": None},
    "layer_chain": {"x": ones((M, N * H)), **LAYER, "exchange": None},
    "linear_chain": {
        "x": ones((M, 64)), "first": ones((D, 64)), "norm": ones(D), "second": ones((F, D)), "exchange": None,
        "eps": 1e-6,
    },
    "filtered_choice": {
        "logits": ones((M, 50)), "keys": zeros((M, 2), jnp.uint32), "temperature": ones(M), "min_p": zeros(M),
        "top_k": zeros(M, jnp.int32), "top_p": ones(M),
    },
    "drawn_choice": {"logits": ones((M, 50)), "keys": zeros((M, 2), jnp.uint32), "temperature": ones(M)},
    "drawn_candidates": {
        "logits": ones((M, 50)), "keys": zeros((M, 2), jnp.uint32), "temperature": ones(M),
    },
    "latent_unpack": {"packed": zeros((M, 160), jnp.uint8), "kv_lora_rank": 128},
}  # fmt: skip
CALLS = {**OTHERS, **ATTENTION, **FUSED}
ARRAYS = [(op, name) for op, call in CALLS.items() for name, value in call.items() if isinstance(value, jax.Array)]
# The first array of each op and the last one.
ENDS = {f"{op}-{name}" for order in (ARRAYS, ARRAYS[::-1]) for op, name in dict(order).items()}


def changed(array: jax.Array) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    """What somebody may pass by mistake for the array, in shape and dtype, with words for it."""
    shape = array.shape
    for axis, length in enumerate(shape):
        longer = (*shape[:axis], length + 1, *shape[axis + 1 :])
        yield f"axis {axis} of {length + 1}", jax.ShapeDtypeStruct(longer, array.dtype)
    yield "an axis more", jax.ShapeDtypeStruct((1, *shape), array.dtype)
    if shape:
        yield "an axis less", jax.ShapeDtypeStruct(shape[1:], array.dtype)
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    yield "the other kind of numbers", jax.ShapeDtypeStruct(shape, jnp.int32 if floating else jnp.float32)


def outcome(function: Any, call: dict[str, Any]) -> BaseException | None:
    """The error of a call that is traced only, None without one."""
    arrays = {name: value for name, value in call.items() if isinstance(value, jax.Array | jax.ShapeDtypeStruct)}
    rest = {name: value for name, value in call.items() if name not in arrays}
    try:
        jax.eval_shape(lambda given: function(**given, **rest), arrays)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("op", CALLS)
def test_the_calls_are_right(op: str) -> None:
    assert outcome(getattr(dflash_kernels, op), CALLS[op]) is None


@pytest.mark.few(*sorted(ENDS))
@pytest.mark.parametrize(("op", "name"), ARRAYS)
def test_what_the_annotation_rejects_is_refused(op: str, name: str) -> None:
    checked = getattr(dflash_kernels, op)
    plain = inspect.unwrap(checked)
    for words, array in changed(CALLS[op][name]):
        call = CALLS[op] | {name: array}
        if isinstance(outcome(checked, call), TypeCheckError):
            error = outcome(plain, call)
            assert isinstance(error, ValueError | NotImplementedError), f"{op}: {name} with {words}: {error!r}"


@pytest.mark.parametrize("stored", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("given", [jnp.float32, jnp.bfloat16])
def test_no_number_is_cast_to_eight_bits_without_a_scale(given: Any, stored: Any) -> None:
    """0.4 would become 0 in int8 pages, and 500 NaN in float8 ones; what is quantized already is stored as it is."""
    pools = {name: pool.astype(stored) for name, pool in POOLS.items()}
    write, call = inspect.unwrap(dflash_kernels.cache_write), FUSED["cache_write"] | pools
    rows = {name: jnp.full((M, K, H), 0.4, given) for name in ("k", "v")}
    with pytest.raises(
        ValueError, match=f"k of {jnp.dtype(given)} cannot be stored in pages of {jnp.dtype(stored)}: quantize"
    ):
        write(**call | rows)
    kept = {name: jnp.full((M, K, H), 3, stored) for name in ("k", "v")}
    k_pages, v_pages = write(**call | kept)
    for pages in (k_pages, v_pages):
        assert pages.dtype == stored
        assert (pages[0].astype(jnp.float32) == 3).all()
    latents = inspect.unwrap(dflash_kernels.latent_write)
    pool = zeros((9, 1, PAGE, 24), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="latent_encode"):
        latents(pool, ones((M, 24), given), SLOTS)
