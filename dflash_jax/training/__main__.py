"""Command line of the training package: `python -m dflash_jax.training --out DIR --work WORKDIR`."""

import argparse
import dataclasses
import importlib.metadata
import json
import shlex
import sys
from pathlib import Path

import jax
import numpy as np

from dflash_jax.checkpoints.atomic import written_whole
from dflash_jax.errors import DFlashError
from dflash_jax.training.card import cards
from dflash_jax.training.corpus import TrainingError, build_corpus, heldout_prompts, heldout_windows
from dflash_jax.training.drafter import train_drafter
from dflash_jax.training.evaluate import lines, report_card
from dflash_jax.training.export import export_pair, write_json
from dflash_jax.training.kinds import KINDS
from dflash_jax.training.optimizer import half
from dflash_jax.training.rollouts import roll_out
from dflash_jax.training.settings import PRESETS, Settings, with_changes
from dflash_jax.training.stages import Clock, Interrupted, kept_json
from dflash_jax.training.target import heldout_loss, train_target

UNFINISHED = 75  # the conventional exit status for "try again": the run stopped at its time limit


def parser() -> argparse.ArgumentParser:
    """Arguments of `python -m dflash_jax.training`."""
    out = argparse.ArgumentParser(
        prog="python -m dflash_jax.training", description="Train the target and drafter that ship here."
    )
    out.add_argument("--out", type=Path, required=True, help="where the folders target and draft are written")
    out.add_argument(
        "--work", type=Path, required=True, help="corpus, checkpoints and logs; a second run goes on from here"
    )
    out.add_argument("--preset", choices=sorted(PRESETS), default="full")
    out.add_argument("--folder", help="train on the Python files of this folder instead of installed packages")
    out.add_argument("--target-steps", type=int)
    out.add_argument("--draft-steps", type=int)
    out.add_argument("--target-rate", type=float)
    out.add_argument("--draft-rate", type=float)
    out.add_argument("--draft-kind", choices=KINDS)
    out.add_argument("--optimizer", choices=("adamw", "muon"))
    out.add_argument("--loss", choices=("dpace", "decay"))
    out.add_argument(
        "--taps", type=lambda text: tuple(map(int, text.split(","))), help="target layers to tap, such as 1,2,3,4"
    )
    out.add_argument("--seed", type=int)
    out.add_argument("--stop-after", type=float, metavar="SECONDS", help="save and exit with status 75 after this long")
    return out


# Settings that a command line says by name, as it comes; taps are written in a form of their own.
_SAID = (
    "folder", "target_steps", "draft_steps", "target_rate", "draft_rate", "draft_kind", "optimizer", "loss", "seed",
)  # fmt: skip


def settings_of(options: argparse.Namespace) -> Settings:
    return with_changes(PRESETS[options.preset], **{name: getattr(options, name) for name in (*_SAID, "taps")})


def reproduction(settings: Settings, preset: str) -> str:
    """The command line that asks for these settings."""
    words = ["python", "-m", "dflash_jax.training", "--out", "DIR", "--work", "WORKDIR", "--preset", preset]
    for name in _SAID:
        if getattr(settings, name) != getattr(PRESETS[preset], name):
            words += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    if settings.taps != PRESETS[preset].taps:
        words += ["--taps", ",".join(map(str, settings.taps))]
    return shlex.join(words)


def versions() -> str:
    found = {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def check_work(settings: Settings, work: Path) -> None:
    """Remembers the settings in the work folder. Raises TrainingError where it holds what a run with others has left."""
    path = work / "settings.json"
    ours = json.loads(json.dumps(dataclasses.asdict(settings)))
    if not path.exists():
        with written_whole(path) as scratch:
            scratch.write_text(json.dumps(ours, indent=1))
        return
    theirs = kept_json(path)
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if names:
        shown = ", ".join(f"{name} {theirs.get(name)!r:.60}, now {ours.get(name)!r:.60}" for name in names)
        raise TrainingError(
            f"{work} holds a run with other settings ({shown}): name another --work, or repeat its arguments"
        )


def train(settings: Settings, preset: str, out: Path, work: Path, clock: Clock) -> None:
    """All stages. Each reads what an earlier process left in `work`.

    Raises:
      Interrupted: the clock ran out.
      TrainingError: the corpus is too small, or `work` is of a run with other settings.
    """
    check_work(settings, work)
    clock.report(f"device: {jax.devices()[0].device_kind}")
    corpus = build_corpus(settings, work / "corpus", clock.report)
    length = settings.rollouts[0].prompt
    prompts = heldout_prompts(corpus, length, settings.evaluation_prompts, settings.seed)
    write_json(
        work / "heldout_prompts.json",
        [{key: prompt[key] for key in ("text", "source", "licence")} for prompt in prompts[: settings.shipped_prompts]],
    )
    target = train_target(settings, corpus.tokens, work / "target", clock)
    loss = heldout_loss(settings, target, heldout_windows(corpus, settings.target_length, 512))
    clock.report(f"target: held-out loss {loss:.4f}")
    data = roll_out(settings, target, corpus.prompt_tokens, work / "rollouts", clock)
    draft = train_drafter(settings, target, data, work / "drafter", clock)
    target, draft = half(target), half(draft)
    evaluation = report_card(settings, target, draft, np.asarray([prompt["ids"] for prompt in prompts], np.int32))
    for line in lines(evaluation):
        clock.report(line)
    record = {
        "manifest": corpus.manifest,
        "log": clock.log,
        "evaluation": evaluation,
        "heldout_loss": loss,
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "command": reproduction(settings, preset),
    }
    write_json(work / "record.json", record)
    sizes = export_pair(settings, target, draft, corpus.tokenizer_path, cards(settings, record), out)
    for name, size in sizes.items():
        clock.report(f"wrote {name}: {size:,} bytes")
    clock.report(f"wrote {sum(sizes.values()):,} bytes in all")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        for folder in (options.out.parent, options.work):  # not after minutes of training
            folder.mkdir(parents=True, exist_ok=True)
        clock = Clock(options.work, lambda line: print(line, flush=True), options.stop_after)
    except OSError as error:
        print(f"error: --out and --work must be folders that can be written to: {error}", file=sys.stderr)
        return 1
    try:
        train(settings_of(options), options.preset, options.out, options.work, clock)
    except Interrupted as stop:
        clock.report(f"{stop}; run the same command again to go on")
        return UNFINISHED
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
