"""Prompts through a latent attention layer in the shape of DeepSeek-V2-Lite (16 heads, 128 + 64, values 128, latent 512), bf16.

    python benchmarks/mla_prefill.py            # measure and write results/mla_prefill.json
    python benchmarks/mla_prefill.py --sweep    # other sizes of the context's chunks too

Three questions. How much dearer is a prompt of 32k tokens prefilled 2k at a time, with its rows read from pages and expanded again
for every 2k, than one attention over keys and values that are there already (both through the ragged kernel)? How much memory does
that take, by the compiler's plan and by the allocator's count, and does it stay the same when the context is four times as long?
And from how many new tokens is expanding faster than attending absorbed? Times are the host's clock around one compiled program on
the device, each call waiting for the output of the one before. Outputs are compared with float64 first.

The prompt's time is given over that of the one attention twice: as it is, expanding included, and for the same number of
operations, where expanding counts as operations too.
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
from dflash_kernels import ragged_attention
from processes import compiled
from record import Record, arguments

from dflash_jax.attention.mla import LatentForm, absorbed_attention
from dflash_jax.attention.mla_prefill import chunked_prefill
from dflash_jax.models.deepseek import MLAttention
from dflash_jax.models.presets import DEEPSEEK_TARGETS

CONFIG = DEEPSEEK_TARGETS["DeepSeek-V2-Lite"]
HEADS, NOPE, ROTATED = CONFIG.num_heads, CONFIG.qk_nope_head_dim, CONFIG.qk_rope_head_dim
PROMPT, STEP, PAGE = 32768, 2048, 64
CHUNKS = (8192, 16384)


class Layer:
    """The layer's attention alone: up-projections as arrays."""

    index, causal = 0, True

    def __init__(self, kv_b: jax.Array):
        self.scale = CONFIG.attention_scale
        weights = kv_b.reshape(-1, NOPE + CONFIG.v_head_dim, CONFIG.kv_lora_rank)
        self.w_uk, self.w_uv = weights[:, :NOPE], weights[:, NOPE:]

    absorb, up = MLAttention.absorb, MLAttention.up

    def expand(self, kv_c: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.einsum("...r,npr->...np", kv_c, self.w_uk), jnp.einsum("...r,nvr->...nv", kv_c, self.w_uv)


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return _normal(jax.random.key(seed), jnp.float32(scale), shape)


@functools.partial(jax.jit, static_argnames="shape")
def _normal(key: jax.Array, scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16)


def inputs(tokens: int, length: int, heads: int = HEADS) -> dict[str, jax.Array]:
    """Queries, and a shuffled pool that holds `length` rows, and 512 more that nobody's table names."""
    width = length // PAGE
    table = jax.random.permutation(jax.random.key(9), width + 8)[None, :width].astype(jnp.int32)
    return {
        "kv_b": normal(0, heads * (NOPE + CONFIG.v_head_dim), CONFIG.kv_lora_rank, scale=CONFIG.kv_lora_rank**-0.5),
        "q": normal(1, 1, tokens, heads, NOPE + ROTATED),
        "pages": normal(4, width + 8, 1, PAGE, CONFIG.latent_width), "table": table,
    }  # fmt: skip


def seconds(program: Any, *args: Any, runs: int = 5) -> list[float]:
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - started)
    return times


def step(arrays: dict[str, jax.Array], q: jax.Array, seen: jax.Array, chunk: int) -> jax.Array:
    """The queries as the last of `seen` tokens, expanded."""
    lens, parts = jnp.array([q.shape[1]], jnp.int32), jnp.split(q, [NOPE], axis=-1)
    layer, pages, table = Layer(arrays["kv_b"]), arrays["pages"], arrays["table"]
    return chunked_prefill(layer, *parts, pages, table, seen[None], lens, context_chunk=chunk)


def prompt_program(chunk: int, steps: int) -> Any:
    """`steps` prefills of `STEP` tokens, the context growing by that many each time."""

    def run(arrays: dict[str, jax.Array]) -> jax.Array:
        def one(i: jax.Array, out: jax.Array) -> jax.Array:
            return step(arrays, after(arrays["q"], out), (i.astype(jnp.int32) + 1) * STEP, chunk)

        return jax.lax.fori_loop(0, steps, one, arrays["q"][..., : CONFIG.v_head_dim])

    return jax.jit(run)


def after(q: jax.Array, out: jax.Array) -> jax.Array:
    """The queries, once there is an output."""
    return jax.lax.optimization_barrier((q, out))[0]


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
    found = jax.jit(functools.partial(step, chunk=chunk))(arrays, arrays["q"], jnp.int32(length))
    pages, table = np.asarray(arrays["pages"], np.float64), np.asarray(arrays["table"])[0]
    rows = pages[table].reshape(-1, CONFIG.latent_width)[:length]
    layer, picked = Layer(np.asarray(arrays["kv_b"], np.float64)), np.array([0, 1, STEP // 3, STEP - 1])
    k = np.einsum("sr,npr->snp", rows[:, : CONFIG.kv_lora_rank], layer.w_uk, optimize=True)
    v = np.einsum("sr,nvr->snv", rows[:, : CONFIG.kv_lora_rank], layer.w_uv, optimize=True)
    q_nope, q_pe = np.split(np.asarray(arrays["q"][0], np.float64)[picked], [NOPE], axis=-1)
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
    steps = PROMPT // STEP
    expanding = 2 * CONFIG.kv_lora_rank * HEADS * (NOPE + CONFIG.v_head_dim) * STEP * steps * (steps + 1) // 2
    q, k, v = (normal(5 + i, PROMPT, HEADS, width) for i, width in enumerate((192, 192, CONFIG.v_head_dim)))
    dense = statistics.median(seconds(dense_program(), q, k, v)) * 1e3
    record.add("mla dense 32k 192/128 bf16", "one causal attention", round(dense, 2), "ms",
               floor=round(flops / card().products * 1e3, 2), tflops=round(flops / dense / 1e9))  # fmt: skip
    arrays = inputs(STEP, PROMPT)
    for chunk in chunks:
        error, times = check(chunk), seconds(prompt_program(chunk, steps), arrays)
        middle = statistics.median(times) * 1e3
        name = f"mla prefill 32k by 2k bf16 chunk {chunk}"
        record.add(name, "attention of the prompt", round(middle, 2), "ms",
                   floor=round((flops + expanding) / card().products * 1e3, 2), error_float64=error,
                   spread=[round(min(times) * 1e3, 2), round(max(times) * 1e3, 2)],
                   teraflop={"attention": round(flops / 1e12, 2), "expanding": round(expanding / 1e12, 2)})  # fmt: skip
        record.add(name, "times one dense attention", round(middle / dense, 3), "x")
        record.add(
            name, "times it for the same operations", round(middle / dense * flops / (flops + expanding), 3), "x"
        )


def memory(record: Record, chunk: int) -> None:
    """What one call needs beside its arguments, by the compiler and by the device's own count.

    The device counts its peak from the start of the process, so nothing as large may have been there before.
    """
    device = jax.local_devices()[0]
    rows = chunk * HEADS * (NOPE + ROTATED + CONFIG.v_head_dim) * 2
    for length in (PROMPT, 4 * PROMPT):
        arrays = inputs(STEP, length)
        run = jax.jit(functools.partial(step, chunk=chunk)).lower(arrays, arrays["q"], jnp.int32(0)).compile()
        plan = run.memory_analysis()
        before = device.memory_stats() or {}
        jax.block_until_ready(run(arrays, arrays["q"], jnp.int32(length)))
        after = device.memory_stats() or {}
        name = f"mla prefill memory {length // 1024}k chunk {chunk}"
        record.add(name, "temporary memory of 2k tokens", round(plan.temp_size_in_bytes / 2**20, 1), "MiB",
                   floor=round(rows / 2**20, 1))  # fmt: skip
        if before and after["peak_bytes_in_use"] > before["peak_bytes_in_use"]:
            peak = after["peak_bytes_in_use"] - before["bytes_in_use"] - plan.output_size_in_bytes
            record.add(name, "the allocator's peak over arguments and output", round(peak / 2**20, 1), "MiB",
                       floor=round(rows / 2**20, 1), in_use_before=before["bytes_in_use"],
                       peak_before=before["peak_bytes_in_use"], peak_after=after["peak_bytes_in_use"])  # fmt: skip


def crossover(record: Record, tokens: tuple[int, ...], lengths: tuple[int, ...], heads: tuple[int, ...]) -> None:
    """New tokens at the end of a context, absorbed and expanded. A program takes any length."""
    cases = [(n, t, form, max(lengths)) for n in heads for t in tokens for form in FORMS]
    # All before anything is timed.
    programs = dict(zip(cases, compiled(many, cases), strict=True))
    for n in heads:
        for t in tokens:
            arrays = inputs(t, max(lengths), n)
            for length in lengths:
                for form in FORMS:
                    run = programs[n, t, form, max(lengths)]
                    once = min(seconds(run, arrays, jnp.int32(length), jnp.int32(1), runs=2))
                    count = max(2, min(20, int(0.01 / once)))
                    times = seconds(run, arrays, jnp.int32(length), jnp.int32(count), runs=3)
                    micro = round(statistics.median(times) / count * 1e6, 1)
                    name = f"mla {t} tokens, {length // 1024}k context, {n} heads bf16"
                    record.add(name, f"{form} form", micro, "us")


def many(heads: int, tokens: int, form: str, longest: int) -> tuple[Any, tuple[Any, ...]]:
    """As many calls of a form after one another as the last argument says, of the context that the one before says; and shapes."""

    def run(arrays: dict[str, jax.Array], length: jax.Array, count: jax.Array) -> jax.Array:
        def one(_: jax.Array, out: jax.Array) -> jax.Array:
            return FORMS[form](arrays, after(arrays["q"], out), length)

        return jax.lax.fori_loop(0, count, one, arrays["q"][..., : CONFIG.v_head_dim])

    number = jax.ShapeDtypeStruct((), jnp.int32)
    return run, (jax.eval_shape(functools.partial(inputs, tokens, longest, heads)), number, number)


def _absorbed(arrays: dict[str, jax.Array], q: jax.Array, length: jax.Array) -> jax.Array:
    lens, parts = jnp.array([q.shape[1]], jnp.int32), jnp.split(q, [NOPE], axis=-1)
    return absorbed_attention(Layer(arrays["kv_b"]), *parts, arrays["pages"], arrays["table"], length[None], lens)


def _expanded(arrays: dict[str, jax.Array], q: jax.Array, length: jax.Array) -> jax.Array:
    return step(arrays, q, length, chunk_tokens(q.shape[2]))


FORMS = {"absorbed": _absorbed, "expanded": _expanded}


def chunk_tokens(heads: int) -> int:
    return LatentForm().chunk(heads * (NOPE + ROTATED + CONFIG.v_head_dim) * 2)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="all sizes of chunks")
    parser.add_argument("--parts", nargs="+", default=["memory", "prompt", "crossover"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 128, 192, 256, 512])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 128])
    options = parser.parse_args()
    record = Record("mla_prefill", options)
    chosen = chunk_tokens(HEADS)
    if "memory" in options.parts:
        memory(record, chosen)
    if "prompt" in options.parts:
        prompt(record, tuple(sorted({chosen, *CHUNKS})) if options.sweep else (chosen,))
    if "crossover" in options.parts:
        crossover(record, tuple(options.tokens), tuple(options.lengths), tuple(options.heads))


if __name__ == "__main__":
    main()
