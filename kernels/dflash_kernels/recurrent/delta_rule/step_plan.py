"""Plan of a delta step with the product after it: how a matrix and heads are dealt to CTAs, from shapes alone."""

import dataclasses

from dflash_kernels.recurrent.delta_rule.inputs import DeltaShape

TILE = 64  # rows of the matrix that a CTA multiplies
BLOCK = 64  # columns of a copy: 128 bytes
CONSUMERS = 2  # warpgroups that multiply, each with half of a CTA's columns
SHARED_MEMORY = 200 * 1024
LEAST_BUSY = 0.9  # of the multiprocessors: with fewer, a launch more is as fast


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Static schedule of one launch.

    CTA `part * tiles + tile` has 64 rows of the matrix and those columns that the heads of a part give; the first CTAs of a part
    have a head each, too.

    Attributes:
      tiles: of the matrix's rows.
      parts: of its columns.
      heads: of a part.
      columns: of a CTA.
    """

    tiles: int
    parts: int
    heads: int
    columns: int

    @property
    def ctas(self) -> int:
        return self.tiles * self.parts

    @property
    def features(self) -> int:
        return self.tiles * TILE

    @property
    def own(self) -> int:
        """Columns of a consumer."""
        return self.columns // CONSUMERS


def step_plan(features: int, shape: DeltaShape, multiprocessors: int) -> StepPlan:
    """Raises NotImplementedError with the reason for shapes that do not tile."""
    tiles, heads = -(-features // TILE), shape.value_heads
    parts = max((n for n in range(1, heads + 1) if heads % n == 0 and n * tiles <= multiprocessors), default=0)
    if features % TILE or tiles * parts < LEAST_BUSY * multiprocessors:
        raise NotImplementedError(
            f"{features} features and {heads} heads make no tiles of {TILE} for nearly all of {multiprocessors} multiprocessors"
        )
    plan = StepPlan(tiles, parts, heads // parts, heads // parts * shape.value_dim)
    if plan.heads > tiles or plan.own % (2 * BLOCK) or TILE * plan.columns * 2 > SHARED_MEMORY:
        raise NotImplementedError(f"{plan.heads} heads of a CTA are too many, or no even number of them")
    return plan
