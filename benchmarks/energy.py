"""Energy of decode steps and cycles in the exact shapes of Qwen3 models, and of the products of a cycle's layers alone.

    python benchmarks/energy.py --models qwen3-4b qwen3-8b --batch 1 8 32
    python benchmarks/energy.py --models qwen3-4b qwen3-8b --batch 32 --context 512 --kinds cycle --no-products

A GPU that multiplies without a pause runs at its power limit: a cycle of many sequences then takes what its energy divided by that
limit allows, whatever waits are taken out of it. Cycles run through the engine a user runs, as those of `decode.py`, for seconds
rather than a few calls. `products` are what the layers of target and drafter and the target's head multiply in such a cycle, with
their norms and nothing else, as the engine has them multiplied, and all of them by XLA (cuBLAS's or Triton's, as it finds them
faster): less than a cycle multiplies, as the drafter's context and proposals are left out. They have no rows for few sequences,
whose products are parts of longer launches. Energy is the driver's counter of the whole board (NVML, `pip install nvidia-ml-py`).
"""

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self, cast

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
from card import card
from decode import SHAPES, engines, start
from dflash_kernels import ColumnBlocks, dense_best, dense_refusal, row_by_row
from record import Record, arguments

from dflash_jax.engine import MAX_CYCLES, Engine
from dflash_jax.execution.fused_dense import run_fused_dense
from dflash_jax.execution.plan import ONE_GRAPH
from dflash_jax.models import bind
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.layers import Rotary
from dflash_jax.models.presets import TARGETS

try:
    import pynvml
except ModuleNotFoundError:
    raise SystemExit("NVIDIA's counters are read with nvidia-ml-py: pip install -e '.[energy]'") from None

SECONDS = 2.5  # of products, and about of cycles: the counter moves every tenth of a second or so
WARM_S = 1.0  # of products before that, for clocks to settle
WARM_CALLS, CALLS = 2, 6  # of the device in one run: texts stay within the pages of `decode.py`
LOOK_S = 0.004  # between two looks at the counter


class Meter:
    """The first visible GPU's counters while something runs: `with meter: ...`, as often as one likes, then `watts`."""

    def __init__(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise SystemExit(
                f"the counters of an NVIDIA GPU were expected, its driver's library says: {error}"
            ) from None
        name = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        by = pynvml.nvmlDeviceGetHandleByIndex if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        self.gpu = by(int(name) if name.isdigit() else name)
        self.limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(self.gpu) / 1e3
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        self.joules = self.counted_s = self.seconds = 0.0
        self.clocks, self.capped = list[int](), list[bool]()

    def __enter__(self) -> Self:
        self._end, self._began = Event(), time.perf_counter()
        self._looker = Thread(target=self._look, daemon=True)
        self._looker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began
        self._end.set()
        self._looker.join()

    def _look(self) -> None:
        """Counts between the counter's first move and its last one, which come a tenth of a second apart."""
        before, moves = None, list[tuple[float, float]]()
        while not self._end.wait(LOOK_S):
            joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu) / 1e3
            if before is not None and joules != before:
                moves.append((time.perf_counter(), joules))
                self.clocks.append(pynvml.nvmlDeviceGetClockInfo(self.gpu, pynvml.NVML_CLOCK_SM))
                reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(self.gpu)
                self.capped.append(bool(reasons & pynvml.nvmlClocksEventReasonSwPowerCap))
            before = joules
        if len(moves) > 1:
            self.counted_s += moves[-1][0] - moves[0][0]
            self.joules += moves[-1][1] - moves[0][1]

    @property
    def watts(self) -> float:
        """On average.

        Raises:
          SystemExit: the counter has moved less than twice.
        """
        if not self.counted_s:
            raise SystemExit(
                f"the driver's counter of energy stood still for {self.seconds:.2f} s: longer runs are needed"
            )
        return self.joules / self.counted_s

    def said(self) -> dict[str, Any]:
        """What rows keep beside their figure."""
        return {
            "power_w": round(self.watts, 1), "power_limit_w": self.limit_w, "clock_mhz": statistics.median(self.clocks),
            "share_capped": round(statistics.mean(self.capped), 2), "counted_s": round(self.counted_s, 2),
        }  # fmt: skip


def cycles(engine: Engine, meter: Meter, *, draft: bool, context: int, batch: int) -> float:
    """Runs cycles of a whole batch under the meter; seconds of one."""
    meter.clear()
    count = 0
    while meter.seconds < SECONDS:
        run = start(engine, draft=draft, context=context, batch=batch, calls=CALLS)
        whole = (one for one in run if not one.first and one.index == 0 and len(one.counts) == MAX_CYCLES)
        for _ in itertools.islice(whole, WARM_CALLS):
            pass
        with meter:
            calls = sum(1 for _ in itertools.islice(whole, CALLS))
        run.close()
        if calls < CALLS:
            raise SystemExit(
                f"prompts of {context} tokens leave too few cycles of all {batch} sequences: take shorter ones"
            )
        count += CALLS * MAX_CYCLES
    return meter.seconds / count


def multiplied(target: Any, draft: Any, x: jax.Array, implementation: str | None) -> Any:
    """A cycle without attention, the drafter's context and proposals: layers that take queries for what attention gives."""
    kept = []
    for model in (target, draft):
        queries = model.config.num_heads * model.config.head_dim
        first, layers = model.layers[0], list(model.layers)
        attend = lambda attn, qkv, rotary, queries=queries: qkv[..., :queries]  # noqa: E731
        kept.append(
            run_fused_dense(layers, model.norm, x, first.input_norm(x), Rotary(x, x), attend, implementation)[1]
        )
    best = dense_best(kept[0].reshape(-1, x.shape[-1]), target.head_weight, implementation=implementation)
    return best, kept[1][0, 0]


def products(engine: Engine, batch: int, implementation: str | None, meter: Meter) -> float:
    """Runs `multiplied` under the meter, again and again; seconds of one time."""
    target, draft = engine.target, cast(DFlashConfig, engine.draft)
    x = jax.random.normal(jax.random.key(7), (batch, draft.block_size, target.hidden_size), jnp.bfloat16)

    def step(weights: Any, x: jax.Array) -> Any:
        return multiplied(bind(target, weights["target"]), bind(draft, weights["draft"]), x, implementation)

    weights: Any = engine.weights
    if implementation == "xla":  # which multiplies no blocks of columns
        weights = jax.tree.map(row_by_row, weights, is_leaf=lambda one: isinstance(one, ColumnBlocks))
    compiled = jax.jit(step).lower(weights, x).compile(ONE_GRAPH)
    meter.clear()
    _repeat(lambda: compiled(weights, x), WARM_S)
    with meter:
        count = _repeat(lambda: compiled(weights, x), SECONDS)
    return meter.seconds / count


def operations(engine: Engine, rows: int) -> int:
    """Floating-point operations of `multiplied`."""
    target, draft = engine.weights["target"], engine.weights["draft"]
    matrices = [one for table in (target, draft) for name, one in table.items() if name.startswith("layers.")]
    matrices.append(target.get("lm_head.weight", target["embed.weight"]))
    return 2 * rows * sum(math.prod(one.shape) for one in matrices if len(one.shape) == 2)


def _repeat(call: Callable[[], Any], seconds: float) -> int:
    """Calls for so long after a first time, two at a time on the device; how often."""
    before = jax.block_until_ready(call())
    began, count = time.perf_counter(), 1
    while time.perf_counter() - began < seconds:
        latest, count = call(), count + 1
        jax.block_until_ready(before)
        before = latest
    jax.block_until_ready(before)
    return count


def add(record: Record, meter: Meter, engine: Engine, name: str, batch: int, options: Any) -> None:
    """Rows of one model and batch."""
    for kind in options.kinds:
        draft = kind == "cycle"
        seconds = cycles(engine, meter, draft=draft, context=options.context, batch=batch)
        context = f"{options.context // 1024}k" if options.context % 1024 == 0 else str(options.context)
        case = f"{kind} {name}{'-b16' if draft else ''} ctx{context} B{batch}"
        record.add(
            case, "energy per " + kind, round(meter.watts * seconds, 3), "J", ms=round(seconds * 1e3, 3), **meter.said()
        )
        record.add(case, "power", round(meter.watts), "W")
    rows, width = batch * cast(DFlashConfig, engine.draft).block_size, engine.target.hidden_size
    if not options.products or dense_refusal(rows, jnp.bfloat16, width):
        return
    for name_of, implementation in (("", None), (", implementation xla", "xla")):
        seconds, floor = products(engine, batch, implementation, meter), operations(engine, rows) / card().products
        case = f"products {name}-b16 B{batch}"
        record.add(case, "time" + name_of, round(seconds * 1e3, 3), "ms", floor=round(floor * 1e3, 3))
        record.add(case, "energy" + name_of, round(meter.watts * seconds, 3), "J", **meter.said())


def main() -> None:
    parser = arguments(__doc__ or "")
    dense = sorted(name for name, (_, target, _) in SHAPES.items() if target in TARGETS)
    parser.add_argument("--models", nargs="+", default=["qwen3-4b"], choices=dense)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kinds", nargs="+", default=["step", "cycle"], choices=["step", "cycle"])
    parser.add_argument(
        "--products", action=argparse.BooleanOptionalAction, default=True, help="a cycle's products alone as well"
    )
    options = parser.parse_args()
    if min(*options.batch, options.context) < 1:
        parser.error("--batch and --context must be at least 1")
    record, meter = Record("energy", options), Meter()
    for name in options.models:
        of_batch = engines(name, options.context, options.batch)
        for batch in options.batch:
            add(record, meter, of_batch[batch], name, batch, options)
        del of_batch
    print(record.write())


if __name__ == "__main__":
    main()
