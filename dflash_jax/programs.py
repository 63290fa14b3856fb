"""Compiled programs and the shapes they are compiled for.

Every program is compiled ahead of its first call and kept. Shapes come from short lists of buckets, so a warm engine compiles
nothing, and the time compiling takes is known and kept out of every other figure.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax


def round_up(value: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `value`, or the largest one."""
    return next((bucket for bucket in buckets if bucket >= value), buckets[-1])


def powers(first: int, last: int, base: int) -> tuple[int, ...]:
    """`first`, `first * base`, ... and `last` at the end; one that `last` exceeds by less than half is left out."""
    buckets = []
    while first < last:
        buckets.append(first)
        first *= base
    if buckets and last < 1.5 * buckets[-1]:
        buckets.pop()  # nearly the same program twice
    return (*buckets, last)


@dataclass(frozen=True)
class Buckets:
    """The shapes an engine runs in: slots, tokens of a prefill chunk, pages of a page table."""

    batch: tuple[int, ...]
    chunk: tuple[int, ...]
    width: tuple[int, ...]

    @classmethod
    def build(cls, *, max_batch: int, max_tokens: int, page_size: int, max_chunk: int) -> "Buckets":
        pages = -(-max_tokens // page_size)
        return cls(
            batch=powers(1, max_batch, 2),
            chunk=powers(min(32, max_chunk), max_chunk, 4),
            width=powers(min(pages, max(1, 256 // page_size)), pages, 4),
        )


@dataclass
class Programs:
    """Compiles on first use and remembers.

    Attributes:
      compile_s: seconds spent compiling so far.
    """

    compile_s: float = 0.0
    _compiled: dict[tuple, Any] = field(default_factory=dict)

    def call(self, function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> Any:
        """`function(*static, *args)` as a compiled program; `donate` numbers arguments of `args`."""
        return self.prepare(function, static, donate, *args)(*args)

    def prepare(self, function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> Any:
        """The compiled program alone; arguments may be shapes (`jax.ShapeDtypeStruct`)."""
        key = (function, static, _signature(args))
        program = self._compiled.get(key)
        if program is None:
            started = time.perf_counter()
            jitted = jax.jit(functools.partial(function, *static), donate_argnums=donate)
            program = self._compiled[key] = jitted.lower(*args).compile()
            self.compile_s += time.perf_counter() - started
        return program

    def shapes(self) -> list[str]:
        """One line for each compiled program, for people."""
        lines = []
        for function, static, (_, leaves) in self._compiled:
            setup = next((part for part in static if hasattr(part, "mode")), None)
            kind = "" if setup is None else f" {'draft' if setup.draft else 'plain'} {setup.mode}"
            lines.append(f"{function.__name__}{kind} {leaves[0] if leaves else ''}".rstrip())
        return sorted(lines)


def _signature(args: tuple) -> tuple:
    """Shapes and dtypes of all arrays but the weights, which never change shape and come first."""
    leaves, tree = jax.tree.flatten(args[1:])
    return tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
