"""From one layer's attention to the next layer's projection in the shapes of Qwen3 models, bf16, against the memory floor.

    python benchmarks/chain.py --models qwen3-4b --rows 1 16

A figure is the time of one layer inside one compiled loop on the device: the host's clock around many layers, divided by their
number. Every layer has weights of its own, over a gigabyte in all, so that nothing is left in the 60 MB L2. The baseline is
the same arithmetic as separate XLA operations. Correctness is checked first: one layer of both against float64.
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
from dflash_kernels import chain_exchange, chain_stream, layer_chain
from record import Record, arguments

from dflash_jax.models.presets import TARGETS

MODELS = {"qwen3-4b": "Qwen3-4B", "qwen3-8b": "Qwen3-8B"}
EPS = 1e-6
WEIGHTS = ("o", "post_norm", "gate_up", "down", "next_norm", "following")
COLD = 1e9


def weights(model: str, seed: int) -> dict[str, jax.Array]:
    """One layer's, and the projection of the layer after it."""
    config = TARGETS[MODELS[model]]
    d, f, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    after = heads + 2 * config.num_kv_heads * config.head_dim
    shapes = {
        "o": (d, heads),
        "post_norm": (d,),
        "gate_up": (2 * f, d),
        "down": (d, f),
        "next_norm": (d,),
        "following": (after, d),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: _draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def _draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    normal = jax.random.normal(key, shape, jnp.bfloat16)
    return normal * jnp.bfloat16(shape[1] ** -0.5) if len(shape) == 2 else 1 + normal * jnp.bfloat16(0.1)


def chained(x: jax.Array, stream: jax.Array, layers: list[dict[str, jax.Array]]) -> tuple[jax.Array, Any]:
    """All layers through the kernel; the stream is `[D, n]`."""
    exchange, projected = jax.new_ref(chain_exchange(stream, layers[0]["down"])), None
    for layer, later in zip(layers, (*layers[1:], layers[0]), strict=True):
        held, ahead = [layer[name] for name in WEIGHTS], later["o"]
        stream, projected = layer_chain(
            x, stream, *held, ahead=ahead, exchange=exchange, eps=EPS, implementation="mosaic_gpu"
        )
    return stream, projected


def separate(x: jax.Array, stream: jax.Array, layers: list[dict[str, jax.Array]]) -> tuple[jax.Array, Any]:
    """All layers as operations of their own; the stream is `[M, D]` in bfloat16."""

    def norm(stream: jax.Array, weight: jax.Array) -> jax.Array:
        wide = stream.astype(jnp.float32)
        return weight * (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)).astype(stream.dtype)

    projected = None
    for layer in layers:
        stream = stream + x @ layer["o"].T
        gate, up = jnp.split(norm(stream, layer["post_norm"]) @ layer["gate_up"].T, 2, axis=-1)
        stream = stream + (jax.nn.silu(gate) * up) @ layer["down"].T
        projected = norm(stream, layer["next_norm"]) @ layer["following"].T
        # Nobody reads the projection: a sum too small to matter keeps it in the program.
        stream = stream + projected[:, :1] * jnp.bfloat16(1e-30)
    return stream, projected


def truth(x: jax.Array, stream: jax.Array, layer: dict[str, jax.Array]) -> np.ndarray:
    """The projection after one layer, in float64."""
    wide = {name: np.asarray(value, np.float64) for name, value in layer.items()}

    def norm(stream: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return stream / np.sqrt((stream**2).mean(-1, keepdims=True) + EPS) * weight

    out = np.asarray(stream, np.float64) + np.asarray(x, np.float64) @ wide["o"].T
    gate, up = np.split(norm(out, wide["post_norm"]) @ wide["gate_up"].T, 2, axis=-1)
    out = out + (gate / (1 + np.exp(-gate)) * up) @ wide["down"].T
    return norm(out, wide["next_norm"]) @ wide["following"].T


def measure(
    function: Callable[..., Any], x: jax.Array, stream: jax.Array, layers: list[dict[str, jax.Array]]
) -> list[float]:
    """Microseconds of a layer: the difference between 22 and 2 rounds through all of them."""

    @jax.jit
    def rounds(x: jax.Array, stream: jax.Array, layers: list[dict[str, jax.Array]], count: Any) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, stream: function(x, stream, layers)[0], stream)

    def clock(count: int) -> float:
        started = time.perf_counter()
        rounds(x, stream, layers, count).block_until_ready()
        return time.perf_counter() - started

    clock(2)
    return [(clock(22) - clock(2)) / (20 * len(layers)) * 1e6 for _ in range(9)]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--models", nargs="+", default=["qwen3-4b"], choices=sorted(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    options = parser.parse_args()
    record = Record("chain", options)
    for model in options.models:
        first = weights(model, 0)
        size = sum(weight.nbytes for weight in first.values())
        layers = [first, *(weights(model, seed) for seed in range(1, int(COLD / size) + 2))]
        heads, width = first["o"].shape[1], first["o"].shape[0]
        for rows in options.rows:
            x = jax.random.normal(jax.random.key(1), (rows, heads), jnp.bfloat16)
            stream = jax.random.normal(jax.random.key(2), (rows, width), jnp.bfloat16)
            true = truth(x, stream, first)
            runs = {"mosaic_gpu": (chained, chain_stream(stream)), "xla": (separate, stream)}
            for name, (function, start) in runs.items():
                out = np.asarray(jax.jit(function)(x, start, [first])[1], np.float64)
                error = float(np.abs(out - true).max() / np.abs(true).max())
                if not error < 0.02:
                    raise SystemExit(f"{model} {rows} rows, {name}: error {error:.2e} against float64")
                times = measure(function, x, start, layers)
                record.add(
                    f"chain {model} M{rows} bf16", "time per layer" + ("" if name == "mosaic_gpu" else ", implementation xla"),
                    round(statistics.median(times), 1), "us", floor=round(size / card().bandwidth * 1e6, 1), implementation=name,
                    spread=[round(min(times), 1), round(max(times), 1)], error_float64=error,
                )  # fmt: skip
    print(record.write())


if __name__ == "__main__":
    main()
