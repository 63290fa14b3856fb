"""Tiling of a mixture of experts in MXFP4: columns, consumers, parts, stages. Arithmetic on shapes only."""

import dataclasses

from dflash_kernels.core.mxfp4 import PIECE, PIECES, TILE
from dflash_kernels.fused.experts.plan import (
    MOST_ENTRIES,
    MOST_EXPERTS,
    MOST_TAKEN,
    SHARED,
    X_SHARED,
    Choice,
    Plan,
    tables_size,
)

CHOICE = Choice(normed=True, scale=1.0)
TILE_BYTES = PIECES * PIECE * 4
CONSUMERS = (5, 3, 2, 1), (3, 2, 1)  # for groups of 8 columns, and of more, whose rings need the room
MOST_RESIDENT = 112 * 1024  # bytes of shared memory for rows
UNITS = 3, 1  # tiles of one consumer in one stage, where rows are resident: fewer waits
KEPT = 3  # work items whose results consumers hand over at once, where rows are resident
_MOST_PARTIAL_ROWS = 16  # entries for which partial results of the second product cost less than idle multiprocessors


@dataclasses.dataclass(frozen=True)
class Gate:
    """SwiGLU of gates up to `limit` and ups from minus to plus `limit`: `(up + 1) * gate * sigmoid(alpha * gate)`."""

    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True)
class Mxfp4Plan(Plan):
    """Everything static about one launch; see `Plan`. A work item has one tile of 64 rows, whose columns several consumers share.

    Attributes:
      gate: what comes between the products.
      consumers: warpgroups, each with every so manieth tile of columns.
      parts: of the columns of the second product, whose results are added by whoever wants them.
      resident: whether whole rows lie in shared memory (`mosaic_gpu_mxfp4_few_sm90`).
      unit: tiles of one consumer in one stage of the ring.
      alone: whether there is one token, whose choices are known to be groups (`mosaic_gpu_mxfp4_one_sm90`).
    """

    gate: Gate = Gate(1.0, 1.0)
    consumers: int = 1
    parts: int = 1
    resident: bool = False
    unit: int = 1
    alone: bool = False

    @property
    def gated_tiles(self) -> int:
        return 2 * self.inner // TILE

    @property
    def down_tiles(self) -> int:
        return self.hidden // TILE

    @property
    def dealt(self) -> tuple[int, int, int]:
        """Distribution of one token's items of the second product after those of the first, so that CTAs end together.

        The CTAs that have one more item of the first product than the others; how many of the second those others have before the
        last ones; and how many last ones there are, one for each CTA or none.
        """
        first, items = self.top_k * self.gated_tiles, self.top_k * self.down_tiles * self.parts
        busy = first % self.ctas or self.ctas
        last = self.ctas if items >= self.ctas else 0
        idle, rest = self.ctas - busy, items - last
        longer = self.hidden * self.parts / self.inner  # an item of the first product, in items of the second

        def longest(of_idle: int) -> float:
            return float(max(longer - (-max(rest - idle * of_idle, 0) // busy), of_idle))

        choices = range(-(-rest // idle), -1, -1) if idle else [0]
        return busy, min(choices, key=longest), last


def plan(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    ctas: int,
    gate: Gate,
    *,
    chooses: bool = True,
    among: int | None = None,
) -> Mxfp4Plan:
    """Raises NotImplementedError with the reason for shapes that do not tile."""
    entries = tokens * top_k
    if not 0 < experts <= MOST_EXPERTS:
        raise NotImplementedError(f"takes 1 to {MOST_EXPERTS} experts, not {experts}")
    if not 0 < entries <= MOST_ENTRIES or top_k > MOST_TAKEN:
        raise NotImplementedError(
            f"takes 1 to {MOST_ENTRIES} choices of tokens, {MOST_TAKEN} of one at most, not {entries}, {top_k}"
        )
    if hidden % TILE or inner % TILE:
        raise NotImplementedError(f"takes widths in {TILE}s, not {hidden} and {inner}")
    units = hidden // TILE, inner // TILE
    everyones = min(among or experts, MOST_EXPERTS)
    columns = next((size for size in (8, 16, 32) if entries <= everyones * size * 2 // 5), 64)
    consumers = next(count for count in CONSUMERS[columns > 8] if all(size % count == 0 for size in units))
    rows = 2 * max(hidden, inner) * columns * 2
    resident = columns == 8 and rows <= MOST_RESIDENT
    unit = next(u for u in UNITS if all(size % (consumers * u) == 0 for size in units)) if resident else 1
    alone = resident and tokens == 1 and top_k <= columns and chooses and among is None
    parts = 1 if alone else _parts(tokens, top_k, experts, everyones, units, consumers * unit, ctas)
    x_stage = consumers * TILE * 2 * columns
    x_stages = max(X_SHARED // x_stage, 3) if columns > 8 else 8
    tables, kept = tables_size(entries, experts, columns), consumers * TILE * columns * 4
    held = rows + KEPT * kept if resident else x_stages * x_stage + kept - kept // consumers
    stages = min((SHARED - tables - held) // (consumers * unit * TILE_BYTES), 16)
    return Mxfp4Plan(
        tokens, top_k, experts, hidden, inner, columns, TILE // 2, stages, x_stages, ctas, CHOICE if chooses else None, among,
        gate, consumers, parts, resident, unit, alone,
    )  # fmt: skip


def _parts(
    tokens: int, top_k: int, experts: int, everyones: int, units: tuple[int, int], consumers: int, ctas: int
) -> int:
    """As many parts of the second product as leave few CTAs idle in their last turn, at random choices; the fewest."""
    if tokens * top_k > _MOST_PARTIAL_ROWS:
        return 1
    distinct = max(round(experts * (1 - (1 - min(top_k / everyones, 1.0)) ** tokens)), 1)
    steps = units[1] // consumers

    def idle(parts: int) -> float:
        items = distinct * units[0] * parts
        return 1 - items / (-(-items // ctas) * ctas)

    choices = [parts for parts in range(1, 6) if steps % parts == 0]
    return next((parts for parts in choices if idle(parts) < 0.1), min(choices, key=idle))
