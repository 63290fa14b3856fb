"""Cost model of a cycle: milliseconds by slots and verified tokens.

Two parts. A model of bytes and arithmetic says how cost grows for any shape: weights are read once however many rows there are,
until the rows' products take longer than the reading. A table measured on one GPU (`cycle_costs.json`, written by
`benchmarks/verify.py`) says by how much the truth differs; its nearest model lends its ratio to shapes that were not measured.
Only ratios between costs decide anything, so a GPU of another speed is served by the same table.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.cache.recurrent import state_bytes
from dflash_jax.cache.specs import layer_specs
from dflash_jax.config import DecoderConfig
from dflash_jax.models.dflash import HEAD_INDEX, SHARED_HEAD
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.heads import head_tables
from dflash_jax.models.registry import layer_traits

TABLE = "cycle_costs.json"
# Of the GPU in the table: bytes a second from memory, products a second of its matrix units as large multiplications reach them.
BANDWIDTH, ARITHMETIC = 4.3e12, 6.0e14
# Seconds that a layer's small operations take however few rows there are.
LAYER_S = 25e-6
# And those that bring the rows of slots which share them to where attention finds them, and back, and that attention takes for a
# whole block of each slot: cycles of Qwen3-4B with 8 slots on an H100 took 4.82, 4.92 and 5.03 ms with 4, 8 and 12 rows a slot,
# 0.42 to 0.62 more than with as many of every slot; with 64 on an H200 8.8 with 4 rows, 1.9 more.
SHARED_LAYER_S, SHARED_SLOT_S = 11e-6, 0.36e-6


@dataclass(frozen=True)
class Stack:
    """One model as seen by the memory: what a pass reads and multiplies.

    Attributes:
      layers: of the stack.
      dense: bytes that every pass reads.
      experts: bytes of all experts.
      share: of the experts that one token takes.
      products: multiplications and additions of one row.
      kept: bytes of keys and values that each token of the context leaves.
      state: bytes of a sequence's recurrent states.
    """

    layers: int
    dense: float
    experts: float
    share: float
    products: float
    kept: float
    state: float = 0.0

    def seconds(self, rows: int, tokens: float) -> float:
        """A pass of `rows` rows over contexts of `tokens` tokens together."""
        read = self.dense + self.experts * (1 - (1 - self.share) ** rows)
        return max(read / BANDWIDTH, rows * self.products / ARITHMETIC) + (
            self.layers * LAYER_S + tokens * self.kept / BANDWIDTH
        )

    def state_seconds(self, slots: int, verified: int) -> float:
        """States are read and written by one token; by more they are read, and read and written once it is known which stand."""
        return slots * self.state * (2 if verified == 1 else 3) / BANDWIDTH


@dataclass(frozen=True)
class CycleCost:
    """Costs of one pair's cycles.

    Attributes:
      target, draft: without embeddings and head.
      head: the target's, read for verification; `proposing`: the one that is read for proposals, the same or a copy of it.
      window: tokens of a context that the drafter sees; None for all.
      table: measured milliseconds over the model's, by slots and verified tokens; empty for the model alone.
    """

    target: Stack
    draft: Stack
    head: Stack
    proposing: Stack
    block: int
    table: Mapping[tuple[int, int], float]
    window: int | None = None
    _ratios: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def ms(self, slots: int, verified: int, context: float, *, proposed: int | None = None) -> float:
        """Milliseconds of one cycle.

        Args:
          verified: tokens verified in each slot, or on average; 1 drafts nothing.
          context: mean tokens of a sequence.
          proposed: tokens of each slot that may be verified, where those are more: slots share rows.
        """
        # Asked between two calls of the device: what does not change with the context is found once.
        if (ratio := self._ratios.get((slots, verified))) is None:
            ratio = self._ratios[slots, verified] = self._ratio(slots, verified)
        return self.modelled(slots, verified, context, proposed=proposed) * ratio

    def modelled(self, slots: int, verified: int, context: float, *, proposed: int | None = None) -> float:
        rows, tokens = slots * verified, slots * context
        seconds = self.target.seconds(rows, tokens) + self.head.seconds(rows, 0.0)
        seconds += self.target.state_seconds(slots, verified)
        if proposed is not None and proposed > verified:
            seconds += self.target.layers * (SHARED_LAYER_S + slots * SHARED_SLOT_S)
        if verified > 1:
            seen = tokens if self.window is None else slots * min(context, float(self.window))
            drafts = slots * ((verified if proposed is None else proposed) - 1)
            seconds += self.draft.seconds(slots * self.block, seen) + self.proposing.seconds(drafts, 0.0)
        return seconds * 1e3

    def _ratio(self, slots: int, verified: int) -> float:
        """Measured over modelled, between measured points on logarithmic scales; the outermost points reach on."""
        if not self.table:
            return 1.0
        by_slots = sorted({s for s, _ in self.table})
        (low, high), weight = _between(by_slots, slots)
        return (1 - weight) * self._along(low, verified) + weight * self._along(high, verified)

    def _along(self, slots: int, verified: int) -> float:
        lengths = sorted(length for s, length in self.table if s == slots)
        if verified == 1 or lengths[0] == verified:
            return self.table[slots, lengths[0]]
        # A cycle without drafting is another program: no point between it and the others.
        drafting = [length for length in lengths if length > 1]
        (low, high), weight = _between(drafting, verified)
        return (1 - weight) * self.table[slots, low] + weight * self.table[slots, high]


def _between(points: Sequence[int], value: int) -> tuple[tuple[int, int], float]:
    """The two neighbours of `value` among sorted `points`, and how far it is from the first to the second."""
    if value <= points[0] or value >= points[-1]:
        end = points[0] if value <= points[0] else points[-1]
        return (end, end), 0.0
    high = next(point for point in points if point >= value)
    low = points[points.index(high) - 1]
    return (low, high), math.log(value / low) / math.log(high / low)


def cycle_cost(
    target: DecoderConfig, draft: DFlashConfig, weights: Mapping[str, Mapping[str, Any]], window: int | None = None
) -> CycleCost:
    """Costs for this pair; `weights` may be shapes. `window`: see `CycleCost`."""
    bare = bare_cost(target, draft, weights)
    return replace(bare, table=_nearest(bare), window=window)


def bare_cost(target: DecoderConfig, draft: DFlashConfig, weights: Mapping[str, Mapping[str, Any]]) -> CycleCost:
    """Cost from bytes and products alone."""
    dtype = jax.tree.leaves(weights["target"])[0].dtype
    shares = {"target": _expert_share(target), "draft": 0.0}
    tables = () if draft.head is None else head_tables(draft.head)
    read = {
        "target": weights["target"],
        "draft": {name: one for name, one in weights["draft"].items() if name not in tables},
    }
    stacks = {
        role: _stack(config, read[role], shares[role], dtype) for role, config in (("target", target), ("draft", draft))
    }
    tied = getattr(target, "tie_embeddings", False)
    head = weights["target"]["embed.weight" if tied else "lm_head.weight"]
    drafter = weights["draft"]
    heads = head, drafter.get(SHARED_HEAD, drafter.get(HEAD_INDEX, head))
    ours, theirs = (Stack(0, _bytes(one), 0.0, 0.0, _products(one), 0.0) for one in heads)
    return CycleCost(stacks["target"], stacks["draft"], ours, theirs, draft.block_size, {})


def _bytes(weight: Any) -> float:
    return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight)))


def _products(weight: Any) -> float:
    """Multiplications and additions of one row; half of them where many rows are multiplied in float8, as few wait for memory."""
    return math.prod(weight.shape) * (1.0 if getattr(weight, "dynamic", False) else 2.0)


def _stack(config: DecoderConfig, weights: Mapping[str, Any], share: float, dtype: jnp.dtype) -> Stack:
    """Bytes that a model's layers read: every matrix but the embedding and the head."""
    dense = experts = products = 0.0
    for name, weight in weights.items():
        if name.startswith(("embed.", "lm_head.")) or name in (SHARED_HEAD, HEAD_INDEX):
            continue
        size, each = _bytes(weight), _products(weight)
        if ".experts." in name:
            experts, products = experts + size, products + each * share
        else:
            dense, products = dense + size, products + each
    kept = float(sum(spec.entries for spec in layer_specs(config)) * dtype.itemsize)
    return Stack(config.num_layers, dense, experts, share, products, kept, float(state_bytes(config, dtype)))


def _expert_share(config: DecoderConfig) -> float:
    """One that every token takes is reckoned as if chance chose it; with one row, that is no difference."""
    experts = layer_traits(config).experts
    return 0.0 if experts is None else experts.per_token / experts.count


@lru_cache(maxsize=1)
def measured() -> tuple[dict[str, Any], ...]:
    """The committed tables: one for each measured pair, with the shape it was measured in."""
    return tuple(json.loads(resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))["pairs"])


def _nearest(pair: CycleCost) -> dict[tuple[int, int], float]:
    """Ratios of the measured pair whose weights are nearest in size."""

    def distance(row: dict[str, Any]) -> float:
        return abs(math.log(row["read_bytes"] / (pair.target.dense + pair.target.experts)))

    row = min(measured(), key=distance)
    return {(slots, verified): ratio for slots, verified, _, ratio in row["cycles"]}
