"""Paged attention in the shapes of Qwen3-8B (32 query and 8 KV heads of 128) and of models with wider heads, cold L2, against the
memory floor.

    python benchmarks/attention.py --without-xla     # measure and write results/attention.json

The kernel's choices are compared by benchmarks/tune.py.

A figure is the time of one call inside one compiled loop on the device, with everything the call launches (folding the heads,
the kernel, the merge of the parts; a schedule, where layers share one, once for eight calls or more): the host's clock around many
calls, divided by their number. Every call reads other pages than the calls before it, over 512 MB or more, so that nothing is left
in the 60 MB L2; a call's output is the next one's queries.
Correctness is checked first, in the same process: one sequence against float64, all against the jnp definition.
"""

import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from card import H200, card
from dflash_kernels.attention.paged.launch import Tuning
from dflash_kernels.attention.paged.mosaic_gpu import tuned
from dflash_kernels.attention.paged.reference import paged_attention_reference
from dflash_kernels.attention.paged.schedule import PagedSchedule, paged_schedule, schedule_helps
from record import Record, arguments

HEADS = (32, 8, 128)  # of a query, of keys, and their size
# Of Gemma 4 31B's layers with and without a window, of its 12B's without one, and of Qwen3.5-9B.
WIDE_HEADS = ((32, 16, 256), (16, 4, 256), (32, 4, 512), (16, 1, 512))
COLD = 512 * 2**20
COMPILED_AT_ONCE = 4
PEER = "FA3, an earlier run on an H200"
# Microseconds of FA3, CUDA-graph replay, cold L2, causal: (B, L) to T to time.
PEER_US = {
    (64, 4096): {1: 262, 16: 272}, (8, 4096): {1: 53, 16: 55}, (1, 4096): {1: 20.0, 16: 21.4}, (1, 32768): {1: 54, 16: 56},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    b: int
    length: int
    t: int
    page_size: int = 64
    causal: bool = True
    stored: str = "bf16"
    others: int | None = None  # length of all sequences but the last
    by_items: bool = False  # pages in eight bits by a schedule, as 16-bit ones are where it helps
    shape: tuple[int, int, int] = HEADS

    @property
    def heads(self) -> int:
        return self.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.shape[1]

    @property
    def head_dim(self) -> int:
        return self.shape[2]

    @property
    def lengths(self) -> list[int]:
        return [self.length if self.others is None else self.others] * (self.b - 1) + [self.length]

    @property
    def name(self) -> str:
        lengths = f"L{self.length}" if self.others is None else f"L{self.others}..{self.length}"
        plain = f"paged B{self.b} {lengths} q{self.t} {self.stored}"
        plain += ("" if self.page_size == 64 else f" page{self.page_size}") + ("" if self.causal else " full")
        plain += "" if self.shape == HEADS else " heads{}/{}x{}".format(*self.shape)
        return plain + (" by items" if self.by_items else "")

    @property
    def bytes(self) -> int:
        of_token = {"bf16": 2 * self.head_dim, "fp8": self.head_dim, "int8": self.head_dim + 2}[self.stored]
        return 2 * (sum(self.lengths) * self.kv_heads * of_token + 2 * self.b * self.t * self.heads * self.head_dim)

    @property
    def floor_us(self) -> float:
        return self.bytes / card().bandwidth * 1e6

    @property
    def mask(self) -> dict[str, Any]:
        return {
            "causal": self.causal,
            "window": (None, None),
            "soft_cap": None,
            "sinks": None,
            "scale": self.head_dim**-0.5,
        }


PEER_CASES = [Case(b, length, t) for (b, length), times in PEER_US.items() for t in times]
FULL_CASES = [Case(b, 4096, 16, causal=False) for b in (64, 8)]
STORED_CASES = [
    Case(b, 4096, t, stored=stored) for stored in ("fp8", "int8") for b in (64, 8) for t in (1, 16)
]  # fmt: skip
RAGGED_CASES = [Case(b, 32768, t, others=others) for b, others in ((32, 500), (8, 512)) for t in (1, 16)] + [
    Case(8, length, t, stored=stored, others=others, by_items=by_items)
    for length, others in ((32768, 512), (8192, None))
    for stored in ("fp8", "int8") for t in (1, 16) for by_items in (False, True)
]  # fmt: skip
WIDE_CASES = [Case(8, 4096, t, shape=shape) for shape in WIDE_HEADS for t in (1, 16)]
PAGE_CASES = [Case(64, 4096, 16, page_size=16), Case(8, 4096, 1, page_size=16)]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q, both pools, the tables of every copy `[copies, B, W]`, lengths, and the scales. All pages are shuffled together."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    tables: jax.Array
    lens: jax.Array
    scales: dict[str, jax.Array]


@functools.partial(jax.jit, static_argnums=(1, 2))
def stored_pool(key: jax.Array, shape: tuple[int, ...], stored: str) -> jax.Array:
    if stored == "int8":
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    dtype = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}[stored]
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def inputs(case: Case, cold: int = COLD) -> Inputs:
    """Copies of the batch with pages of their own, `cold` bytes in all or more."""
    held = -(-np.array(case.lengths) // case.page_size)[:, None] > np.arange(case.length // case.page_size)
    copies = math.ceil(cold / case.bytes)
    keys = jax.random.split(jax.random.key(0), 6)
    pool = (copies * int(held.sum()), case.kv_heads, case.page_size, case.head_dim)
    q = jax.random.normal(keys[0], (case.b, case.t, case.heads, case.head_dim), jnp.bfloat16)
    k, v = stored_pool(keys[1], pool, case.stored), stored_pool(keys[2], pool, case.stored)
    order = jax.random.permutation(keys[3], pool[0]).astype(jnp.int32).reshape(copies, -1)
    tables = jnp.zeros((copies, *held.shape), jnp.int32).at[:, held].set(order)
    scales = {}
    if case.stored == "fp8":
        scales = {name: jnp.linspace(0.8, 1.3, case.kv_heads) for name in ("k_scale", "v_scale")}
    if case.stored == "int8":
        uniform = functools.partial(jax.random.uniform, minval=0.01, maxval=0.02)
        scales = {"k_scale": uniform(keys[4], pool[:3]), "v_scale": uniform(keys[5], (case.kv_heads, case.head_dim))}
    return Inputs(q, k, v, tables, jnp.array(case.lengths, jnp.int32), scales)


def implementation(case: Case, name: str, tuning: Tuning | None = None) -> Callable[..., tuple[jax.Array, jax.Array]]:
    function = paged_attention_reference if name == "xla" else functools.partial(tuned, tuning=tuning)
    return jax.jit(functools.partial(function, **case.mask))


def ragged(case: Case, given: Inputs) -> tuple[jax.Array, ...]:
    """Arguments of a call with lengths of all kinds, whose last sequence has two dead queries."""
    lens = jnp.maximum(given.lens - 37 * (1 + jnp.arange(case.b)) % 700, 5).at[-1].set(case.length - 11)
    live = jnp.full((case.b,), case.t, jnp.int32).at[-1].set(max(case.t - 2, 1))
    return 3 * given.q, given.k, given.v, given.tables[-1], lens, live


def truth(case: Case, call: tuple[jax.Array, ...], scales: dict[str, jax.Array]) -> np.ndarray:
    """Output of the last sequence's live queries in float64."""
    q, k, v, table, lens, live = (np.asarray(x) if x.ndim < 4 else x for x in call)
    length, rows, group = lens[-1], live[-1], case.heads // case.kv_heads
    k, v = (np.asarray(pool[table[-1]].astype(jnp.float32), np.float64) for pool in (k, v))
    if case.stored == "fp8":
        k, v = (pool * np.asarray(scale)[:, None, None] for pool, scale in zip((k, v), scales.values(), strict=True))
    if case.stored == "int8":
        k, v = k * np.asarray(scales["k_scale"][table[-1]])[..., None], v * np.asarray(scales["v_scale"])[:, None]
    k, v = (pool.swapaxes(1, 2).reshape(-1, case.kv_heads, case.head_dim) for pool in (k, v))
    grouped = np.asarray(q[-1], np.float64)[:rows].reshape(rows, case.kv_heads, group, case.head_dim)
    scores = np.einsum("tkgh,skh->kgts", grouped, k[:length], optimize=True) * case.mask["scale"]
    if case.causal:
        scores = np.where(np.arange(length) > (length - rows + np.arange(rows))[:, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kgts,skh->tkgh", weights, v[:length], optimize=True).reshape(rows, case.heads, case.head_dim)


def error_of(true: np.ndarray, out: jax.Array) -> float:
    """Largest error of the last sequence, as a share of its largest output."""
    found = np.asarray(out[-1, : len(true)], np.float64)
    return float(np.abs(found - true).max() / np.abs(true).max())


def check(case: Case, given: Inputs) -> float:
    """Stops the run where the kernel is wrong; returns its error against float64."""
    call = ragged(case, given)
    shared = {"schedule": dealt(case, call[4])} if deals(case) else {}
    ours, theirs = (
        implementation(case, name)(*call, **given.scales, **shared)[0].astype(jnp.float32)
        for name in ("mosaic_gpu", "xla")
    )
    error, apart = (
        error_of(truth(case, call, given.scales), ours),
        float(jnp.abs(ours - theirs).max() / jnp.abs(theirs).max()),
    )
    if not (error < 0.02 and apart < 0.02):
        raise SystemExit(f"{case.name}: error {error:.2e} against float64, {apart:.2e} against xla")
    return error


def deals(case: Case) -> bool:
    """Whether a model's layers would share a schedule."""
    shape = {"heads": case.heads, "kv_heads": case.kv_heads, "tokens": case.t, "longest": case.length}
    return (case.stored == "bf16" or case.by_items) and schedule_helps(case.b, **shape)


def dealt(case: Case, lens: jax.Array) -> PagedSchedule:
    """The schedule that calls with these lengths share."""
    return paged_schedule(lens, heads=case.heads, kv_heads=case.kv_heads, tokens=case.t, narrow=case.stored != "bf16")


def looped(
    case: Case, given: Inputs, attend: Callable[..., Any], *, slow: bool = False, scheduled: bool = False
) -> Callable[[], float]:
    """A run of about 40 ms, compiled and warm: gives microseconds of one call."""
    copies = given.tables.shape[0]
    unrolled = 1 if slow else min(max(copies, 8), 16)
    rounds = copies if slow else max(round(0.04 / (max(case.floor_us, 8) * 1e-6 * unrolled)), 1)

    @jax.jit
    def many(q, k, v, tables, lens, scales):
        live = jnp.full((case.b,), case.t, jnp.int32)

        def body(_, carry):
            q, tables = carry
            options = scales | ({"schedule": dealt(case, lens)} if scheduled else {})
            for call in range(unrolled):
                q = attend(q, k, v, tables[call % copies], lens, live, **options)[0]
            # The next calls take the next tables, and nothing about them is taken out of the loop.
            return q, jnp.roll(tables, -unrolled, axis=0)

        return jax.lax.fori_loop(0, rounds, body, (q, tables))

    arrays = (given.q, given.k, given.v, given.tables, given.lens, given.scales)

    def run() -> float:
        started = time.perf_counter()
        many(*arrays)[0].block_until_ready()
        return (time.perf_counter() - started) * 1e6 / (rounds * unrolled)

    run()
    return run


def measure(case: Case, given: Inputs, attend: Callable[..., Any], *, slow: bool = False) -> list[float]:
    """Microseconds of one call, in each of several runs."""
    run = looped(case, given, attend, slow=slow)
    return [run() for _ in range(3 if slow else 7)]


def prepared(case: Case, without_xla: bool) -> tuple[float, dict[str, Callable[[], float]]]:
    """The kernel's error, and runs to time for each implementation by name."""
    given = inputs(case)
    error = check(case, given)
    names = ["mosaic_gpu", "xla"] if case in PEER_CASES and not without_xla else ["mosaic_gpu"]
    runs = {}
    for name in names:
        slow = name == "xla"
        runs[name] = looped(case, given, implementation(case, name), slow=slow, scheduled=not slow and deals(case))
    return error, runs


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=None, help="cases by name, quoted, stars allowed")
    parser.add_argument(
        "--without-xla", action="store_true", help="leave the slow baseline out of those that have a peer"
    )
    options = parser.parse_args()
    cases = PEER_CASES + STORED_CASES + FULL_CASES + PAGE_CASES + RAGGED_CASES + WIDE_CASES
    cases = [case for case in cases if not options.only or any(fnmatchcase(case.name, one) for one in options.only)]
    record = Record("attention", options)
    # Compiling takes longer than measuring: it goes on side by side, and is over before anything is timed.
    with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        ready = list(pool.map(functools.partial(prepared, without_xla=options.without_xla), cases))
    for case, (error, runs) in zip(cases, ready, strict=True):
        peer = PEER_US[case.b, case.length].get(case.t) if case in PEER_CASES else None
        for name, run in runs.items():
            times = [run() for _ in range(3 if name == "xla" else 7)]
            middle = statistics.median(times)
            record.add(
                case.name, "time per call" if name == "mosaic_gpu" else "time per call, implementation xla", round(middle, 1), "us",
                floor=round(case.floor_us, 1), peer=PEER if peer else None, peer_value=peer, peer_card=H200, implementation=name,
                spread=[round(min(times), 1), round(max(times), 1)], bandwidth_gb_s=round(case.bytes / middle / 1e3),
                error_float64=error if name == "mosaic_gpu" else None,
            )  # fmt: skip
    if record.rows:
        print(record.write())


if __name__ == "__main__":
    main()
