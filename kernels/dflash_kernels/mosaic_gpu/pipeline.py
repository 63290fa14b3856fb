"""Pipelines between who fills shared memory and who uses it: the ring of stages in CUTLASS' terms, barriers, copies by one warp."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.thread_op import SCALAR, interpreting, thread_op


@dataclass(frozen=True)
class Ring:
    """`stages` tiles that are filled and used in turn. The step that a tile belongs to counts from 0 over the CTA's life.

    Attributes:
      full: barriers, one for each stage, that the copies of a tile complete.
      empty: barriers that consumers arrive at; None where whoever fills a stage knows otherwise that it is used up.
    """

    stages: int
    full: Any
    empty: Any = None

    def stage(self, step: Any) -> Any:
        """Stage of a step's tile."""
        return rem(step, self.stages)

    def after(self, stage: Any) -> Any:
        """The stage of the step after that of `stage`: cheaper than a remainder for each step."""
        return jnp.where(stage == self.stages - 1, 0, stage + 1)

    def producer_acquire(self, step: Any, stage: Any) -> None:
        """Waits until the stage is empty, as it is before its first use."""
        self.await_empty(step >= self.stages, stage)

    def await_empty(self, used: Any, stage: Any) -> None:
        """`producer_acquire` for whoever knows otherwise whether the stage has been used."""
        pl.when(used)(lambda: plgpu.barrier_wait(self.empty.at[stage]))

    def consumer_wait(self, stage: Any) -> None:
        """Waits until the stage is full."""
        plgpu.barrier_wait(self.full.at[stage])

    def limit_in_flight(self, step: Any, steps: Any) -> None:
        """Waits, before a step's copies, for those of `steps` steps before; not in the interpreter, where none is in flight."""
        if interpreting():
            return
        landed = step - steps
        pl.when(landed >= 0)(lambda: self.consumer_wait(self.stage(landed)))

    def await_landed(self, first: Any, last: Any) -> None:
        """Waits for the copies of steps `first` up to `last`: for who limits those in flight to fewer than until now, as whoever
        waits at a barrier waits for each of its completions."""
        if not interpreting():
            lax.fori_loop(first, last, lambda step, _: self.consumer_wait(self.stage(step)), None)

    def consumer_release(self, stage: Any) -> None:
        """Gives the stage back."""
        plgpu.barrier_arrive(self.empty.at[stage])

    def drain(self, steps: Any) -> None:
        """Waits, after that many steps, until every stage is given back: each completion of a barrier is waited for."""
        lax.fori_loop(
            jnp.maximum(steps - self.stages, 0),
            steps,
            lambda step, _: plgpu.barrier_wait(self.empty.at[self.stage(step)]),
            None,
        )


def rem(a: Any, b: int) -> Any:
    """Remainder of int32 scalars."""
    return lax.rem(a, jnp.int32(b))


def div(a: Any, b: int) -> Any:
    """Quotient of int32 scalars, towards 0."""
    return lax.div(a, jnp.int32(b))


def by_one_warp(task: Callable[[], None], condition: Any = None) -> None:
    """Runs a task that starts copies, if the condition holds, by the first warp: a warpgroup would arrive at each barrier thread by
    thread, and wait for all.
    """
    if interpreting():
        task() if condition is None else pl.when(condition)(task)
    else:
        plgpu.warp_map(lambda warp: pl.when(warp == 0 if condition is None else (warp == 0) & condition)(task))


@thread_op(interpret=lambda: None)
def warpgroup_barrier() -> None:
    """All threads of the warpgroup wait for each other."""
    utils.warpgroup_barrier()


def arrive_by_warps(barriers: Any, place: Any) -> None:
    """A warpgroup's arrival at a barrier by one thread of each warp, for all of its threads: they would arrive one by one.

    `barriers`: `tma.address_of` some; `place`: which of them.
    """
    if interpreting():
        plgpu.barrier_arrive(barriers.at[place])
    else:
        _arrive_by_warps(barriers + place * 8)


@thread_op(args=(SCALAR,))
def _arrive_by_warps(barrier: Any) -> None:
    th.warp_barrier()
    one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARP)
    th.when(one, "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0], 32;", barrier)
