"""Compiled programs and the shapes they are compiled for.

Every program is compiled ahead of its first call and kept. Shapes come from short lists of buckets, so a warm engine compiles
nothing, and the time compiling takes is known and kept out of every other figure.
"""

import functools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from dflash_jax.config import Qwen3Config
from dflash_jax.line import Line, no_collection, place, short_turns
from dflash_jax.side_by_side import kernels_side_by_side
from dflash_jax.value_names import name_values_once

if TYPE_CHECKING:
    from dflash_jax.decoding.state import Setup
    from dflash_jax.stored_programs import StoredPrograms


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


THREADS = 4
# For `loop` on a GPU: all of it is one CUDA graph, with the loop in it. No host stands between two cycles, and a call returns
# while the device works. Its launches wait for what they read, not for whatever stands before them: the drafter's context is made
# beside its block, small operations beside large ones.
ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE",
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
# Beside that, for as many rows of a dense model in bfloat16 as let XLA multiply onto the residual stream (`dense_onto`): one call
# of cuBLAS each. Where XLA weighs Triton's products as well, the addition may end up apart.
PLAIN_ROWS = 512
PLAIN_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}
Status = Literal["compiled", "pending", "missing"]


def start_compiling(jobs: Iterable[Callable[[], Any]]) -> list[Future]:
    """Runs jobs that compile in the background, some side by side. A call that needs their programs waits.

    They are traced in their order, whichever thread comes first.
    """
    jobs = list(jobs)
    arrived = [Event() for _ in jobs]
    # Threads do not inherit this setting where it was made for a block.
    precision = jax.config.jax_default_matmul_precision

    def run(number: int, job: Callable[[], Any]) -> None:
        with jax.default_matmul_precision(precision), short_turns(), place(number, arrived):
            job()

    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="compile")
    futures = [pool.submit(run, number, job) for number, job in enumerate(jobs)]
    pool.shutdown(wait=False)
    return futures


def drop(futures: list[Future]) -> None:
    """Returns when nothing is compiled any more: waits for what has begun, drops the rest."""
    for future in futures:
        future.cancel()
    wait(futures)


@dataclass
class Programs:
    """Compiles on first use and remembers. May be asked from several threads.

    Attributes:
      stored: of this process: programs that are on disk, and go there; None keeps none.
      compile_s: seconds that calls have waited for programs so far.
    """

    stored: ClassVar["StoredPrograms | None"] = None
    compile_s: float = 0.0
    _compiled: dict[tuple, Any] = field(default_factory=dict)
    _pending: dict[tuple, Future] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _tracing: Line = field(default_factory=Line)

    def call(self, function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> Any:
        """`function(*static, *args)` as a compiled program; `donate` numbers arguments of `args`."""
        program = self._compiled.get((function, static, _signature(args)))
        if program is None:
            started = time.perf_counter()
            program = self.prepare(function, static, donate, *args)
            self.compile_s += time.perf_counter() - started
        return program(*args)

    @staticmethod
    def key(function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> tuple:
        """What `prepare` with these arguments remembers its program under."""
        return function, static, _signature(args)

    def status(self, key: tuple) -> Status:
        """Whether a call would find its program compiled, or somebody compiling it."""
        return "compiled" if key in self._compiled else "pending" if key in self._pending else "missing"

    def prepare(self, function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> Any:
        """The compiled program alone; arguments may be shapes (`jax.ShapeDtypeStruct`).

        A program that another thread is compiling already is waited for.
        """
        key, ours = (function, static, _signature(args)), Future()
        # An interrupt may come after every call: none may leave a program behind that is pending for good.
        try:
            with self._lock:
                if key in self._compiled:
                    return self._compiled[key]
                if (others := self._pending.get(key)) is None:
                    self._pending[key] = ours
            if others is not None:
                return others.result()
            program, keep = self._make(function, static, donate, args)
            self._compiled[key] = program
            ours.set_result(program)
        except BaseException as error:
            if not ours.done():
                ours.set_exception(error)
            raise
        finally:
            if self._pending.get(key) is ours:
                del self._pending[key]
            del ours  # which holds the error, and that this frame
        keep()  # nobody waits for it
        return program

    def _make(
        self, function: Callable, static: tuple, donate: tuple[int, ...], args: tuple
    ) -> tuple[Any, Callable[[], object]]:
        """The program, and what remains to be done for it to be there next time."""
        lower = functools.partial(self._lower, function, static, donate, args)
        if Programs.stored is None:
            return lower().compile(), lambda: None
        return Programs.stored.program(function, static, donate, args, lower)

    def _lower(self, function: Callable, static: tuple, donate: tuple[int, ...], args: tuple) -> Any:
        # Tracing is Python, which one thread at a time can run; the rest of compiling is not.
        with self._tracing, no_collection():
            whole = function.__name__ == "loop" and jax.default_backend() == "gpu"
            options = loop_options(*static, *args) if whole else None
            program = jax.jit(functools.partial(function, *static), donate_argnums=donate, compiler_options=options)
            traced = program.trace(*args)
            name_values_once()
            with kernels_side_by_side() if jax.default_backend() == "gpu" else nullcontext():
                return traced.lower()

    def shapes(self) -> list[str]:
        """One line for each compiled program, for people."""
        lines = []
        for function, static, (_, leaves) in tuple(self._compiled):  # at once: others may be compiling
            setup = next((part for part in static if hasattr(part, "mode")), None)
            kind = "" if setup is None else f" {'draft' if setup.draft else 'plain'} {setup.mode}"
            first = f"({leaves[0][0]}, '{leaves[0][1]}')" if leaves else ""
            lines.append(f"{function.__name__}{kind} {first}".rstrip())
        return sorted(lines)


def loop_options(setup: "Setup", max_cycles: int, weights: Any, page_table: Any, *rest: Any) -> dict[str, Any]:
    """What XLA is told about `loop` of these arguments."""
    fits = page_table.shape[0] * setup.width == PLAIN_ROWS and isinstance(setup.target, Qwen3Config)
    plain = {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    return ONE_GRAPH | (PLAIN_PRODUCTS if fits and plain else {})


def _signature(args: tuple) -> tuple:
    """Shapes and dtypes of all arrays but the weights, which never change shape and come first."""
    leaves, tree = jax.tree.flatten(args[1:])
    # Asked before every launch: names of dtypes would take ten times as long to make as all the rest.
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
