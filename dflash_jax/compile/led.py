"""Programs over the devices of several processes: each of them has to call the same ones in the same order.

Process 0 runs the engine and decides. Before it calls a program it tells the others which one, with the numbers that come from the
host; arrays of the device have a number on all processes, as the weights and what programs return are counted alike everywhere. So
the others need no engine of their own, and what process 0 decides by its clock is no matter.
"""

import atexit
import importlib
import itertools
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dflash_jax.compile.executable_cache import describe, rebuild
from dflash_jax.compile.programs import Programs, start_compiling
from dflash_jax.errors import DFlashError
from dflash_jax.parallel.link import Leader, Member, Record
from dflash_jax.parallel.ranks import Ranks


def programs_over(ranks: Ranks | None) -> Programs:
    """Programs of these devices, for the engine of this process."""
    return (
        LedPrograms(ranks=ranks)
        if ranks is not None and ranks.led and jax.process_index() == 0
        else Programs(ranks=ranks)
    )


def lead_or_follow(programs: Programs, weights: Any, makers: dict[str, Callable[[], Any]]) -> None:
    """Connects the processes that share a model, once each has its weights. Only process 0 comes back; the others call what it
    calls, and end when it ends. Where one process has all devices nothing happens.

    Args:
      makers: by the names of `Programs.made`.
    """
    if isinstance(programs, LedPrograms):
        programs.lead(weights)
    elif programs.ranks is not None and programs.ranks.led:
        follow(programs, weights, makers, Member().records())
        raise SystemExit(0)


@dataclass
class LedPrograms(Programs):
    """Process 0's programs. Until `lead` others know of none of them."""

    _leader: Leader | None = None
    _numbers: dict[int, int] = field(default_factory=dict)  # of arrays, by their identity
    _next: "itertools.count[int]" = field(default_factory=itertools.count)
    _gone: list[int] = field(default_factory=list)
    _told: dict[tuple, int] = field(default_factory=dict)
    # An interrupt of the thread that calls must not come between what is told and what is done.
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "dflash-jax leading"))

    def lead(self, weights: Any) -> None:
        """Connects with the others, who have the same weights."""
        self._leader = Leader()
        atexit.register(self._leader.close)
        self._count(weights)

    def call(self, function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> Any:
        """See `Programs.call`."""
        precision = jax.config.jax_default_matmul_precision
        return self._worker.submit(self._call, precision, function, static, donate, args).result()

    def prepare(self, function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> Any:
        """See `Programs.prepare`; the others compile at the same time, as XLA shares among processes what it tries out.

        Raises:
          DFlashError: the others are not connected yet, so nobody would compile beside this process.
        """
        if self._leader is None:
            raise DFlashError("several processes compile nothing ahead of their weights")
        if self.key(function, static, donate, *args) not in self._told:
            self._worker.submit(self._ask, function, static, donate, args).result()
        return super().prepare(function, static, donate, *args)

    def made[T](self, name: str, make: Callable[[], T], shardings: Any) -> T:
        """See `Programs.made`."""
        return self._worker.submit(self._make_arrays, name, make, shardings).result()

    def _call(self, precision: Any, function: Callable, static: tuple, donate: tuple[int, ...], args: tuple) -> Any:
        assert self._leader is not None, "programs are called once the others have their weights"
        leaves, tree = jax.tree.flatten(args)
        numbers = [self._numbers.get(id(leaf), -1) for leaf in leaves]
        leaves = [np.asarray(leaf) if number < 0 else leaf for leaf, number in zip(leaves, numbers, strict=True)]
        args, values = tree.unflatten(leaves), [leaf for leaf, n in zip(leaves, numbers, strict=True) if n < 0]
        header = self._introduced(function, static, donate, args)
        self._tell({"call": header.pop("number"), **header}, [np.array(numbers, np.int32), *values])
        del leaves, values
        with jax.default_matmul_precision(precision):
            results = super().call(function, static, donate, *args)
        self._count(results)
        return results

    def _ask(self, function: Callable, static: tuple, donate: tuple[int, ...], args: tuple) -> None:
        """Has the others compile a program; once."""
        if self.key(function, static, donate, *args) not in self._told:
            header = self._introduced(function, static, donate, args)
            self._tell({"prepare": header.pop("number"), **header}, [])

    def _introduced(self, function: Callable, static: tuple, donate: tuple[int, ...], args: tuple) -> dict[str, Any]:
        """A program's number, and what it is where the others have not heard of it."""
        key = self.key(function, static, donate, *args)
        if key in self._told:
            return {"number": self._told[key]}
        self._told[key] = len(self._told)
        name = f"{function.__module__}:{function.__qualname__}"
        program = {"function": name, "static": describe(static), "donate": list(donate), "args": describe(args)}
        return {"number": self._told[key], "program": program}

    def _make_arrays(self, name: str, make: Callable[[], Any], shardings: Any) -> Any:
        self._tell({"make": name}, [])
        made = super().made(name, make, shardings)
        self._count(made)
        return made

    def _tell(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        assert self._leader is not None, "nothing is made before the others have their weights"
        gone = []
        while self._gone:  # which other threads add to
            gone.append(self._gone.pop())
        self._leader.tell(header | {"gone": gone}, arrays)

    def _count(self, arrays: Any) -> None:
        """Numbers arrays, until they are gone here: then the others may let go of theirs."""
        for array in jax.tree.leaves(arrays):
            number, place = next(self._next), id(array)
            self._numbers[place] = number
            weakref.finalize(array, self._forget, place, number).atexit = False

    def _forget(self, place: int, number: int) -> None:
        if self._numbers.get(place) == number:
            del self._numbers[place]
        self._gone.append(number)


def follow(programs: Programs, weights: Any, makers: dict[str, Callable[[], Any]], records: Iterable[Record]) -> None:
    """Calls what process 0 calls, until it stops.

    Args:
      makers: by the names of `Programs.made`.
    """
    numbers, arrays = itertools.count(), dict[int, Any]()
    known: list[tuple[Callable, tuple, tuple[int, ...], Any]] = []

    def keep(results: Any) -> None:
        arrays.update((next(numbers), leaf) for leaf in jax.tree.leaves(results))

    def called(number: int, given: list[np.ndarray]) -> Any:
        function, static, donate, args = known[number]
        values = iter(given[1:])
        leaves = [next(values) if each < 0 else arrays[each] for each in given[0].tolist()]
        return programs.call(function, static, donate, *jax.tree.unflatten(jax.tree.structure(args), leaves))

    def prepare(number: int) -> Callable[[], object]:
        function, static, donate, args = known[number]
        # Shapes do not say how weights are cut.
        first = args[0] if args[0] is None else weights
        return lambda: programs.prepare(function, static, donate, first, *args[1:])

    keep(weights)
    for header, given in records:
        for number in header["gone"]:
            arrays.pop(number, None)
        if (new := header.get("program")) is not None:
            described = rebuild(new["static"]), tuple(new["donate"]), rebuild(new["args"])
            known.append((_function(new["function"]), *described))
        if "prepare" in header:
            start_compiling([prepare(header["prepare"])], in_order=False)
        else:
            keep(makers[header["make"]]() if "make" in header else called(header["call"], given))


def _function(name: str) -> Callable:
    """A function of this package, by its module and name."""
    module, _, qualname = name.partition(":")
    if module.split(".")[0] != "dflash_jax":
        raise ValueError(f"{name} is not of dflash_jax")
    return getattr(importlib.import_module(module), qualname)
