"""Compiled programs: every one is compiled ahead of its first call and kept.

Shapes come from short lists (`dflash_jax.engine.buckets`), so a warm engine compiles nothing, and the time compiling takes is known
and kept out of every other figure.
"""

import functools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax

from dflash_jax.compile.jax_patches import kernels_side_by_side, name_values_once
from dflash_jax.compile.tracing import TracingQueue, arrive, job, no_collection, short_turns
from dflash_jax.parallel.ranks import Ranks

if TYPE_CHECKING:
    from dflash_jax.compile.executable_cache import StoredPrograms


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


def start_compiling(jobs: Iterable[Callable[[], Any]], *, in_order: bool = True) -> list[Future]:
    """Runs jobs that compile in the background, some side by side. A call that needs their programs waits.

    Once Python ends, none begins: the rest end with SystemExit.

    Args:
      in_order: programs are traced in the order of the jobs: one begins once that before has its place in the tracing queue. False
        for jobs that do not come to that queue.
    """
    jobs = list(jobs)
    futures, left, turn = [Future() for _ in jobs], iter(range(len(jobs))), Lock()
    running = arriving = 0
    given_up = set[int]()
    # Threads do not inherit this setting where it was made for a block.
    precision = jax.config.jax_default_matmul_precision
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="compile")

    def run(number: int) -> None:
        arrived = functools.partial(follow, arrived=1)
        if not in_order:
            arrived()
        with job(number, arrived if in_order else _nothing):
            with turn:
                begins = number not in given_up and futures[number].set_running_or_notify_cancel()
            if begins:
                try:
                    with jax.default_matmul_precision(precision), short_turns():
                        jobs[number]()
                except BaseException as error:
                    futures[number].set_exception(error)
                else:
                    futures[number].set_result(None)
        follow(ended=1)

    def follow(arrived: int = 0, ended: int = 0) -> None:
        """The pool is given one job after the other: Python waits for all that it has before it ends."""
        nonlocal running, arriving
        with turn:
            arriving, running = arriving - arrived, running - ended
            if arriving or running == THREADS:
                return
            number = next(left, None)
            if number is None:
                pool.shutdown(wait=False)
                return
            arriving, running = 1, running + 1
            try:
                pool.submit(run, number)
            except RuntimeError as error:  # Python ends, or the system has no thread left
                reason = SystemExit() if "shutdown" in str(error) else error
                # A pool that finds no thread for `number` has it in its queue all the same.
                given_up.update((number, *left))
                for late in given_up:
                    if futures[late].set_running_or_notify_cancel():
                        futures[late].set_exception(reason)

    follow()
    return futures


def _nothing() -> None:
    pass


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
      ranks: devices that share every program; None for one device.
      waited_s: seconds that calls have waited for programs, but for the calls that wait now.
    """

    stored: ClassVar["StoredPrograms | None"] = None
    ranks: Ranks | None = None
    waited_s: float = 0.0
    _waiting: dict[int, float] = field(default_factory=dict)  # by threads, the clock as their calls began to wait
    _compiled: dict[tuple, Any] = field(default_factory=dict)
    _pending: dict[tuple, Future] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _tracing: TracingQueue = field(default_factory=TracingQueue)

    def call(self, function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> Any:
        """`function(*static, *args)` as a compiled program; `donate` numbers arguments of `args`."""
        program = self._compiled.get((function, static, _signature(args)))
        if program is None:
            started = time.perf_counter()
            try:
                self._waiting[get_ident()] = started
                program = self.prepare(function, static, donate, *args)
            finally:
                with self._lock:
                    self._waiting.pop(get_ident(), None)
                    self.waited_s += time.perf_counter() - started
        return program(*args)

    @property
    def compile_s(self) -> float:
        """Seconds that calls have waited for programs so far. Whoever comes while one waits waits for the rest alone."""
        with self._lock:
            return self.waited_s + sum(time.perf_counter() - started for started in [*self._waiting.values()])

    def made[T](self, name: str, make: Callable[[], T], shardings: Any) -> T:
        """Arrays that ranks share, made where they stay. `name` tells `make` from others of an engine."""
        return jax.jit(make, out_shardings=shardings)()

    @staticmethod
    def key(function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> tuple:
        """Key under which `prepare` keeps the program of these arguments."""
        return function, static, _signature(args)

    def largest_workspace(self) -> int | None:
        """The most bytes that a program compiled so far holds beside its arguments, results of its own included, by XLA's account;
        None where no program has one."""
        found = [program.memory_analysis() for program in [*self._compiled.values()]]
        return max(
            (one.temp_size_in_bytes + one.output_size_in_bytes - one.alias_size_in_bytes for one in found if one),
            default=None,
        )

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
                arrive()
                return others.result()
            self._tracing.join()
            program, keep = self._make(function, static, donate, args)
            self._compiled[key] = program
            ours.set_result(program)
        except BaseException as error:
            if not ours.done():
                ours.set_exception(error)
            raise
        finally:
            self._tracing.leave()
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
        # What is stored is for one device: programs of several are JAX's own cache's.
        if Programs.stored is None or self.ranks is not None:
            return lower().compile(), lambda: None
        return Programs.stored.program(function, static, donate, args, lower)

    def _lower(self, function: Callable, static: tuple, donate: tuple[int, ...], args: tuple) -> Any:
        # With it come the kernels, which a command does without until it has a model.
        from dflash_jax.compile.over_ranks import over_ranks, static_of_rank

        # Tracing is Python, which one thread at a time can run; the rest of compiling is not.
        # What a program of somebody else's wants refused (`jax_numpy_rank_promotion`) is no fault of these.
        with self._tracing, no_collection(), jax.numpy_rank_promotion("allow"):
            options = _OPTIONS.get(function) if jax.default_backend() == "gpu" else None
            options = None if options is None else options(*static_of_rank(static), *args)
            if self.ranks is not None:
                program = over_ranks(self.ranks, function, static, donate, args, options)
            else:
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
