"""Choice of the next program: its mode, its slots, and the tokens that it verifies in each. Every combination is a program.

A better program that is not compiled is compiled in the background once its lack has cost as much time as compiling takes; until
then the best compiled one runs. Nobody waits.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from dflash_jax.compile.programs import Status, start_compiling
from dflash_jax.decoding.state import Emitted, Setup
from dflash_jax.engine.batch import Batch
from dflash_jax.engine.buckets import round_up
from dflash_jax.engine.in_flight import Row
from dflash_jax.engine.requests import ADJUSTING, Needs
from dflash_jax.engine.resources import Resources
from dflash_jax.engine.slots import Job
from dflash_jax.engine.verify_policy import Kind, Length, Served, kind_of
from dflash_jax.engine.warmup import Jobs


def choose_needs(batch: Batch, jobs: Iterable[Job]) -> Needs:
    """Needs that the next programs serve: those of these requests, or more if the program for less is not compiled."""
    exact = Needs.of({job.needs for job in jobs})
    if exact == batch.needs or not batch.needs.covers(exact):
        return exact
    return exact if loop_status(batch, exact, batch.size, batch.cycles, batch.verified) == "compiled" else batch.needs


def choose_cycles(batch: Batch, cycles: int) -> tuple[Setup, int]:
    """Setup of the next cycles, and their number, at most `cycles`."""
    policy, running = batch.core.verify_policy, batch.slots.decoding
    if not batch.draft or not running:
        return batch.setup, cycles
    kinds: dict[int, Kind] = {job.ticket: kind_of(job.request) for job in running}
    status = partial(loop_status, batch, batch.needs, batch.size, cycles)
    decision = policy.next(kinds, batch.size, batch.context, cycles, status)
    if decision.compile is not None:
        jobs = _jobs(batch, batch.needs, batch.size, decision.compile)
        start_compiling([jobs.loop(batch.size, batch.width_for(decision.cycles, jobs.setup.width))])
    return batch.core.verifying(batch.setup, decision.length, batch.size), decision.cycles


def choose_slots(batch: Batch, most: int) -> int:
    """The number of slots for the next cycles where nobody waits or is prefilled: fewer than now where the programs for fewer are
    there, and those that lead back to `most`."""
    core, now = batch.core, batch.size
    fewer = round_up(max(1, len(batch.slots.taken)), core.buckets.batch)
    if fewer >= now:
        return now
    cycles, moves = batch.cycles, [(now, fewer), (fewer, most)]
    length = core.verify_policy.with_slots(fewer, batch.context) if batch.draft else Length(1)
    there = {resize_status(batch, *move) for move in moves}
    if {*there, loop_status(batch, batch.needs, fewer, cycles, length)} == {"compiled"}:
        return fewer
    if core.verify_policy.fewer_slots_pay(now, fewer, batch.context, cycles):
        jobs = _jobs(batch, batch.needs, fewer, length)
        start_compiling(
            [jobs.loop(fewer, batch.width_for(cycles, jobs.setup.width)), *(jobs.resize(*move) for move in moves)]
        )
    return now


def learn(core: Resources, rows: Sequence[Row], setup: Setup, emitted: Emitted) -> None:
    """Tells the verify-length policy what came of cycles of `setup`."""
    served = [Served(row.job.ticket, row.column, kind_of(row.job.request)) for row in rows]
    core.verify_policy.look(Length(setup.length, setup.per_request), served, emitted)


def _jobs(batch: Batch, needs: Needs, slots: int, length: Length) -> Jobs:
    return Jobs(batch.core, batch.core.verifying(batch.setup_for(needs), length, slots), needs.stop_width)


def loop_status(batch: Batch, needs: Needs, slots: int, cycles: int, length: Length) -> Status:
    setup = _jobs(batch, needs, slots, length).setup
    return status_of(batch, setup, batch.width_for(cycles, setup.width), slots, needs.stop_width)


def status_of(
    batch: Batch, setup: Setup, width: int, slots: int | None = None, stop_width: int | None = None
) -> Status:
    """Status of a program for cycles; with the batch's slots and stop ids if none are named."""
    jobs = Jobs(batch.core, setup, stop_width or batch.needs.stop_width)
    sizes = slots or batch.size, width
    return batch.core.program_status((jobs.setup, *sizes, jobs.stop_width), lambda: jobs.loop(*sizes).args)


def resize_status(batch: Batch, old: int, new: int) -> Status:
    jobs = _jobs(batch, batch.needs, batch.size, batch.verified)
    name = ("resize", batch.draft, batch.needs.mode in ADJUSTING, old, new, jobs.stop_width)
    return batch.core.program_status(name, lambda: jobs.resize(old, new).args)
