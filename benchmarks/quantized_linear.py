"""Products with matrices in eight bits in the shapes of Qwen3-4B, few rows of bf16, against the floor and XLA's own product.

    python benchmarks/quantized_linear.py

A figure is the time of one product inside one compiled loop on the device over matrices of their own, over a gigabyte in all, so
that nothing is left in the 60 MB L2: the host's clock around 22 rounds less that around 2. The floor is the matrix's bytes over the
memory's bandwidth. `xla bfloat16` is the product with the same matrix in sixteen bits. What the kernel gives is compared with
float64 first.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from card import card
from dflash_kernels import quantized_linear
from record import Record, arguments

SHAPES = {
    "qkv": (6144, 2560),
    "o": (2560, 4096),
    "gate_up": (19456, 2560),
    "down": (2560, 9728),
    "head": (151936, 2560),
}
DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "bfloat16": jnp.bfloat16}
COLD = 1.2e9


def matrix(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    if dtype == jnp.int8:
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def measure(product: Callable[..., Any], x: jax.Array, matrices: list[jax.Array], scales: jax.Array) -> list[float]:
    """Microseconds of a product."""

    @jax.jit
    def rounds(x: jax.Array, matrices: list[jax.Array], scales: jax.Array, count: Any) -> jax.Array:
        def once(_: Any, x: jax.Array) -> jax.Array:
            for values in matrices:
                # Each product waits for the one before: its result, too small to matter, goes into the next one's input.
                x = x + product(x, values, scales)[:, :1] * jnp.bfloat16(1e-30)
            return x

        return jax.lax.fori_loop(0, count, once, x)

    def clock(count: int) -> float:
        started = time.perf_counter()
        rounds(x, matrices, scales, count).block_until_ready()
        return time.perf_counter() - started

    clock(2)
    return [(clock(22) - clock(2)) / (20 * len(matrices)) * 1e6 for _ in range(7)]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    record = Record("quantized_linear", options)
    for name in options.shapes:
        features, depth = SHAPES[name]
        scales = jax.random.uniform(jax.random.key(3), (features,), minval=0.01, maxval=0.02)
        for kind in options.dtypes:
            size = features * depth * jnp.dtype(DTYPES[kind]).itemsize
            keys = jax.random.split(jax.random.key(0), int(COLD / size) + 2)
            matrices = [matrix(key, SHAPES[name], DTYPES[kind]) for key in keys]
            for rows in options.rows:
                x = jax.random.normal(jax.random.key(1), (rows, depth), jnp.bfloat16)
                for path in ("xla",) if kind == "bfloat16" else ("mosaic_gpu", "xla"):

                    def product(x: jax.Array, values: jax.Array, scales: jax.Array, path: str = path) -> jax.Array:
                        return quantized_linear(x, values, scales, implementation=path)

                    if path == "mosaic_gpu":
                        check(product, x, matrices[0], scales)
                    times = measure(product, x, matrices, scales)
                    record.add(
                        f"{name} {kind} M{rows} {path}", "time per product", round(statistics.median(times), 2), "us",
                        floor=round(size / card().bandwidth * 1e6, 2), spread=[round(min(times), 2), round(max(times), 2)],
                    )  # fmt: skip
            del matrices


def check(product: Callable[..., Any], x: jax.Array, values: jax.Array, scales: jax.Array) -> None:
    """The last 4096 features against float64, as near as sums in float32 of bf16 results are."""
    some = slice(-4096, None)
    true = np.asarray(x, np.float64) @ np.asarray(values[some], np.float64).T * np.asarray(scales[some], np.float64)
    found = np.asarray(jax.jit(product)(x, values, scales)[:, some], np.float64)
    error = np.abs(found - true).max() / np.abs(true).max()
    assert error < 2**-8, f"error {error} of the largest result"


if __name__ == "__main__":
    main()
