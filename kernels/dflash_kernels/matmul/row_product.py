"""Plan of one row's norm and product: how a matrix's rows are dealt to CTAs, from shapes alone."""

import dataclasses

TILE = 64  # rows of the matrix that a warpgroup multiplies
CONSUMERS = 2  # warpgroups that do
BLOCK = 64  # columns of a copy: 128 bytes
STAGES = 16  # at most
SHARED_MEMORY = 216 * 1024
LEAST_BUSY = 0.9  # of the CTAs: with fewer, other products are as fast


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Static shapes and schedule of one launch.

    Attributes:
      features, depth: F and D of the matrix.
      rows: of a tile, which a CTA multiplies at a time; the last tile begins inside the one before where they do not go up.
      stages: of `BLOCK` columns in shared memory.
      ctas: persistent CTAs.
    """

    features: int
    depth: int
    rows: int
    stages: int
    ctas: int

    @property
    def tiles(self) -> int:
        return -(-self.features // self.rows)

    @property
    def blocks(self) -> int:
        """Stages of one tile."""
        return self.depth // BLOCK

    @property
    def offsets(self) -> tuple[int, ...]:
        """First rows of what each consumer has of a tile: they overlap where a tile is less than both have."""
        return tuple(index * (self.rows - TILE) // (CONSUMERS - 1) for index in range(CONSUMERS))


def row_plan(features: int, depth: int, ctas: int) -> RowPlan:
    """Raises NotImplementedError with the reason for shapes that do not tile."""
    if features % 8 or depth % BLOCK:
        raise NotImplementedError(f"takes features in 8s and a depth in {BLOCK}s, not {features} and {depth}")
    turns = -(-features // (ctas * CONSUMERS * TILE))
    rows = max(-(-features // (ctas * turns * 8)) * 8, TILE)
    used = -(-features // rows)
    if used < LEAST_BUSY * ctas:
        raise NotImplementedError(f"{features} features are {used} tiles of {rows}, too few for {ctas} multiprocessors")
    stages = min((SHARED_MEMORY - 4 * depth) // (rows * BLOCK * 2), STAGES)
    return RowPlan(features, depth, rows, stages, min(ctas, used))
