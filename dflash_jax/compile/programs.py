"""Compiled programs and the shapes they are compiled for.

Every program is compiled ahead of its first call and kept. Shapes come from short lists of buckets, so a warm engine compiles
nothing, and the time compiling takes is known and kept out of every other figure.
"""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax

from dflash_jax.compile.mosaic_kernels import kernels_side_by_side
from dflash_jax.compile.tracing import Line, no_collection, place, short_turns
from dflash_jax.compile.value_names import name_values_once

if TYPE_CHECKING:
    from dflash_jax.compile.executable_cache import StoredPrograms


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


# Prompts are prefilled in rows of so many tokens, the pieces of one or of several, in numbers of rows that double from the least to
# the most. Measured on an H200 in the shapes of Qwen3-4B, with calls queued one behind the other: 1 x 32, 1 x 128 and 4 x 32 tokens
# take 3.4 ms each, for they read the same weights, 8 x 32 4.3, 16 x 32 6.9 and 1 x 512 7.0. So fewer rows than 4 gain nothing, and
# from 8 to 16 each prompt more costs what its products cost.
PIECE, LEAST_PIECES, MOST_PIECES = 32, 4, 16
# One prompt alone that lacks more is one row: then attention is that of a prompt, which reads the keys before it once for 128 of
# its queries, and latent keys are expanded once.
PIECES_OF_ONE = 8


@dataclass(frozen=True)
class Buckets:
    """The shapes an engine runs in.

    Attributes:
      batch: slots.
      width: pages of a page table.
      piece: tokens of a row in which prompts are prefilled.
      pieces: rows of a call.
      whole: the row of one prompt that is not cut into pieces, where prompts may be so long.
    """

    batch: tuple[int, ...]
    width: tuple[int, ...]
    piece: int
    pieces: tuple[int, ...]
    whole: tuple[int, int] | None

    @classmethod
    def build(cls, *, max_batch: int, max_tokens: int, page_size: int, longest: int, max_chunk: int) -> "Buckets":
        """For sequences of `max_tokens` tokens and prompts of `longest`; `max_chunk` tokens are prefilled at once at most."""
        pages, one = -(-max_tokens // page_size), min(longest, max_chunk)
        piece = min(PIECE, one)
        limit = MOST_PIECES if max_batch > 1 else PIECES_OF_ONE
        most = min(max_chunk // piece, limit, max_batch * -(-longest // piece))
        return cls(
            batch=powers(1, max_batch, 2),
            width=powers(min(pages, max(1, 256 // page_size)), pages, 4),
            piece=piece,
            pieces=powers(min(LEAST_PIECES, most), most, 2),
            whole=(1, one) if one > PIECES_OF_ONE * piece else None,
        )

    def prompts(self, lefts: Sequence[int]) -> tuple[int, int]:
        """Rows and tokens of each in which prompts are prefilled together that lack so many tokens; one alone may lack more."""
        count = self.count(lefts)
        if len(lefts) == 1 and count > PIECES_OF_ONE and self.whole:
            return self.whole
        return round_up(count, self.pieces), self.piece

    def count(self, lefts: Iterable[int]) -> int:
        """Pieces of prompts that lack so many tokens."""
        return sum(-(-left // self.piece) for left in lefts)

    def room(self, lefts: Sequence[int]) -> int:
        """Tokens that one more prompt may lack to be prefilled together with these."""
        return (self.pieces[-1] - self.count(lefts)) * self.piece

    @property
    def chunk(self) -> int:
        """Tokens of a call at most."""
        return max(self.pieces[-1] * self.piece, 0 if self.whole is None else self.whole[1])


THREADS = 4
# `prefill_chunk` is left to XLA's own choice of options. 512 tokens of Qwen3-4B take 7.24 ms in calls queued one behind the other:
# 6.60 in 310 kernels (5.41 of it products, at 660 to 700 TFLOP/s) and 2 us between each two. Without graphs 7.57 ms, with cuBLAS's
# products outside of them 7.46, without Triton's the same: it is the head's alone. A call by itself takes 2.0 to 2.4 ms more, which
# is the host's time before the device begins: 0.5 for 420 arguments, 0.2 for four small arrays, 0.6 to make 305 launches ready,
# 0.2 to update their graph and 0.5 to launch it.
Status = Literal["compiled", "pending", "missing"]


_OPTIONS: dict[Callable, Callable[..., dict[str, Any]]] = {}


def compiled_with[F: Callable](options: Callable[..., dict[str, Any]]) -> Callable[[F], F]:
    """Declares what XLA is told about a function's programs on a GPU: `options` of the same arguments, which may be shapes."""

    def declare(function: F) -> F:
        _OPTIONS[function] = options
        return function

    return declare


def start_compiling(jobs: Iterable[Callable[[], Any]]) -> list[Future]:
    """Runs jobs that compile in the background, some side by side. A call that needs their programs waits.

    They are traced in their order, whichever thread comes first. Once Python ends, none begins: the rest end with SystemExit.
    """
    jobs = list(jobs)
    arrived, futures = [Event() for _ in jobs], [Future() for _ in jobs]
    left, turn = iter(range(len(jobs))), Lock()
    # Threads do not inherit this setting where it was made for a block.
    precision = jax.config.jax_default_matmul_precision
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="compile")

    def run(number: int) -> None:
        if futures[number].set_running_or_notify_cancel():
            try:
                with jax.default_matmul_precision(precision), short_turns(), place(number, arrived):
                    jobs[number]()
            except BaseException as error:
                futures[number].set_exception(error)
            else:
                futures[number].set_result(None)
        follow()

    def follow() -> None:
        """The pool is given one job after the other: Python waits for all that it has before it ends."""
        with turn:
            number = next(left, None)
            if number is None:
                pool.shutdown(wait=False)
                return
            try:
                pool.submit(run, number)
            except RuntimeError as error:  # Python ends, or the system has no thread left
                reason = SystemExit() if "interpreter shutdown" in str(error) else error
                for late in (number, *left):
                    if futures[late].set_running_or_notify_cancel():
                        futures[late].set_exception(reason)

    for _ in jobs[:THREADS]:
        follow()
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
        # What a program of somebody else's wants refused (`jax_numpy_rank_promotion`) is no fault of these.
        with self._tracing, no_collection(), jax.numpy_rank_promotion("allow"):
            options = _OPTIONS.get(function) if jax.default_backend() == "gpu" else None
            options = None if options is None else options(*static, *args)
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


def _signature(args: tuple) -> tuple:
    """Shapes and dtypes of all arrays but the weights, which never change shape and come first."""
    leaves, tree = jax.tree.flatten(args[1:])
    # Asked before every launch: names of dtypes would take ten times as long to make as all the rest.
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
