"""Launch of a mixture of experts in MXFP4 for few rows on Hopper: what the kernel takes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.core.mxfp4 import PIECE, Mxfp4Tiles
from dflash_kernels.fused.experts.plan import MOST_CHOOSING, most_groups
from dflash_kernels.fused.experts.plan_mxfp4 import CHOICE, Gate, Mxfp4Plan, plan

_SOME = Gate(1.0, 1.0)


def refuse(tokens: int, taken: int, dtype: Any, *, experts: int, hidden: int, inner: int) -> None:
    """Raises NotImplementedError, with the reason, where `mxfp4_mixture_mosaic_gpu` would."""
    require_hopper()
    _require_bfloat16(dtype)
    plan(tokens, taken, experts, hidden, inner, target().multiprocessors, _SOME)


def _require_bfloat16(*dtypes: Any) -> None:
    if any(dtype != jnp.bfloat16 for dtype in dtypes):
        raise NotImplementedError(f"takes bfloat16 throughout, not {', '.join(str(jnp.dtype(one)) for one in dtypes)}")


def mxfp4_mixture_mosaic_gpu(*args: Any, **options: Any) -> Array:
    """See `mxfp4_mixture`. Raises NotImplementedError for what it does not take.

    The launch has one CTA for each multiprocessor. They wait for one another, so all of them must be resident at once: nothing else
    that waits for the whole GPU may run beside it.
    """
    require_hopper()
    return launch(*args, **options, ctas=target().multiprocessors)


def launch(
    logits: Float[Array, "T A"],
    x: Float[Array, "T D"],
    gate_up: Mxfp4Tiles,
    gate_up_bias: Float[Array, "E twoF"],
    down: Mxfp4Tiles,
    down_bias: Float[Array, "E D"],
    *,
    taken: int,
    gate: Gate,
    first: Int[Array, ""] | None = None,
    exchange: Any = None,
    ctas: int,
    interpret: Any = None,
) -> Float[Array, "n T D"]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    _require_bfloat16(x.dtype, gate_up_bias.dtype, down_bias.dtype)
    count, hidden, inner = down.shape
    among = None if first is None else logits.shape[1]
    made = functools.partial(plan, x.shape[0], taken, count, hidden, inner, ctas, gate, among=among)
    given = {"entries": logits.reshape(-1).astype(jnp.float32)}
    given |= {} if first is None else {"first": jnp.reshape(first, 1).astype(jnp.int32)}
    if not (chooses := x.shape[0] <= MOST_CHOOSING):
        given = dict(zip(("entries", "weights"), _choices(made(), [*given.values()], interpret), strict=True))
    matrices = tuple(
        one for matrix, bias in ((gate_up, gate_up_bias), (down, down_bias))
        for one in (matrix.words.reshape(-1, PIECE), bias.reshape(-1))
    )  # fmt: skip
    exchange = jax.new_ref(jnp.zeros((most_groups(count),), jnp.int32)) if exchange is None else exchange
    out = _run(made(chooses=chooses), x, given, matrices, exchange, interpret)
    return out.reshape(-1, *x.shape)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _choices(schedule: Mxfp4Plan, given: list[Array], interpret: Any) -> tuple[Array, Array]:
    from dflash_kernels.fused.experts.routing_sm90 import choices

    return choices(schedule, CHOICE, given, interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 5))
def _run(schedule: Mxfp4Plan, x: Array, given: dict[str, Array], matrices: Any, exchange: Any, interpret: Any) -> Array:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.fused.experts import mosaic_gpu_mxfp4_sm90 as kernel

    return kernel.experts(schedule, x, given, matrices, exchange, interpret)
