"""Requests that begin with the same pages: attention that reads these once against attention of each by itself, bf16, pages of 64.

    python benchmarks/cascade.py                 # measure and write results/cascade.json
    python benchmarks/cascade.py --groups 2      # two beginnings in a batch

B sequences share so many tokens, or groups of them do, and have 256 of their own each; the last T of these are queries. 32 query
heads over 8 of 128, as Qwen3-4B and 8B have them. A figure is the time of one layer's call in one loop on the device, over as many
pools as hold 256 MB: a layer finds nothing of its own in the L2. `dflash_jax/engine/cascade.py` chooses between the two; a row
says which it takes. Rows of both are compared with float64 first.
"""

import functools
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels import paged_schedule, schedule_helps
from prefill import in_turns
from record import Record, arguments

from dflash_jax.attention.cascade import cascade_attention, split_tables
from dflash_jax.attention.prefill import attend_to_pages
from dflash_jax.engine.cascade import LayerCost, Sharers, shared_argument
from dflash_jax.execution.plan import ONE_GRAPH

HEADS, KV_HEADS, HEAD_DIM, PAGE, OWN = 32, 8, 128, 64, 256
SHARED, SEQUENCES, QUERIES = (2048, 8192, 32768), (8, 32), (1, 16)
KEPT = 256 * 2**20  # bytes of all pools, more than any L2
ALLOWED = 0.02  # error, as a share of the row's largest output
CALLS, ROUNDS = 24, 7  # of all pools in a program: enough that its own start is nothing


def heads_schedule(lens: jax.Array, t: int, width: int):
    """As a decode loop makes it."""
    options: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "tokens": t}
    return paged_schedule(lens, **options) if schedule_helps(len(lens), longest=width * PAGE, **options) else None


def alone(q: jax.Array, pools: list, table: jax.Array, lens: jax.Array, shared: jax.Array) -> jax.Array:
    """Layers one after the other, each sequence by itself."""
    q_lens = jnp.full(q.shape[:1], q.shape[1], jnp.int32)
    schedule = heads_schedule(lens, q.shape[1], table.shape[1])
    options: dict[str, Any] = {"page_table": table, "seq_lens": lens, "q_lens": q_lens, "causal": True}
    call: Callable[..., jax.Array] = functools.partial(attend_to_pages, schedule=schedule, **options)
    for pool in pools:
        q = q.at[(0,) * 4].set(call(q, *pool).ravel()[0])
    return call(q, *pools[-1])


def together(q: jax.Array, pools: list, table: jax.Array, lens: jax.Array, shared: jax.Array) -> jax.Array:
    """The same, what is shared read once."""
    q_lens = jnp.full(q.shape[:1], q.shape[1], jnp.int32)
    parts = split_tables(table, shared, PAGE)
    schedule = heads_schedule(lens - parts.skipped, q.shape[1], table.shape[1])
    options: dict[str, Any] = {"parts": parts, "seq_lens": lens, "q_lens": q_lens, "schedule": schedule}
    cascade: Any = cascade_attention  # of the output alone: its lse is not asked for
    call: Callable[..., jax.Array] = functools.partial(cascade, **options)
    for pool in pools:
        q = q.at[(0,) * 4].set(call(q, *pool).ravel()[0])
    return call(q, *pools[-1])


FORMS: dict[str, Callable[..., jax.Array]] = {"alone": alone, "together": together}


def inputs(b: int, t: int, shared: int, groups: int = 1) -> tuple:
    """Queries, one layer's pools after the other, table, lengths and shared pages: by group where there are several."""
    count = (groups * shared + b * OWN) // PAGE
    each = 2 * count * PAGE * KV_HEADS * HEAD_DIM * 2
    keys = jax.random.split(jax.random.key(0), 3)
    make = jax.jit(jax.random.normal, static_argnums=(1, 2))
    q = 2 * make(keys[0], (b, t, HEADS, HEAD_DIM), jnp.bfloat16)
    first = tuple(make(key, (count, KV_HEADS, PAGE, HEAD_DIM), jnp.bfloat16) for key in keys[1:])
    pools = [first, *(tuple(x + 0 for x in first) for _ in range(max(1, -(-KEPT // each) - 1)))]
    pages = np.random.default_rng(0).permutation(count).astype(np.int32)
    common, own = np.split(pages, [groups * shared // PAGE])
    rows, of = np.arange(b), np.arange(b) * groups // b
    table = np.concatenate([common.reshape(groups, -1)[of], own.reshape(b, -1)], axis=1)
    members = [(rows[of == group], shared // PAGE) for group in range(groups)]
    told = shared_argument(members, rows, b)
    return q, pools, jnp.asarray(table), jnp.full((b,), shared + OWN, jnp.int32), jnp.asarray(told)


def check(
    name: str, out: jax.Array, q: jax.Array, pools: list, table: jax.Array, lens: jax.Array, *_: jax.Array
) -> float:
    """Largest error of some rows against float64; stops the run where it is too large."""
    error, scale, t = 0.0, HEAD_DIM**-0.5, q.shape[1]
    pages, (queries, found) = [np.asarray(pool) for pool in pools[-1]], (np.asarray(x) for x in (q, out))
    rows = np.asarray(table)
    for b, row, head in ((1, 0, 0), (q.shape[0] // 2, t // 2, 5), (q.shape[0] - 1, t - 1, HEADS - 1)):
        seen = int(lens[b]) - t + row + 1
        k, v = (
            pool[rows[b], head * KV_HEADS // HEADS].astype(np.float64).reshape(-1, HEAD_DIM)[:seen] for pool in pages
        )
        scores = k @ queries[b, row, head].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        true = weights @ v / weights.sum()
        error = max(error, float(np.abs(found[b, row, head].astype(np.float64) - true).max() / np.abs(true).max()))
    if not error < ALLOWED:
        raise SystemExit(f"{name}: error {error:.2e} against float64")
    return error


def program(form: str, given: tuple, calls: int) -> Callable[[], jax.Array]:
    """`calls` times all layers in one loop; its result is the last layer's."""

    def many(q, *rest):
        def body(_, q):
            return q.at[(0,) * 4].set(FORMS[form](q, *rest).ravel()[0])

        return FORMS[form](jax.lax.fori_loop(0, calls - 1, body, q), *rest)

    options = ONE_GRAPH if jax.default_backend() == "gpu" else None
    ready = jax.jit(many, compiler_options=options).lower(*given).compile()
    return functools.partial(ready, *given)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shared", type=int, nargs="+", default=SHARED, help="tokens in common")
    parser.add_argument("--sequences", type=int, nargs="+", default=SEQUENCES, help="values of B")
    parser.add_argument("--queries", type=int, nargs="+", default=QUERIES, help="values of T")
    parser.add_argument("--groups", type=int, default=1, help="groups of sequences, each with a beginning of its own")
    options = parser.parse_args()
    record, groups = Record("cascade", options), options.groups
    for shared in options.shared:
        cases = {(b, t): inputs(b, t, shared, groups) for b in options.sequences for t in options.queries}
        # Compiling takes longer than measuring: programs are compiled side by side, before anything is timed.
        with ThreadPoolExecutor(8) as pool:
            programs = {
                (*case, form): pool.submit(program, form, given, CALLS)
                for case, given in cases.items()
                for form in FORMS
            }
        for (b, t), given in cases.items():
            together = f"{b} sequences" if groups == 1 else f"{groups} groups of {b} sequences"
            name = f"{together} that share {shared} tokens, T{t} H{HEADS}/{KV_HEADS} bf16"
            ready = {form: programs[b, t, form].result() for form in FORMS}
            # One element of the queries is another one after each call: never the rows that are compared.
            layer = LayerCost(2 * KV_HEADS * HEAD_DIM * 2, HEADS, KV_HEADS, HEAD_DIM)
            sharers = [Sharers(b // groups, shared)] * groups
            chosen = "together" if layer.saved_s(sharers, b, t) > 0 else "alone"
            errors = {form: check(name, run(), *given) for form, run in ready.items()}
            count = CALLS * (len(given[1]) + 1)
            times = in_turns(ready, count, ROUNDS)
            for form in FORMS:
                record.add(
                    name, f"time of a layer, {form}", round(statistics.median(times[form]) * 1e6, 1), "us",
                    chosen=chosen, error_float64=errors[form],
                    spread=[round(min(times[form]) * 1e6, 1), round(max(times[form]) * 1e6, 1)],
                )  # fmt: skip


if __name__ == "__main__":
    main()
