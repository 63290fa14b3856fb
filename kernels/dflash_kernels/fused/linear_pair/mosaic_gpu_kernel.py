"""The Hopper kernel: the end of a layer's chain alone, with a stream that was nothing before.

Its first product is split over the depth, 64 features of the sum for each of some CTAs; the norm's factors multiply the second
product. How CTAs hand results over, and what the warpgroups do: see `layer_chain`.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused.layer.mosaic_gpu_share import Share
from dflash_kernels.fused.layer.mosaic_gpu_sm90 import scratch
from dflash_kernels.fused.layer.plan import ROWS, Plan


class _PairShare(Share):
    """What one CTA does of the two products."""

    def _stream(self, norm: str, rows):
        return plgpu.layout_cast(jnp.zeros((ROWS, self.plan.tokens), jnp.float32), plgpu.Layout.WGMMA)

    def _keep(self, rows, stream):
        """Nobody wants the sum itself."""


def chain(plan: Plan, inputs: dict[str, jax.Array], exchange: Any, interpret: Any = None) -> jax.Array:
    """Runs the kernel.

    Args:
      plan: shapes and schedule.
      inputs: `gated [live, depth]`, weights `down` and `next`, `next_norm`.
      exchange: Ref of int32 as `Exchange` describes it, that no other launch uses at the same time.
    """
    dtype, (down, following) = inputs["gated"].dtype, plan.products
    outputs = {
        "projected": ((plan.live, following.features), dtype),
        "parts": ((down.splits, plan.hidden, plan.tokens), jnp.float32),
        "squares": ((-(-plan.owners // ROWS) * ROWS, plan.tokens), jnp.float32),
        "scaled": ((plan.tokens, plan.hidden), dtype),
    }
    outputs = {name: jax.ShapeDtypeStruct(*shape) for name, shape in outputs.items()}
    options: dict[str, Any] = {
        "grid": (plan.ctas,), "grid_names": ("cta",), "num_threads": 3, "thread_name": "wg",
        "scratch_types": scratch(plan, dtype, dtype, interpret), "compiler_params": plgpu.CompilerParams(approx_math=True),
    }  # fmt: skip

    def body(*refs, run, held, **buffers):
        _PairShare(plan, run, dict(zip(held, refs, strict=True)), buffers, interpret).run()

    if interpret is None:
        whole: Any = functools.partial(body, run=plan.products, held=(*inputs, "exchange", "projected"))
        whole.__name__ = "linear_chain"  # what profilers show
        return plgpu.kernel(whole, out_type=outputs["projected"], **options)(*inputs.values(), exchange)
    # The interpreter cannot make CTAs wait for each other: one launch for each stage, which share their results.
    shared = [jax.new_ref(jnp.full(out.shape, jnp.nan, out.dtype)) for out in outputs.values()]
    for stage in (down, "down", following):
        one = functools.partial(body, run=(stage,), held=(*inputs, *outputs))
        plgpu.kernel(one, out_type=(), interpret=interpret, **options)(*inputs.values(), *shared)
    return shared[0][...]
