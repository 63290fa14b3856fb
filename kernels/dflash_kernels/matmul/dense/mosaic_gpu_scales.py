"""Scales of rows and features, which products of numbers in eight bits are multiplied with before they are written."""

# pyright: reportAbstractUsage=false

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.matmul.dense.tiling import Plan

_WGMMA = plgpu.Layout.WGMMA


class Scales:
    """Scales of a launch: of all rows and of all features, gate's before up's, float32 in global memory."""

    def __init__(self, plan: Plan, rows: Any, features: Any):
        self.plan, self.rows, self.features = plan, rows, features

    def of_rows(self, rows: Any) -> Any:
        """Of a warpgroup's rows: asked for before its product, there after it."""
        return _load(self.rows.at[rows], 1)

    def scaled(self, product: Any, of_rows: Any, feature: Any) -> list[Any]:
        """`parts_of` a product whose features begin with `feature`, times its scales."""
        scaled = []
        for number, part in enumerate(parts_of(self.plan, product)):
            first = number * self.plan.features + feature
            of_features = _load(self.features.at[pl.ds(first, self.plan.own_step)], 0)
            factors = (lax.broadcast_in_dim(one, part.shape, [axis]) for axis, one in enumerate((of_rows, of_features)))
            scaled.append(part * next(factors) * next(factors))
        return scaled


def parts_of(plan: Plan, product: Any) -> list[Any]:
    """A warpgroup's part of a tile: its features, or those of gate and those of up."""
    step = plan.own_step
    return [product] if plan.parts == 1 else [product[:, :step], product[:, step:]]


def _load(ref: Any, axis: int) -> Any:
    return plgpu.load(ref, layout=_WGMMA.reduce(axis), optimized=False)
