"""Time of one decode step and one DFlash cycle where 1, 2 or 4 GPUs share a model, random bf16 weights in published shapes.

    python benchmarks/several_gpus.py
    python benchmarks/several_gpus.py --models qwen3-8b --tp 1 2 --batch 1 8
    python benchmarks/several_gpus.py --models qwen3-8b --tp 2 --collectives

Measured as `decode.py` does, through the engine a user runs. What does not fit so many GPUs is passed over with its sizes. The
floor is what each GPU reads, without what GPUs tell one another. Rows say what ran the target's layers, and whether GPUs exchanged
numbers in the project's kernels or by JAX's collectives. No drafter of Qwen3-32B is published: the one here has five
layers of the target's widths.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
from decode import THREADS, measure, start
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
from dflash_jax.models.presets import DRAFTERS, MOE_TARGETS, TARGETS
from dflash_jax.parallel.ranks import held, local_ranks

BFLOAT16 = jax.numpy.dtype("bfloat16")
_OF_32B = replace(
    DRAFTERS["Qwen3-8B-DFlash-b16"], hidden_size=5120, intermediate_size=25_600, num_heads=64, target_hidden_size=5120,
    target_layer_ids=(1, 16, 31, 46, 61), num_target_layers=64,
)  # fmt: skip
# Family, target and drafter.
MODELS: Mapping[str, tuple[str, Any, Any]] = {
    "qwen3-4b": ("qwen3", TARGETS["Qwen3-4B"], DRAFTERS["Qwen3-4B-DFlash-b16"]),
    "qwen3-8b": ("qwen3", TARGETS["Qwen3-8B"], DRAFTERS["Qwen3-8B-DFlash-b16"]),
    "qwen3-32b": ("qwen3", TARGETS["Qwen3-32B"], _OF_32B),
    "qwen3-coder-30b-a3b": (
        "qwen3_moe", MOE_TARGETS["Qwen3-Coder-30B-A3B-Instruct"], DRAFTERS["Qwen3-Coder-30B-A3B-DFlash"],
    ),
}  # fmt: skip


def build(name: str, tp: int, context: int, batch: int) -> Engine:
    """An engine over random weights, each GPU's drawn where they stay.

    Raises:
      CapacityError: they do not fit.
    """
    family, target, draft = MODELS[name]
    models, ranks = [(target, family_named(family)), (draft, family_named("dflash"))], local_ranks(tp)
    rows = cycle_rows(batch, draft)
    stored, kept = stored_shapes(models, BFLOAT16, ranks=ranks), weight_shapes(models, BFLOAT16, rows=rows, ranks=ranks)
    engine = Engine(
        target, draft, spread(models, kept, ranks), BFLOAT16, max_model_len=context + 640, max_batch=batch,
        programs=Programs(ranks=ranks),
    )  # fmt: skip
    memory = plan_for(engine, reading_bytes(stored, kept), None)
    drawn = {
        known.role: init_params(known.parameters(config), jax.random.key(len(known.role)), "bfloat16", ranks=ranks)
        for config, known in models
    }
    if ranks is not None:
        return replace(engine, weights=completed(models, drawn, ranks), num_pages=memory.num_pages)
    for config, known in models:
        drawn[known.role] = known.derived(config, drawn[known.role])
    return replace(engine, weights=round_weights(drawn, target, draft, BFLOAT16, rows=rows), num_pages=memory.num_pages)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["qwen3-8b", "qwen3-32b", "qwen3-coder-30b-a3b"], choices=sorted(MODELS)
    )
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=["step", "cycle"], choices=["step", "cycle"])
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument(
        "--collectives", action="store_true", help="GPUs tell one another everything by JAX's collectives"
    )
    parser.add_argument("--exchange", action="store_true", help="gated delta nets add up in kernels too")
    options = parser.parse_args()
    switches.RANK_EXCHANGE = not options.collectives
    switches.RANK_EXCHANGE_DELTA = options.exchange
    record = Record("several_gpus", options)
    for name, tp in itertools.product(options.models, options.tp):
        if reasons := sharing_refusals(*MODELS[name][1:], tp):
            print(f"{name} tp{tp}: {'; '.join(reasons)}", flush=True)
            continue
        try:
            engine = build(name, tp, options.context, max(options.batch))
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
    at, seconds = f"tp{tp}{by} ctx{options.context // 1024}k", time.perf_counter() - started
    record.add(f"compile {name} {at}", "compile time, all programs", round(seconds, 1), "s")
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
