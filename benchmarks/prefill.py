"""Attention of whole prompts, bf16, 2 x 8192 tokens, against the matrix ceiling and other libraries in the same run.

    python benchmarks/prefill.py               # measure and write results/prefill.json
    python benchmarks/prefill.py --sweep       # time the kernel's choices for each shape, write nothing

A figure is the time of one call inside one compiled loop on the device, with everything the call launches: the host's clock around
several calls, divided by their number. One element of a call's queries comes from the call before it. Keys and values are larger
than the L2. A causal call counts half the multiplications. The kernel and the same run's peers take turns. Correctness is checked
first, in the same process: rows of the last sequence against float64.
"""

import dataclasses
import functools
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
from card import H200, card, measured_here
from dflash_kernels.attention.ragged.launch import Tuning
from dflash_kernels.attention.ragged.mosaic_gpu import tuned_dense, tuned_paged
from record import Record, arguments

ALLOWED = 0.02  # error
CALLS, ROUNDS = 8, 7
QUOTED = "FA3, an earlier run on an H200"
# TFLOP/s of FA3 for the same shapes: (head dim, value dim, causal).
FA3 = {(128, 128, False): 649, (128, 128, True): 590, (192, 128, False): 673, (192, 128, True): 646}


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    page_size: int = 0
    b: int = 2
    length: int = 8192

    @property
    def name(self) -> str:
        dims = f"D{self.head_dim}" if self.head_dim == self.value_dim else f"D{self.head_dim}/{self.value_dim}"
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}/{self.kv_heads}"
        pages = f" page{self.page_size}" if self.page_size else ""
        return f"prefill B{self.b} S{self.length} {heads} {dims} {'causal' if self.causal else 'full'}{pages} bf16"

    @property
    def flops(self) -> float:
        whole = 2.0 * self.b * self.heads * self.length**2 * (self.head_dim + self.value_dim)
        return whole / 2 if self.causal else whole

    @property
    def mask(self) -> dict[str, Any]:
        rest = {"window": (None, None), "soft_cap": None, "sinks": None, "alibi_slopes": None, "alibi_sqrt": False}
        return rest | {"causal": self.causal, "scale": self.head_dim**-0.5}


MHA, MLA, GQA = (16, 16, 128, 128), (16, 16, 192, 128), (32, 8, 128, 128)
CASES = [Case(*shape, causal) for shape in (MHA, MLA) for causal in (False, True)] + [Case(*GQA, causal=True)]
CASES += [Case(*shape, True, page_size) for shape, page_size in ((MHA, 64), (MHA, 128), (GQA, 64))]


def inputs(case: Case) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """Packed q, k and v, and the arguments after q of the call: packed, or with the same keys in shuffled pages."""
    keys = jax.random.split(jax.random.key(0), 4)
    make, tokens = jax.jit(jax.random.normal, static_argnums=(1, 2)), case.b * case.length
    q = make(keys[0], (tokens, case.heads, case.head_dim), jnp.bfloat16)
    k = make(keys[1], (tokens, case.kv_heads, case.head_dim), jnp.bfloat16)
    v = make(keys[2], (tokens, case.kv_heads, case.value_dim), jnp.bfloat16)
    cu = jnp.arange(case.b + 1, dtype=jnp.int32) * case.length
    if not case.page_size:
        return (q, k, v), (k, v, cu, cu)
    pages = tokens // case.page_size
    places = jax.random.permutation(keys[3], pages).astype(jnp.int32)

    def pool(array: jax.Array) -> jax.Array:
        split = array.reshape(pages, case.page_size, *array.shape[1:]).swapaxes(1, 2)
        return split[jnp.argsort(places)]

    lens = jnp.full((case.b,), case.length, jnp.int32)
    return (q, k, v), (pool(k), pool(v), cu, places.reshape(case.b, -1), lens)


def ours(case: Case, tuning: Tuning | None = None, interpret: Any = None) -> Callable[..., jax.Array]:
    """The kernel; `tuning` None: as calls have it, from the table."""
    function = functools.partial(
        tuned_paged if case.page_size else tuned_dense, **case.mask, tuning=tuning, interpret=interpret
    )
    return lambda *arrays: function(*arrays)[0]


def error_of(case: Case, packed: tuple[jax.Array, ...], out: jax.Array) -> float:
    """Largest error of some rows of the last sequence against float64, as a share of the row's largest output."""
    error, first = 0.0, (case.b - 1) * case.length
    for row in {row % case.length for row in (0, 1, 63, 64, 127, 4097, -1)}:
        for head in (0, case.heads - 1):
            seen = slice(first, first + (row + 1 if case.causal else case.length))
            k, v = (np.asarray(x[seen, head * case.kv_heads // case.heads], np.float64) for x in packed[1:])
            scores = k @ np.asarray(packed[0][first + row, head], np.float64) * case.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            true = weights @ v / weights.sum()
            error = max(
                error, float(np.abs(np.asarray(out[first + row, head], np.float64) - true).max() / np.abs(true).max())
            )
    return error


def check(case: Case, packed: tuple[jax.Array, ...], out: jax.Array) -> float:
    """The error; stops the run where it is too large."""
    error = error_of(case, packed, out)
    if not error < ALLOWED:
        raise SystemExit(f"{case.name}: error {error:.2e} against float64")
    return error


def looped(call: Callable[..., jax.Array], calls: int) -> Callable[..., jax.Array]:
    """Compiled: one call after the other; the output of the last one."""

    @jax.jit
    def many(q, *rest):
        def body(_, q):
            return q.at[(0,) * q.ndim].set(call(q, *rest).ravel()[0].astype(q.dtype))

        return call(jax.lax.fori_loop(0, calls - 1, body, q), *rest)

    return many


def seconds_of_one(calls: int, many: Callable[[], Any]) -> float:
    """Time of one of the calls that `many` makes."""
    started = time.perf_counter()
    jax.block_until_ready(many())
    return (time.perf_counter() - started) / calls


def in_turns(programs: dict[str, Callable[[], Any]], calls: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of one call of each program in each round: a GPU that grows hot slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            times[name].append(seconds_of_one(calls, program))
    return times


def cudnn(case: Case) -> Callable[..., jax.Array]:
    options = {"is_causal": case.causal, "implementation": "cudnn"}
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)


def attention_mgpu(case: Case) -> Callable[..., jax.Array]:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as module

    config = module.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=case.causal)
    return lambda q, k, v: module.attention(q, k, v, config)


def peers(case: Case, packed: tuple[jax.Array, ...]) -> dict[str, Callable[[], Any]]:
    """Programs of other implementations on the same rows as a batch. jax's own kernel takes float16 only."""
    found = {}
    batch = [array.reshape(case.b, case.length, *array.shape[1:]) for array in packed]
    half = [array.astype(jnp.float16) for array in batch]
    for name, make, arrays in (
        ("cuDNN through jax.nn", cudnn, batch),
        ("jax attention_mgpu, float16", attention_mgpu, half),
    ):
        program = functools.partial(looped(make(case), CALLS), *arrays)
        try:
            jax.block_until_ready(program())
            found[name] = program
        except Exception as reason:  # a peer that does not take the shape must not end the run
            print(f"{case.name:44s} {name} failed: {str(reason)[:120]}", flush=True)
    return found


def sweep(case: Case, packed: tuple[jax.Array, ...], rest: tuple[jax.Array, ...]) -> None:
    for change in (
        {},
        {"stages": 3},
        {"keys": 64},
        {"keys": 64, "stages": 3},
        {"kv_heads_at_once": 4},
    ):
        try:
            program = functools.partial(looped(ours(case, Tuning(**change)), CALLS), packed[0], *rest)
            error = check(case, packed, program())
            speed = case.flops / statistics.median(in_turns({"": program}, CALLS, ROUNDS)[""]) / 1e12
        except Exception as reason:  # a variant that does not compile or fit must not end the sweep
            print(f"{case.name:44s} {change} failed: {str(reason)[:200]}", flush=True)
            continue
        print(f"{case.name:44s} {speed:7.1f} TFLOP/s  error {error:.1e}  {change}", flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time the kernel's choices instead")
    parser.add_argument("--only", nargs="+", default=None, help="cases by name, quoted")
    parser.add_argument("--without-peers", action="store_true", help="measure no other libraries")
    options = parser.parse_args()
    record = Record("prefill", options)
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        packed, rest = inputs(case)
        if options.sweep:
            sweep(case, packed, rest)
            continue
        program = functools.partial(looped(ours(case), CALLS), packed[0], *rest)
        error = check(case, packed, program())
        others = {} if case.page_size or options.without_peers else peers(case, packed)
        seconds = in_turns({"ours": program} | others, CALLS, ROUNDS)
        times = seconds.pop("ours")
        speeds = [case.flops / second / 1e12 for second in times]
        same_run = {name: round(case.flops / statistics.median(turns) / 1e12, 1) for name, turns in seconds.items()}
        peer = peer_value = None
        if not case.page_size and case.heads == case.kv_heads and measured_here(H200):
            peer, peer_value = QUOTED, FA3[case.head_dim, case.value_dim, case.causal]
        elif same_run:
            peer, peer_value = max(same_run.items(), key=lambda item: item[1])
        record.add(
            case.name, "matrix throughput", round(statistics.median(speeds), 1), "TFLOP/s", floor=card().products / 1e12,
            peer=peer, peer_value=peer_value, time_us=round(statistics.median(times) * 1e6, 1),
            floor_us=round(case.flops / card().products * 1e6, 1), spread=[round(min(speeds), 1), round(max(speeds), 1)],
            error_float64=error, same_run=same_run,
        )  # fmt: skip
    if record.rows:
        print(record.write())


if __name__ == "__main__":
    main()
