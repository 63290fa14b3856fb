"""Picking an implementation of an op: in the order asked for, with every refusal's reason kept."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dflash_kernels.core.device import HOPPER, default_device, target

NUMBERS = ("scale", "soft_cap", "eps")  # options that kernels are compiled for


class NoImplementationError(NotImplementedError):
    """No implementation takes this call. The message lists each one that was tried and why it refused."""


def first_fitting(
    op: str,
    implementations: Mapping[str, Callable[..., Any]],
    wanted: str | Sequence[str] | None,
    *args: Any,
    **options: Any,
) -> Any:
    """Calls the first implementation that takes the arguments.

    Args:
      op: name of the operation, for messages.
      implementations: name to function, best first. A function refuses by raising NotImplementedError with its reason.
      wanted: None for all in order, or one name, or several in the order to try. What is named is never replaced silently.
        "triton" is left out of all on Hopper, where the other kernels and XLA are what is measured: there it has to be named.
      *args, **options: passed on, NumPy's arrays as JAX's, which traced indices can be used on. Arrays that were put on a device
        of another platform than the default one say what the call is for; in a program that is traced nothing does, and it is
        for the default device.

    Raises:
      NoImplementationError: a name is unknown, or every candidate refused.
    """
    if (elsewhere := _held_elsewhere(args, options)) is not None:
        with jax.default_device(elsewhere):
            return first_fitting(op, implementations, wanted, *args, **options)
    if wanted is None:
        left_out = {"triton"} if "triton" in implementations and target().capability == HOPPER else set()
        names = [name for name in implementations if name not in left_out]
    else:
        names = [wanted] if isinstance(wanted, str) else list(wanted)
    unknown = [name for name in names if name not in implementations]
    if unknown or not names:
        raise NoImplementationError(f"{op}: no implementation named {unknown}; there are {', '.join(implementations)}")
    args = tuple(_as_jax(value) for value in args)
    options = {key: _as_jax(value) for key, value in options.items()}
    reasons = []
    for name in names:
        try:
            if name == "xla":
                return implementations[name](*args, **options)
            _refuse_traced(options)
            if jax.config.jax_enable_x64:
                return _in_32_bits(implementations[name], args, options)
            return implementations[name](*args, **options)
        except NotImplementedError as reason:
            reasons.append(f"{name}: {reason}")
    raise NoImplementationError(f"{op}: no implementation takes this call\n  " + "\n  ".join(reasons))


def _refuse_traced(options: Mapping[str, Any]) -> None:
    for name in NUMBERS:
        if isinstance(options.get(name), Tracer):
            raise NotImplementedError(f"takes a {name} that is known when the kernel is compiled, not a traced one")


def _held_elsewhere(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A device that arrays outside of a trace were put on, where none is of the default device's platform."""
    arrays = [leaf for leaf in jax.tree.leaves((args, options)) if isinstance(leaf, jax.Array)]
    if any(isinstance(array, Tracer) for array in arrays):
        return None
    devices = [device for array in arrays if array.committed for device in array.devices()]
    platform = default_device().platform
    return devices[0] if devices and all(device.platform != platform for device in devices) else None


def _in_32_bits(implementation: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls a kernel as it is where 64 bits are not enabled: there, every plain number in it would have 64."""
    args, options = jax.tree.map(_narrow, (args, options))
    with jax.enable_x64(False):
        return implementation(*args, **options)


def _narrow(value: Any) -> Any:
    return value.astype(jnp.int32) if isinstance(value, jax.Array) and value.dtype == jnp.int64 else value


def _as_jax(value: Any) -> Any:
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value
