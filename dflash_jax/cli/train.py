"""`dflash-jax train`: a drafter for any target."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import tqdm

from dflash_jax.checkpoints.pair import shipped_pair
from dflash_jax.cli.report import position_line
from dflash_jax.cli.terminal import note
from dflash_jax.training.fit_settings import FitSettings
from dflash_jax.training.kinds import HeadSizes
from dflash_jax.training.stages import Clock, Interrupted, latest
from dflash_jax.training.train_any import Task, train_any

UNFINISHED = 75  # the conventional status for "try again": the run stopped at its time limit
_SETTINGS = (
    "kind", "block_size", "layers", "taps", "mask_id", "length", "rows", "anchors", "steps", "rate", "optimizer", "loss", "teacher",
    "seed",
)  # fmt: skip


def train(args: argparse.Namespace) -> int:
    """Trains, shows how far it is, and says what the drafter is worth."""
    given = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    if args.head_rank is not None:
        given["head"] = HeadSizes(rank=args.head_rank)
    settings = FitSettings(**given)
    output = args.output
    work = args.work or output.with_name(f"{output.name}.work")
    task = Task(
        target=args.target or str(shipped_pair() / "target"), data=Path(args.data), output=output,
        work=work, settings=settings, chat=args.chat,
        chat_options=dict(args.chat_option), regenerate=args.regenerate, temperature=args.temperature, max_tokens=args.max_tokens,
        evaluation_tokens=args.evaluation_tokens, devices=args.devices,
    )  # fmt: skip
    clock = Clock(task.work, note, args.stop_after)
    begun = latest(task.work / "drafter") or 0
    with tqdm.tqdm(total=settings.steps, initial=begun, unit="step", disable=not sys.stderr.isatty()) as bar:

        def advance(step: int, metrics: Mapping[str, float]) -> None:
            bar.set_postfix({name: f"{value:.3f}" for name, value in metrics.items()}, refresh=False)
            bar.update(step - bar.n)

        try:
            found = train_any(task, clock, advance)
        except Interrupted as stop:
            note(f"{stop}; the same command goes on")
            return UNFINISHED
    for temperature, row in found.items():
        print(f"temperature {temperature}: {row['tokens_per_cycle']:.2f} tokens per cycle on held-out prompts")
        print(position_line(row["by_position"]))
    print(f"{output} is the drafter: dflash-jax generate ... --model {task.target} --draft {output}")
    return 0
