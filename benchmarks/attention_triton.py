"""Paged attention through Triton, the kernel for GPUs older than Hopper, in cases of attention.py on whatever GPU is here.

    python benchmarks/attention_triton.py            # measure and write results/attention_triton.json
    python benchmarks/attention_triton.py --sweep    # time the kernel's choices for each shape, write nothing

How it is measured, what the floor is and where the peer's figures come from: see attention.py.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
from attention import PEER, PEER_US, Case, error_of, implementation, inputs, measure, ragged, truth
from card import H200
from dflash_kernels.attention.paged.triton import CHOSEN, Tuning, paged_attention_triton
from record import Record, arguments

CASES = [Case(b, 4096, t) for b in (64, 8, 1) for t in (1, 16)] + [Case(1, 4096, 512)]
TRIED: dict[int, tuple[dict[str, int], ...]] = {
    1: ({}, {"stages": 7}, {"keys": 32}, {"warps": 2}),
    16: ({}, {"keys": 64}, {"keys": 64, "stages": 3}, {"warps": 8}),
    512: ({}, *({"rows": 128, "warps": 8, "keys": keys, "stages": stages} for keys in (32, 64) for stages in (3, 5))),
}


def attention(case: Case, tuning: Tuning = CHOSEN) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return jax.jit(functools.partial(paged_attention_triton, **case.mask, tuning=tuning))


def check(case: Case, arrays: tuple[jax.Array, ...]) -> float:
    """Stops the run where the kernel is wrong; returns its error against float64."""
    call = ragged(case, arrays)
    ours, theirs = (attend(*call)[0].astype(jnp.float32) for attend in (attention(case), implementation(case, "xla")))
    error, apart = error_of(truth(case, call), ours), float(jnp.abs(ours - theirs).max() / jnp.abs(theirs).max())
    if not (error < 0.02 and apart < 0.02):
        raise SystemExit(f"{case.name}: error {error:.2e} against float64, {apart:.2e} against xla")
    return error


def variants(case: Case) -> list[Tuning]:
    """What a sweep tries: tiles first with the parts chosen from the shapes, then other numbers of parts."""
    splits = {64: (1, 2, 3), 8: (2, 4, 6), 1: (8, 16, 32)}[case.b] if case.t < 512 else (1, 2)
    return [Tuning(**change) for change in (*TRIED[case.t], *({"splits": count} for count in splits))]


def sweep(case: Case, arrays: tuple[jax.Array, ...]) -> None:
    call = ragged(case, arrays)
    true = truth(case, call)
    for tuning in variants(case):
        changed = {key: value for key, value in dataclasses.asdict(tuning).items() if value != getattr(CHOSEN, key)}
        name = " ".join(f"{key}={value}" for key, value in changed.items()) or "chosen"
        try:
            attend = attention(case, tuning)
            error, times = error_of(true, attend(*call)[0]), measure(case, arrays, attend)
        except Exception as reason:  # a variant that does not compile or fit must not end the sweep
            print(f"{case.name:26s} {name:26s} failed: {str(reason)[:200]}", flush=True)
            continue
        middle = statistics.median(times)
        share = case.floor_us / middle
        print(f"{case.name:26s} {name:26s} {middle:8.1f} us {share:6.1%} error {error:.1e}", flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time the kernel's choices instead")
    parser.add_argument("--only", nargs="+", default=None, help="cases by name, quoted")
    options = parser.parse_args()
    record = Record("attention_triton", options)
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        arrays = inputs(case)
        if options.sweep:
            sweep(case, arrays)
            continue
        error, times = check(case, arrays), measure(case, arrays, attention(case))
        middle = statistics.median(times)
        extras: dict[str, Any] = {"spread": [round(min(times), 1), round(max(times), 1)], "error_float64": error}
        peer = PEER_US[case.b, case.length].get(case.t)
        record.add(
            f"{case.name} triton", "time per call", round(middle, 1), "us", floor=round(case.floor_us, 1),
            peer=PEER if peer else None, peer_value=peer, peer_card=H200, implementation="triton",
            bandwidth_gb_s=round(case.bytes / middle / 1e3), **extras,
        )  # fmt: skip


if __name__ == "__main__":
    main()
