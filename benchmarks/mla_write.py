"""Norm, rotations and cache write of one latent attention layer in the shape of DeepSeek-V2-Lite, bf16.

    python benchmarks/mla_write.py

A figure is the time of one layer inside one compiled loop on the device over 27 layers with pools and projections of their own, as
a decode step has them, the queries of one round being the next one's: the host's clock around many rounds, divided by rounds and
layers. "apart" is the latent's norm, both rotations and the write as operations of their own; what `mla_write` gives is compared
with it first. The floor is the bytes that must move over the memory's bandwidth; a launch inside the loop takes 1.3 us or more
whatever it does.
"""

import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from card import card
from dflash_kernels import latent_write, mla_write
from record import Record, arguments

from dflash_jax.models.deepseek import rotate_interleaved
from dflash_jax.models.layers import Rotary, rms_norm
from dflash_jax.models.presets import DEEPSEEK_TARGETS

CONFIG = DEEPSEEK_TARGETS["DeepSeek-V2-Lite"]
HEADS, HEAD_DIM, RANK, WIDTH = CONFIG.num_heads, CONFIG.head_dim, CONFIG.kv_lora_rank, CONFIG.latent_width
ROTATED, LAYERS, PAGE = CONFIG.qk_rope_head_dim, CONFIG.num_layers, 64


def apart(pool, rows, q, slots, cos, sin, *, norm, eps):
    kv_c, k_pe = jnp.split(rows, [RANK], axis=-1)
    k_pe = rotate_interleaved(k_pe[:, None], Rotary(cos, sin))[:, 0]
    q_pe = rotate_interleaved(q[..., HEAD_DIM - ROTATED :], Rotary(cos, sin))
    q = jnp.concatenate([q[..., : HEAD_DIM - ROTATED], q_pe], axis=-1)
    return q, latent_write(pool, jnp.concatenate([rms_norm(kv_c, norm, eps), k_pe], axis=-1), slots)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def tables(step: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Slots, cos and sin of a round: made on the device, new each time."""
    positions = jnp.arange(tokens) + step
    angles = positions[:, None] * 10000.0 ** -(jnp.arange(ROTATED // 2) / (ROTATED // 2))
    return positions.astype(jnp.int32) % (4 * max(PAGE, tokens)), jnp.cos(angles), jnp.sin(angles)


def program(form: Any) -> Any:
    """Rounds over all layers; the last round's queries and the pools come out."""

    def run(pools, rows, q, norms, rounds):
        def one(step, state):
            # Ties the rows to the round, or what depends on nothing else would be computed once for all rounds.
            own_rows, step = jax.lax.optimization_barrier((rows, step))
            slots, cos, sin = tables(step, q[0].shape[0])
            done = [
                form(pool, row, turned, slots, cos, sin, norm=norm, eps=1e-6)
                for pool, turned, row, norm in zip(*state, own_rows, norms, strict=True)
            ]
            return [pool for _, pool in done], [turned for turned, _ in done]

        return jax.lax.fori_loop(0, rounds, one, (pools, q))

    return jax.jit(run, donate_argnums=(0, 2))


def check(tokens: int) -> None:
    arrays = normal(1, tokens, WIDTH), normal(2, tokens, HEADS, HEAD_DIM), *tables(jnp.int32(5), tokens)
    pool = jnp.zeros((4 * max(PAGE, tokens) // PAGE, 1, PAGE, WIDTH), jnp.bfloat16)
    options = {"norm": normal(3, RANK), "eps": 1e-6}
    together, separate = (jax.jit(functools.partial(f, **options))(pool, *arrays) for f in (mla_write, apart))
    for found, expected in zip(together, separate, strict=True):
        found, expected = (np.asarray(x, np.float32) for x in (found, expected))
        # A normed number is rounded twice, and where a float32 sum falls beside the other's it may be by two units, 2^-6 of a
        # number just past a power of two. Where a turn's two products cancel, what is left is their float32 rounding.
        if not (np.abs(found - expected) <= 2**-6 * np.abs(expected) + 1e-6).all():
            raise SystemExit(f"{tokens} tokens: mla_write and the same operations apart disagree")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128, 2048])
    options = parser.parse_args()
    record = Record("mla_write", options)
    for tokens in options.tokens:
        check(tokens)
        found = {}
        for name, form in (("apart", apart), ("together", mla_write)):
            pools = [jnp.zeros((4 * max(PAGE, tokens) // PAGE, 1, PAGE, WIDTH), jnp.bfloat16) for _ in range(LAYERS)]
            rest = [
                [normal(i, *shape) for i in range(LAYERS)]
                for shape in ((tokens, WIDTH), (tokens, HEADS, HEAD_DIM), (RANK,))
            ]
            rows, q, norms = rest
            run, times = program(form), []
            for _ in range(5):
                start = time.perf_counter()
                pools, q = jax.block_until_ready(run(pools, rows, q, norms, jnp.int32(200)))
                times.append(time.perf_counter() - start)
            found[name] = round(statistics.median(times[1:]) / 200 / LAYERS * 1e6, 2)
        moved = 2 * tokens * 2 * (WIDTH + HEADS * ROTATED)
        floor = round(moved / card().bandwidth * 1e6, 2)
        record.add(f"mla_write T{tokens} bf16", "time per layer", found["together"], "us", floor=floor,
                   peer="operations apart", peer_value=found["apart"])  # fmt: skip


if __name__ == "__main__":
    main()
