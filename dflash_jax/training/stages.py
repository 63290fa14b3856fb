"""Runs optimiser steps in compiled chunks, with checkpoints, a time limit and a log that together survive interruption."""

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import orbax.checkpoint as ocp

from dflash_jax.checkpoints.atomic import written_whole
from dflash_jax.errors import DFlashError, ParameterError
from dflash_jax.training.optimizer import learning_rates

_SAVE_EVERY_S = 150.0
_SHOW_EVERY_S = 10.0


@runtime_checkable
class Pace(Protocol):
    """Settings of a run's steps: the number in one compiled call, and the share that warms up."""

    @property
    def chunk(self) -> int: ...
    @property
    def warmup(self) -> float: ...


class Interrupted(Exception):
    """The time limit was reached. Everything needed to go on is in the work folder."""


class Clock:
    """Time limit and progress lines of one process, and the run's log across processes."""

    def __init__(self, work: Path, report: Callable[[str], None], stop_after: float | None = None):
        self.report_line, self.stop_after, self.started = report, stop_after, time.monotonic()
        self.path = work / "log.json"
        self.log: dict[str, Any] = kept_json(self.path) if self.path.exists() else {}

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def expired(self) -> bool:
        return self.stop_after is not None and self.elapsed() > self.stop_after

    def report(self, line: str) -> None:
        self.report_line(f"[{self.elapsed():6.1f} s] {line}")

    def note(self, stage: str, **values: Any) -> None:
        """Keeps `values` in the log of `stage`; `seconds` adds up over processes."""
        entry = self.log.setdefault(stage, {})
        values["seconds"] = entry.get("seconds", 0.0) + values.get("seconds", 0.0)
        entry.update(values)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(self.path) as scratch:
            scratch.write_text(json.dumps(self.log, indent=1))


def kept_json(path: Path) -> Any:
    """JSON that an earlier process of a run wrote into its work folder.

    Raises:
      ParameterError: the file was cut off or changed since.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ParameterError(
            f"{path} is not the JSON that a run keeps there ({error}): remove it, or name another work folder"
        ) from error


def latest(folder: Path) -> int | None:
    """The step of the newest complete checkpoint in `folder`."""
    steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
    return max(steps, default=None)


def save(folder: Path, step: int, state: Any) -> None:
    """Writes a checkpoint (Orbax renames it into place when whole) and removes older ones.

    Raises:
      DFlashError: the folder cannot be written, for example because its disk is full; older checkpoints stay.
    """
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.absolute() / str(step), state, force=True)
    except (OSError, ValueError) as error:  # TensorStore's errors of the disk are ValueErrors
        for part in folder.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(part, ignore_errors=True)
        raise DFlashError(
            f"{folder} cannot hold the checkpoint of step {step} ({str(error).rsplit(': ', 1)[-1]:.200}): make room there; "
            "the same command goes on from the newest whole checkpoint"
        ) from error
    for path in folder.glob("*"):
        if path.name.isdigit() and int(path.name) < step:
            shutil.rmtree(path)


def restore(folder: Path, step: int, like: Any) -> Any:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder.absolute() / str(step), abstract)


def run_steps(
    stage: str,
    state: Any,
    chunk: Callable[[Any, int, Any], tuple[Any, Mapping[str, Any]]],
    folder: Path,
    clock: Clock,
    *,
    total: int,
    peak: float,
    settings: Pace,
    until: float | None = None,
) -> Any:
    """Steps `0 .. total - 1` in chunks of `settings.chunk`, from the newest checkpoint in `folder` if there is one.

    Args:
      chunk: `(state, first step, learning rates) -> (state, metrics)`; what it draws may depend on the step number only, so
        that a resumed run equals an uninterrupted one bit for bit.
      until: seconds of the clock at which to end. After each chunk `total` becomes what fits at the pace so far, so that rates have
        fallen by then; they depend on the clock, and a resumed run is another one.

    Raises:
      Interrupted: the clock ran out, after saving.
    """
    first = began_step = latest(folder) or 0
    if first:
        state = restore(folder, first, state)
        clock.report(f"{stage}: going on from step {first}")
    history = [row for row in clock.log.get(stage, {}).get("history", []) if row["step"] <= first]
    began = saved = clock.elapsed()
    shown, compiled = -math.inf, None
    while first < total:
        count = min(settings.chunk, total - first)
        state, metrics = chunk(state, first, learning_rates(first, count, total, peak, settings.warmup))
        first += count
        metrics = {name: float(value) for name, value in metrics.items()}
        history.append({"step": first, **metrics})
        now, stop = clock.elapsed(), clock.expired()
        if until is not None and now >= until:
            total = first
        elif until is not None and compiled is not None:
            pace = (now - compiled[0]) / (first - compiled[1])
            total = first + settings.chunk * int((until - now) / (pace * settings.chunk))
        elif until is not None:
            compiled = now, first  # the first chunk says nothing of the pace
        if now - shown > _SHOW_EVERY_S or first == total or stop:
            values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            pace = (now - began) / (first - began_step) * 1e3
            clock.report(f"{stage}: step {first} of {total}, {values}, {pace:.2f} ms a step")
            shown = now
        if first == total or stop or now - saved > _SAVE_EVERY_S:
            save(folder, first, state)
            clock.note(stage, steps=first, history=history, seconds=clock.elapsed() - saved)
            saved = clock.elapsed()
        if stop and first < total:
            raise Interrupted(f"{stage}: stopped at step {first} of {total}")
    return state
