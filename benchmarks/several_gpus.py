"""Time of one decode step and one DFlash cycle where 1, 2 or 4 GPUs share a model, random bf16 weights in published shapes.

    python benchmarks/several_gpus.py
    python benchmarks/several_gpus.py --models qwen3-8b --tp 1 2 --batch 1 8
    python benchmarks/several_gpus.py --models qwen3-8b --tp 2 --collectives
    python benchmarks/several_gpus.py --models deepseek-v2-lite --tp 4 --dealt 4 --context 131072 --batch 1

Measured as `decode.py` does, through the engine a user runs. What does not fit so many GPUs is passed over with its sizes. The
floor is what each GPU reads, without what GPUs tell one another. Rows say what ran the target's layers, and whether GPUs exchanged
numbers in the project's kernels or by JAX's collectives. No drafters of Qwen3-32B, Qwen3-235B-A22B and DeepSeek's targets are
published: those here have five layers of the target's width. `deepseek-v3-5-layers` are V3's three dense layers and two with
experts.
"""

import itertools
import statistics
import sys
import time
from argparse import BooleanOptionalAction
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
from decode import LONG, THREADS, measure, start
from floors import floor_ms
from record import Record, arguments

from dflash_jax.checkpoints.weights import completed, reading_bytes, round_weights, spread, stored_shapes, weight_shapes
from dflash_jax.compile.programs import Programs
from dflash_jax.decoding.cycle import in_one_graph
from dflash_jax.engine import Engine
from dflash_jax.engine.planning import plan_for
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import CapacityError
from dflash_jax.execution import switches
from dflash_jax.execution.weight_layout import cycle_rows
from dflash_jax.models import family_named, init_params
from dflash_jax.models.presets import (
    DEEPSEEK_TARGETS,
    DRAFTERS,
    GPT_OSS_TARGETS,
    HYBRID_TARGETS,
    MOE_TARGETS,
    TARGETS,
)
from dflash_jax.parallel.ranks import held, local_ranks

BFLOAT16 = jax.numpy.dtype("bfloat16")


def _drafter(target: Any, taps: tuple[int, ...], **sizes: int) -> Any:
    """Five layers of the target's width, which see what comes out of the layers `taps`."""
    return replace(
        DRAFTERS["Qwen3-8B-DFlash-b16"], hidden_size=target.hidden_size, target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size, mask_token_id=target.vocab_size - 1, target_layer_ids=taps,
        num_target_layers=target.num_layers, max_position=target.max_position, **sizes,
    )  # fmt: skip


_32B, _V2_LITE = TARGETS["Qwen3-32B"], DEEPSEEK_TARGETS["DeepSeek-V2-Lite"]
_V3 = replace(DEEPSEEK_TARGETS["DeepSeek-V3"], num_layers=5, windows=(None,) * 5, num_mtp_layers=0)
# Sizes of its published file.
_235B = replace(
    MOE_TARGETS["Qwen3-30B-A3B"], hidden_size=4096, intermediate_size=12_288, num_layers=94, num_heads=64,
    windows=(None,) * 94, moe_intermediate_size=1536,
)  # fmt: skip
# Family, target and drafter.
MODELS: Mapping[str, tuple[str, Any, Any]] = {
    "qwen3-4b": ("qwen3", TARGETS["Qwen3-4B"], DRAFTERS["Qwen3-4B-DFlash-b16"]),
    "qwen3-8b": ("qwen3", TARGETS["Qwen3-8B"], DRAFTERS["Qwen3-8B-DFlash-b16"]),
    "qwen3-32b": ("qwen3", _32B, _drafter(_32B, (1, 16, 31, 46, 61), intermediate_size=25_600, num_heads=64)),
    "qwen3.5-9b": ("qwen3_5", HYBRID_TARGETS["Qwen3.5-9B"], DRAFTERS["Qwen3.5-9B-DFlash"]),
    "qwen3-235b-a22b": ("qwen3_moe", _235B, _drafter(_235B, (1, 23, 46, 69, 91))),
    "deepseek-v2-lite": ("deepseek", _V2_LITE, _drafter(_V2_LITE, (1, 7, 13, 19, 25), intermediate_size=6144)),
    "deepseek-v3-5-layers": ("deepseek", _V3, _drafter(_V3, (0, 1, 2, 3, 4), intermediate_size=18_432)),
    "gpt-oss-20b": ("gpt_oss", GPT_OSS_TARGETS["gpt-oss-20b"], DRAFTERS["gpt-oss-20b-DFlash"]),
    "qwen3-coder-30b-a3b": (
        "qwen3_moe", MOE_TARGETS["Qwen3-Coder-30B-A3B-Instruct"], DRAFTERS["Qwen3-Coder-30B-A3B-DFlash"],
    ),
}  # fmt: skip


def planned_engine(name: str, tp: int, dealt: int, context: int, batch: int) -> Engine:
    """An engine that has shapes in place of weights, with which its programs are compiled.

    Args:
      dealt: GPUs that keep a part each of every page.

    Raises:
      CapacityError: they do not fit.
    """
    family, target, draft = MODELS[name]
    models, ranks = [(target, family_named(family)), (draft, family_named("dflash"))], local_ranks(tp, dealt=dealt)
    rows = cycle_rows(batch, draft)
    stored, kept = stored_shapes(models, BFLOAT16, ranks=ranks), weight_shapes(models, BFLOAT16, rows=rows, ranks=ranks)
    engine = Engine(
        target, draft, spread(models, kept, ranks), BFLOAT16, max_model_len=context + 640, max_batch=batch,
        page_size=64 * dealt, programs=Programs(ranks=ranks),
    )  # fmt: skip
    engine = replace(engine, num_pages=plan_for(engine, reading_bytes(stored, kept), None).num_pages)
    if context >= LONG:
        engine.buckets = replace(engine.buckets, width=engine.buckets.width[-1:])
    return engine


def draw_weights(engine: Engine, name: str) -> None:
    """Gives it random weights, each GPU's drawn where they stay."""
    family, target, draft = MODELS[name]
    models, ranks = [(target, family_named(family)), (draft, family_named("dflash"))], engine.programs.ranks
    drawn = {
        known.role: init_params(known.parameters(config), jax.random.key(len(known.role)), "bfloat16", ranks=ranks)
        for config, known in models
    }
    if ranks is not None:
        engine.weights = completed(models, drawn, ranks)
        return
    for config, known in models:
        drawn[known.role] = known.derived(config, drawn[known.role])
    rows = cycle_rows(engine.max_batch, draft)
    engine.weights = round_weights(drawn, target, draft, BFLOAT16, rows=rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["qwen3-8b", "qwen3-32b", "qwen3-coder-30b-a3b"], choices=sorted(MODELS)
    )
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--dealt", type=int, default=1, help="GPUs that keep a part each of every page")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=["step", "cycle"], choices=["step", "cycle"])
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument(
        "--collectives", action="store_true", help="GPUs tell one another everything by JAX's collectives"
    )
    parser.add_argument(
        "--exchange", action=BooleanOptionalAction, default=switches.RANK_EXCHANGE_DELTA,
        help="gated delta nets add up in kernels too",
    )  # fmt: skip
    options = parser.parse_args()
    switches.RANK_EXCHANGE = not options.collectives
    switches.RANK_EXCHANGE_DELTA = options.exchange
    record = Record("several_gpus", options)
    for name, tp in itertools.product(options.models, options.tp):
        if reasons := sharing_refusals(*MODELS[name][1:], tp):
            print(f"{name} tp{tp}: {'; '.join(reasons)}", flush=True)
            continue
        try:
            engine = planned_engine(name, tp, options.dealt, options.context, max(options.batch))
        except CapacityError as error:
            print(f"{name} tp{tp}: {error}", flush=True)
            continue
        of_model(record, options, name, tp, engine)
        del engine
    print(record.write(), flush=True)


def of_model(record: Record, options: Any, name: str, tp: int, engine: Engine) -> None:
    """Rows of one model on so many GPUs: a step and a cycle for each batch."""
    cases = list(itertools.product(options.batch, options.kinds))
    size = {"context": options.context, "calls": options.calls}
    started = time.perf_counter()
    runs = [start(engine, draft=kind == "cycle", batch=batch, **size) for batch, kind in cases]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda job: job(), [job for run in runs for job in run.first_jobs()]))
    by = " NCCL" if tp > 1 and options.collectives else ""
    by += f" dealt{options.dealt}" if options.dealt > 1 else ""
    at, seconds = f"tp{tp}{by} ctx{options.context // 1024}k", time.perf_counter() - started
    record.add(f"compile {name} {at}", "compile time, all programs", round(seconds, 1), "s")
    started = time.perf_counter()
    draw_weights(engine, name)
    jax.block_until_ready(engine.weights)
    print(f"weights drawn in {time.perf_counter() - started:.1f} s", flush=True)
    for batch, kind in cases:
        draft = kind == "cycle"
        times = measure(engine, draft=draft, batch=batch, **size)
        record.add(
            f"{kind} {name} {at} B{batch}", "time per " + kind, round(statistics.median(times), 3), "ms",
            floor=floor_ms(engine, draft=draft, context=options.context, batch=batch),
            spread=[round(min(times), 3), round(max(times), 3)], **how(engine, draft=draft, batch=batch),
        )  # fmt: skip


def how(engine: Engine, *, draft: bool, batch: int) -> dict[str, Any]:
    """What runs the target's layers in such a cycle, and whether GPUs exchange numbers in kernels."""
    setup = engine.setup(mode="greedy", draft=draft).of_rank()
    weights = {role: held(table) for role, table in engine.weights.items()} if engine.tp > 1 else engine.weights
    plans = setup.plans(weights, batch, engine.buckets.width[-1], engine.pool_shapes())
    return {"runner": plans.target.runner, "exchange": plans.target.exchange, "one_graph": in_one_graph(setup, plans)}


if __name__ == "__main__":
    main()
