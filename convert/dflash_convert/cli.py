"""The command `dflash-convert`.

    dflash-convert Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --output qwen3-8b
    dflash-convert Qwen3-8B --dry-run
    dflash-convert qwen3-8b --reverse --output Qwen3-8B

Exit codes: 0 done, 1 unexpected, 2 wrong usage, 3 source not usable, 4 verification failed, 5 output exists or cannot be
written, 130 interrupted.
"""

import argparse
import logging
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dflash_convert.console import UNEXPECTED, Console, peak_rss
from dflash_convert.reverse import tensor_bytes, write_huggingface
from dflash_convert.verify import VerificationError, verify_hash, verify_logits
from dflash_convert.write import OutputError, OutputExistsError, output_folder, refuse_existing, write_converted
from dflash_jax.checkpoints.converted import DRAFT, MARKER, open_converted
from dflash_jax.checkpoints.hf_folder import CONFIG
from dflash_jax.checkpoints.hub import resolve_source
from dflash_jax.checkpoints.huggingface import HuggingFaceCheckpoint, inspect, open_checkpoint
from dflash_jax.checkpoints.mapping import KEEP
from dflash_jax.checkpoints.pair import check_pair
from dflash_jax.cli.main import leave_stdout, open_closed_streams
from dflash_jax.cli.signals import interrupts
from dflash_jax.device import local_device
from dflash_jax.errors import CheckpointError, ConfigError, DFlashError, PairError
from dflash_jax.models import DFlashConfig
from dflash_jax.options import FLOAT_DTYPES

OK, USAGE, SOURCE, VERIFY, EXISTS, INTERRUPTED = 0, 2, 3, 4, 5, 130


class UsageError(DFlashError):
    """The arguments contradict each other."""


# Most special first: a failed verification is a CheckpointError too.
_FAILURES: tuple[tuple[type[BaseException], int, str], ...] = (
    (KeyboardInterrupt, INTERRUPTED, "interrupted"),
    (UsageError, USAGE, "usage"),
    (OutputExistsError, EXISTS, "output exists"),
    (OutputError, EXISTS, "output not usable"),
    (VerificationError, VERIFY, "verification failed"),
    (CheckpointError, SOURCE, "source not usable"),
    (ConfigError, SOURCE, "source not usable"),
    (PairError, SOURCE, "source not usable"),
    (Exception, UNEXPECTED, "unexpected"),
)


@dataclass(frozen=True)
class Source:
    """One checkpoint of a run: its role in the output, its folder, and what the marker says of its origin."""

    part: str
    folder: Path
    origin: dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    open_closed_streams()
    console = Console(quiet=options.quiet, as_json=options.json)
    if "JAX_PLATFORMS" not in os.environ:
        # Bytes move on the host. Orbax would start JAX's GPU backend all the same, which takes most of the card's memory.
        jax.config.update("jax_platforms", "cpu")
    # Orbax logs each thread's traceback of a write that failed, asyncio every failure but the first. The error is told below.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with interrupts(signal.SIGTERM):
            code = _run(options, console)
    except BrokenPipeError:
        # The reader of stdout has left.
        leave_stdout()
        return UNEXPECTED
    except (Exception, KeyboardInterrupt) as error:
        code, label = next((code, label) for kind, code, label in _FAILURES if isinstance(error, kind))
        message = str(error) or type(error).__name__
        if code == UNEXPECTED and not isinstance(error, OSError | DFlashError):  # which name what is at fault
            traceback.print_exc()
        console.report |= {"status": label, "error": message, "problems": list(getattr(error, "problems", ()))}
        console.fail(label, message)
    return console.finish(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash-convert",
        description="Converts a Hugging Face checkpoint (and its drafter) into a folder that dflash_jax loads.",
        epilog="Exit codes: 0 done, 1 unexpected, 2 wrong usage, 3 source not usable, 4 verification failed, 5 output exists "
        "or cannot be written, 130 interrupted.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a folder with config.json and safetensors files, or owner/name on the hub")
    add("--output", metavar="DIR", type=Path, help="the folder to write; it appears whole or not at all")
    add("--draft", metavar="SOURCE", help="the DFlash drafter to convert along, into DIR/draft")
    add("--revision", metavar="REV", help="branch, tag or commit of SOURCE on the hub")
    add("--draft-revision", metavar="REV", help="the same for --draft")
    add("--dtype", choices=(KEEP, *FLOAT_DTYPES), default=KEEP, help="dtype of the weights (default: keep)")
    add("--dry-run", action="store_true", help="print the plan and write nothing")
    add(
        "--verify",
        choices=("none", "hash", "logits"),
        default="hash",
        help="hash: read everything back and compare every bit; logits: that, and run both checkpoints (default: hash)",
    )
    add("--overwrite", action="store_true", help=f"replace DIR if it is a converted folder, one with {MARKER}")
    add("--reverse", action="store_true", help="SOURCE is a converted folder; write a Hugging Face folder")
    add("--json", action="store_true", help="print one JSON object on stdout")
    add("--quiet", action="store_true", help="print errors only")
    return parser


def _run(options: argparse.Namespace, console: Console) -> int:
    started = time.monotonic()
    if options.output is None and not options.dry_run:
        raise UsageError("--output DIR is needed (or --dry-run, which writes nothing)")
    if options.reverse:
        foreign = options.draft or options.revision or options.dry_run or options.dtype != KEEP
        if foreign or options.overwrite or options.verify == "logits":
            raise UsageError("--reverse goes with --output, --verify none|hash, --json and --quiet only")
        _reverse(options, console)
    else:
        local_device()
        given = [source for source in (options.source, options.draft) if source]
        fetched = not all(Path(source).exists() for source in given)
        if fetched and options.output is not None and not options.dry_run:
            refuse_existing(options.output, overwrite=options.overwrite)  # before gigabytes come from the hub
        sources = [Source("target", *_resolve(options.source, options.revision))]
        if options.draft:
            sources.append(Source("draft", *_resolve(options.draft, options.draft_revision)))
        if options.dry_run:
            return _dry_run(sources, options, console)
        _convert(sources, options, console)
    seconds, peak = time.monotonic() - started, peak_rss()
    console.report["seconds"] = round(seconds, 3)
    console.say(f"wrote {options.output} in {seconds:.1f} s; peak memory {peak / 2**20:,.0f} MiB")
    return OK


def _resolve(source: str, revision: str | None) -> tuple[Path, dict[str, Any]]:
    folder, commit = resolve_source(source, revision)
    if (folder / MARKER).exists():
        problem = "is converted already: load it as it is, or give --reverse to make a Hugging Face folder of it"
        raise CheckpointError(str(folder), problem)
    # A local path says nothing to others and may say too much; the folder's own name is enough.
    given = folder.resolve().name if Path(source).expanduser().exists() else source
    return folder, {"given": given, "revision": commit}


def _dry_run(sources: Sequence[Source], options: argparse.Namespace, console: Console) -> int:
    code, parts = OK, {}
    for source in sources:
        checkpoint, problems = inspect(source.folder, options.dtype)
        part: dict[str, Any] = {"problems": problems}
        console.say(f"{source.part}: {source.folder}")
        if checkpoint is not None:
            plan = checkpoint.plan
            part |= {
                "family": checkpoint.family.name,
                "rows": plan.rows(),
                "missing": list(plan.missing),
                "unexpected": list(plan.unexpected),
                "parameters": len(plan.steps),
                "bytes": plan.nbytes,
                "predicted_peak_bytes": plan.peak_bytes,
                "notices": _notices(source, checkpoint, sources),
            }
            for line in [*plan.table(), *(f"notice: {notice}" for notice in part["notices"])]:
                console.say(line)
        if problems:
            code = SOURCE
            error = CheckpointError(str(source.folder), problems)
            console.tell(str(error))
        parts[source.part] = part
    console.report |= {"status": "source not usable" if code else "ok", "dry_run": True, "plan": parts}
    return code


def _convert(sources: Sequence[Source], options: argparse.Namespace, console: Console) -> None:
    output: Path = options.output
    for source in sources:
        _refuse_nesting(output, source.folder)
    checkpoints = [open_checkpoint(source.folder, options.dtype) for source in sources]
    _check_roles(checkpoints)
    nbytes = sum(checkpoint.plan.nbytes for checkpoint in checkpoints)
    with output_folder(output, overwrite=options.overwrite, nbytes=nbytes) as temporary:
        for source, checkpoint in zip(sources, checkpoints, strict=True):
            folder = temporary if source is sources[0] else temporary / DRAFT
            folder.mkdir(exist_ok=True)
            for notice in _notices(source, checkpoint, sources):
                console.say(f"notice: {notice}")
            write_converted(folder, checkpoint, source.origin | {"dtype": options.dtype}, console.progress)
            result = {
                "parameters": len(checkpoint.plan.steps),
                "bytes": checkpoint.plan.nbytes,
                "notices": _notices(source, checkpoint, sources),
            }
            if options.verify != "none":
                try:
                    verify_hash(folder, checkpoint.plan, console.progress)
                except VerificationError as error:  # of a folder that will be gone
                    raise VerificationError(str(source.folder), error.problems) from error
            if options.verify == "logits":
                result["logit_difference"] = verify_logits(folder, source.folder, checkpoint.plan, options.dtype)
                console.say(f"{source.part}: outputs differ by {result['logit_difference']:.3g} of the largest value")
            console.report[source.part] = result
    console.report |= {"output": str(output), "verified": options.verify}


def _notices(source: Source, checkpoint: HuggingFaceCheckpoint, sources: Sequence[Source]) -> list[str]:
    """What to say of one checkpoint of a run: `load` would have found a drafter beside it, its output has none."""
    beside = source.folder / DRAFT
    if len(sources) > 1 or not (beside / CONFIG).is_file():
        return checkpoint.notices
    return [*checkpoint.notices, f"{beside} is not converted along: give --draft {beside}"]


def _check_roles(checkpoints: Sequence[HuggingFaceCheckpoint]) -> None:
    """Whether the second checkpoint drafts for the first."""
    if len(checkpoints) == 1:
        return
    target, draft = checkpoints
    if target.family.role != "target" or not isinstance(draft.config, DFlashConfig):
        raise PairError(
            f"SOURCE must be a target and --draft a drafter, got families {target.family.name} and {draft.family.name}; "
            "swap them or drop --draft"
        )
    check_pair(target.config, draft.config)


def _reverse(options: argparse.Namespace, console: Console) -> None:
    _refuse_nesting(options.output, Path(options.source))
    converted = open_converted(options.source)
    parts = [converted, *([open_converted(converted.draft)] if converted.draft else [])]
    with output_folder(options.output, nbytes=sum(map(tensor_bytes, parts))) as temporary:
        for part in parts:
            folder = temporary if part is converted else temporary / DRAFT
            folder.mkdir(exist_ok=True)
            write_huggingface(folder, part, console.progress)
            if lost := part.marker["left_out"]:
                console.say(f"notice: left out by the conversion, so not written: {', '.join(lost)}")
            if options.verify == "hash":
                verify_hash(part.folder, open_checkpoint(folder).plan, console.progress)
    console.report |= {"output": str(options.output), "verified": options.verify}


def _refuse_nesting(output: Path, source: Path) -> None:
    """An output inside its source (or around it) would read what it writes."""
    ours, theirs = output.resolve(), source.resolve()
    if ours == theirs or theirs in ours.parents or ours in theirs.parents:
        raise UsageError(f"--output {output} and source {source} lie inside one another; name another output")
