"""Time of one decode step and one DFlash cycle in the exact shapes of published models, random bf16 weights, against the floor.

    python benchmarks/decode.py --models qwen3-4b --context 1024 --batch 1 8
    python benchmarks/decode.py --models qwen3-4b --context 8192 --batch 8 --cache-dtype none int8
    python benchmarks/decode.py --models llama-3.1-8b qwen3-8b --batch 1 8 32
    python benchmarks/decode.py --models qwen3-4b --batch 1 8 --transformers
    python benchmarks/decode.py --models qwen3-4b --batch 1 8 --sampling full
    python benchmarks/decode.py --models qwen3-4b --context 32768 --draft-window 2048
    python benchmarks/decode.py --models qwen3-4b --batch 1 8 32 --kinds cycle --exact
    python benchmarks/decode.py --models qwen3.5-9b --batch 1 8 --weight-dtype fp8_dynamic --turn HYBRID_EIGHT_BITS

Measured through the engine a user runs: `cycles` cycles for each question from the host, results copied back, compilation excluded.
Weights lie as they do in an engine for as many sequences as are measured: for 32 otherwise than for 8.
Random weights accept next to nothing, so a cycle's context grows by one token; its work is the same as with any acceptance. Rows
`first token` are the time from a prompt's first chunk to its first token.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
import numpy as np
from card import H200
from dflash_kernels.attention.paged.api import IMPLEMENTATIONS
from floors import floor_ms
from record import Record, arguments

from dflash_jax.bench.workload import SHAPES, published_shape
from dflash_jax.cache import CacheScales
from dflash_jax.checkpoints.weights import round_weights
from dflash_jax.config import DecoderConfig
from dflash_jax.decoding.sampling import Mode
from dflash_jax.engine import CYCLES_PER_CHUNK, MAX_CYCLES, Engine, Run
from dflash_jax.engine.requests import Request
from dflash_jax.execution import switches
from dflash_jax.execution.weight_layout import blocks_pay, cycle_rows
from dflash_jax.models import family_named, init_params
from dflash_jax.options import CALIBRATED, DRAFT_WEIGHT_DTYPES, WEIGHT_DTYPES, WeightDtype
from dflash_jax.quantization.kv_formats import INT8_CALIBRATED_TO
from dflash_jax.sampling_params import SamplingParams

THREADS = 12  # that compile
LAWS: dict[Mode, dict[str, float]] = {
    "greedy": {}, "sampled": {"temperature": 0.7}, "full": {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
}  # fmt: skip
# From this context on one width of the page table: programs for the beginnings of prompts take longer to compile than to run.
LONG = 8192
# Peer measurements of the same shapes on the same kind of GPU (vLLM 0.23.0, FA3, CUDA graphs), ms.
PEER = {
    ("qwen3-4b", "step"): {1: 3.63, 8: 3.99, 32: 5.14}, ("qwen3-4b", "cycle"): {1: 6.09, 8: 6.08, 32: 11.4},
    ("qwen3-8b", "step"): {1: 5.19, 8: 5.72, 32: 6.64}, ("qwen3-8b", "cycle"): {1: 6.50, 8: 7.54, 32: 16.6},
}  # fmt: skip


def build(
    name: str,
    context: int,
    batch: int,
    weight_dtype: WeightDtype | None = None,
    draft_weight_dtype: WeightDtype | None = None,
    *,
    exact: bool = False,
) -> Engine:
    """An engine over random weights made on the device."""
    family, target, draft = published_shape(name)
    tables = {"target": (family, target), "draft": ("dflash", draft)}
    weights = {}
    for role, (family, config) in tables.items():
        known = family_named(family)
        table = init_params(known.parameters(config), jax.random.key(len(role)), "bfloat16")
        weights[role] = known.derived(config, table)
    kinds, rows = (weight_dtype, draft_weight_dtype), cycle_rows(batch, draft)
    weights = round_weights(weights, target, draft, jax.numpy.dtype("bfloat16"), *kinds, rows=rows)
    return Engine(
        target=target, draft=draft, weights=weights, dtype=jax.numpy.dtype("bfloat16"), max_model_len=context + 640,
        max_batch=batch, exact=exact,
    )  # fmt: skip


def engines(
    name: str,
    context: int,
    batches: Sequence[int],
    weight_dtype: WeightDtype | None = None,
    draft_weight_dtype: WeightDtype | None = None,
    *,
    exact: bool = False,
) -> dict[int, Engine]:
    """One of `build` for each batch: the same one for those whose weights lie alike. Exact ones run as many slots as they have: of
    weights that lie alike each batch has its own."""
    _, target, draft = published_shape(name)
    groups, found = dict[tuple[bool, ...], list[int]](), dict[int, Engine]()
    for batch in batches:
        rows = cycle_rows(batch, draft)
        alike = tuple(blocks_pay(config, jax.numpy.bfloat16, rows) for config in (target, draft))
        groups.setdefault(alike, []).append(batch)
    for group in groups.values():
        engine = build(name, context, max(group), weight_dtype, draft_weight_dtype, exact=exact)
        found |= {batch: replace(engine, max_batch=batch, num_pages=0) if exact else engine for batch in group}
    return found


def scales(target: DecoderConfig) -> CacheScales:
    """Of int8 pages: random weights make about normal values, whose largest of a text are some four deviations."""
    of_channels = np.full((target.num_kv_heads, target.head_dim), 4 / INT8_CALIBRATED_TO, np.float32)
    return CacheScales((), (of_channels,) * target.cached_layers)


def resized(
    of_batch: Mapping[int, Engine], context: int, cache_dtype: str | None = None, window: int | None = None
) -> dict[int, Engine]:
    """The same weights for prompts of another length, pages kept in another way, and a drafter that sees no more than `window`."""
    made = {id(engine): _resized(engine, context, cache_dtype, window) for engine in of_batch.values()}
    return {batch: made[id(engine)] for batch, engine in of_batch.items()}


def _resized(engine: Engine, context: int, cache_dtype: str | None, window: int | None) -> Engine:
    found = scales(engine.target) if cache_dtype == "int8" else None
    kept = {"cache_dtype": cache_dtype, "cache_scales": found, "draft_window": window}
    engine = replace(engine, max_model_len=context + 640, num_pages=0, **kept)
    if context >= LONG:
        engine.buckets = replace(engine.buckets, width=engine.buckets.width[-1:])
    return engine


def start(engine: Engine, *, draft: bool, context: int, batch: int, calls: int, sampling: Mode = "greedy") -> Run:
    """A run of random prompts that gives `calls` device calls of `MAX_CYCLES` cycles, after two calls of warm-up."""
    rng = np.random.default_rng(0)
    # Prompts that wait are prefilled between shorter calls, during which the first requests decode already.
    admitting = batch * CYCLES_PER_CHUNK * -(-context // engine.buckets.chunk)
    most = min(600, (calls + 2) * MAX_CYCLES + admitting)
    params = SamplingParams(max_tokens=most, ignore_eos=True, seed=0, **LAWS[sampling])
    requests = [Request(i, tuple(rng.integers(0, 1000, context).tolist()), params, ()) for i in range(batch)]
    return engine.run(requests, draft=draft)


def measure(
    engine: Engine, *, draft: bool, context: int, batch: int, calls: int, sampling: Mode = "greedy"
) -> list[float]:
    """Milliseconds of one cycle in each of `calls` device calls of `MAX_CYCLES` cycles."""
    size = {"context": context, "batch": batch, "calls": calls}
    run, times = start(engine, draft=draft, **size, sampling=sampling), list[float]()
    for update in run:
        if not update.first and update.index == 0 and len(update.counts) == MAX_CYCLES:
            times.append(update.seconds / MAX_CYCLES * 1e3)
        if len(times) >= calls + 2:
            break
    run.close()
    return times[2:]


def first_token_ms(engine: Engine, *, draft: bool, context: int) -> float:
    """Milliseconds from a prompt's first chunk to its first token, for a prompt that nothing is known of."""
    ids = np.random.default_rng(1).integers(0, 1000, context).tolist()
    request = Request(0, tuple(ids), SamplingParams(max_tokens=1, ignore_eos=True), ())
    return next(update.seconds for update in list(engine.run([request], draft=draft, slots=1))) * 1e3


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-4b"], choices=sorted(SHAPES))
    parser.add_argument("--context", nargs="+", type=int, default=[1024])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--kinds", nargs="+", default=["step", "cycle"], choices=["step", "cycle"])
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument(
        "--attention", nargs="+", default=["best"], choices=["best", *IMPLEMENTATIONS],
        help="implementations of paged attention, one after the other; `best` is what an engine takes, launches that hold more "
        "than attention included",
    )  # fmt: skip
    parser.add_argument(
        "--chain",
        action=argparse.BooleanOptionalAction,
        default=switches.PERSISTENT,
        help="one launch between two layers' attention where it takes the rows, or separate operations",
    )
    parser.add_argument(
        "--weight-dtype", default=None, choices=list(WEIGHT_DTYPES), help="large matrices in eight bits"
    )
    parser.add_argument(
        "--draft-weight-dtype", default=None, choices=list(DRAFT_WEIGHT_DTYPES), help="the same for the drafter alone"
    )
    parser.add_argument("--draft-window", type=int, default=None, help="tokens of a context that the drafter sees")
    parser.add_argument(
        "--cache-dtype",
        nargs="+",
        default=["none"],
        choices=["none", *CALIBRATED],
        help="the target's keys and values in eight bits, one after the other",
    )
    parser.add_argument(
        "--sampling", default="greedy", choices=list(LAWS),
        help="how tokens are chosen: at temperature 0.7, and with the top_p and top_k that Qwen3's cards recommend",
    )  # fmt: skip
    parser.add_argument("--exact", action="store_true", help="texts that are the same bit by bit in any company")
    parser.add_argument(
        "--turn", nargs="+", default=[], choices=sorted(switches.switches()), metavar="SWITCH",
        help="switches of dflash_jax/execution/switches.py that are turned the other way",
    )  # fmt: skip
    parser.add_argument(
        "--transformers", action="store_true", help="Hugging Face's generate on the same shapes afterwards (peers.py)"
    )
    options = parser.parse_args()
    switches.PERSISTENT = options.chain
    for name in options.turn:
        setattr(switches, name, not getattr(switches, name))
    suffix = "" if options.chain else " separate"
    suffix += "" if options.weight_dtype is None else f" {options.weight_dtype}"
    suffix += "" if options.draft_weight_dtype is None else f" {options.draft_weight_dtype} drafter"
    suffix += "" if options.draft_window is None else f" window{options.draft_window}"
    suffix += "" if options.sampling == "greedy" else f" {options.sampling}"
    suffix += " exact" if options.exact else ""
    suffix += "".join(f" {name} {'on' if getattr(switches, name) else 'off'}" for name in options.turn)
    pages = {kept: "" if kept == "none" else f" {kept} pages" for kept in options.cache_dtype}
    every, whole = dict(IMPLEMENTATIONS), switches.PERSISTENT_ATTENTION
    named = "" if options.attention == ["best"] else " " + " ".join(options.attention)
    contexts = "" if 1024 in options.context else f" ctx{min(options.context) // 1024}k"
    record = Record("decode" + (contexts + named + suffix + "".join(pages.values())).replace(" ", "_"), options)
    for attention in options.attention:
        IMPLEMENTATIONS.clear()
        IMPLEMENTATIONS.update(every if attention == "best" else {attention: every[attention]})
        switches.PERSISTENT_ATTENTION = switches.FUSED_QKV = whole and attention == "best"
        jax.clear_caches()
        for name in options.models:
            kinds = options.weight_dtype, options.draft_weight_dtype
            of_batch = engines(name, options.context[0], options.batch, *kinds, exact=options.exact)
            for context, kept in itertools.product(options.context, options.cache_dtype):
                of_batch = resized(of_batch, context, None if kept == "none" else kept, options.draft_window)
                words = ("" if attention == "best" else f" {attention}") + suffix + pages[kept]
                add(record, options, name, of_batch, context, words)
            del of_batch
    print(record.write(), flush=True)
    if options.transformers:
        measure_transformers(options)


def measure_transformers(options: argparse.Namespace) -> None:
    """Runs `peers.py` for the same models and batches, in a process of its own with the memory that JAX leaves."""
    words = {"--models": options.models, "--context": options.context[:1], "--batch": options.batch}
    words |= {"--out": [options.out]} | ({"--commit": [options.commit]} if options.commit else {})
    command = [str(word) for name, values in words.items() for word in (name, *values)]
    subprocess.run([sys.executable, str(Path(__file__).with_name("peers.py")), *command], check=True)


def add(
    record: Record, options: argparse.Namespace, name: str, of_batch: Mapping[int, Engine], context: int, suffix: str
) -> None:
    """Rows of one model and context: a step and a cycle for each batch, the first token, and the time of compiling."""
    at = f"ctx{context // 1024}k"
    block = published_shape(name)[2].block_size
    kinds = [(kind, kind == "cycle", name if kind == "step" else f"{name}-b{block}") for kind in options.kinds]
    started = time.perf_counter()
    runs = [
        start(
            of_batch[batch], draft=draft, calls=options.calls, context=context, batch=batch, sampling=options.sampling
        )
        for batch in options.batch
        for _, draft, _ in kinds
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda job: job(), [job for run in runs for job in run.first_jobs()]))
    compiling = time.perf_counter() - started
    print(f"compiled in {compiling:.1f} s", flush=True)
    for batch in options.batch:
        size, engine = {"context": context, "batch": batch}, of_batch[batch]
        for kind, draft, model in kinds:
            started = time.perf_counter()
            times = measure(engine, draft=draft, calls=options.calls, **size, sampling=options.sampling)
            peers = PEER.get((name, kind), {}) if context == 1024 and options.sampling == "greedy" else {}
            record.add(
                f"{kind} {model} {at} B{batch}{suffix}", "time per " + kind,
                round(statistics.median(times), 3), "ms", floor=floor_ms(engine, draft=draft, **size),
                peer="vLLM 0.23.0, an earlier run on an H200" if batch in peers else None, peer_value=peers.get(batch),
                peer_card=H200,
                spread=[round(min(times), 3), round(max(times), 3)], wall_s=round(time.perf_counter() - started, 1),
            )  # fmt: skip
            if batch == 1:
                first = first_token_ms(engine, draft=draft, context=context)
                record.add(f"first token {model} {at}{suffix}", "time to the first token", round(first, 1), "ms")
    compiling += sum({id(engine): engine.programs.compile_s for engine in of_batch.values()}.values())
    record.add(f"compile {name} {at}{suffix}", "compile time, all programs", round(compiling, 1), "s")


if __name__ == "__main__":
    main()
