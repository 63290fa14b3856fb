"""The Hopper kernel: one persistent CTA on every multiprocessor takes a share of each product in turn.

Weights are the left operand of the matrix instruction, tokens the right one, so that few tokens waste nothing. One warpgroup
does nothing but start copies of weights into a ring of shared memory: it depends on no result, runs ahead of everybody
across the products, and keeps memory busy while the grid waits. A second one copies blocks of activations, past the queue of
the weights' copies, the third multiplies. What one product leaves for the next is read word by word as it is written
(`mosaic_gpu_exchange`).

The output and down projections are split over their depth, or they would not fill the machine. The CTA of the first part waits
for the others' parts, in float32, and adds all in a fixed order to 64 features of the residual stream. It leaves the stream times
the norm's weight; the factor that the norm still lacks, one for a token, is known only when all have met, and multiplies the
product instead of its input.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.layouts import interleave_columns
from dflash_kernels.fused.layer.mosaic_gpu_share import Share
from dflash_kernels.fused.layer.plan import BLOCK, COPIES, ROWS, Plan, Product
from dflash_kernels.mosaic_gpu.layouts import tiled


def interpreted_stages(plan: Plan) -> tuple[Product | str, ...]:
    """Products and the additions of their parts, in order."""
    o, gate_up, down, *following = plan.products
    return (o, "o", gate_up, down, "down", *following)


def scratch(plan: Plan, dtype: Any, weights: Any, interpret: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA for activations and weights of these dtypes."""
    activations, more = (
        plgpu.SMEM((plan.x_slots, plan.x_blocks, plan.tokens, BLOCK), dtype, transforms=tiled(dtype)),
        {},
    )
    if plan.narrow:
        # Rows of the first digits, then rows of the second ones.
        shape = plan.x_slots, COPIES, 2 * plan.tokens, 2 * BLOCK
        activations = plgpu.SMEM(shape, weights, transforms=tiled(weights))
        more["unit_sm"] = plgpu.SMEM((plan.x_slots, plan.tokens), jnp.float32)
    return more | {
        "w_sm": ring(plan, weights), "x_sm": activations,
        "w_in": plgpu.Barrier(num_arrivals=COPIES, num_barriers=plan.slots),
        "w_out": plgpu.Barrier(num_barriers=plan.slots),
        "x_in": plgpu.Barrier(num_barriers=plan.x_slots),
        "x_out": plgpu.Barrier(num_barriers=plan.x_slots),
    }  # fmt: skip


def ring(plan: Plan, dtype: Any) -> Any:
    """Slots of weights, or of what else has the same bytes in a row."""
    columns = BLOCK * 2 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM((plan.slots, plan.slot_rows, columns), dtype, transforms=tiled(dtype))


def results(plan: Plan, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes: `stream` and `projected`. The rest goes through the exchange, but under the interpreter."""
    _, gate_up, _, *following = plan.products
    splits = max(product.splits for product in plan.products)
    shapes = {
        "stream": ((plan.hidden, plan.tokens), jnp.float32),
        "projected": ((plan.live, following[0].features) if following else (1, ROWS), dtype),
        "parts": ((splits, plan.hidden, plan.tokens), jnp.float32),
        "squares": ((-(-plan.owners // ROWS) * ROWS, plan.tokens), jnp.float32),
        "scaled": ((plan.tokens, plan.hidden), dtype), "gated": ((plan.tokens, gate_up.features), dtype),
    }  # fmt: skip
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def chain(
    plan: Plan, inputs: dict[str, jax.Array], exchange: Any, interpret: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernel.

    Args:
      plan: shapes and schedule.
      inputs: `x [live, heads]`, `before [hidden, tokens]` float32, weights `o`, `gate_up`, `down`, `next`, norms `post_norm`,
        `next_norm`, and for weights of one byte, their columns in pairs, the scales of their rows `o_scales` and so on.
      exchange: Ref of int32 as `Exchange` describes it, that no other launch uses at the same time.

    Returns:
      The residual stream `[hidden, tokens]` float32, and the next projection `[live, features]`, None without `next`.
    """
    dtype, outputs = inputs["x"].dtype, results(plan, inputs["x"].dtype)
    if plan.narrow and interpret is None:
        inputs = inputs | {"x": interleave_columns(inputs["x"])}
    names, out_names = list(inputs), list(outputs)
    options: dict[str, Any] = {
        "grid": (plan.ctas,), "grid_names": ("cta",), "num_threads": 3, "thread_name": "wg",
        "scratch_types": scratch(plan, dtype, inputs["o"].dtype, interpret),
        "compiler_params": plgpu.CompilerParams(approx_math=True),
    }  # fmt: skip

    def body(*refs, run, held, **buffers):
        Share(plan, run, dict(zip(held, refs, strict=True)), buffers, interpret).run()

    if interpret is None:
        outputs = {name: outputs[name] for name in ("stream", "projected")}
        out_names = list(outputs)
        whole = functools.partial(body, run=plan.products, held=(*names, "exchange", *out_names))
        out = plgpu.kernel(whole, out_type=tuple(outputs.values()), **options)(*inputs.values(), exchange)
        return out[0], out[1] if "next" in inputs else None
    # The interpreter cannot make CTAs wait for each other: one launch for each stage, which share their results.
    shared = [jax.new_ref(jnp.full(out.shape, jnp.nan, out.dtype)) for out in outputs.values()]
    for stage in interpreted_stages(plan):
        one = functools.partial(body, run=(stage,), held=(*names, *out_names))
        plgpu.kernel(one, out_type=(), interpret=interpret, **options)(*inputs.values(), *shared)
    return shared[0][...], shared[1][...] if "next" in inputs else None
