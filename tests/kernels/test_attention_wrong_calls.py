"""Numbers, packed sequences and schedules in calls of attention. What people get wrong in any op is in test_wrong_calls.py."""

import inspect
from typing import Any

import dflash_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError
from jax import Array

from tests.devices import custom_calls, h200

from .plain import ones, zeros

FLOATS, LENS = ones((10, 4, 16)), jnp.array([9, 16], jnp.int32)
POOL, TABLE = ones((8, 2, 4, 16)), jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
ENDS = jnp.array([0, 4, 10], jnp.int32)
CALLS: dict[str, dict[str, Any]] = {
    "paged_attention": {
        "q": ones((2, 3, 4, 16)), "k_pages": POOL, "v_pages": POOL, "page_table": TABLE, "seq_lens": LENS,
    },
    "ragged_attention": {"q": FLOATS, "k": FLOATS[:, :2], "v": FLOATS[:, :2], "cu_q_lens": ENDS},
    "ragged_paged_attention": {
        "q": FLOATS, "k_pages": POOL, "v_pages": POOL, "cu_q_lens": ENDS, "page_table": TABLE, "seq_lens": LENS,
    },
    "mla_attention": {
        "q": ones((2, 3, 4, 16)), "latent_pages": POOL[:, :1], "page_table": TABLE, "seq_lens": LENS, "kv_lora_rank": 8,
        "scale": 0.25,
    },
}  # fmt: skip
MASKED = ("paged_attention", "ragged_attention", "ragged_paged_attention")


@pytest.mark.few("paged_attention")
@pytest.mark.parametrize("op", MASKED)
def test_numbers_of_any_width(op: str) -> None:
    """Windows past any sequence have no border, and NumPy's numbers make no result wider."""
    call = inspect.unwrap(getattr(dflash_kernels, op))
    wanted = call(**CALLS[op], scale=0.5, soft_cap=3.0, alibi_slopes=ones(4), return_lse=True)
    with jax.enable_x64(True):
        given = call(
            **CALLS[op], window=(2**31 - 1, 2**40), scale=np.float64(0.5), soft_cap=np.float64(3), alibi_slopes=ones(4),
            return_lse=True,
        )  # fmt: skip
    for ours, theirs in zip(given, wanted, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    one = call(**CALLS[op], scale=jnp.float32(0.5), soft_cap=3.0, alibi_slopes=ones(4))
    np.testing.assert_array_equal(one, wanted[0])


@pytest.mark.parametrize("op", CALLS)
def test_a_traced_number(op: str) -> None:
    """Kernels are compiled for a number; XLA takes one that only the program knows, and so does a call that names nothing."""
    numbers = {"scale": 0.3} | ({"soft_cap": 2.0} if op in MASKED else {})
    call = inspect.unwrap(getattr(dflash_kernels, op))
    traced = jax.jit(lambda **numbers: call(**CALLS[op] | numbers))(**numbers)
    np.testing.assert_allclose(traced, call(**CALLS[op] | numbers), rtol=1e-6)

    width, value = (64, 64) if op != "mla_attention" else (576, 64)
    changes = {
        name: zeros((*array.shape[:-1], width if name != "v_pages" else value), jnp.bfloat16)
        for name, array in CALLS[op].items()
        if isinstance(array, Array) and jnp.issubdtype(array.dtype, jnp.floating)
    }
    pages = {
        name: zeros((8, array.shape[1], 64, array.shape[3]), array.dtype)
        for name, array in changes.items()
        if "pages" in name
    }
    changes |= pages | ({"kv_lora_rank": 512} if op == "mla_attention" else {})
    with h200(), pytest.raises(NoImplementationError, match="takes a scale that is known when the kernel is compiled"):
        jax.jit(lambda **numbers: call(**CALLS[op] | changes | numbers, implementation="mosaic_gpu")).trace(**numbers)
    assert custom_calls(lambda scale: call(**CALLS[op] | changes | {"scale": scale}), 0.3) == []


@pytest.mark.parametrize("op", CALLS)
def test_a_number_that_is_an_array(op: str) -> None:
    """Static arguments of programs are hashed, which arrays are not."""
    call = inspect.unwrap(getattr(dflash_kernels, op))
    wanted = call(**CALLS[op] | {"scale": 0.25})
    for scale in (jnp.float32(0.25), np.float64(0.25), np.float32(0.25)):
        np.testing.assert_array_equal(call(**CALLS[op] | {"scale": scale}), wanted)


def test_nothing_packed_at_all() -> None:
    def attend(tokens: int, keys: int, ends: Array, key_ends: Array) -> tuple[Array, Array]:
        arrays = ones((tokens, 4, 16)), ones((keys, 2, 16)), ones((keys, 2, 8))
        return dflash_kernels.ragged_attention(*arrays, ends, key_ends, return_lse=True)  # pyright: ignore

    none, some = zeros((3,), jnp.int32), jnp.array([0, 1, 3], jnp.int32)
    assert [x.shape for x in attend(0, 3, none, some)] == [(0, 4, 8), (0, 4)]
    out, lse = attend(3, 0, some, none)
    assert out.shape == (3, 4, 8)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()


SLOTS, ROWS = jnp.arange(5, dtype=jnp.int32), ones((5, 2, 16))
ANGLES = {"cos": ones((5, 8)), "sin": ones((5, 8))}
WRITES: dict[str, dict[str, Any]] = {
    "cache_write": {"k_pages": POOL, "v_pages": POOL, "k": ROWS, "v": ROWS, "slots": SLOTS},
    "latent_write": {"latent_pages": POOL[:, :1], "latents": ROWS[:, 0], "slots": SLOTS},
    "qkv_write": {"k_pages": POOL, "v_pages": POOL, "qkv": ones((5, 128)), "slots": SLOTS, **ANGLES},
    "kv_write": {"k_pages": (POOL,), "v_pages": (POOL,), "kv": ones((5, 64)), "slots": SLOTS, **ANGLES},
    "mla_write": {
        "latent_pages": ones((8, 1, 4, 24)), "rows": ones((5, 24)), "q": ones((5, 4, 20)), "slots": SLOTS,
        "norm": ones(8), **ANGLES,
    },
}  # fmt: skip


def test_a_schedule_of_other_sequences() -> None:
    call = CALLS["paged_attention"]
    schedule = dflash_kernels.paged_schedule(ones((3,), jnp.int32), heads=4, kv_heads=2, tokens=3)
    with pytest.raises(ValueError, match=r"the schedule is for 6 sequences times KV heads, not 2 \* 2"):
        dflash_kernels.paged_attention(**call, schedule=schedule)
