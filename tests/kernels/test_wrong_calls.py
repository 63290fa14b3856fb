"""What people get wrong in calls of products, norms, experts and formats: each is a sentence, and none is a silent answer."""

import inspect
from typing import Any

import dflash_kernels
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

POOL, TABLE = jnp.ones((8, 1, 4, 24)), jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
STARTS, LENS, ROWS = jnp.zeros(2, jnp.int32), jnp.array([3, 4], jnp.int32), jnp.ones((3, 6))
STREAM, PARTS, EPS = jnp.ones((3, 4)), jnp.ones((2, 3, 4)), 1e-6
EXPERTS = {"x": ROWS, "gate_up": jnp.ones((4, 8, 6)), "down": jnp.ones((4, 6, 4))}
PIECES = {"latent_pages": POOL, "page_table": TABLE, "starts": STARTS, "lens": LENS}
EIGHT = dflash_kernels.Float8Rows(ROWS.astype(jnp.float8_e4m3fn), jnp.ones(3))
FLOAT8 = ("float8_dense", "float8_gated", "float8_best")
CALLS: dict[str, dict[str, Any]] = {
    "grouped_linear": {
        "x": jnp.ones((8, 6)), "weight": jnp.ones((3, 4, 6)), "groups": STARTS, "count": jnp.array(2, jnp.int32),
    },
    "routed_experts": {**EXPERTS, "experts": jnp.zeros((3, 2), jnp.int32), "weights": jnp.ones((3, 2))},
    "mixture": {**EXPERTS, "logits": jnp.ones((3, 4)), "taken": 2, "normed": True},
    "quantized_linear": {"x": jnp.ones((3, 16)), "values": jnp.ones((5, 16), jnp.int8), "scales": jnp.ones(5)},
    "quantize_tensor": {"x": jnp.ones((3, 16)), "scale": 1.0},
    "quantize_groups": {"x": jnp.ones((3, 16)), "group": 8},
    "quantize_nvfp4": {"x": jnp.ones((3, 16)), "global_scale": 1.0},
    **{op: {"x": ROWS, "weight": jnp.ones((4, 6))} for op in ("dense", "dense_gated", "dense_parts", "dense_best")},
    "dense_onto": {"x": ROWS, "weight": jnp.ones((4, 6)), "stream": STREAM, "norm": STREAM[0], "eps": EPS},
    "float8_rows": {"x": jnp.ones((3, 16))},
    **{op: {"x": EIGHT, "weight": jnp.ones((4, 6), jnp.float8_e4m3fn), "scales": jnp.ones(4)} for op in FLOAT8},
    "float8_onto": {
        "x": EIGHT, "weight": jnp.ones((4, 6), jnp.float8_e4m3fn), "scales": jnp.ones(4), "stream": STREAM, "norm": STREAM[0],
        "eps": EPS,
    },
    "add_norm": {"parts": PARTS, "stream": STREAM, "weight": STREAM[0], "eps": EPS},
    "add_norm_scores": {
        "parts": PARTS, "stream": STREAM, "weight": STREAM[0], "scorer": jnp.ones((5, 4)), "eps": EPS,
    },
    "embed_norm": {"table": jnp.ones((9, 4)), "ids": STARTS, "weight": STREAM[0], "eps": EPS},
    "stream_norm": {"stream": jnp.ones((4, 8)), "rows": 3, "weight": STREAM[0], "eps": EPS},
    "merge_states": {
        "prefix_out": PARTS, "prefix_lse": PARTS[..., 0], "suffix_out": PARTS, "suffix_lse": PARTS[..., 0],
    },
    "latent_pack": {"latents": jnp.ones((3, 136)), "kv_lora_rank": 128},
    "latent_encode": {"latents": jnp.ones((3, 136)), "pool_dtype": jnp.float8_e4m3fn, "kv_lora_rank": 128},
    "latent_gather": {**PIECES, "rows": 7},
    "latent_expand": {**PIECES, "w_uk": jnp.ones((2, 5, 16)), "w_uv": jnp.ones((2, 6, 16)), "rows": 8},
}  # fmt: skip
ARRAYS = [(op, name) for op, call in CALLS.items() for name, value in call.items() if isinstance(value, Array)]
FIXED = [(op, name) for op, name in ARRAYS if not op.startswith(("quantize_", "latent_pack", "latent_enc", "merge"))]


def refused(op: str, changes: dict[str, Any], message: str) -> None:
    # The function itself: in test runs a shape checker around it would speak first.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(getattr(dflash_kernels, op))(**CALLS[op] | changes)


@pytest.mark.parametrize(("op", "name"), [pair for pair in ARRAYS if pair[1] != "count"])
def test_an_array_that_is_none(op: str, name: str) -> None:
    refused(op, {name: np.asarray(CALLS[op][name]).tolist()}, f"{name} must be an array .*, not a list")
    refused(op, {name: None}, f"{name} must be an array .*, not a NoneType")


@pytest.mark.parametrize(("op", "name"), FIXED)
def test_an_axis_too_many(op: str, name: str) -> None:
    refused(op, {name: CALLS[op][name][None]}, rf"{name} must be an array \[.*\], not \(1, ?")


@pytest.mark.parametrize(("op", "name"), [pair for pair in ARRAYS if pair != ("latent_gather", "latent_pages")])
def test_numbers_of_another_kind(op: str, name: str) -> None:
    given = CALLS[op][name]
    counts = jnp.issubdtype(given.dtype, jnp.integer) and name != "values"
    other, message = (jnp.float32, "must hold integers") if counts else (jnp.int32, "must (be|hold) ")
    refused(op, {name: given.astype(other)}, f"{name} {message}.*, not {jnp.dtype(other)}")


@pytest.mark.parametrize(
    ("op", "name"),
    [("latent_gather", "rows"), ("latent_expand", "rows"), ("stream_norm", "rows"), ("mixture", "taken")],
)
def test_a_number_that_counts_nothing(op: str, name: str) -> None:
    for number in (-1, 2.0, True):
        refused(op, {name: number}, f"{name} must be a whole number, 0 or more, not {number}")


def test_bytes_of_packed_rows() -> None:
    with pytest.raises(ValueError, match="packed rows are bytes, uint8, not float32"):
        inspect.unwrap(dflash_kernels.latent_unpack)(jnp.ones((3, 148)), kv_lora_rank=128)


def test_no_rows_at_all() -> None:
    packed = dflash_kernels.latent_pack(jnp.ones((0, 136)), kv_lora_rank=128)
    assert packed.shape == (0, 148)
    assert dflash_kernels.latent_unpack(packed, kv_lora_rank=128).shape == (0, 136)
    refused("grouped_linear", {"x": jnp.ones((0, 6))}, "0 rows do not make 2 blocks")


def test_a_count_that_is_a_plain_number() -> None:
    call = inspect.unwrap(dflash_kernels.grouped_linear)
    np.testing.assert_array_equal(call(**CALLS["grouped_linear"] | {"count": 2}), call(**CALLS["grouped_linear"]))
