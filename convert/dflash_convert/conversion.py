"""A run of `dflash-convert` after its arguments are read: plan, write, verify, and the reverse."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dflash_convert.console import Console, peak_rss
from dflash_convert.errors import UsageError, VerificationError
from dflash_convert.parser import DTYPES, VERIFICATIONS
from dflash_convert.reverse import tensor_bytes, write_huggingface
from dflash_convert.verify import verify_hash, verify_logits
from dflash_convert.write import output_folder, refuse_existing, write_converted
from dflash_jax.checkpoints.converted import DRAFT, MARKER, VISION, open_converted
from dflash_jax.checkpoints.hf_folder import CONFIG
from dflash_jax.checkpoints.hub import resolve_source
from dflash_jax.checkpoints.huggingface import HuggingFaceCheckpoint, inspect, open_checkpoint
from dflash_jax.checkpoints.mapping import KEEP
from dflash_jax.checkpoints.pair import check_pair
from dflash_jax.compile.device import local_device
from dflash_jax.errors import CheckpointError, ConfigError, PairError, TokenizerError
from dflash_jax.models import DFlashConfig
from dflash_jax.text.tokenizer import Tokenizer, end_token_ids

OK, SOURCE = 0, 3


@dataclass(frozen=True)
class Options:
    """Options of a run: the arguments of `dflash-convert`, under their names, but for those of its output on a terminal.

    Raises:
      UsageError: `dtype` or `verify` is none of the choices.
    """

    source: str
    output: Path | None = None
    draft: str | None = None
    revision: str | None = None
    draft_revision: str | None = None
    dtype: str = KEEP
    dry_run: bool = False
    verify: str = VERIFICATIONS[1]
    overwrite: bool = False
    reverse: bool = False

    def __post_init__(self):
        for name, choices in (("dtype", DTYPES), ("verify", VERIFICATIONS)):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Source:
    """One checkpoint of a run: its role in the output, its folder, and what the marker says of its origin."""

    part: str
    folder: Path
    origin: dict[str, Any]


def run(options: Options, console: Console) -> int:
    """Does what the arguments say; returns the exit code.

    Raises:
      UsageError: the arguments contradict each other.
      DFlashError: a source or the output is not usable, or what was written is not what the source holds.
    """
    started = time.monotonic()
    if options.output is None and not options.dry_run:
        raise UsageError("--output DIR is needed (or --dry-run, which writes nothing)")
    if options.reverse:
        foreign = options.draft or options.revision or options.dry_run or options.dtype != KEEP
        if foreign or options.overwrite or options.verify == "logits":
            raise UsageError("--reverse (reverse=True) goes with an output and --verify none|hash only")
        _reverse(options, console)
    else:
        local_device()
        given = [source for source in (options.source, options.draft) if source]
        fetched = not all(_home_expanded(source).exists() for source in given)
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


def _home_expanded(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:  # no such user: who opens it says so
        return Path(source)


def _check_text(folder: Path) -> None:
    """Whether `load` would take a target's tokenizer, chat template and end tokens.

    Raises:
      TokenizerError, ConfigError: a file cannot be used.
    """
    end_token_ids(folder, Tokenizer.from_folder(folder))


def _text_problems(folder: Path) -> list[str]:
    try:
        _check_text(folder)
    except (TokenizerError, ConfigError) as error:
        return [str(error)]
    return []


def _dry_run(sources: Sequence[Source], options: Options, console: Console) -> int:
    code, parts = OK, {}
    for source in sources:
        checkpoint, problems = inspect(source.folder, options.dtype)
        if checkpoint is not None and checkpoint.family.role == "target":
            problems = [*problems, *_text_problems(source.folder)]
        part: dict[str, Any] = {"problems": problems}
        console.say(f"{source.part}: {source.folder}")
        if checkpoint is not None:
            plan = checkpoint.plan
            part |= {
                "family": checkpoint.family.name,
                "rows": plan.rows() + ([] if checkpoint.vision is None else checkpoint.vision.plan.rows()),
                "missing": list(plan.missing),
                "unexpected": list(plan.unexpected),
                "parameters": len(plan.steps),
                "bytes": plan.nbytes,
                "predicted_peak_bytes": plan.peak_bytes,
                "notices": _notices(source, checkpoint, sources),
            }
            lines = plan.table() + ([] if checkpoint.vision is None else checkpoint.vision.plan.table())
            for line in [*lines, *(f"notice: {notice}" for notice in part["notices"])]:
                console.say(line)
        if problems:
            code = SOURCE
            error = CheckpointError(str(source.folder), problems)
            console.tell(str(error))
        parts[source.part] = part
    console.report |= {"status": "source not usable" if code else "ok", "dry_run": True, "plan": parts}
    return code


def _convert(sources: Sequence[Source], options: Options, console: Console) -> None:
    output = cast(Path, options.output)
    for source in sources:
        _refuse_nesting(output, source.folder)
    checkpoints = [open_checkpoint(source.folder, options.dtype) for source in sources]
    _check_roles(checkpoints)
    if checkpoints[0].family.role == "target":
        _check_text(sources[0].folder)
    nbytes = sum(part.plan.nbytes for one in checkpoints for part in (one, one.vision) if part is not None)
    with output_folder(output, overwrite=options.overwrite, nbytes=nbytes) as temporary:
        for source, checkpoint in zip(sources, checkpoints, strict=True):
            folder = temporary if source is sources[0] else temporary / DRAFT
            folder.mkdir(exist_ok=True)
            for notice in _notices(source, checkpoint, sources):
                console.say(f"notice: {notice}")
            parts = [(folder, checkpoint)]
            if checkpoint.vision is not None:
                parts.append((folder / VISION, checkpoint.vision))
            for own, part in parts:
                own.mkdir(exist_ok=True)
                write_converted(own, part, source.origin | {"dtype": options.dtype}, console.progress)
            result = {
                "parameters": sum(len(part.plan.steps) for _, part in parts),
                "bytes": sum(part.plan.nbytes for _, part in parts),
                "notices": _notices(source, checkpoint, sources),
            }
            if options.verify != "none":
                try:
                    for own, part in parts:
                        verify_hash(own, part, console.progress)
                except VerificationError as error:  # of a folder that will be gone
                    raise VerificationError(str(source.folder), error.problems) from error
            if options.verify == "logits":
                result["logit_difference"] = verify_logits(folder, source.folder, checkpoint.plan, checkpoint.dtype)
                console.say(f"{source.part}: outputs differ by {result['logit_difference']:.3g} of the largest value")
            console.report[source.part] = result
    console.report |= {"output": str(output), "verified": options.verify}


def _notices(source: Source, checkpoint: HuggingFaceCheckpoint, sources: Sequence[Source]) -> list[str]:
    """Notices of one checkpoint of a run: `load` would have found a drafter beside it, its output has none."""
    beside = source.folder / DRAFT
    if len(sources) > 1 or not (beside / CONFIG).is_file():
        return checkpoint.notices
    return [*checkpoint.notices, f"{beside} is not converted along: give --draft {beside}"]


def _check_roles(checkpoints: Sequence[HuggingFaceCheckpoint]) -> None:
    """Whether the second checkpoint drafts for the first."""
    if len(checkpoints) == 1:
        return
    target, draft = checkpoints
    if (target.family.role, draft.family.role) != ("target", "draft"):
        raise PairError(
            f"SOURCE must be a target and --draft a drafter, got families {target.family.name} and {draft.family.name}; "
            "swap them or drop --draft"
        )
    check_pair(target.config, cast(DFlashConfig, draft.config))


def _reverse(options: Options, console: Console) -> None:
    source, output = _home_expanded(options.source), cast(Path, options.output)
    _refuse_nesting(output, source)
    converted = open_converted(source)
    _check_text(converted.folder)
    notices: list[str] = []
    parts = [converted, *([open_converted(converted.draft)] if converted.draft else [])]
    with output_folder(output, nbytes=sum(map(tensor_bytes, parts))) as temporary:
        for part in parts:
            folder = temporary if part is converted else temporary / DRAFT
            folder.mkdir(exist_ok=True)
            write_huggingface(folder, part, console.progress)
            if lost := part.marker["left_out"]:
                notices.append(f"left out by the conversion, so not written: {', '.join(lost)}")
                console.say(f"notice: {notices[-1]}")
            if options.verify == "hash":
                written = open_checkpoint(folder)
                verify_hash(part.folder, written, console.progress)
                if part.vision is not None and written.vision is not None:
                    verify_hash(part.vision.folder, written.vision, console.progress)
    console.report |= {"output": str(output), "verified": options.verify, "notices": notices}


def _refuse_nesting(output: Path, source: Path) -> None:
    """An output inside its source (or around it) would read what it writes."""
    ours, theirs = Path(os.path.realpath(output)), Path(os.path.realpath(source))  # links in a circle lead nowhere
    if ours == theirs or theirs in ours.parents or ours in theirs.parents:
        raise UsageError(f"output {output} and source {source} lie inside one another; name another output")
