"""The routed experts of DeepSeek-V2-Lite (64 of 1408, 6 a token, hidden 2048) or Qwen3-30B-A3B (128 of 768, 8 a token), bf16:
ways through them, by number of tokens.

    python benchmarks/moe.py
    python benchmarks/moe.py --shape Qwen3-30B-A3B

A figure is the time of one call inside one compiled loop, routing to other experts every time; over 1 GB of weights leaves nothing in
the L2. The floor is reading the weights of the experts that are taken once, at the bandwidth of a device-to-device copy. Every
way's output is compared with float32 first.
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
from flax import nnx
from record import Record, arguments

from dflash_jax.models.moe import Experts
from dflash_jax.models.presets_deepseek import DEEPSEEK_TARGETS

BANDWIDTH = 4.3e12  # bytes a second, device-to-device copy measured on this kind of GPU
CONFIG = DEEPSEEK_TARGETS["DeepSeek-V2-Lite"]
COUNT, TAKEN, D, F = CONFIG.num_experts, CONFIG.experts_per_token, CONFIG.hidden_size, CONFIG.moe_intermediate_size
BYTES = 2 * 3 * D * F  # of one expert
BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def module(weights: tuple[jax.Array, jax.Array]) -> Experts:
    experts = nnx.eval_shape(lambda: Experts(CONFIG))
    experts.gate_up_proj.weight, experts.down_proj.weight = map(nnx.Param, weights)
    return experts


def ragged(weights: tuple[jax.Array, jax.Array], x: jax.Array, experts: jax.Array, share: jax.Array) -> jax.Array:
    """Rows sorted by expert, `jax.lax.ragged_dot_general` for each of the two products."""
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=COUNT).astype(jnp.int32)

    def product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
        by_expert = matrix.reshape(COUNT, -1, rows.shape[-1])
        return jax.lax.ragged_dot_general(rows, by_expert, sizes, BY_EXPERT, preferred_element_type=rows.dtype)

    gate, up = jnp.split(product(x[order // TAKEN], weights[0]), 2, axis=-1)
    out = product(jax.nn.silu(gate) * up, weights[1])[jnp.argsort(order)].reshape(*experts.shape, -1)
    return (out.astype(jnp.float32) * share[..., None]).sum(axis=-2).astype(x.dtype)


def ways(tokens: int) -> dict[str, Callable[..., jax.Array]]:
    """The way the model takes first."""
    found = {
        "time per call": lambda weights, *args: module(weights)(*args),
        "time per call, every expert": lambda weights, *args: module(weights).every(*args),
    }
    if tokens * TAKEN > COUNT:
        found["time per call, experts in blocks"] = lambda weights, *args: module(weights).grouped(*args)
    if tokens <= 16:
        found["time per call, gathered experts"] = lambda weights, *args: module(weights).chosen(*args)
    return found | {"time per call, ragged_dot": ragged}


def true_values(weights: tuple[jax.Array, jax.Array], x: jax.Array, experts: jax.Array, share: jax.Array) -> np.ndarray:
    """The last token in float32."""
    gate_up, down = weights[0].reshape(COUNT, 2 * F, D), weights[1].reshape(COUNT, D, F)
    row, out = np.asarray(x[-1], np.float32), np.zeros(D, np.float32)
    for expert, weight in zip(np.asarray(experts[-1]), np.asarray(share[-1]), strict=True):
        gate, up = np.split(np.asarray(gate_up[expert], np.float32) @ row, 2)
        out += weight * (np.asarray(down[expert], np.float32) @ (gate / (1 + np.exp(-gate)) * up))
    return out


def micros(
    way: Any, weights: tuple[jax.Array, jax.Array], x: jax.Array, routes: jax.Array, share: jax.Array
) -> list[float]:
    """Microseconds of one call in each of five runs of 16."""

    @jax.jit
    def many(weights: tuple[jax.Array, jax.Array], x: jax.Array, routes: jax.Array) -> jax.Array:
        def one(i: jax.Array, x: jax.Array) -> jax.Array:
            out = way(weights, x, routes[i % routes.shape[0]], share).astype(jnp.float32)
            return (out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)

        return jax.lax.fori_loop(0, 16, one, x)

    many(weights, x, routes).block_until_ready()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        many(weights, x, routes).block_until_ready()
        times.append((time.perf_counter() - started) / 16 * 1e6)
    return times


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16, 128, 512, 2048])
    parser.add_argument("--without-ragged", action="store_true", help="leave ragged_dot out")
    options = parser.parse_args()
    record, keys = Record("moe", options), jax.random.split(jax.random.key(0), 3)
    normal = jax.jit(
        lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5, static_argnums=1
    )
    weights = normal(keys[0], (COUNT * 2 * F, D)), normal(keys[1], (COUNT * D, F))
    for tokens in options.tokens:
        rng = np.random.default_rng(tokens)
        routes = np.stack([[rng.permutation(COUNT)[:TAKEN] for _ in range(tokens)] for _ in range(8)]).astype(np.int32)
        x, share = normal(keys[2], (tokens, D)) * D**0.5, jnp.full((tokens, TAKEN), 1 / TAKEN, jnp.float32)
        true = true_values(weights, x, routes[0], share)
        distinct = statistics.mean(len(np.unique(route)) for route in routes)
        floor = round(distinct * BYTES / BANDWIDTH * 1e6, 1)
        for metric, way in ways(tokens).items():
            if options.without_ragged and "ragged" in metric:
                continue
            found = np.asarray(jax.jit(way)(weights, x, jnp.asarray(routes[0]), share)[-1], np.float32)
            error = float(np.abs(found - true).max() / np.abs(true).max())
            if not error < 0.03:
                raise SystemExit(f"{tokens} tokens, {metric}: error {error:.2e} against float32")
            times = micros(way, weights, x, jnp.asarray(routes), share)
            record.add(
                f"experts V2-Lite T{tokens} bf16", metric, round(statistics.median(times), 1), "us", floor=floor,
                error_float32=error, spread=[round(min(times), 1), round(max(times), 1)],
            )  # fmt: skip


if __name__ == "__main__":
    main()
