"""Sparse latent attention of one layer in the shapes of DeepSeek-V3.2 and GLM-5: what each step of it takes, and dense attention.

    python benchmarks/sparse.py --models DeepSeek-V3.2 --batch 1 8 --tokens 1 16 --contexts 4096 16384 32768 131072

"scores" goes over the index keys of a sequence in float8, "choice" takes the 2,048 best and tells their slots, "attention" is to
these rows, "sparse" all three one after the other, and "dense" is latent attention over all rows, all of them in bfloat16: sparse
attention pays where it takes less. A figure is the host's clock around many rounds of a loop on the device, divided by rounds. A
call begins when the one before it has ended, without an operation between them, and reads other pages than the last ones did, so
that it finds them in memory and not in the cache. Floors are the bytes that must move, or the operations, whichever take longer.
"""

import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from card import card
from dflash_kernels import index_encode, index_scores, index_select, mla_attention, mla_selected_attention
from jax import lax
from record import Record, arguments

from dflash_jax.compile.jax_patches import name_values_once
from dflash_jax.models import SparseDeepseekConfig
from dflash_jax.models.presets import SPARSE_TARGETS

PAGE, CALLS = 64, 4
STEPS = ("scores", "choice", "attention", "sparse", "dense")
CACHE = 2**28  # bytes that calls go through before they read the same again: several times what an L2 holds


def normal(key: jax.Array, seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(key, seed), shape, jnp.bfloat16)


type Arrays = dict[str, jax.Array]
type Step = Callable[[Arrays, jax.Array, jax.Array], jax.Array]


def compiled(
    step: Step, arrays: Arrays, first: jax.Array, turns: Sequence[jax.Array], rounds: int
) -> Callable[[], float]:
    """Compiles `rounds` rounds of `CALLS` calls of `step(arrays, first, turn)`; what comes back measures microseconds of a call."""

    def run(arrays: Arrays, first: jax.Array, turns: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        def one(_: int, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            held = list(outs)
            for call in range(CALLS):
                # No call begins before the one before it has ended. What that gave is carried on, or the compiler leaves it out.
                again, held[call - 1] = lax.optimization_barrier((first, held[call - 1]))
                held[call] = step(arrays, again, turns[call % len(turns)])
            return tuple(held)

        return lax.fori_loop(0, rounds, one, (step(arrays, first, turns[0]),) * CALLS)

    traced = jax.jit(run).trace(arrays, first, turns)
    name_values_once()
    program = traced.lower().compile()

    def measure() -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            jax.block_until_ready(program(arrays, first, turns))
            times.append(time.perf_counter() - begin)
        return round(statistics.median(times[1:]) / (rounds * CALLS + 1) * 1e6, 2)

    return measure


class Layer:
    """One layer's attention: its arrays, in as many copies as it takes to be read from memory, and its steps."""

    def __init__(self, config: SparseDeepseekConfig, b: int, t: int, s: int):
        self.config, pages = config, b * s // PAGE
        self.options = {"kv_lora_rank": config.kv_lora_rank, "scale": config.attention_scale}
        copies = min(max(math.ceil(CACHE / (b * s * (config.index_head_dim + 4))), 1), CALLS)

        # Pages of a sequence lie anywhere, those of a copy among themselves.
        orders = [np.random.default_rng(copy).permutation(pages) + copy * pages for copy in range(copies)]
        self.tables = [jnp.asarray(order.reshape(b, -1), jnp.int32) for order in orders]

        @jax.jit
        def made(key: jax.Array) -> tuple[Arrays, jax.Array]:
            keys, key_scale = index_encode(normal(key, 1, copies * pages, 1, PAGE, config.index_head_dim))
            index_q, q_scale = index_encode(normal(key, 2, b, t, config.index_heads, config.index_head_dim))
            return {
                "keys": keys, "key_scale": key_scale, "latents": normal(key, 0, copies * pages, 1, PAGE, config.latent_width),
                "q": normal(key, 3, b, t, config.num_heads, config.latent_width), "lens": jnp.full((b,), s, jnp.int32),
                "live": jnp.full((b,), t, jnp.int32),
                "weights": normal(key, 4, b, t, config.index_heads).astype(jnp.float32) * q_scale,
            }, index_q  # fmt: skip

        self.arrays, self.index_q = made(jax.random.key(0))

    @functools.cached_property
    def found(self) -> jax.Array:
        """Scores of the first copy."""
        return self.scores(self.arrays, self.index_q, self.tables[0])

    @functools.cached_property
    def slots(self) -> list[jax.Array]:
        """What each copy's queries see."""
        return [self.choice(self.arrays, self.found, table) for table in self.tables]

    def scores(self, arrays: Arrays, q: jax.Array, table: jax.Array) -> jax.Array:
        return index_scores(
            q, arrays["weights"], arrays["keys"], table, arrays["lens"], q_lens=arrays["live"], index_scale=arrays["key_scale"],
        )  # fmt: skip

    def choice(self, arrays: Arrays, scores: jax.Array, table: jax.Array) -> jax.Array:
        del arrays
        count = self.config.index_topk
        return index_select(scores, count=count, page_table=table, page_size=PAGE)

    def attention(self, arrays: Arrays, q: jax.Array, slots: jax.Array) -> jax.Array:
        return mla_selected_attention(q, arrays["latents"], slots, **self.options)

    def sparse(self, arrays: Arrays, index_q: jax.Array, table: jax.Array) -> jax.Array:
        slots = self.choice(arrays, self.scores(arrays, index_q, table), table)
        return self.attention(arrays, arrays["q"], slots)

    def dense(self, arrays: Arrays, q: jax.Array, table: jax.Array) -> jax.Array:
        return mla_attention(q, arrays["latents"], table, arrays["lens"], q_lens=arrays["live"], **self.options)


def programs(
    config: SparseDeepseekConfig, b: int, t: int, s: int, steps: Sequence[str], rounds: int
) -> dict[str, Callable[[], float]]:
    """What measures each of the steps."""
    layer = Layer(config, b, t, s)
    cases: dict[str, tuple[Step, Callable[[], tuple[jax.Array, Sequence[jax.Array]]]]] = {
        "scores": (layer.scores, lambda: (layer.index_q, layer.tables)),
        "choice": (layer.choice, lambda: (layer.found, layer.tables)),
        "attention": (layer.attention, lambda: (layer.arrays["q"], layer.slots)),
        "sparse": (layer.sparse, lambda: (layer.index_q, layer.tables)),
        "dense": (layer.dense, lambda: (layer.arrays["q"], layer.tables)),
    }
    return {name: compiled(cases[name][0], layer.arrays, *cases[name][1](), rounds) for name in steps}


def floors(config: SparseDeepseekConfig, b: int, t: int, s: int) -> dict[str, float]:
    """Microseconds; products of eight bits are taken to be twice as fast as of sixteen."""
    seen, width, moved = min(config.index_topk, s), 2 * config.kv_lora_rank + config.qk_rope_head_dim, card().bandwidth
    index = b * s * (config.index_head_dim + 4) / moved, b * t * 2 * config.index_heads * config.index_head_dim * s / 2
    attend, dense = (2 * b * t * config.num_heads * width * keys for keys in (seen, s))
    found = {
        "scores": max(index[0], index[1] / card().products) * 1e6, "choice": b * t * s * 4 / moved * 1e6,
        "attention": max(attend / card().products, b * t * seen * config.latent_width * 2 / moved) * 1e6,
        "dense": max(dense / card().products, b * s * config.latent_width * 2 / moved) * 1e6,
    }  # fmt: skip
    # What is written and read between steps may stay in the cache.
    return found | {"sparse": found["scores"] + found["attention"]}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=SPARSE_TARGETS, default=["DeepSeek-V3.2", "GLM-5"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 16_384, 32_768, 131_072])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    record = Record("sparse", options)
    cases = list(itertools.product(options.models, options.batch, options.tokens, options.contexts))
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(programs, SPARSE_TARGETS[name], *sizes, options.steps, options.rounds) for name, *sizes in cases
        ]
    # From here on nothing else runs on the GPU.
    for (name, b, t, s), job in zip(cases, jobs, strict=True):
        least = floors(SPARSE_TARGETS[name], b, t, s)
        for step, measure in job.result().items():
            record.add(f"{name} B{b} T{t} S{s} {step}", "time per layer", measure(), "us", floor=round(least[step], 2))


if __name__ == "__main__":
    main()
