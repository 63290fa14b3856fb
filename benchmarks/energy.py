"""Energy of decode steps and cycles in the exact shapes of Qwen3 models, and of the products of a cycle's layers alone.

    python benchmarks/energy.py --models qwen3-4b qwen3-8b --batch 1 8 32

A GPU that multiplies without a pause runs at its power limit: a cycle of many sequences then takes what its energy divided by that
limit allows, whatever waits are taken out of it. Cycles run through the engine a user runs, as those of `decode.py`, for seconds
rather than a few calls. `products` are those of all layers of target and drafter and of the target's head, one after the other and
nothing else, by XLA (cuBLAS) and by this project's kernel: less than a cycle multiplies, as the drafter's context and proposals are
left out. Energy is the counter of the driver (NVML, `pip install nvidia-ml-py`), of the whole board.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import pynvml
from decode import PRODUCTS, SHAPES, build, start
from dflash_kernels import dense
from record import Record, arguments

from dflash_jax.engine import MAX_CYCLES, Engine

SECONDS = 2.5  # of products, and about of cycles: the counter moves every tenth of a second or so
WARM_S = 1.0  # of products before that, for clocks to settle
WARM_CALLS, CALLS = 2, 6  # of the device in one run: texts stay within the pages of `decode.py`
LOOK_S = 0.004  # between two looks at the counter


class Meter:
    """The first visible GPU's counters while something runs: `with meter: ...`, as often as one likes, then `watts`."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
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
        """Between the counter's first move and its last: it stands still for longer than a call takes."""
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
        for _ in range(WARM_CALLS):
            next(whole)
        with meter:
            for _ in range(CALLS):
                next(whole)
        run.close()
        count += CALLS * MAX_CYCLES
    return meter.seconds / count


def matrices(engine: Engine) -> list[jax.Array]:
    """All that layers of target and drafter multiply with, and the head."""
    target, draft = engine.weights["target"], engine.weights["draft"]
    layers = [weight for table in (target, draft) for name, weight in table.items() if name.startswith("layers.")]
    head = target.get("lm_head.weight", target["embed.weight"])
    return [weight for weight in jax.tree.leaves((layers, head)) if weight.ndim == 2]


def products(weights: list[jax.Array], rows: int, implementation: str, meter: Meter) -> float:
    """Multiplies rows with all weights under the meter, again and again; seconds of one time."""
    depths = sorted({weight.shape[1] for weight in weights})
    keys = jax.random.split(jax.random.key(7), len(depths))
    x = {depth: jax.random.normal(key, (rows, depth), jnp.bfloat16) for depth, key in zip(depths, keys, strict=True)}
    # All results are kept to the end of a call, so that none is left out.
    step = jax.jit(lambda x, weights: [dense(x[w.shape[1]], w, implementation=implementation) for w in weights])
    meter.clear()
    _repeat(lambda: step(x, weights), WARM_S)
    with meter:
        count = _repeat(lambda: step(x, weights), SECONDS)
    return meter.seconds / count


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
        case = f"{kind} {name}{'-b16' if draft else ''} ctx{options.context // 1024}k B{batch}"
        record.add(
            case, "energy per " + kind, round(meter.watts * seconds, 3), "J", ms=round(seconds * 1e3, 3), **meter.said()
        )
        record.add(case, "power", round(meter.watts), "W")
    if engine.draft is None or "cycle" not in options.kinds:
        return
    rows, weights = batch * engine.draft.block_size, matrices(engine)
    floor = 2 * rows * sum(weight.size for weight in weights) / PRODUCTS
    for implementation in ("xla", "mosaic_gpu"):
        seconds = products(weights, rows, implementation, meter)
        case, of = f"products of cycle {name}-b16 B{batch}", f", implementation {implementation}"
        record.add(case, "time" + of, round(seconds * 1e3, 3), "ms", floor=round(floor * 1e3, 3))
        record.add(case, "energy" + of, round(meter.watts * seconds, 3), "J", **meter.said())


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--models", nargs="+", default=["qwen3-4b"], choices=sorted(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kinds", nargs="*", default=["step", "cycle"], choices=["step", "cycle"])
    options = parser.parse_args()
    record, meter = Record("energy", options), Meter()
    for name in options.models:
        engine = build(name, options.context, max(options.batch))
        for batch in options.batch:
            add(record, meter, engine, name, batch, options)
        del engine
    print(record.write())


if __name__ == "__main__":
    main()
