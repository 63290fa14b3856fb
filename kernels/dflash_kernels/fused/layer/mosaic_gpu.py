"""The chain on Hopper: what the kernel takes."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.core.layouts import ColumnBlocks, as_stored
from dflash_kernels.fused.layer.arguments import Layer
from dflash_kernels.fused.layer.plan import Plan, plan

WORTH = 64 * 2**20  # bytes of a layer's weights
WORTH_ROWS = 16  # more have not been measured to be faster than separate operations


def layer_chain_mosaic_gpu(*args: Any, eps: float) -> tuple[Array, Array | None]:
    """See `layer_chain`. Raises NotImplementedError for what it does not take.

    The launch has one CTA for each multiprocessor. They wait for one another, so all of them must be resident at once: nothing else
    that waits for the whole GPU may run beside it.
    """
    require_hopper()
    return launch(*args, eps=eps, ctas=target().multiprocessors)


def refuse(rows: int, dtype: Any, *, itemsize: int = 2, **widths: int) -> None:
    """Raises NotImplementedError, with the reason, where `layer_chain_mosaic_gpu` would or is not worth its meetings."""
    require_hopper()
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 throughout, not {dtype}")
    if rows > WORTH_ROWS:
        raise NotImplementedError(f"is known to be faster for up to {WORTH_ROWS} rows, not {rows}")
    products = plan(live=rows, ctas=target().multiprocessors, eps=0.0, itemsize=itemsize, **widths).products
    size = sum(itemsize * product.parts * product.features * product.depth for product in products)
    if size < WORTH:
        raise NotImplementedError(f"a layer of {size} bytes takes less time than the meetings of all multiprocessors")


def launch(
    x: Float[Array, "M A"],
    layer: Layer,
    ahead: Shaped[Array, "D A"] | ColumnBlocks | None,
    exchange: Any,
    *,
    eps: float,
    ctas: int,
    interpret: Any = None,
) -> tuple[Float[Array, "D n"], Float[Array, "M G"] | None]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    refuse_dtypes((x,), layer)
    schedule = plan(live=x.shape[0], ctas=ctas, eps=eps, **layer.sizes())
    refuse_stream(schedule, x.shape[0], layer.stream)
    if exchange is not None and exchange.shape != (schedule.exchange.words,):
        raise ValueError(
            f"the exchange must have {schedule.exchange.words} words for these shapes, not {exchange.shape}"
        )
    inputs = {"x": x, **layer.inputs()}
    if ahead is not None and interpret is None:
        inputs["ahead"] = as_stored(ahead)
    return _run(schedule, inputs, exchange, interpret)


def refuse_dtypes(activations: Sequence[Array], layer: Layer) -> None:
    """Raises NotImplementedError for dtypes that no product has."""
    # The stream goes into products before its norm divides it: float16 would overflow.
    weights = [layer.o, layer.gate_up, layer.down, *([] if layer.following is None else [layer.following])]
    norms = [layer.post_norm, *([] if layer.next_norm is None else [layer.next_norm])]
    found, stored = {array.dtype for array in (*activations, *norms)}, {weight.dtype for weight in weights}
    allowed = [jnp.bfloat16] if layer.scales is None else [jnp.int8, jnp.float8_e4m3fn]
    if found != {jnp.dtype(jnp.bfloat16)} or stored not in [{jnp.dtype(dtype)} for dtype in allowed]:
        names = ", ".join(str(array.dtype) for array in (*activations, *norms, *weights))
        raise NotImplementedError(
            f"takes bfloat16 throughout, not {names}, or weights all in int8 or in float8_e4m3fn with scales"
        )


def refuse_stream(schedule: Plan, rows: int, stream: Array) -> None:
    """Raises NotImplementedError for a stream of another dtype or of other columns than the launch has."""
    if stream.dtype != jnp.float32:
        raise NotImplementedError(f"takes a stream in float32, as `chain_stream` makes it, not {stream.dtype}")
    if stream.shape[1] != schedule.tokens:
        raise NotImplementedError(f"takes a stream of {schedule.tokens} columns for {rows} rows, not {stream.shape[1]}")


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 3))
def _run(schedule: Plan, inputs: dict[str, Array], exchange: Any, interpret: Any) -> tuple[Array, Array | None]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.fused.layer import mosaic_gpu_sm90 as kernel

    return kernel.chain(schedule, inputs, exchange, interpret)
