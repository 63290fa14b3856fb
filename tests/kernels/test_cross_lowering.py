"""Every op lowers for GPUs that are not here, in shapes of real models, with the implementation that is best there."""

import importlib.util
import re
from typing import Any

import dflash_kernels
import jax
import jax.numpy as jnp
import pytest
from dflash_kernels.target import target

from ..devices import on

BATCH, TOKENS, TABLE = 4, 16, 64
# jax-triton cannot be imported without a CUDA build of JAX; those GPUs then run on XLA.
HAS_CUDA = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
HAS_JAX_TRITON = HAS_CUDA and all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))
CALLS = {"NVIDIA A100-SXM4-80GB": "triton_kernel_call", "NVIDIA H200": "mosaic_gpu_v2"}


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype=jnp.int32)


POOL, LATENTS = array(99, 8, 64, 128), array(99, 1, 64, 576)
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
    "kv_write": (
        ((POOL,) * 5, (POOL,) * 5, array(64, 80 * 128), integers(64), *[array(64, 64, dtype=jnp.float32)] * 2), {},
    ),
    "latent_expand": (
        (LATENTS, integers(BATCH, TABLE), *[integers(BATCH)] * 2, *[array(16, 128, 512)] * 2), {"rows": 512},
    ),
    "latent_gather": ((LATENTS, integers(BATCH, TABLE), integers(BATCH), integers(BATCH)), {"rows": 512}),
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
}  # fmt: skip


def lowered(op: str, kind: str) -> list[str]:
    """Names of the custom calls, in order."""
    arrays, options = OPS[op]
    with on(kind):
        function = jax.jit(lambda *arrays: getattr(dflash_kernels, op.split()[0])(*arrays, **options))
        return re.findall(r"custom_call @(\w+)", function.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text())


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
    "op", ["qkv_write", "kv_write", "cache_write", "latent_write", "latent_write bytes", "mla_write"]
)
def test_a_write_is_one_launch_where_there_is_a_kernel(op: str) -> None:
    assert lowered(op, "NVIDIA H200") == ["mosaic_gpu_v2"]
    assert lowered(op, "NVIDIA A100-SXM4-80GB") == []


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
