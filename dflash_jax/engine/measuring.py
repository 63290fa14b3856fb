"""Memory profiling: what the worst case takes on the device, beside what was planned for it.

The plan is made before anything is loaded, from shapes alone. Here as many requests of full length as there are pages for are
served, with every filter of sampling, and what programs, weights and pools then take is asked of XLA and of the device. vLLM plans
by such a run; here it checks a plan, and costs as much as serving those prompts.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.memory import MemoryPlan
from dflash_jax.engine.requests import Request
from dflash_jax.sampling_params import SamplingParams


@dataclass(frozen=True)
class MemoryReading:
    """Bytes of one device, or of each of several that share a model.

    Attributes:
      plan: what was planned.
      weights, pools: of the arrays themselves.
      workspace: the most that a program which ran holds beside its arguments, by XLA's account of its buffers; None where programs
        have none.
      peak: the most that this process has held of the device so far, as the device counts; None where it does not.
      requests, tokens: served side by side, and the length of each.
    """

    plan: MemoryPlan
    weights: int
    pools: int
    workspace: int | None
    peak: int | None
    requests: int
    tokens: int

    @property
    def planned_peak(self) -> int:
        """Sum of the plan's parts."""
        return self.plan.weights + self.plan.workspace + self.plan.states + self.plan.snapshots + self.plan.pools

    def facts(self) -> dict[str, Any]:
        """Requests and their length, and under `bytes` pairs of what was planned and what was read."""
        rows = {
            "weights": (self.plan.weights, self.weights), "pages": (self.plan.pools, self.pools),
            "workspace": (self.plan.workspace, self.workspace), "all": (self.planned_peak, self.peak),
        }  # fmt: skip
        return {"requests": self.requests, "tokens": self.tokens, "bytes": rows}


def measure_memory(engine: Engine, plan: MemoryPlan) -> MemoryReading:
    """Serves the largest load that `plan` has pages for, and reads what it took. Nobody else's requests may run meanwhile.

    Raises:
      CapacityError: the device's memory ran out, which is what this is to find.
    """
    count = max(1, min(engine.max_batch, int(plan.sequences)))
    produced = max(1, min(2 * (1 if engine.draft is None else engine.draft.num_drafts + 1), engine.max_model_len // 2))
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, engine.target.vocab_size, (count, engine.max_model_len - produced))
    params = SamplingParams(
        max_tokens=produced, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, seed=0, ignore_eos=True
    )
    requests = [Request(index, tuple(prompt), params, ()) for index, prompt in enumerate(prompts.tolist())]
    for _ in engine.run(requests, draft=engine.draft is not None, cycles=2):
        pass
    stats = jax.local_devices()[0].memory_stats() or {}
    return MemoryReading(
        plan, _held(engine.weights), _held(engine.take_pools()), engine.programs.largest_workspace(),
        stats.get("peak_bytes_in_use"), count, engine.max_model_len,
    )  # fmt: skip


def _held(arrays: object) -> int:
    """Bytes of arrays on one of their devices."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
