"""Absorbed latent attention (rows of 512 + 64, bf16, pages of 64, cold L2) against the floors of memory and arithmetic.

    python benchmarks/mla.py             # measure and write results/mla.json
    python benchmarks/mla.py --sweep     # time the kernel's choices for each shape, write nothing

A figure is the time of one call inside one compiled loop on the device, with everything the call launches (the kernel, the merge
of the parts and of their lse): the host's clock around many calls, divided by their number. The host looks after each turn of the
loop, which is four calls or more (16 of short ones, as it takes some 8 us), and does nothing else: everything is compiled before
the first call is timed. Every call reads other pages than the calls before it, over 256 MB or more, so that nothing is left in the
60 MB L2. The floor is the larger of the bytes at 4.3 TB/s and the products at 790 TFLOP/s, both measured on this kind of GPU.
Correctness is checked first, in the same process, on inputs of a tenth of the normal distribution: one sequence against float64,
all against the jnp definition.
"""

import dataclasses
import functools
import math
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
from card import H200, card
from dflash_kernels.attention.mla.launch import Tuning
from dflash_kernels.attention.mla.mosaic_gpu import tuned
from dflash_kernels.attention.mla.reference import mla_attention_reference
from processes import compiled
from record import Record, arguments

RANK, ROTATED = 512, 64
OPTIONS: dict[str, Any] = {"kv_lora_rank": RANK, "scale": (RANK + ROTATED) ** -0.5, "causal": True}
LATENT_SCALE = 1 / 512  # of the float8 cases
COLD = 256 * 2**20
CALLS, SHORT_CALLS = 4, 16  # in one turn of the loop, at least; of calls whose floor is below 100 us
PEER = "FlashMLA, an earlier run on an H200"
# Microseconds of FlashMLA, CUDA-graph replay, cold L2, causal: (B, L, T, heads) to time.
PEER_US = {
    (128, 4096, 1, 128): 287, (128, 4096, 2, 128): 555, (64, 16384, 1, 128): 636, (16, 4096, 16, 128): 505,
    (128, 4096, 1, 16): 181, (64, 4096, 16, 16): 265, (8, 4096, 16, 16): 56, (1, 4096, 1, 128): 35, (1, 32768, 1, 128): 64,
    (1, 32768, 16, 16): 78,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    b: int
    length: int
    t: int
    heads: int
    page_size: int = 64
    quantized: bool = False

    @property
    def name(self) -> str:
        page, stored = "" if self.page_size == 64 else f" page{self.page_size}", "float8" if self.quantized else "bf16"
        return f"mla B{self.b} L{self.length} q{self.t} H{self.heads} {stored}{page}"

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS | ({"latent_scale": np.float32(LATENT_SCALE)} if self.quantized else {})

    @property
    def bytes(self) -> int:
        rows, latents = self.b * self.t * self.heads, self.b * self.length * (RANK + ROTATED)
        return latents * (1 if self.quantized else 2) + 2 * rows * (2 * RANK + ROTATED)

    @property
    def flops(self) -> int:
        return 2 * self.b * self.t * self.length * self.heads * (2 * RANK + ROTATED)

    @property
    def floor_us(self) -> float:
        return max(self.bytes / card().bandwidth, self.flops / card().products) * 1e6


PEER_CASES = [Case(*shape) for shape in PEER_US]
QUANTIZED_CASES = [Case(*shape, quantized=True) for shape in ((128, 4096, 1, 128), (128, 4096, 1, 16))]
PAGE_CASES = [Case(128, 4096, 1, 16, page_size=16)]


def inputs(case: Case, cold: int = COLD, calls: int | None = None) -> tuple[Any, ...]:
    """q, the pool of `cold` bytes or more, a table for every copy of the batch, lengths and live queries; pages are shuffled."""
    if calls is None:
        calls = CALLS if case.floor_us >= 100 else SHORT_CALLS
    width = case.length // case.page_size
    copies = max(math.ceil(cold / case.bytes), calls)
    keys = jax.random.split(jax.random.key(0), 3)
    make = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) / 10, static_argnums=1)
    q = make(keys[0], (case.b, case.t, case.heads, RANK + ROTATED))
    pool = make(keys[1], (copies * case.b * width, 1, case.page_size, RANK + ROTATED))
    if case.quantized:
        pool = jax.jit(lambda x: (x / LATENT_SCALE).astype(jnp.float8_e4m3fn), donate_argnums=0)(pool)
    tables = jax.random.permutation(keys[2], pool.shape[0]).astype(jnp.int32).reshape(copies, case.b, width)
    lens, live = (jnp.full((case.b,), count, jnp.int32) for count in (case.length, case.t))
    return q, pool, tuple(tables), lens, live


def looped(
    case: Case, name: str, tuning: Tuning | None = None
) -> tuple[Callable[..., tuple[Any, ...]], tuple[Any, ...]]:
    """`rounds` times one call for each copy of the batch, which gives the results of the last round, and its arguments' shapes."""
    function = mla_attention_reference if name == "xla" else functools.partial(tuned, tuning=tuning)

    def body(q, pool, tables, lens, live, index, _):
        # A sum the compiler cannot see through: nothing of a round is taken out of the loop.
        lens = lens + jnp.minimum(index, 0)
        return tuple(function(q, pool, table, lens, live, **case.options) for table in tables)

    def many(q, pool, tables, lens, live, rounds):
        once = functools.partial(body, q, pool, tables, lens, live)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(once, 0, None))
        return jax.lax.fori_loop(0, rounds, once, empty)

    return many, (*jax.eval_shape(functools.partial(inputs, case)), jax.ShapeDtypeStruct((), jnp.int32))


def ragged(case: Case, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a call with lengths of all kinds, whose last sequence has two dead queries."""
    q, pool, tables, lens, live = arrays
    lens = jnp.maximum(lens - 37 * (1 + jnp.arange(case.b)) % 700, 5).at[-1].set(case.length - 11)
    return q, pool, tables, lens, live.at[-1].set(max(case.t - 2, 1))


def truth(call: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse of the last sequence's live queries in float64, in the last copy of the batch."""
    q, pool, tables, lens, live = call
    length, rows = int(lens[-1]), int(live[-1])
    latents = np.asarray(pool[tables[-1][-1]], np.float64).reshape(-1, RANK + ROTATED)[:length]
    latents *= LATENT_SCALE if pool.dtype == jnp.float8_e4m3fn else 1
    scores = np.einsum("tnc,sc->nts", np.asarray(q[-1], np.float64)[:rows], latents, optimize=True) * OPTIONS["scale"]
    scores = np.where(np.arange(length) > (length - rows + np.arange(rows))[:, None], -np.inf, scores)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("nts,sr->tnr", weights / total, latents[:, :RANK], optimize=True)
    return out, (top + np.log(total))[..., 0].T


def errors(true: tuple[np.ndarray, np.ndarray], found: tuple[jax.Array, jax.Array]) -> dict[str, float]:
    """Largest absolute error and cosine difference of the output, largest error of the lse, of the last sequence."""
    (out, lse), rows = true, len(true[0])
    ours, ours_lse = np.asarray(found[0][-1, :rows], np.float64), np.asarray(found[1][-1, :rows], np.float64)
    cosine = 1 - 2 * (ours * out).sum() / ((ours**2).sum() + (out**2).sum())
    return {
        "error_float64": float(np.abs(ours - out).max()), "cosine_difference": float(cosine),
        "lse_error": float((np.abs(ours_lse - lse) / np.maximum(np.abs(lse), 1)).max()),
    }  # fmt: skip


def check(case: Case, arrays: tuple[Any, ...], programs: dict[str, Callable[..., Any]]) -> dict[str, float]:
    """Stops the run where the kernel is wrong; returns its errors against float64."""
    call = ragged(case, arrays)
    outs = {name: many(*call, np.int32(1))[-1] for name, many in programs.items()}
    found = errors(truth(call), outs["mosaic_gpu"])
    if "xla" in outs:
        apart = jnp.abs(outs["mosaic_gpu"][0].astype(jnp.float32) - outs["xla"][0].astype(jnp.float32)).max()
        found["apart_from_xla"] = float(apart)
    limits = {"error_float64": 8e-4, "cosine_difference": 5e-6, "lse_error": 1e-6, "apart_from_xla": 1e-3}
    if not all(value < limits[name] for name, value in found.items()):
        raise SystemExit(f"{case.name}: {found}, allowed {limits}")
    return found


def measure(case: Case, arrays: tuple[Any, ...], many: Callable[..., Any], *, slow: bool = False) -> list[float]:
    """Microseconds of one call, in each of several runs of about 40 ms."""
    copies = len(arrays[2])
    rounds = 1 if slow else max(round(0.04 / (max(case.floor_us, 8) * 1e-6 * copies)), 1)
    jax.block_until_ready(many(*arrays, np.int32(rounds)))
    times = []
    for _ in range(3 if slow else 7):
        started = time.perf_counter()
        jax.block_until_ready(many(*arrays, np.int32(rounds)))
        times.append((time.perf_counter() - started) * 1e6 / (rounds * copies))
    return times


def variants(case: Case) -> list[Tuning]:
    """What a sweep tries, the choice made from the shapes first."""
    tiles = case.b * -(-case.t * case.heads // 64)
    around = [] if tiles >= 100 else [max(round(132 / tiles * part), 1) for part in (0.25, 0.5, 1)]
    return [Tuning(), *(Tuning(splits=splits) for splits in around)]


def sweep(case: Case, arrays: tuple[Any, ...]) -> None:
    call = ragged(case, arrays)
    true = truth(call)
    for tuning in variants(case):
        changed = {key: value for key, value in dataclasses.asdict(tuning).items() if value != getattr(Tuning(), key)}
        name = " ".join(f"{key}={value}" for key, value in changed.items()) or "chosen"
        try:
            function, shapes = looped(case, "mosaic_gpu", tuning)
            many = jax.jit(function).lower(*shapes).compile()
            found, middle = errors(true, many(*call, np.int32(1))[-1]), statistics.median(measure(case, arrays, many))
        except Exception as reason:  # a variant that does not compile or fit must not end the sweep
            print(f"{case.name:34s} {name:14s} failed: {str(reason)[:300]}", flush=True)
            continue
        rates = f"{case.bytes / middle / 1e3:5.0f} GB/s {case.flops / middle / 1e6:5.0f} TFLOP/s"
        peer = PEER_US.get((case.b, case.length, case.t, case.heads))
        wrong = " ".join(f"{value:.1e}" for value in found.values())
        print(f"{case.name:34s} {name:14s} {middle:8.1f} us (peer {peer}) {rates}  errors {wrong}", flush=True)


def report(record: Record, case: Case, programs: dict[str, Callable[..., Any]]) -> None:
    """Checks and times one case."""
    arrays = inputs(case)
    found = check(case, arrays, programs)
    peer = PEER_US.get((case.b, case.length, case.t, case.heads)) if case in PEER_CASES else None
    for name, many in programs.items():
        times = measure(case, arrays, many, slow=name == "xla")
        middle = statistics.median(times)
        record.add(
            case.name, "time per call" if name == "mosaic_gpu" else "time per call, implementation xla", round(middle, 1), "us",
            floor=round(case.floor_us, 1), peer=PEER if peer else None, peer_value=peer, peer_card=H200, implementation=name,
            spread=[round(min(times), 1), round(max(times), 1)], bandwidth_gb_s=round(case.bytes / middle / 1e3),
            tflop_s=round(case.flops / middle / 1e6), **(found if name == "mosaic_gpu" else {}),
        )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time the kernel's choices instead")
    parser.add_argument("--only", nargs="+", default=None, help="cases by name, quoted")
    parser.add_argument("--without-xla", action="store_true", help="leave the slow baseline out")
    options = parser.parse_args()
    record = Record("mla", options)
    cases = PEER_CASES if options.sweep else PEER_CASES + PAGE_CASES + QUANTIZED_CASES
    cases = [case for case in cases if not options.only or case.name in options.only]
    if options.sweep:
        for case in cases:
            sweep(case, inputs(case))
        return
    names = ["mosaic_gpu"] if options.without_xla else ["mosaic_gpu", "xla"]
    # Side by side, but never beside a measurement: rows timed then came out half as slow again, with spreads of a factor of two.
    jobs = [(case, name) for case in cases for name in names]
    programs = dict(zip(jobs, compiled(looped, jobs), strict=True))
    for case in cases:
        report(record, case, {name: programs[case, name] for name in names})
    if record.rows:
        print(record.write())


if __name__ == "__main__":
    main()
