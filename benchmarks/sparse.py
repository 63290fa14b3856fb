"""Sparse latent attention of one layer in the shapes of DeepSeek-V3.2 and GLM-5: what each step of it takes, and dense attention.

    python benchmarks/sparse.py --models DeepSeek-V3.2 --batch 1 8 --tokens 1 16 --contexts 4096 32768 131072

"scores" goes over the index keys of a sequence in float8, "choice" takes the 2,048 best, "attention" gathers their packed rows, and
"dense" is latent attention over all rows in bfloat16: sparse attention pays where the three take less together. A figure is the
host's clock around many rounds of a loop on the device, divided by rounds; a round's input hangs on the result of the one before.
Floors are the bytes that must move, or the operations, whichever take longer.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
from card import card
from dflash_kernels import (
    index_encode,
    index_scores,
    index_select,
    latent_encode,
    mla_attention,
    mla_selected_attention,
)
from record import Record, arguments

from dflash_jax.models import SparseDeepseekConfig
from dflash_jax.models.presets import SPARSE_TARGETS

PAGE = 64


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def rounds_of(step: Any, start: jax.Array, arrays: Any, rounds: int) -> float:
    """Microseconds of a round of `step(carried, arrays)`."""

    @jax.jit
    def run(carried: jax.Array, arrays: Any) -> jax.Array:
        def one(_: int, carried: jax.Array) -> jax.Array:
            # Nothing of it, but the next round cannot begin before.
            return carried + (0 * jnp.nan_to_num(step(carried, arrays)).ravel()[0]).astype(carried.dtype)

        return jax.lax.fori_loop(0, rounds, one, carried)

    times = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(run(start, arrays))
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times[1:]) / rounds * 1e6, 1)


def measured(config: SparseDeepseekConfig, b: int, t: int, s: int, rounds: int) -> dict[str, float]:
    rank, pages = config.kv_lora_rank, b * s // PAGE
    table, lens = jnp.arange(pages, dtype=jnp.int32).reshape(b, -1), jnp.full((b,), s, jnp.int32)
    latents = normal(0, pages, 1, PAGE, config.latent_width)
    keys, key_scale = index_encode(normal(1, pages, 1, PAGE, config.index_head_dim))
    index_q = normal(2, b, t, config.index_heads, config.index_head_dim)
    weights = normal(3, b, t, config.index_heads).astype(jnp.float32)
    q, scale = normal(4, b, t, config.num_heads, config.latent_width), config.attention_scale

    def scores(carried: jax.Array, arrays: Any) -> jax.Array:
        keys, key_scale = arrays
        return index_scores(carried.astype(keys.dtype), weights, keys, table, lens, index_scale=key_scale)

    def choice(carried: jax.Array, arrays: Any) -> jax.Array:
        return index_select(carried, count=config.index_topk).astype(jnp.float32)

    def chosen(carried: jax.Array, arrays: Any) -> jax.Array:
        packed, slots = arrays
        return mla_selected_attention(carried, packed, slots, kv_lora_rank=rank, scale=scale)

    def dense(carried: jax.Array, arrays: Any) -> jax.Array:
        return mla_attention(carried, arrays, table, lens, kv_lora_rank=rank, scale=scale)

    given = keys, key_scale
    found = scores(index_q, given)
    places = index_select(found, count=config.index_topk)
    slots = jnp.where(places >= 0, places + (jnp.arange(b) * s)[:, None, None].astype(jnp.int32), -1)
    packed = latent_encode(latents, jnp.uint8, kv_lora_rank=rank)
    return {
        "scores": rounds_of(scores, index_q, given, rounds), "choice": rounds_of(choice, found, (), rounds),
        "attention": rounds_of(chosen, q, (packed, slots), rounds), "dense": rounds_of(dense, q, latents, rounds),
    }  # fmt: skip


def floors(config: SparseDeepseekConfig, b: int, t: int, s: int) -> dict[str, float]:
    """Microseconds; products of eight bits are taken to be twice as fast as of sixteen."""
    seen, width, moved = min(config.index_topk, s), 2 * config.kv_lora_rank + config.qk_rope_head_dim, card().bandwidth
    index = b * s * (config.index_head_dim + 4) / moved, b * t * 2 * config.index_heads * config.index_head_dim * s / 2
    attend, dense = (2 * b * t * config.num_heads * width * keys for keys in (seen, s))
    return {
        "scores": max(index[0], index[1] / card().products) * 1e6, "choice": b * t * s * 4 / moved * 1e6,
        "attention": max(attend / card().products, b * t * seen * 656 / moved) * 1e6,
        "dense": max(dense / card().products, b * s * config.latent_width * 2 / moved) * 1e6,
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=SPARSE_TARGETS, default=["DeepSeek-V3.2", "GLM-5"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 32_768, 131_072])
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    record = Record("sparse", options)
    for name in options.models:
        for b, t, s in ((b, t, s) for b in options.batch for t in options.tokens for s in options.contexts):
            least = floors(SPARSE_TARGETS[name], b, t, s)
            for step, taken in measured(SPARSE_TARGETS[name], b, t, s, options.rounds).items():
                record.add(f"{name} B{b} T{t} S{s} {step}", "time per layer", taken, "us", floor=round(least[step], 2))


if __name__ == "__main__":
    main()
