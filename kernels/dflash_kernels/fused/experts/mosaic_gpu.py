"""Launch of a mixture of experts for few rows on Hopper: what the kernel takes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_kernels.core.device import require_half_precision, require_hopper, target
from dflash_kernels.fused.experts.plan import (
    MOST_CHOOSING,
    Choice,
    Plan,
    most_groups,
    plan,
)


def refuse(tokens: int, taken: int, dtype: Any, *, experts: int, hidden: int, inner: int) -> None:
    """Raises NotImplementedError, with the reason, where `routed_experts_mosaic_gpu` would."""
    require_hopper()
    require_half_precision(dtype)
    plan(tokens, taken, experts, hidden, inner, target().multiprocessors)


def routed_experts_mosaic_gpu(
    x: Array,
    experts: Array,
    weights: Array,
    gate_up: Array,
    down: Array,
    *,
    exchange: Any,
) -> Array:
    """See `routed_experts`. Raises NotImplementedError for what it does not take.

    The launch has one CTA for each multiprocessor. They wait for one another, so all of them must be resident at once: nothing else
    that waits for the whole GPU may run beside it.
    """
    require_hopper()
    how: Any = {"exchange": exchange, "ctas": target().multiprocessors}
    return launch(x, experts, weights, gate_up, down, **how)


def mixture_mosaic_gpu(
    logits: Array,
    x: Array,
    gate_up: Array,
    down: Array,
    *,
    taken: int,
    choice: Choice,
    first: Array | None,
    exchange: Any,
) -> Array:
    """See `mixture`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    how: Any = {"exchange": exchange, "ctas": target().multiprocessors}
    if x.shape[0] > MOST_CHOOSING:
        experts, weights = launch_choices(logits, taken, choice, down.shape, how["ctas"], first)
        among = None if first is None else logits.shape[1] - choice.shared
        return launch(x, experts, weights, gate_up, down, among=among, **how)
    return launch(x, logits, None, gate_up, down, taken=taken, choice=choice, first=first, **how)


def launch_choices(
    logits: Array,
    taken: int,
    choice: Choice,
    sizes: tuple[int, ...],
    ctas: int,
    first: Array | None = None,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """`chosen` by a kernel: XLA would sort, in six launches. Of a share, experts by their numbers there, `NOBODY` for others'."""
    (tokens, scores), (count, hidden, inner) = logits.shape, sizes
    among = None if first is None else scores - choice.shared
    schedule = plan(tokens, taken + choice.shared, count, hidden, inner, ctas, choice, among)
    given = [logits.reshape(-1).astype(jnp.float32), *([] if first is None else [_word(first)])]
    experts, weights = (part.reshape(tokens, -1) for part in _choices(schedule, given, interpret))
    return experts, weights


def _word(first: Array) -> Array:
    return jnp.reshape(first, 1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _choices(schedule: Plan, given: list[Array], interpret: Any) -> tuple[Array, Array]:
    from dflash_kernels.fused.experts.routing_sm90 import choices

    assert schedule.choice is not None
    return choices(schedule, schedule.choice, given, interpret)


def launch(
    x: Float[Array, "T D"],
    experts: Array,
    weights: Array | None,
    gate_up: Float[Array, "E twoF D"],
    down: Float[Array, "E D F"],
    *,
    exchange: Any = None,
    taken: int | None = None,
    choice: Choice | None = None,
    first: Array | None = None,
    among: int | None = None,
    ctas: int,
    interpret: Any = None,
) -> Float[Array, "k T D"]:
    """The implementation without the device check: for tests on the CPU (`interpret`).

    With `choice` the kernel chooses: `experts` are the logits, `weights` None, and `taken` experts are taken, beside a shared one;
    `first` as of `mixture`. Without it, `among` says that some of `experts` are `NOBODY`, and how many experts tokens chose from.
    """
    require_half_precision(x.dtype, gate_up.dtype, down.dtype)
    taken = experts.shape[1] if taken is None else taken + int(choice is not None and choice.shared)
    count, hidden, inner = down.shape
    if choice is not None and first is not None:
        among = experts.shape[1] - choice.shared
    schedule = plan(x.shape[0], taken, count, hidden, inner, ctas, choice, among)
    gate_up, down = (matrix.reshape(-1, matrix.shape[2]) for matrix in (gate_up, down))
    exchange = jax.new_ref(jnp.zeros((most_groups(count),), jnp.int32)) if exchange is None else exchange
    experts = experts.reshape(-1).astype(jnp.int32 if choice is None else jnp.float32)
    named = {} if weights is None else {"weights": weights.reshape(-1).astype(jnp.float32)}
    named |= {} if first is None else {"first": _word(first)}
    return _run(schedule, x, experts, named, gate_up, down, exchange, interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 7))
def _run(
    schedule: Plan,
    x: Array,
    entries: Array,
    named: dict[str, Array],
    gate_up: Array,
    down: Array,
    exchange: Any,
    interpret: Any,
) -> Array:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.fused.experts import mosaic_gpu_sm90 as kernel

    return kernel.experts(schedule, x, entries, named, gate_up, down, exchange, interpret)
