"""Chunks at the end of prompts over pages of 64: the kernel for prompts against the one for decoding.

    python benchmarks/chunks.py     # measure and write results/chunks.json

B prompts of 4,096 tokens, 32 query heads over 8, bf16, causal; the last T tokens of each are queries. A figure is the time of one
call inside one compiled loop on the device, as in prefill.py. `dflash_jax/attention/prefill.py` chooses between the two; a row says
which it takes. Both are compared with float64 first.
"""

import functools
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels import paged_attention
from prefill import Case, in_turns, inputs, looped
from record import Record, arguments

from dflash_jax.attention.prefill import fills, long_chunks

LENGTH, HEADS, KV_HEADS, HEAD_DIM, PAGE = 4096, 32, 8, 128, 64
CHUNKS = [(1, 64), (1, 128), (1, 256), (1, 512), (8, 16), (8, 32), (8, 64), (8, 128)]  # B, T
KERNELS: dict[str, Callable[..., jax.Array]] = {
    "prompts": functools.partial(long_chunks, implementation="mosaic_gpu"), "decoding": paged_attention,
}  # fmt: skip
ALLOWED = 0.02  # error, as a share of the row's largest output
CALLS, ROUNDS = 20, 7


def truth(q: jax.Array, k: jax.Array, v: jax.Array, row: int, head: int) -> np.ndarray:
    """Output in float64 of one row of the last prompt's chunk."""
    last = slice(k.shape[0] - LENGTH, k.shape[0] - q.shape[1] + row + 1)
    keys, values = (np.asarray(x[last, head * KV_HEADS // HEADS], np.float64) for x in (k, v))
    scores = keys @ np.asarray(q[-1, row, head], np.float64) * HEAD_DIM**-0.5
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


def check(name: str, out: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> float:
    """Largest error of some rows against float64; stops the run where it is too large."""
    error = 0.0
    # Not the very first one: between calls, an element of it is replaced.
    for row, head in ((1, 0), (q.shape[1] // 2, 5), (q.shape[1] - 1, HEADS - 1)):
        true = truth(q, k, v, row, head)
        error = max(error, float(np.abs(np.asarray(out[-1, row, head], np.float64) - true).max() / np.abs(true).max()))
    if not error < ALLOWED:
        raise SystemExit(f"{name}: error {error:.2e} against float64")
    return error


def program(name: str, q: jax.Array, *pages: jax.Array) -> Callable[[], jax.Array]:
    """Several calls of one of the kernels."""
    call = functools.partial(KERNELS[name], q_lens=jnp.full(q.shape[:1], q.shape[1], jnp.int32))
    many = looped(call, CALLS).lower(q, *pages).compile()
    return functools.partial(many, q, *pages)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=sorted({b for b, _ in CHUNKS}), help="values of B")
    options = parser.parse_args()
    record = Record("chunks", options)
    for b in options.sequences:
        case = Case(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, True, PAGE, b=b, length=LENGTH)
        (q, k, v), (k_pages, v_pages, _, table, lens) = inputs(case)
        pages = (k_pages, v_pages, table, lens)
        chunks = [t for count, t in CHUNKS if count == b]
        batches = {t: q[: b * t].reshape(b, t, HEADS, HEAD_DIM) for t in chunks}

        # Compiling takes longer than measuring: programs are compiled side by side, before anything is timed.
        with ThreadPoolExecutor(4) as pool:
            programs = {(t, name): pool.submit(program, name, batches[t], *pages) for t in chunks for name in KERNELS}
        for t in chunks:
            case_name = f"chunk B{b} T{t} of L{LENGTH} H{HEADS}/{KV_HEADS} bf16"
            ready = {name: programs[t, name].result() for name in KERNELS}
            errors = {name: check(case_name, run(), batches[t], k, v) for name, run in ready.items()}
            times = in_turns(ready, CALLS, ROUNDS)
            for name in KERNELS:
                record.add(
                    case_name, f"time per call, kernel for {name}", round(statistics.median(times[name]) * 1e6, 1), "us",
                    chosen="prompts" if fills(b, t, HEADS) else "decoding", error_float64=errors[name],
                    spread=[round(min(times[name]) * 1e6, 1), round(max(times[name]) * 1e6, 1)],
                )  # fmt: skip


if __name__ == "__main__":
    main()
