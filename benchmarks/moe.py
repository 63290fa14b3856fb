"""The routed experts of DeepSeek-V2-Lite (64 of 1408, 6 a token, hidden 2048) or Qwen3-30B-A3B (128 of 768, 8 a token), bf16:
ways through them, by number of tokens.

    python benchmarks/moe.py
    python benchmarks/moe.py --shape Qwen3-30B-A3B

A figure is the time of one call and a norm inside one compiled loop, routing to other experts every time; 1.1 GB of weights
leave nothing in the L2. The floor is reading the weights of the experts that are taken once, at the bandwidth of a
device-to-device copy. Every way's output is compared with float32 first.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from card import card
from dflash_kernels import routed_experts, routed_experts_refusal
from flax import nnx
from record import Record, arguments

from dflash_jax.models.moe import Experts, ExpertsConfig
from dflash_jax.models.presets import DEEPSEEK_TARGETS, MOE_TARGETS

ROUNDS = 60  # of a call for each of eight routings: to start them takes as long as a few of the shortest
SHAPES = {"V2-Lite": DEEPSEEK_TARGETS["DeepSeek-V2-Lite"], "Qwen3-30B-A3B": MOE_TARGETS["Qwen3-30B-A3B"]}
BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)

type Weights = tuple[jax.Array, jax.Array]


class Mixture:
    """One layer's experts in the shape of a model, with random weights."""

    def __init__(self, config: ExpertsConfig):
        self.config, self.count, self.taken = config, config.num_experts, config.experts_per_token
        self.hidden, self.inner = config.hidden_size, config.moe_intermediate_size
        keys = jax.random.split(jax.random.key(0), 2)
        rows = self.count * 2 * self.inner, self.count * self.hidden
        self.weights = normal(keys[0], (rows[0], self.hidden)), normal(keys[1], (rows[1], self.inner))

    def module(self, weights: Weights) -> Experts:
        experts = nnx.eval_shape(lambda: Experts(self.config))
        experts.gate_up_proj.weight, experts.down_proj.weight = map(nnx.Param, weights)
        return experts

    def streamed(self, weights: Weights, x: jax.Array, experts: jax.Array, share: jax.Array) -> jax.Array:
        """`routed_experts`, its parts added."""
        matrices = (matrix.reshape(self.count, -1, matrix.shape[1]) for matrix in weights)
        return routed_experts(x, experts, share, *matrices).sum(axis=0).astype(x.dtype)

    def ragged(self, weights: Weights, x: jax.Array, experts: jax.Array, share: jax.Array) -> jax.Array:
        """Rows sorted by expert, `jax.lax.ragged_dot_general` for each of the two products."""
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=self.count).astype(jnp.int32)

        def product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
            by_expert = matrix.reshape(self.count, -1, rows.shape[-1])
            return jax.lax.ragged_dot_general(rows, by_expert, sizes, BY_EXPERT, preferred_element_type=rows.dtype)

        gate, up = jnp.split(product(x[order // self.taken], weights[0]), 2, axis=-1)
        out = product(jax.nn.silu(gate) * up, weights[1])[jnp.argsort(order)].reshape(*experts.shape, -1)
        return (out.astype(jnp.float32) * share[..., None]).sum(axis=-2).astype(x.dtype)

    def ways(self, tokens: int) -> dict[str, Callable[..., jax.Array]]:
        """The way the model takes first."""
        found: dict[str, Callable[..., jax.Array]] = {
            "time per call": lambda weights, *args: self.module(weights)(*args),
            "time per call, every expert": lambda weights, *args: self.module(weights).every(*args),
        }
        sizes = {"experts": self.count, "hidden": self.hidden, "inner": self.inner}
        if routed_experts_refusal(tokens, self.taken, jnp.bfloat16, **sizes) is None:
            found["time per call, experts streamed"] = self.streamed
        if tokens * self.taken > self.count:
            found["time per call, experts in blocks"] = lambda weights, *args: self.module(weights).grouped(*args)
        if tokens <= 16:
            found["time per call, gathered experts"] = lambda weights, *args: self.module(weights).chosen(*args)
        return found | {"time per call, ragged_dot": self.ragged}

    def true_values(self, x: jax.Array, experts: jax.Array, share: jax.Array) -> np.ndarray:
        """The last token in float32."""
        gate_up, down = (matrix.reshape(self.count, -1, matrix.shape[1]) for matrix in self.weights)
        row, out = np.asarray(x[-1], np.float32), np.zeros(self.hidden, np.float32)
        for expert, weight in zip(np.asarray(experts[-1]), np.asarray(share[-1]), strict=True):
            gate, up = np.split(np.asarray(gate_up[expert], np.float32) @ row, 2)
            out += weight * (np.asarray(down[expert], np.float32) @ (gate / (1 + np.exp(-gate)) * up))
        return out


@partial(jax.jit, static_argnums=1)
def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5


def micros(way: Any, weights: Weights, x: jax.Array, routes: jax.Array, share: jax.Array) -> list[float]:
    """Microseconds of one call in each of five runs."""

    @jax.jit
    def many(weights: Weights, x: jax.Array, routes: jax.Array) -> jax.Array:
        def round_of_all(_: jax.Array, x: jax.Array) -> jax.Array:
            for route in routes:
                out = way(weights, x, route, share).astype(jnp.float32)
                x = (out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
            return x

        return jax.lax.fori_loop(0, ROUNDS, round_of_all, x)

    many(weights, x, routes).block_until_ready()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        many(weights, x, routes).block_until_ready()
        times.append((time.perf_counter() - started) / (ROUNDS * len(routes)) * 1e6)
    return times


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=list(SHAPES), default="V2-Lite")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16, 128, 512, 2048])
    parser.add_argument("--without-ragged", action="store_true", help="leave ragged_dot out")
    options = parser.parse_args()
    record, mixture = Record("moe", options), Mixture(SHAPES[options.shape])
    count, taken = mixture.count, mixture.taken
    for tokens in options.tokens:
        rng = np.random.default_rng(tokens)
        routes = np.stack([[rng.permutation(count)[:taken] for _ in range(tokens)] for _ in range(8)]).astype(np.int32)
        x, share = (
            normal(jax.random.key(2), (tokens, mixture.hidden)),
            jnp.full((tokens, taken), 1 / taken, jnp.float32),
        )
        x = x * mixture.hidden**0.5
        true = mixture.true_values(x, routes[0], share)
        distinct = statistics.mean(len(np.unique(route)) for route in routes)
        floor = round(distinct * 6 * mixture.hidden * mixture.inner / card().bandwidth * 1e6, 1)
        for metric, way in mixture.ways(tokens).items():
            if options.without_ragged and "ragged" in metric:
                continue
            found = np.asarray(jax.jit(way)(mixture.weights, x, jnp.asarray(routes[0]), share)[-1], np.float32)
            error = float(np.abs(found - true).max() / np.abs(true).max())
            if not error < 0.03:
                raise SystemExit(f"{tokens} tokens, {metric}: error {error:.2e} against float32")
            times = micros(way, mixture.weights, x, jnp.asarray(routes), share)
            record.add(
                f"experts {options.shape} T{tokens} bf16", metric, round(statistics.median(times), 1), "us", floor=floor,
                error_float32=error, spread=[round(min(times), 1), round(max(times), 1)],
            )  # fmt: skip


if __name__ == "__main__":
    main()
