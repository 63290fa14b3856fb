"""Every op lowers for GPUs that are not here, in shapes of real models, with the implementation that is best there."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import dflash_kernels
import jax
import jax.numpy as jnp
import pytest
from dflash_kernels.core.device import target

from ..devices import custom_calls, on

BATCH, TOKENS, TABLE = 4, 16, 64
# jax-triton cannot be imported without a CUDA build of JAX; those GPUs then run on XLA.
HAS_CUDA = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
HAS_JAX_TRITON = HAS_CUDA and all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))
CALLS = {"NVIDIA A100-SXM4-80GB": "triton_kernel_call", "NVIDIA H200": "mosaic_gpu_v2"}


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype=jnp.int32)


def float8(rows: int, columns: int) -> tuple[Any, Any]:
    """A matrix and the scales of its rows."""
    return array(rows, columns, dtype=jnp.float8_e4m3fn), array(rows, dtype=jnp.float32)


EIGHT = dflash_kernels.Float8Rows(*float8(128, 2560))
POOL, LATENTS = array(99, 8, 64, 128), array(99, 1, 64, 576)
# A layer of Qwen3-4B for 16 tokens of one sequence: from its projection to heads, and from there to the next projection.
HEADS = (
    POOL, POOL, array(16, 48 * 128), integers(1, TABLE), integers(1), integers(1), *[array(16, 64, dtype=jnp.float32)] * 2,
)  # fmt: skip
NORMS = (array(128), array(128))
EXPERTS = (array(128, 2 * 768, 2048), array(128, 2048, 768))  # of a layer of Qwen3-30B-A3B
# Of a layer of gpt-oss-20b: both matrices in tiles, each with its bias.
TILES = (
    dflash_kernels.Mxfp4Tiles(integers(32, 90, 45, 4, 136), True, jnp.dtype("bfloat16")), array(32, 5760),
    dflash_kernels.Mxfp4Tiles(integers(32, 45, 45, 4, 136), False, jnp.dtype("bfloat16")), array(32, 2880),
)  # fmt: skip
LAW = (array(128, dtype=jnp.float32),) * 3  # temperature, min_p, top_p
KEYS = array(128, 2, dtype=jnp.uint32)
STREAM_AND_LAYER = (
    array(2560, 16, dtype=jnp.float32), array(2560, 4096), array(2560), array(2 * 9728, 2560), array(2560, 9728), array(2560),
    array(6144, 2560),
)  # fmt: skip
# A layer of Qwen3.5-27B.
DELTA = {"shape": dflash_kernels.DeltaShape(16, 48, 128, 128), "eps": 1e-6}
NET = dflash_kernels.DeltaWeights(array(10240, 4), *[array(48, dtype=jnp.float32)] * 2, array(128))
SLOTS = dflash_kernels.DeltaState(array(BATCH, 48, 128, 128, dtype=jnp.float32), array(BATCH, 3, 10240))
FACTORS = dflash_kernels.DeltaFactors(
    array(BATCH, TOKENS, 16, 128, dtype=jnp.float32), array(BATCH, TOKENS, 48, 128, dtype=jnp.float32),
    array(BATCH, TOKENS, 48, dtype=jnp.float32), array(BATCH, TOKENS, 10240),
)  # fmt: skip
FLAGS = array(BATCH, dtype=jnp.bool_)
# Each op's arrays and keyword arguments.
OPS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "paged_attention": ((array(BATCH, TOKENS, 32, 128), POOL, POOL, integers(BATCH, TABLE), integers(BATCH)), {}),
    "ragged_attention": (
        (array(1000, 16, 192), array(1000, 16, 192), array(1000, 16, 128), integers(BATCH + 1), integers(BATCH + 1)), {},
    ),
    "ragged_paged_attention": (
        (array(1000, 32, 128), POOL, POOL, integers(BATCH + 1), integers(BATCH, TABLE), integers(BATCH)), {"return_lse": True},
    ),
    "mla_attention": (
        (array(BATCH, TOKENS, 16, 576), LATENTS, integers(BATCH, TABLE), integers(BATCH)), {"kv_lora_rank": 512, "scale": 0.1},
    ),
    "cache_write": ((POOL, POOL, array(64, 8, 128), array(64, 8, 128), integers(64)), {}),
    "qkv_write": (
        (POOL, POOL, array(64, 48 * 128), integers(64), *[array(64, 64, dtype=jnp.float32)] * 2), {"eps": 1e-6},
    ),
    "few_qkv_write": (
        (
            *[array(99, 8, 64, 64)] * 2, array(8, 2880), array(5120, 2880), array(5120), integers(8),
            *[array(8, 32, dtype=jnp.float32)] * 2,
        ),
        {},
    ),
    "token_attention": (
        (
            *[array(99, 8, 64, 64)] * 2, array(1, 2880), (array(5120, 2880), array(5120)), (array(2880, 4096), array(2880)),
            integers(1, TABLE), *[integers(1)] * 3, *[array(1, 32, dtype=jnp.float32)] * 2,
            array(4, 1, 2880, dtype=jnp.float32), array(2880), array(64),
        ),
        {},
    ),
    "kv_write": (
        ((POOL,) * 5, (POOL,) * 5, array(64, 80 * 128), integers(64), *[array(64, 64, dtype=jnp.float32)] * 2), {},
    ),
    "latent_expand": (
        (LATENTS, integers(BATCH, TABLE), *[integers(BATCH)] * 2, *[array(16, 128, 512)] * 2), {"rows": 512},
    ),
    "latent_gather": ((LATENTS, integers(BATCH, TABLE), integers(BATCH), integers(BATCH)), {"rows": 512}),
    "index_encode": ((array(64, 128),), {}),
    "index_scores": (
        (array(BATCH, TOKENS, 64, 128, dtype=jnp.float8_e4m3fn), array(BATCH, TOKENS, 64, dtype=jnp.float32),
         array(99, 1, 64, 128, dtype=jnp.float8_e4m3fn), integers(BATCH, TABLE), integers(BATCH),
         array(99, 1, 64, dtype=jnp.float32)), {},
    ),
    "index_select": ((array(BATCH, TOKENS, TABLE * 64, dtype=jnp.float32),), {"count": 2048}),
    "mla_selected_attention bytes": (
        (array(BATCH, TOKENS, 128, 576), array(99, 1, 64, 656, dtype=jnp.uint8), integers(BATCH, TOKENS, 2048)),
        {"kv_lora_rank": 512, "scale": 0.1},
    ),
    "latent_write bytes": (
        (array(99, 1, 64, 656, dtype=jnp.uint8), array(64, 656, dtype=jnp.uint8), integers(64)), {},
    ),
    "latent_write": ((LATENTS, array(64, 576), integers(64)), {}),
    "mla_write": (
        (LATENTS, array(64, 576), array(64, 16, 192), integers(64), *[array(64, 32, dtype=jnp.float32)] * 2, array(512)), {},
    ),
    "merge_states": (
        (array(64, 32, 128), array(64, 32, dtype=jnp.float32), array(64, 32, 128), array(64, 32, dtype=jnp.float32)), {},
    ),
    "dense": ((array(128, 2560), array(6144, 2560)), {}),
    "dense_gated": ((array(128, 2560), array(2 * 9728, 2560)), {}),
    "dense_parts": ((array(128, 9728), array(2560, 9728)), {}),
    "dense_onto": ((array(128, 4096), array(2560, 4096), array(128, 2560), array(2560)), {"eps": 1e-6}),
    "dense_best": ((array(128, 2560), array(151_936, 2560)), {}),
    "reduce_add_norm": ((array(4, 128, 2560, dtype=jnp.float32), array(128, 2560), array(2560)), {"eps": 1e-6}),
    "gather_ranks": ((integers(2),), {}),
    "reduce_ranks": ((array(128, 2880),), {}),
    "add_norm": ((array(4, 128, 2560, dtype=jnp.float32), array(128, 2560), array(2560)), {"eps": 1e-6}),
    "add_norm_scores": (
        (array(4, 128, 2560, dtype=jnp.float32), array(128, 2560), array(2560), array(128, 2560)), {"eps": 1e-6},
    ),
    "add_norm_dense": (
        (array(9, 1, 2048, dtype=jnp.float32), array(1, 2048), array(2048), array(12_352, 2048)), {"eps": 1e-6},
    ),
    "float8_rows": ((array(128, 9728),), {"paired": True}),
    "float8_dense": ((EIGHT, *float8(6144, 2560)), {}),
    "float8_gated": ((EIGHT, *float8(2 * 9728, 2560)), {}),
    "float8_onto": ((EIGHT, *float8(2560, 2560), array(128, 2560), array(2560)), {"eps": 1e-6, "paired": True}),
    "float8_best": ((EIGHT, *float8(151_936, 2560)), {}),
    "float8_candidates": ((EIGHT, *float8(151_936, 2560)), {"count": 16}),
    "filtered_choice": (
        (array(128, 151_936), KEYS, *LAW, integers(128)), {},
    ),
    "drawn_choice": ((array(128, 151_936), KEYS, LAW[0]), {}),
    "drawn_candidates": ((array(128, 151_936), KEYS, LAW[0]), {}),
    "embed_norm": ((array(151_936, 2560), integers(16), array(2560)), {"eps": 1e-6}),
    "stream_norm": ((array(2560, 16, dtype=jnp.float32), array(2560)), {"eps": 1e-6}),
    "quantized_linear": (
        (array(16, 2560), array(6144, 2560, dtype=jnp.int8), array(6144, dtype=jnp.float32)), {},
    ),
    "grouped_linear": (
        (array(8 * 128, 2048), array(64, 2 * 1408, 2048), integers(8), integers()), {"gated": True},
    ),
    "routed_experts": ((array(16, 2048), integers(16, 8), array(16, 8, dtype=jnp.float32), *EXPERTS), {}),
    "mixture": ((array(16, 128, dtype=jnp.float32), array(16, 2048), *EXPERTS), {"taken": 8, "normed": True}),
    "mxfp4_mixture": (
        (array(8, 32, dtype=jnp.float32), array(8, 2880), *TILES), {"taken": 4, "alpha": 1.702, "limit": 7.0},
    ),
    "few_linear": ((array(8, 2880), array(5120, 2880), array(5120)), {}),
    "layer_chain": ((array(16, 4096), *STREAM_AND_LAYER), {}),
    "attention_chain": ((*HEADS, *STREAM_AND_LAYER), {}),
    "attention_chain without norms": ((*HEADS, *STREAM_AND_LAYER), {"normed": False}),
    "linear_chain": ((array(16, 12800), array(2560, 12800), array(2560), array(10240, 2560)), {}),
    "qkv_attention": ((*HEADS, *NORMS), {}),
    "qkv_attention without norms": ((*HEADS, None, None), {}),
    "delta_verify": ((array(BATCH, TOKENS, 16480), NET, SLOTS), DELTA),
    "delta_fold": ((SLOTS, FACTORS, integers(BATCH)), {}),
    "delta_step": ((array(BATCH, 1, 16480), NET, SLOTS, FLAGS), DELTA),
    "delta_prefill": (
        (array(BATCH, 64, 16480), NET, SLOTS, integers(BATCH), FLAGS, FLAGS, integers(BATCH)), DELTA,
    ),
    "latent_pack": ((array(64, 576),), {"kv_lora_rank": 512}),
    "latent_unpack": ((array(64, 656, dtype=jnp.uint8),), {"kv_lora_rank": 512}),
    "latent_encode": ((array(64, 576),), {"pool_dtype": jnp.float8_e4m3fn, "kv_lora_rank": 512}),
    "latent_decode": ((array(64, 656, dtype=jnp.uint8),), {"dtype": jnp.bfloat16, "kv_lora_rank": 512}),
    "quantize_tensor": ((array(64, 2048), array(dtype=jnp.float32)), {}),
    "quantize_groups": ((array(64, 2048),), {"group": 128}),
    "quantize_nvfp4": ((array(64, 2048), array(dtype=jnp.float32)), {}),
}  # fmt: skip


ONE_OF_EACH_KIND = (
    "paged_attention", "ragged_paged_attention", "mla_attention", "kv_write", "dense_gated", "grouped_linear", "embed_norm",
    "qkv_attention",
)  # fmt: skip


def layer_chain(*arrays: Any) -> Any:
    exchange = jax.new_ref(dflash_kernels.chain_exchange(arrays[1], arrays[5]))
    return dflash_kernels.layer_chain(*arrays, exchange=exchange)


def attention_chain(*arrays: Any, normed: bool = True) -> Any:
    stream, down = arrays[len(HEADS)], arrays[len(HEADS) + 4]
    starts = dflash_kernels.attention_chain_exchange(stream, down, 1, TOKENS, heads=32, kv_heads=8)
    norm = jnp.ones((128,), jnp.bfloat16) if normed else None
    exchange = tuple(map(jax.new_ref, starts))
    return dflash_kernels.attention_chain(*arrays, q_norm=norm, k_norm=norm, exchange=exchange)


def linear_chain(*arrays: Any) -> Any:
    (rows, depth), (hidden, _), _, (features, _) = (array.shape for array in arrays)
    exchange = dflash_kernels.linear_chain_exchange(rows, depth=depth, hidden=hidden, features=features)
    return dflash_kernels.linear_chain(*arrays, exchange=jax.new_ref(exchange), eps=1e-6)


def filtered_choice(logits: Any, keys: Any, temperature: Any, min_p: Any, top_p: Any, top_k: Any) -> Any:
    law = {"temperature": temperature, "min_p": min_p, "top_p": top_p, "top_k": top_k}
    return dflash_kernels.filtered_choice(logits, keys, **law)


def delta_prefill(projected: Any, weights: Any, state: Any, slots: Any, *told: Any, **options: Any) -> Any:
    told = dict(zip(("follows", "fresh", "lengths"), told, strict=True))
    return dflash_kernels.delta_prefill(projected, weights, state, slots=slots, **told, **options)


def token_attention(*arrays: Any) -> Any:
    *given, parts, norm, sinks = arrays
    added = dflash_kernels.AddNorm(parts, norm, 1e-5, rounds_last=True)
    return dflash_kernels.token_attention(*given, added=added, sinks=sinks)


# Of calls that need more than arrays in order.
WRITTEN_OUT: dict[str, Callable[..., Any]] = {
    "layer_chain": layer_chain,
    "attention_chain": attention_chain,
    "linear_chain": linear_chain,
    "delta_prefill": delta_prefill,
    "filtered_choice": filtered_choice,
    "token_attention": token_attention,
    "index_scores": lambda *arrays: dflash_kernels.index_scores(*arrays[:-1], index_scale=arrays[-1]),
    "qkv_attention": lambda *arrays: dflash_kernels.qkv_attention(*arrays[:-2], q_norm=arrays[-2], k_norm=arrays[-1]),
    "stream_norm": lambda stream, norm, **options: dflash_kernels.stream_norm(stream, 16, norm, **options),
}


@functools.cache
def lowered(op: str, kind: str) -> list[str]:
    """Names of the custom calls, in order."""
    arrays, options = OPS[op]
    name = op.split()[0]
    call = WRITTEN_OUT.get(name) or getattr(dflash_kernels, name)
    return custom_calls(lambda *arrays: call(*arrays, **options), *arrays, kind=kind)


def test_every_op_is_here() -> None:
    functions = {name: getattr(dflash_kernels, name) for name in dflash_kernels.__all__}
    ops = {name for name, one in functions.items() if "implementation" in getattr(one, "__annotations__", ())}
    assert {op.split()[0] for op in OPS} == ops


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("op", OPS)
def test_lowers(op: str, kind: str) -> None:
    assert set(lowered(op, kind)) <= {CALLS[kind]}


def test_attention_is_a_kernel_where_there_is_one() -> None:
    for op in ("paged_attention", "mla_attention"):
        assert set(lowered(op, "NVIDIA H200")) == {"mosaic_gpu_v2"}
        assert lowered(op, "NVIDIA A100-SXM4-80GB") == (["triton_kernel_call"] if HAS_JAX_TRITON else [])
    assert lowered("paged_attention", "Tesla T4") == []


@pytest.mark.parametrize(
    "op",
    [
        "qkv_write",
        "few_qkv_write",
        "token_attention",
        "kv_write",
        "cache_write",
        "latent_write",
        "latent_write bytes",
        "mla_write",
    ],
)
def test_a_write_is_one_launch_where_there_is_a_kernel(op: str) -> None:
    assert lowered(op, "NVIDIA H200") == ["mosaic_gpu_v2"]
    assert lowered(op, "NVIDIA A100-SXM4-80GB") == []


@pytest.mark.parametrize(
    "op",
    [
        "dense", "dense_gated", "dense_parts", "dense_onto", "dense_best", "add_norm", "embed_norm", "stream_norm",
        "add_norm_scores", "quantized_linear", "grouped_linear", "routed_experts", "mixture", "mxfp4_mixture", "few_linear",
        "layer_chain",
        "attention_chain", "index_scores", "index_select", "mla_selected_attention bytes",
        "attention_chain without norms", "linear_chain", "float8_rows", "float8_dense", "float8_gated", "float8_onto",
        "float8_best", "float8_candidates", "filtered_choice", "drawn_choice", "drawn_candidates", "add_norm_dense",
    ],
)  # fmt: skip
def test_products_and_norms_have_a_kernel_on_hopper_only(op: str) -> None:
    assert set(lowered(op, "NVIDIA H200")) == {"mosaic_gpu_v2"}
    assert lowered(op, "NVIDIA A100-SXM4-80GB") == []


@pytest.mark.few("bfloat16-left", "bfloat16-both")
@pytest.mark.parametrize(
    "window", [(None, None), (40, None), (None, 3), (40, 3)], ids=["everything", "left", "right", "both"]
)
@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8])
def test_attention_without_a_causal_mask_lowers(stored: Any, window: tuple[int | None, int | None]) -> None:
    """On Hopper every kind of pages has code of its own for what a row sees."""
    q, *_, table, lengths = OPS["paged_attention"][0]
    pool, scales = array(*POOL.shape, dtype=stored), {}
    if stored == jnp.float8_e4m3fn:
        scales = dict.fromkeys(("k_scale", "v_scale"), array(8, dtype=jnp.float32))
    elif stored == jnp.int8:
        scales = {"k_scale": array(99, 8, 64, dtype=jnp.float32), "v_scale": array(8, 128, dtype=jnp.float32)}

    def call(*arrays: Any) -> Any:
        given = dict(zip(scales, arrays[5:], strict=True))
        return dflash_kernels.paged_attention(*arrays[:5], causal=False, window=window, **given)

    assert set(custom_calls(call, q, pool, pool, table, lengths, *scales.values())) == {"mosaic_gpu_v2"}


@pytest.mark.few("paged_attention", "kv_write", "dense_gated", "grouped_linear", "embed_norm")
@pytest.mark.parametrize("op", ONE_OF_EACH_KIND)
def test_lowers_where_64_bits_are_enabled(op: str) -> None:
    """Plain numbers have 64 bits then, and tables come in int64; kernels count in 32."""
    arrays, options = OPS[op]
    call = WRITTEN_OUT.get(op) or getattr(dflash_kernels, op)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: array(*x.shape, dtype=jnp.int64 if x.dtype == jnp.int32 else x.dtype), arrays)
        assert custom_calls(lambda *arrays: call(*arrays, **options), *wide) == lowered(op, "NVIDIA H200")


def test_the_device_in_use() -> None:
    here = target()
    assert here.kind == jax.devices()[0].device_kind
    with on("NVIDIA A100-SXM4-80GB"):
        assert (target().capability, target().multiprocessors) == (80, 108)
    with on("NVIDIA H200"):
        assert target().capability == 90
    with on("NVIDIA Unheard-Of"):
        assert (target().capability, target().platform) == (0, "gpu")
        assert target().words == "the device, NVIDIA Unheard-Of, has none that is known"
    with jax.sharding.use_abstract_mesh(jax.make_mesh((1,), ("x",)).abstract_mesh):
        assert target() == here
