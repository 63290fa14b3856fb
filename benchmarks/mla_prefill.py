"""Prompts through a latent attention layer in the shape of DeepSeek-V2-Lite (16 heads, 128 + 64, values 128, latent 512), bf16.

    python benchmarks/mla_prefill.py            # measure and write results/mla_prefill.json
    python benchmarks/mla_prefill.py --sweep    # other sizes of the context's chunks too

Three questions. How much dearer is a prompt of 32k tokens prefilled 2k at a time, with its context read from pages and expanded
again for every 2k, than one attention over keys and values that are there already (both through the ragged kernel)? Does the memory
it takes stay the same when the context is four times as long? And from how many new tokens is expanding the context faster than
attending to it absorbed? Times are the host's clock around one compiled program on the device, a call's output being the next
one's queries. Outputs are compared with float64 first.
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
from dflash_kernels import ragged_attention
from record import Record, arguments

from dflash_jax.attention.mla import LatentForm, absorbed_attention
from dflash_jax.attention.mla_prefill import chunked_prefill
from dflash_jax.models.deepseek import MLAttention
from dflash_jax.models.presets_deepseek import DEEPSEEK_TARGETS

MATRIX = 790e12  # bf16 operations a second, a large product measured on this kind of GPU
CONFIG = DEEPSEEK_TARGETS["DeepSeek-V2-Lite"]
HEADS, NOPE, ROTATED = CONFIG.num_heads, CONFIG.qk_nope_head_dim, CONFIG.qk_rope_head_dim
PROMPT, STEP, PAGE = 32768, 2048, 64
CHUNKS = (8192, 16384, 32768)


class Layer:
    """The layer's attention alone: up-projections as arrays."""

    index, causal = 0, True

    def __init__(self, kv_b: jax.Array):
        self.scale = CONFIG.attention_scale
        weights = kv_b.reshape(HEADS, -1, CONFIG.kv_lora_rank)
        self.w_uk, self.w_uv = weights[:, :NOPE], weights[:, NOPE:]

    absorb, up = MLAttention.absorb, MLAttention.up

    def expand(self, kv_c: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.einsum("...r,npr->...np", kv_c, self.w_uk), jnp.einsum("...r,nvr->...nv", kv_c, self.w_uv)


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    make = jax.jit(lambda key: (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16))
    return make(jax.random.key(seed))


def inputs(tokens: int, length: int) -> dict[str, jax.Array]:
    """New tokens and a shuffled pool that holds `length` rows, and 512 more that nobody's table names."""
    width = length // PAGE
    table = jax.random.permutation(jax.random.key(9), width + 8)[None, :width].astype(jnp.int32)
    return {
        "kv_b": normal(0, HEADS * (NOPE + CONFIG.v_head_dim), CONFIG.kv_lora_rank, scale=CONFIG.kv_lora_rank**-0.5),
        "q_nope": normal(1, 1, tokens, HEADS, NOPE), "q_pe": normal(2, 1, tokens, HEADS, ROTATED),
        "latents": normal(3, 1, tokens, CONFIG.latent_width), "pages": normal(4, width + 8, 1, PAGE, CONFIG.latent_width),
        "table": table,
    }  # fmt: skip


def seconds(program: Any, *args: Any, runs: int = 5) -> list[float]:
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - started)
    return times


def step(arrays: dict[str, jax.Array], q_nope: jax.Array, context: jax.Array, chunk: int) -> jax.Array:
    """The new tokens after `context` others, expanded."""
    lens = jnp.array([q_nope.shape[1]], jnp.int32)
    return chunked_prefill(
        Layer(arrays["kv_b"]), q_nope, arrays["q_pe"], arrays["latents"], arrays["pages"], arrays["table"], context[None], lens,
        context_chunk=chunk,
    )  # fmt: skip


def prompt_program(chunk: int, steps: int) -> Any:
    """`steps` prefills of `STEP` tokens, the context growing by that many each time."""

    def run(arrays: dict[str, jax.Array]) -> jax.Array:
        def one(i: jax.Array, q_nope: jax.Array) -> jax.Array:
            return step(arrays, q_nope, i.astype(jnp.int32) * STEP, chunk)

        return jax.lax.fori_loop(0, steps, one, arrays["q_nope"])

    return jax.jit(run)


def dense_program() -> Any:
    """One causal attention of the whole prompt, keys and values given."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        starts = jnp.array([0, PROMPT], jnp.int32)
        return ragged_attention(q, k, v, starts, causal=True, scale=CONFIG.attention_scale)

    return jax.jit(run)


def check(chunk: int) -> float:
    """Error of the last tokens of a 6k prompt against float64, as a share of the largest output."""
    length = 3 * STEP
    arrays = inputs(STEP, length)
    found = jax.jit(functools.partial(step, chunk=chunk))(arrays, arrays["q_nope"], jnp.int32(2 * STEP))
    pages, table = np.asarray(arrays["pages"], np.float64), np.asarray(arrays["table"])[0]
    rows = np.concatenate(
        [pages[table].reshape(-1, CONFIG.latent_width)[: 2 * STEP], np.asarray(arrays["latents"][0], np.float64)]
    )
    layer, picked = Layer(np.asarray(arrays["kv_b"], np.float64)), np.array([0, 1, STEP // 3, STEP - 1])
    k = np.einsum("sr,npr->snp", rows[:, : CONFIG.kv_lora_rank], layer.w_uk, optimize=True)
    v = np.einsum("sr,nvr->snv", rows[:, : CONFIG.kv_lora_rank], layer.w_uv, optimize=True)
    q_nope, q_pe = (np.asarray(arrays[name][0], np.float64)[picked] for name in ("q_nope", "q_pe"))
    scores = np.einsum("tnp,snp->nts", q_nope, k, optimize=True)
    scores += np.einsum("tnr,sr->nts", q_pe, rows[:, CONFIG.kv_lora_rank :], optimize=True)
    scores = np.where(np.arange(length) <= 2 * STEP + picked[:, None], scores * CONFIG.attention_scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    true = np.einsum("nts,snv->tnv", weights / weights.sum(-1, keepdims=True), v, optimize=True)
    error = float(np.abs(np.asarray(found[0, picked], np.float64) - true).max() / np.abs(true).max())
    if not error < 0.02:
        raise SystemExit(f"prefill of {STEP} tokens after {2 * STEP}: error {error:.2e} against float64")
    return error


def prompt(record: Record, chunks: tuple[int, ...]) -> None:
    """32k tokens, 2k at a time, against one dense attention."""
    flops = HEADS * (NOPE + ROTATED + CONFIG.v_head_dim) * PROMPT**2
    q, k, v = (normal(5 + i, PROMPT, HEADS, width) for i, width in enumerate((192, 192, CONFIG.v_head_dim)))
    dense = statistics.median(seconds(dense_program(), q, k, v)) * 1e3
    floor = round(flops / MATRIX * 1e3, 2)
    record.add("mla dense 32k 192/128 bf16", "one causal attention", round(dense, 2), "ms", floor=floor,
               tflops=round(flops / dense / 1e9))  # fmt: skip
    arrays = inputs(STEP, PROMPT)
    for chunk in chunks:
        error, times = check(chunk), seconds(prompt_program(chunk, PROMPT // STEP), arrays)
        middle = statistics.median(times) * 1e3
        name = f"mla prefill 32k by 2k bf16 chunk {chunk}"
        record.add(name, "attention of the prompt", round(middle, 2), "ms", floor=floor, error_float64=error,
                   spread=[round(min(times) * 1e3, 2), round(max(times) * 1e3, 2)])  # fmt: skip
        record.add(name, "times one dense attention", round(middle / dense, 3), "x")


def memory(record: Record, chunk: int) -> None:
    """What one call needs beside its arguments and output, by the compiler and by the device's own count."""
    device = jax.local_devices()[0]
    for length in (PROMPT, 4 * PROMPT):
        arrays = inputs(STEP, length)
        run = jax.jit(functools.partial(step, chunk=chunk)).lower(arrays, arrays["q_nope"], jnp.int32(0)).compile()
        temporary = run.memory_analysis().temp_size_in_bytes
        before = (device.memory_stats() or {}).get("bytes_in_use")
        jax.block_until_ready(run(arrays, arrays["q_nope"], jnp.int32(length - STEP)))
        stats = device.memory_stats() or {}
        name = f"mla prefill memory {length // 1024}k chunk {chunk}"
        record.add(name, "temporary memory of 2k tokens", round(temporary / 2**20, 1), "MiB",
                   in_use_before=before, peak_bytes_in_use=stats.get("peak_bytes_in_use"))  # fmt: skip


def crossover(record: Record, tokens: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """New tokens after a context, absorbed and expanded."""
    for length in lengths:
        for t in tokens:
            arrays, lens = inputs(t, length), jnp.array([t], jnp.int32)

            def absorbed(arrays: dict[str, jax.Array], q_nope: jax.Array, lens=lens, length=length) -> jax.Array:
                seen = jnp.array([length], jnp.int32)
                q_pe, pages = arrays["q_pe"], arrays["pages"]
                return absorbed_attention(Layer(arrays["kv_b"]), q_nope, q_pe, pages, arrays["table"], seen, lens)

            def expanded(arrays: dict[str, jax.Array], q_nope: jax.Array, length=length, t=t) -> jax.Array:
                return step(arrays, q_nope, jnp.int32(length - t), LatentForm().context_chunk)

            for name, form in (("absorbed", absorbed), ("expanded", expanded)):

                @jax.jit
                def many(arrays: dict[str, jax.Array], form=form) -> jax.Array:
                    return jax.lax.fori_loop(0, 20, lambda _, q: form(arrays, q), arrays["q_nope"])

                micro = statistics.median(seconds(many, arrays)) / 20 * 1e6
                record.add(f"mla {t} tokens after {length // 1024}k bf16", f"{name} form", round(micro, 1), "us")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="all sizes of chunks")
    parser.add_argument("--parts", nargs="+", default=["prompt", "memory", "crossover"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 256, 512, 1024])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192])
    options = parser.parse_args()
    record = Record("mla_prefill", options)
    chosen = LatentForm().context_chunk
    if "prompt" in options.parts:
        prompt(record, CHUNKS if options.sweep else (chosen,))
    if "memory" in options.parts:
        memory(record, chosen)
    if "crossover" in options.parts:
        crossover(record, tuple(options.tokens), tuple(options.lengths))


if __name__ == "__main__":
    main()
