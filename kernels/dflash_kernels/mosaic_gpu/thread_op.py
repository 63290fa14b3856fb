"""Thread-level code as operations of a Pallas kernel: each is declared once, with its types and its form in Pallas' interpreter.

`kernel` launches like `plgpu.kernel` and knows whether its body is interpreted; `thread_op` makes an operation of a function that
is written in terms of one thread's registers and addresses.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

SCALAR = plgpu.Layout.WG_SPLAT(())  # one number that all threads have
MATRIX = plgpu.Layout.WGMMA  # a matrix instruction's operand in registers, or its result
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)  # one number for each row, or each column, of such a matrix
GLOBAL = plgpu.RefType()  # a Ref to global memory, or to shared memory without a swizzle
NUMBER = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)
FACTOR = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.float32), layout=SCALAR)
# Four 32-bit words of each thread of a warpgroup, whatever they mean.
WORDS = plgpu.ShapeDtypeStruct((512,), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_STRIDED((512,), vec_size=4))

_interpreted: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreted", default=False)


def kernel(body: Callable[..., None], *, interpret: Any = None, **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel`, under whose `body` `interpreting()` says whether `interpret` is given."""

    @functools.wraps(body)
    def traced(*refs: Any, **buffers: Any) -> None:
        with interpreted(interpret is not None):
            body(*refs, **buffers)

    return plgpu.kernel(traced, interpret=interpret, **options)


@contextlib.contextmanager
def interpreted(value: bool = True) -> Iterator[None]:
    """Kernels that are traced inside are for the interpreter, or not."""
    token = _interpreted.set(value)
    try:
        yield
    finally:
        _interpreted.reset(token)


def interpreting() -> bool:
    """Whether the kernel that is being traced runs in Pallas' interpreter."""
    return _interpreted.get()


def matrix(shape: tuple[int, ...], dtype: Any = jnp.float32) -> plgpu.ShapeDtypeStruct:
    """A matrix in registers, as what an operation returns."""
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=MATRIX)


def row(size: int, dtype: Any = jnp.float32) -> plgpu.ShapeDtypeStruct:
    """One number for each row of a matrix in registers, as what an operation returns."""
    return plgpu.ShapeDtypeStruct((size,), jnp.dtype(dtype), layout=ROW)


def thread_op(
    *, args: Any = (), returns: Any = None, interpret: Callable[..., Any] | None = None, context: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes an operation of a function that all threads of a warpgroup run, and that is written out when a kernel is lowered.

    The function gets the operands as `inline_mgpu` gives them, but scalars as plain MLIR values, and may return one for a scalar.

    Args:
      args: type of each operand, a layout or `RefType`; or a function of operands and options that gives them. The type of a list
        is that of its elements; None is for what only the interpreter's form looks at.
      returns: `ShapeDtypeStruct` of the result, a list of several, None; or a function as for `args`.
      interpret: what runs in its place in the interpreter; None: there is nothing, the operation must not be reached there.
      context: the function's first argument is Mosaic's launch context.

    Returns:
      A decorator. The operation takes the operands by position and everything static by keyword.
    """

    def declare(threads: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(threads)
        def op(*operands: Any, **options: Any) -> Any:
            if interpreting():
                if interpret is None:
                    raise NotImplementedError(f"{threads.__name__} has no form for Pallas' interpreter")
                return interpret(*operands, **options)
            types: Any = args(*operands, **options) if callable(args) else args
            result = returns(*operands, **options) if callable(returns) else returns
            given = [_as_typed(operand, of) for operand, of in zip(operands, types, strict=True)]

            @plgpu.inline_mgpu(arg_types=tuple(of for _, of in given), return_type=result)
            def inlined(ctx: Any, *held: Any) -> Any:
                held = jax.tree.map(_plain, held, is_leaf=_in_registers)
                found = threads(ctx, *held, **options) if context else threads(*held, **options)
                return None if result is None else jax.tree.map(_splat, result, found)

            return inlined(*(operand for operand, _ in given))

        return op

    return declare


def _as_typed(operand: Any, of: Any) -> tuple[Any, Any]:
    """An operand and its type, or those of a list's elements; plain numbers as arrays."""
    if of is None:
        return None, None
    if of == SCALAR:
        operand = jax.tree.map(_as_array, operand)
    return operand, jax.tree.map(lambda _: of, operand)


def _as_array(number: Any) -> Any:
    return jnp.asarray(number, jnp.int32 if type(number) is int else None) if isinstance(number, int) else number


def _in_registers(held: Any) -> bool:
    return isinstance(held, mgpu.FragmentedArray)


def _plain(held: Any) -> Any:
    return held.registers.item() if _in_registers(held) and held.shape == () else held


def _splat(wanted: plgpu.ShapeDtypeStruct, found: Any) -> Any:
    if not isinstance(found, ir.Value):
        return found
    return mgpu.FragmentedArray.splat(found, (), is_signed=True if jnp.issubdtype(wanted.dtype, jnp.integer) else None)
