"""Time of one cycle by sequences and verified tokens, in the exact shapes of a published pair with random bf16 weights.

    python benchmarks/verify.py --shapes qwen3-4b --batch 1 8 32 64
    python benchmarks/verify.py --shapes qwen3-4b --batch 8 64 --verified 4 8 --shared 4 6 8
    python benchmarks/verify.py --table benchmarks/results/verify.json

The second form has slots share rows as well, so many for each of them on average. The third writes the table that the engine goes
by, `dflash_jax/engine/cycle_costs.json`, from the rows of such files.

Measured through the engine a user runs, as `decode.py` does: the prompts are prefilled once, then every verified length takes its
turn. Random weights accept next to nothing, so contexts grow by one token a cycle; the work is the same with any acceptance.
"""

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from record import Record, arguments

from dflash_jax.bench.workload import SHAPES, published_shape, random_pair
from dflash_jax.checkpoints.weights import weight_shapes
from dflash_jax.engine import Engine
from dflash_jax.engine import cycle_costs as costs
from dflash_jax.engine.acceptance_estimate import AcceptanceEstimate
from dflash_jax.engine.cycle_costs import bare_cost
from dflash_jax.engine.requests import STOP_WIDTH, Request
from dflash_jax.engine.verify_policy import Length, VerifyPolicy
from dflash_jax.engine.warmup import Jobs
from dflash_jax.models import family_named
from dflash_jax.sampling_params import SamplingParams

CYCLES = 16  # between two looks at the results
THREADS = 12
# A call with the length before, which was on its way already; one that waits for the host, and with it a graph's first launch; one
# more that was not on its way early.
WARM = 3


class Shared(VerifyPolicy):
    """So many rows for each slot on average, always."""

    def __init__(self, offered: int, option: int, signs: int):
        super().__init__(offered, option)
        self.current, self.estimate = Length(option, shared=True), AcceptanceEstimate(offered - 1, signs)

    def shares(self, slots: int) -> bool:
        return True


def choose(engine: Engine, length: Length) -> None:
    """Has the next cycles verify so much."""
    assert engine.draft is not None, "a drafter drafts"
    engine.verify_length = length.tokens or None
    draft = engine.draft
    engine._lengths = Shared(draft.num_drafts + 1, length.tokens, draft.signs) if length.shared else None


def compile_ahead(engine: Engine, batches: list[int], lengths: list[Length], tokens: int, *, plain: bool) -> None:
    """Every program that will be timed, several at a time."""
    setup = engine.setup(mode="greedy", draft=True)
    setups = [setup.verifying(length.tokens, per_request=length.shared) for length in lengths]
    setups += [engine.setup(mode="greedy", draft=False)] if plain else []
    width = engine.width_of(tokens)
    jobs = [Jobs(engine, setup, STOP_WIDTH).loop(batch, width) for batch in batches for setup in setups]
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def measure(engine: Engine, batch: int, lengths: list[Length], context: int, calls: int) -> dict[Length, list[float]]:
    """Milliseconds of a cycle by verified length, for each of `calls` device calls after `WARM` others; 0 is without drafter."""
    rng, times = np.random.default_rng(0), {length: list[float]() for length in lengths}
    turns = [length for length in lengths for _ in range(calls + WARM)]
    # While prompts are prefilled the first requests decode already.
    spare = 4 * batch * -(-context // engine.buckets.chunk)
    params = SamplingParams(max_tokens=len(turns) * CYCLES * 2 + spare, ignore_eos=True)
    requests = [Request(i, tuple(rng.integers(0, 1000, context).tolist()), params, ()) for i in range(batch)]
    choose(engine, turns[0])
    run = engine.run(requests, draft=lengths != [Length(0)], cycles=CYCLES)
    for update in run:
        if not update.first and update.index == 0 and len(update.counts) == CYCLES:
            times[turns.pop(0)].append(update.seconds / CYCLES * 1e3)
            if not turns:
                break
            choose(engine, turns[0])
    run.close()
    return {length: found[WARM:] for length, found in times.items()}


def write_table(paths: list[Path]) -> Path:
    """All measured cycles by pair: slots, verified tokens, milliseconds, and those over what bytes and products say."""
    pairs: dict[str, dict[str, Any]] = {}
    for row in [row for path in paths for row in json.loads(path.read_text()) if row.get("verified")]:
        name, context = row["shapes"], row["context"]
        family, *configs = published_shape(name)
        shapes = weight_shapes(
            [(configs[0], family_named(family)), (configs[1], family_named("dflash"))], jnp.dtype("bfloat16")
        )
        cost = bare_cost(*configs, shapes)
        read = cost.target.dense + cost.target.experts
        pair = pairs.setdefault(name, {"pair": name, "context": context, "read_bytes": read, "cycles": {}})
        modelled = cost.modelled(row["slots"], row["verified"], float(context))
        pair["cycles"][row["slots"], row["verified"]] = [row["value"], round(row["value"] / modelled, 4)]
    for pair in pairs.values():
        pair["cycles"] = [[*key, *value] for key, value in sorted(pair["cycles"].items())]
    path = Path(costs.__file__).parent / costs.TABLE
    path.write_text(json.dumps({"pairs": list(pairs.values())}, indent=1) + "\n")
    return path


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", default="qwen3-4b", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--verified", type=int, nargs="+", default=[1, 4, 8, 12, 16])
    parser.add_argument("--shared", type=int, nargs="+", default=[], help="rows for each slot on average")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="steps without a drafter too")
    parser.add_argument(
        "--table", type=Path, nargs="+", metavar="FILE", help="measure nothing, write the engine's table"
    )
    options = parser.parse_args()
    if options.table:
        print(write_table(options.table))
        return
    record = Record("verify", options)
    verified = [*map(Length, options.verified), *(Length(mean, shared=True) for mean in options.shared)]
    tokens = options.context + CYCLES * (options.calls + WARM + 1) * len(verified) + 4 * max(options.batch)
    began = time.perf_counter()
    model = random_pair(options.shapes, max_model_len=2 * tokens, max_batch=max(options.batch))
    print(f"weights {time.perf_counter() - began:.1f} s", flush=True)
    compile_ahead(model.engine, options.batch, verified, tokens, plain=options.plain)
    print(f"and programs {time.perf_counter() - began:.1f} s", flush=True)
    for batch in options.batch:
        for lengths in (verified, [Length(0)])[: 2 if options.plain else 1]:
            for length, times in measure(model.engine, batch, lengths, options.context, options.calls).items():
                kind = "step" if not length.tokens else f"verify {length.tokens}{' shared' if length.shared else ''}"
                memory = jax.local_devices()[0].memory_stats() or {}
                record.add(
                    f"{kind} {options.shapes} ctx{options.context // 1024}k B{batch}", "time per cycle",
                    round(statistics.median(times), 3), "ms", spread=[round(min(times), 3), round(max(times), 3)],
                    shapes=options.shapes, context=options.context, slots=batch,
                    verified=None if length.shared else length.tokens, shared=length.tokens if length.shared else None,
                    peak_bytes=memory.get("peak_bytes_in_use"),
                )  # fmt: skip
    print(record.write())


if __name__ == "__main__":
    main()
