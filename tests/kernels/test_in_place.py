"""Kernels that write pools in place, of pools that are slices of a stack, as a scan over layers has them."""

import functools
from collections.abc import Callable
from typing import Any

import dflash_kernels as dk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from ..devices import h200

LAYERS, PAGES, TOKENS, HEADS = 3, 9, 16, 8
SLOTS = jnp.array([3, -1, 70, PAGES * 64, *range(128, 140)], jnp.int32)
# Of attention: eight sequences, since less does not fill a GPU; none shares a page.
SEQUENCES, WIDTH = 8, 32
TABLE = jnp.zeros((SEQUENCES, WIDTH), jnp.int32).at[:, 0].set(jnp.arange(SEQUENCES))
LENS, NEW = jnp.full(SEQUENCES, TOKENS, jnp.int32), jnp.full(SEQUENCES, TOKENS, jnp.int32)


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


ROWS, LATENTS, PROJECTED = normal(TOKENS, HEADS, 128), normal(TOKENS, 576), normal(TOKENS, 48 * 128)
QUERIES, NORM, LATENT_NORM = normal(2 * TOKENS, 16, 192), normal(128), normal(512)
ANGLES, LATENT_ANGLES = ((normal(TOKENS, half, dtype=jnp.float32),) * 2 for half in (64, 32))
NORMS = {"q_norm": NORM, "k_norm": NORM}


def cache_write(pool: Array, how: dict[str, Any]) -> tuple[Array, ...]:
    return dk.cache_write(pool, pool + 1, ROWS, ROWS * 2, SLOTS, **how)


def latent_write(pool: Array, how: dict[str, Any]) -> tuple[Array, ...]:
    return (dk.latent_write(pool, LATENTS, SLOTS, **how),)


def qkv_write(pool: Array, how: dict[str, Any]) -> tuple[Array, ...]:
    written = dk.qkv_write(pool, pool + 1, PROJECTED, SLOTS, *ANGLES, **NORMS, **how)
    return written.k_pages, written.v_pages


def kv_write(pool: Array, how: dict[str, Any]) -> tuple[Array, ...]:
    kv = PROJECTED[:, : 2 * HEADS * 128]
    written = dk.kv_write((pool,), (pool + 1,), kv, SLOTS, *ANGLES, k_norm=(NORM,), **how)
    return written.k_pages[0], written.v_pages[0]


def mla_write(pool: Array, how: dict[str, Any]) -> tuple[Array, ...]:
    q = (QUERIES + pool[0, 0, 0, 0])[TOKENS:]  # a slice, too: queries turn where they lie
    written = dk.mla_write(pool, LATENTS, q, SLOTS, *LATENT_ANGLES, norm=LATENT_NORM, **how)
    return written.latent_pages, written.q


def qkv_attention(pool: Array, how: dict[str, Any]) -> tuple[Array, ...]:
    qkv, cos, sin = (jnp.tile(rows, (SEQUENCES, 1)) for rows in (PROJECTED, ANGLES[0], ANGLES[1]))
    attended = dk.qkv_attention(pool, pool + 1, qkv, TABLE, LENS, NEW, cos, sin, **NORMS, **how)
    return attended.k_pages, attended.v_pages, attended.out


type Write = Callable[[Array, dict[str, Any]], tuple[Array, ...]]
WRITES: list[Write] = [cache_write, latent_write, qkv_write, kv_write, mla_write, qkv_attention]


def scanned(write: Write, stack: Array, how: dict[str, Any]) -> tuple[Array, ...]:
    return jax.lax.scan(lambda carry, pool: (carry, write(pool, how)), 0, stack)[1]


def indexed(write: Write, stack: Array, how: dict[str, Any]) -> tuple[Array, ...]:
    return write(stack[1], how)


def updated(write: Write, stack: Array, how: dict[str, Any]) -> tuple[Array, ...]:
    def layer(i: Array, stack: Array) -> Array:
        return stack.at[i].set(write(stack[i], how)[0])

    return (jax.lax.fori_loop(0, LAYERS, layer, stack),)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [scanned, indexed, updated])
@pytest.mark.parametrize("write", WRITES)
def test_a_pool_that_is_a_slice(write: Write, way: Callable[..., Any]) -> None:
    heads, width = (1, 576) if write in (latent_write, mla_write) else (HEADS, 128)
    stack = normal(LAYERS, PAGES, heads, 64, width)
    before = np.array(stack)
    run = jax.jit(functools.partial(way, write), static_argnums=1)
    ours = run(stack, Named("mosaic_gpu"))
    np.testing.assert_array_equal(np.asarray(stack), before, err_msg="what the caller holds was written")
    for got, wanted in zip(ours, run(stack, Named("xla")), strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), wanted.astype(jnp.float32), rtol=2**-6, atol=2**-6)


class Named(dict[str, Any]):
    """An implementation's name as keyword arguments, which programs can be compiled for."""

    def __init__(self, name: str):
        super().__init__(implementation=name)

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(self["implementation"])


@pytest.mark.parametrize("write", WRITES)
def test_barriers_keep_slices_out(write: Write) -> None:
    """One before and one after each array that is written; what they are for shows on a GPU only."""
    heads, width = (1, 576) if write in (latent_write, mla_write) else (HEADS, 128)
    pool = jax.ShapeDtypeStruct((PAGES, heads, 64, width), jnp.bfloat16)
    with h200():
        traced = jax.jit(lambda pool: write(pool, {})).trace(pool)
    lines = traced.lower(lowering_platforms=("cuda",)).as_text().splitlines()
    kernel = next(i for i, line in enumerate(lines) if "custom_call @mosaic_gpu_v2" in line)
    barriers = [i for i, line in enumerate(lines) if "stablehlo.optimization_barrier" in line]
    written = 1 if write is latent_write else 2
    assert sum(i < kernel for i in barriers) >= written
    assert sum(i > kernel for i in barriers) >= written
