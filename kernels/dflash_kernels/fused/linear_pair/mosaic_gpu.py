"""Two products with a norm between them on Hopper: the end of a layer's chain alone, with a residual stream of zeros.

The first product is split-K, and the norm's factors multiply the second one; the CTA program is `gemm_chain`'s.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.fused.plan import (
    BLOCK,
    COPIES,
    LEAST_WIDTH,
    MOST_ROWS,
    ROWS,
    WORTH,
    WORTH_ROWS,
    Plan,
    padded_rows,
    split_k,
    unsplit,
    with_stages,
)


def linear_chain_mosaic_gpu(*args: Any, eps: float) -> Array:
    """See `linear_chain`. Raises NotImplementedError for what it does not take.

    The launch has one CTA for each multiprocessor. They wait for one another, so all of them must be resident at once: nothing else
    that waits for the whole GPU may run beside it.
    """
    require_hopper()
    return launch(*args, eps=eps, ctas=target().multiprocessors)


def refuse(rows: int, dtype: Any, *, depth: int, hidden: int, features: int) -> None:
    """Raises NotImplementedError, with the reason, where `linear_chain_mosaic_gpu` would or is not worth its grid syncs."""
    require_hopper()
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 throughout, not {dtype}")
    if rows > WORTH_ROWS:
        raise NotImplementedError(f"is known to be faster for up to {WORTH_ROWS} rows, not {rows}")
    plan(rows, depth, hidden, features, ctas=target().multiprocessors, eps=0.0)
    size = 2 * hidden * (depth + features)
    if size < WORTH:
        raise NotImplementedError(f"products of {size} bytes take less time than the meetings of all multiprocessors")


def plan(rows: int, depth: int, hidden: int, features: int, *, ctas: int, eps: float) -> Plan:
    """The first product as a layer's last projection onto the residual stream, the second one as the projection after it.

    Raises NotImplementedError with the reason for shapes that do not tile.
    """
    if not 0 < rows <= MOST_ROWS:
        raise NotImplementedError(f"takes 1 to {MOST_ROWS} rows, not {rows}")
    for name, size in {"depth": depth, "hidden": hidden}.items():
        if size % (COPIES * BLOCK):
            raise NotImplementedError(f"takes widths that {COPIES * BLOCK} divides, not {name} {size}")
    if features % LEAST_WIDTH:
        raise NotImplementedError(f"takes widths that {LEAST_WIDTH} divides, not features {features}")
    if hidden // ROWS > ctas:
        raise NotImplementedError(f"hidden {hidden} needs {hidden // ROWS} multiprocessors to add up, there are {ctas}")
    products = split_k("down", hidden, depth, ctas), unsplit("next", features, hidden, 1, ctas)
    return with_stages(Plan(rows, padded_rows(rows), hidden, products, ctas, 0, 0, 0, eps))


def launch(
    x: Float[Array, "M nD"],
    first: Float[Array, "D nD"],
    norm: Float[Array, "D"],
    second: Float[Array, "F D"],
    exchange: Any,
    *,
    eps: float,
    ctas: int,
    interpret: Any = None,
) -> Float[Array, "M F"]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    if {array.dtype for array in (x, first, norm, second)} != {jnp.dtype(jnp.bfloat16)}:
        raise NotImplementedError(
            f"takes bfloat16 throughout, not {x.dtype}, {first.dtype}, {norm.dtype}, {second.dtype}"
        )
    hidden, depth = first.shape
    made = plan(x.shape[0], depth, hidden, second.shape[0], ctas=ctas, eps=eps)
    if exchange is not None and exchange.shape != (made.mailbox.words,):
        raise ValueError(f"the exchange must have {made.mailbox.words} words for these shapes, not {exchange.shape}")
    inputs = {"gated": x, "down": first, "next_norm": norm, "next": second}
    return _run(made, inputs, exchange, interpret)


# Compiled as a function of its own, so that all calls of a program share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 3))
def _run(plan: Plan, inputs: dict[str, Array], exchange: Any, interpret: Any) -> Array:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.fused import gemm_chain
    from dflash_kernels.mosaic_gpu.mailbox import given_or_own

    dtype = inputs["gated"].dtype
    found = gemm_chain.launch(
        gemm_chain.program(plan), "linear_chain", plan, plan.products, inputs,
        {"mailbox": given_or_own(exchange, plan.mailbox.words)}, dtype, gemm_chain.scratch(plan, dtype, dtype), interpret,
    )  # fmt: skip
    return found["projected"]
