"""What people get wrong in calls of any op: each is a sentence that names the argument and says what came, none is a silent answer.

Properties over every op: what is no array, axes too many and numbers of another kind in place of each array of a valid call, one by
one; windows, soft caps and counts that mean nothing. What ops take is in `CALLS`, here and in test_attention_wrong_calls.py.
"""

import inspect
import re
from typing import Any

import dflash_kernels
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from .plain import ones, zeros
from .test_attention_wrong_calls import CALLS as ATTENTION
from .test_attention_wrong_calls import WRITES

POOL, TABLE = ones((8, 1, 4, 24)), jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
STARTS, LENS, ROWS = zeros(2, jnp.int32), jnp.array([3, 4], jnp.int32), ones((3, 6))
STREAM, PARTS, EPS = ones((3, 4)), ones((2, 3, 4)), 1e-6
EXPERTS = {"x": ROWS, "gate_up": ones((4, 8, 6)), "down": ones((4, 6, 4))}
PIECES = {"latent_pages": POOL, "page_table": TABLE, "starts": STARTS, "lens": LENS}
SIZES = dflash_kernels.DeltaShape(1, 2, 4, 6)
SLOTS = dflash_kernels.DeltaState(ones((2, 2, 4, 6)), ones((2, 3, SIZES.channels)))
NET = dflash_kernels.DeltaWeights(ones((SIZES.channels, 4)), ones(2), ones(2), ones(6))
DELTA = {"projected": ones((2, 1, SIZES.columns)), "weights": NET, "state": SLOTS, "shape": SIZES, "eps": EPS}
FACTORS = dflash_kernels.DeltaFactors(
    ones((2, 3, 1, 4)), ones((2, 3, 2, 6)), ones((2, 3, 2)), ones((2, 3, SIZES.channels))
)
FLAGS = jnp.array([True, False])
EIGHT = dflash_kernels.Float8Rows(ROWS.astype(jnp.float8_e4m3fn), ones(3))
FLOAT8 = ("float8_dense", "float8_gated", "float8_best")
CALLS: dict[str, dict[str, Any]] = {
    "grouped_linear": {
        "x": ones((8, 6)), "weight": ones((3, 4, 6)), "groups": STARTS, "count": jnp.array(2, jnp.int32),
    },
    "routed_experts": {**EXPERTS, "experts": zeros((3, 2), jnp.int32), "weights": ones((3, 2))},
    "mixture": {**EXPERTS, "logits": ones((3, 4)), "taken": 2, "normed": True},
    "quantized_linear": {"x": ones((3, 16)), "values": ones((5, 16), jnp.int8), "scales": ones(5)},
    "quantize_tensor": {"x": ones((3, 16)), "scale": 1.0},
    "quantize_groups": {"x": ones((3, 16)), "group": 8},
    "quantize_nvfp4": {"x": ones((3, 16)), "global_scale": 1.0},
    **{op: {"x": ROWS, "weight": ones((4, 6))} for op in ("dense", "dense_gated", "dense_parts", "dense_best", "few_linear")},
    "dense_onto": {"x": ROWS, "weight": ones((4, 6)), "stream": STREAM, "norm": STREAM[0], "eps": EPS},
    "float8_rows": {"x": ones((3, 16))},
    **{op: {"x": EIGHT, "weight": ones((4, 6), jnp.float8_e4m3fn), "scales": ones(4)} for op in FLOAT8},
    "float8_onto": {
        "x": EIGHT, "weight": ones((4, 6), jnp.float8_e4m3fn), "scales": ones(4), "stream": STREAM, "norm": STREAM[0],
        "eps": EPS,
    },
    "add_norm": {"parts": PARTS, "stream": STREAM, "weight": STREAM[0], "eps": EPS},
    "add_norm_scores": {
        "parts": PARTS, "stream": STREAM, "weight": STREAM[0], "scorer": ones((5, 4)), "eps": EPS,
    },
    "add_norm_dense": {
        "parts": PARTS, "stream": STREAM, "weight": STREAM[0], "matrix": ones((5, 4)), "eps": EPS,
    },
    "embed_norm": {"table": ones((9, 4)), "ids": STARTS, "weight": STREAM[0], "eps": EPS},
    "reduce_add_norm": {"parts": PARTS, "stream": STREAM, "weight": STREAM[0], "eps": EPS},
    "reduce_ranks": {"x": ROWS},
    "stream_norm": {"stream": ones((4, 8)), "rows": 3, "weight": STREAM[0], "eps": EPS},
    "delta_verify": DELTA,
    "delta_step": {**DELTA, "live": FLAGS},
    "delta_fold": {"state": SLOTS, "factors": FACTORS, "counts": LENS},
    "delta_prefill": {**DELTA, "slots": STARTS, "follows": FLAGS, "fresh": FLAGS, "lengths": LENS},
    "merge_states": {
        "prefix_out": PARTS, "prefix_lse": PARTS[..., 0], "suffix_out": PARTS, "suffix_lse": PARTS[..., 0],
    },
    "latent_pack": {"latents": ones((3, 136)), "kv_lora_rank": 128},
    "latent_encode": {"latents": ones((3, 136)), "pool_dtype": jnp.float8_e4m3fn, "kv_lora_rank": 128},
    "latent_gather": {**PIECES, "rows": 7},
    "index_encode": {"x": ones((3, 16))},
    "index_scores": {
        "q": ones((2, 3, 5, 24)), "weights": ones((2, 3, 5)), "index_pages": POOL, "page_table": TABLE, "seq_lens": LENS,
    },
    "index_select": {"scores": ones((3, 16)), "count": 4},
    "mla_selected_attention": {
        "q": ones((2, 3, 5, 24)), "latent_pages": POOL, "slots": zeros((2, 3, 7), jnp.int32), "kv_lora_rank": 16, "scale": 0.1,
    },
    "latent_expand": {**PIECES, "w_uk": ones((2, 5, 16)), "w_uv": ones((2, 6, 16)), "rows": 8},
}  # fmt: skip
ALL = {**CALLS, **ATTENTION, **WRITES}
# Ops whose rows have any number of axes, and what messages call some arrays.
ANY_ROWS = (
    "quantize_tensor",
    "quantize_groups",
    "quantize_nvfp4",
    "latent_pack",
    "latent_encode",
    "index_encode",
    "index_select",
)
CALLED = {
    "qkv": "projection", "kv": "projection", "cu_q_lens": "cu_kv_lens", "k_pages": "pages|pools", "v_pages": "pages|pools",
    "latent_pages": "pages", "index_pages": "pages", **dict.fromkeys(CALLS["merge_states"], "outputs and lse"),
}  # fmt: skip
NO_ARRAY = st.sampled_from([None, [1.0, 2.0], "x", 3])
# Numbers of a kind that no such array holds: one in its place has to be refused, whatever it is.
NO_FLOATS = [jnp.int32, jnp.uint32, jnp.bool_, jnp.complex64]
NO_PAGES = [*NO_FLOATS, jnp.uint16, jnp.float8_e5m2fnuz]
NO_INTEGERS = [jnp.float32, jnp.bfloat16, jnp.bool_, jnp.complex64]
NO_FLAGS = [jnp.float32, jnp.int32, jnp.complex64]
MASKED = ("paged_attention", "ragged_attention", "ragged_paged_attention")
COUNTED = [
    ("latent_gather", "rows"),
    ("latent_expand", "rows"),
    ("stream_norm", "rows"),
    ("mixture", "taken"),
    ("index_select", "count"),
]
few = settings(derandomize=True, deadline=None, max_examples=6)


def arrays_of(op: str) -> dict[str, Array]:
    return {name: value for name, value in ALL[op].items() if isinstance(value, Array)}


def refused(op: str, changes: dict[str, Any], message: str) -> None:
    # The function itself: in test runs a shape checker around it would speak first.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(getattr(dflash_kernels, op))(**ALL[op] | changes)


def named(op: str, name: str, value: Any, came: str) -> None:
    """A call with `value` is refused in a sentence that names the argument and says what came."""
    refused(op, {name: value}, rf"(?s)\b({name}|{CALLED.get(name, name)})\b.*{re.escape(came)}")


@pytest.mark.parametrize("op", ALL)
@few
@given(data=st.data())
def test_what_is_no_array_is_named(op: str, data: st.DataObject) -> None:
    for name in arrays_of(op):
        if name != "count":  # which may be a plain number
            # Both of `cos` and `sin` may be None in a write of heads, one of them may not.
            value = data.draw(
                NO_ARRAY.filter(lambda value, name=name: value is not None or name not in ("cos", "sin")), name
            )
            named(op, name, value, f"not a {type(value).__name__}")


@pytest.mark.parametrize("op", [op for op in ALL if op not in ANY_ROWS])
@few
@given(data=st.data())
def test_axes_too_many_are_named(op: str, data: st.DataObject) -> None:
    for name, array in arrays_of(op).items():
        more = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=2), name)
        shape = (*more, *array.shape)
        named(op, name, jnp.asarray(np.broadcast_to(np.asarray(array), shape)), f"{shape}")


@pytest.mark.parametrize("op", ALL)
@few
@given(data=st.data())
def test_numbers_of_another_kind_are_named(op: str, data: st.DataObject) -> None:
    for name, array in arrays_of(op).items():
        if (op, name) == ("latent_gather", "latent_pages"):  # which holds anything
            continue
        counts = jnp.issubdtype(array.dtype, jnp.integer) and name != "values"
        flags = array.dtype == jnp.bool_
        kinds = NO_INTEGERS if counts else NO_FLAGS if flags else NO_PAGES if "pages" in name else NO_FLOATS
        kind = data.draw(st.sampled_from(kinds), name)
        named(op, name, jnp.asarray(np.asarray(array).astype(jnp.dtype(kind))), str(jnp.dtype(kind)))


@pytest.mark.parametrize("op", MASKED)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    side=st.integers(max_value=-1),
    other=st.none() | st.integers(0, 99),
    fraction=st.floats(0.1, 9.9).filter(lambda number: number != int(number)),
    cap=st.floats(max_value=0.0) | st.just(np.nan),
)
def test_options_of_attention_are_named(op: str, side: int, other: int | None, fraction: float, cap: float) -> None:
    for window in ((side, other), (other, side), (side, side), (fraction, other), abs(side), (1, 2, 3), "ab"):
        refused(op, {"window": window}, "window .* must be a pair")
    refused(op, {"soft_cap": cap}, "soft_cap .* must be positive, or None")
    refused(op, {"sinks": [0.0] * 4}, r"sinks must be an array \[N\], not a list")


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        *((op, {"q": ATTENTION[op]["q"][..., :0, :]}, "entry or more|do not fit") for op in ATTENTION),
        *(
            (op, {"page_table": ATTENTION[op]["page_table"][:, :0]}, r"page_table \(2, 0\) must have one entry")
            for op in ATTENTION
            if op != "ragged_attention"
        ),
        ("paged_attention", {"q": ones((2, 0, 4, 16))}, "q .* must have one entry or more"),
        ("grouped_linear", {"x": ones((0, 6))}, "0 rows do not make 2 blocks"),
    ],
)  # fmt: skip
def test_nothing_at_all_is_named(op: str, changes: dict[str, Any], message: str) -> None:
    refused(op, changes, message)


@pytest.mark.parametrize(("op", "name"), COUNTED)
@few
@given(number=st.integers(max_value=-1) | st.floats() | st.booleans() | st.none())
def test_a_number_that_counts_nothing(op: str, name: str, number: Any) -> None:
    refused(op, {name: number}, rf"{name} must be a whole number, 0 or more, not {re.escape(repr(number))}")


def test_bytes_of_packed_rows() -> None:
    with pytest.raises(ValueError, match="packed rows are bytes, uint8, not float32"):
        inspect.unwrap(dflash_kernels.latent_unpack)(ones((3, 148)), kv_lora_rank=128)


def test_no_rows_at_all() -> None:
    packed = dflash_kernels.latent_pack(ones((0, 136)), kv_lora_rank=128)
    assert packed.shape == (0, 148)
    assert dflash_kernels.latent_unpack(packed, kv_lora_rank=128).shape == (0, 136)


def test_a_count_that_is_a_plain_number() -> None:
    call = inspect.unwrap(dflash_kernels.grouped_linear)
    np.testing.assert_array_equal(call(**CALLS["grouped_linear"] | {"count": 2}), call(**CALLS["grouped_linear"]))
