"""A row's results have the same bits wherever it stands among as many rows and whatever the others hold: kernels in Pallas's
interpreter, and what a GPU runs (`-m gpu`)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import dense, dense_gated, dense_parts, routed_experts
from dflash_kernels.fused.experts.mosaic_gpu import launch as launch_experts
from dflash_kernels.matmul.dense.mosaic_gpu import launch as launch_dense
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_jax.execution.plan import EXACT_PRODUCTS

INTERPRET = plgpu.InterpretGPUParams()
Rows = dict[str, jax.Array]


def check(run: Callable[[Rows], Any], draw: Callable[[jax.Array], Rows], rows: int) -> None:
    """A third of the rows stand elsewhere the second time, in another order, among others."""
    keys, rng = jax.random.split(jax.random.key(rows)), np.random.default_rng(rows)
    first, second = (draw(key) for key in keys)
    own, there = (rng.permutation(rows)[: max(rows // 3, 1)] for _ in range(2))
    second = {name: array.at[there].set(first[name][own]) for name, array in second.items()}
    before, after = (np.asarray(run(given).astype(jnp.float32)) for given in (first, second))
    np.testing.assert_array_equal(before[..., own, :], after[..., there, :])


def products(depth: int, features: int) -> tuple[Callable[[int], Callable[[jax.Array], Rows]], jax.Array]:
    weight = (jax.random.normal(jax.random.key(1), (features, depth)) * depth**-0.5).astype(jnp.bfloat16)
    return lambda rows: lambda key: {"x": jax.random.normal(key, (rows, depth)).astype(jnp.bfloat16)}, weight


def mixtures(hidden: int, inner: int, count: int, taken: int) -> tuple[Callable[[int], Any], dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(2))
    shapes = {"gate_up": (count, 2 * inner, hidden), "down": (count, hidden, inner)}
    matrices = {
        name: (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }

    def draw(rows: int) -> Callable[[jax.Array], Rows]:
        def drawn(key: jax.Array) -> Rows:
            of = jax.random.split(key, 3)
            scores, weights = jax.random.normal(of[0], (rows, count)), jax.random.uniform(of[1], (rows, taken))
            x = jax.random.normal(of[2], (rows, hidden)).astype(jnp.bfloat16)
            return {"x": x, "experts": jax.lax.top_k(scores, taken)[1], "weights": weights}

        return drawn

    return draw, matrices


@pytest.mark.parametrize("form", ["store", "split_k"])
def test_products_interpreted(form: Any) -> None:
    draw, weight = products(256, 64)
    how: Any = {"multiprocessors": 4, "interpret": INTERPRET}
    check(lambda given: launch_dense(form, given["x"], weight, **how)[0], draw(32), 32)


def test_experts_interpreted() -> None:
    draw, matrices = mixtures(128, 128, 3, 2)
    check(lambda given: launch_experts(**given, **matrices, ctas=2, interpret=INTERPRET), draw(6), 6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [32, 128, 512])
@pytest.mark.parametrize("form", [dense, dense_gated, dense_parts])
def test_products(form: Any, rows: int) -> None:
    draw, weight = products(2560, 6144)
    check(jax.jit(lambda given: form(given["x"], weight, implementation="mosaic_gpu")), draw(rows), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 128, 512])
@pytest.mark.parametrize(("depth", "features"), [(2560, 6144), (9728, 2560), (2560, 151936)])
def test_products_of_xla(depth: int, features: int, rows: int) -> None:
    """With the options that exact programs have."""
    draw, weight = products(depth, features)
    run = jax.jit(lambda given: given["x"] @ weight.T, compiler_options=EXACT_PRODUCTS)
    check(run, draw(rows), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 128, 512])
def test_experts(rows: int) -> None:
    draw, matrices = mixtures(2048, 768, 128, 8)
    check(jax.jit(lambda given: routed_experts(**given, **matrices)), draw(rows), rows)
