"""`dflash-jax bench`: loads, measures each number of users with and without drafting, prints a table, keeps the figures whole."""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dflash_jax.bench.measure import Figures, check_imposed, measure
from dflash_jax.bench.workload import LAW, Workload, published_shape, random_pair, read_prompts, synthetic
from dflash_jax.checkpoints.atomic import written_whole
from dflash_jax.checkpoints.pair import open_pair
from dflash_jax.cli.info import PACKAGES, installed_version
from dflash_jax.cli.report import position_line
from dflash_jax.cli.terminal import note
from dflash_jax.compile.device import local_device
from dflash_jax.config import DecoderConfig
from dflash_jax.engine.planning import choose_model_len
from dflash_jax.errors import ParameterError
from dflash_jax.model import Model, load
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.text.prompts import prompt_ids

STDOUT = "-", "/dev/stdout"
COLUMNS = (
    ("users", "{0.concurrency}"), ("draft", "{draft}"), ("tokens/s", "{0.tokens_per_s:.0f}"),
    ("first p50", "{first[p50]:.1f} ms"), ("p99", "{first[p99]:.1f} ms"), ("next p50", "{gap[p50]:.2f} ms"),
    ("p99", "{gap[p99]:.2f} ms"), ("per cycle", "{0.tokens_per_cycle:.2f}"), ("verified", "{verified}"),
)  # fmt: skip


def bench(args: argparse.Namespace, options: Mapping[str, Any]) -> list[Figures]:
    """Runs what the command line asked for; `options` are `load`'s. Prints to stderr where the JSON goes to stdout."""
    out = sys.stderr if args.json in STDOUT else sys.stdout
    check(args)
    texts = [] if args.prompts is None else read_prompts(args.prompts)
    model = _model(args, options)
    for notice in model.notices:
        note(notice)
    workload = _workload(args, model, texts)
    device, law = jax.local_devices()[0].device_kind, SamplingParams()
    drawn = [f", {name} {value:g}" for name, value in workload.law.items() if value != getattr(law, name)]
    print(f"{model.name} on {device} in {model.engine.dtype}: {workload.name}{''.join(drawn)}", file=out)
    if args.imposed_acceptance is not None:
        print(f"acceptance is imposed: {args.imposed_acceptance} tokens a cycle, no model's text", file=out)
    print(line([name for name, _ in COLUMNS]), file=out, flush=True)
    rows = []
    for users in args.concurrency:
        for draft in (True, False) if model.draft is not None and not args.no_draft else (False,):
            figures = measure(
                model, workload, concurrency=users, requests=args.requests or max(8, 4 * users), draft=draft,
                imposed_acceptance=args.imposed_acceptance if draft else None,
            )  # fmt: skip
            rows.append(figures)
            print(line(cells(figures)), file=out, flush=True)
            if shares := position_line(figures.acceptance_by_position):
                print(f"  {shares}", file=out, flush=True)
    if args.json is not None:
        write(args.json, [environment(model) | row.to_dict() for row in rows])
    return rows


def check(args: argparse.Namespace) -> None:
    """Raises ParameterError before a model is loaded for numbers that make no run, or for figures that could not be written."""
    counts = {"--input-length": args.input_length, "--output-length": args.output_length, "--requests": args.requests}
    for name, value in [*counts.items(), *(("--concurrency", users) for users in args.concurrency)]:
        if value is not None and value < 1:
            raise ParameterError(f"{name} must be at least 1, got {value}")
    SamplingParams(max_tokens=args.output_length, **_law(args))
    if args.requests is not None and args.requests < max(args.concurrency):
        raise ParameterError(
            f"--requests {args.requests} is fewer than --concurrency {max(args.concurrency)}: one for each user"
        )
    if args.shapes is not None:
        _, target, drafter = published_shape(args.shapes)
        model_len(args, target)
        if args.imposed_acceptance is not None:
            check_imposed(args.imposed_acceptance, drafter.num_drafts + 1)
    if args.prompts is None and args.chat:
        raise ParameterError("--chat is for the texts of a prompt file, random tokens take no template: name --prompts")
    if args.json is None or args.json in STDOUT:
        return
    if (path := Path(args.json)).is_dir():
        raise ParameterError(f"--json {args.json} is a folder: name the file that is to be written")
    if not os.access(path if _is_special(path) else path.resolve().parent, os.W_OK):
        raise ParameterError(f"--json {args.json}: its folder does not exist or cannot be written to")


def _is_special(path: Path) -> bool:
    """Whether something is there that takes what is written and may not be replaced, as a pipe or `/dev/null`."""
    return path.exists() and not path.is_file()


def _model(args: argparse.Namespace, options: Mapping[str, Any]) -> Model:
    users = max(args.concurrency)
    if args.shapes is None:
        target, _ = open_pair(args.model, False, revision=args.revision)
        changes = {"max_batch": users, "max_model_len": model_len(args, target.config)}
        return load(args.model, **dict(options) | changes)
    device = local_device().device_kind
    note(f"filling the shapes of {args.shapes} with random weights on {device} ...")
    length = args.max_model_len or args.input_length + args.output_length + 64
    return random_pair(args.shapes, **dict(options) | {"max_batch": users, "max_model_len": length})


def model_len(args: argparse.Namespace, target: DecoderConfig) -> int | None:
    """`max_model_len`: as asked, or more than the default where random prompts with their answers need more.

    Raises:
      ParameterError: they need more than was asked, or than the model was made for.
    """
    if args.prompts is not None:
        return args.max_model_len
    needed, asked = args.input_length + args.output_length, args.max_model_len
    most, name = (target.max_position, "the model takes") if asked is None else (asked, "--max-model-len is")
    if needed > most:
        raise ParameterError(
            f"--input-length {args.input_length} and --output-length {args.output_length} are {needed} tokens together, "
            f"{name} {most}"
        )
    return max(needed, choose_model_len(target, None)) if asked is None else asked


def _law(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in LAW}


def _workload(args: argparse.Namespace, model: Model, texts: Sequence[str]) -> Workload:
    if args.prompts is None:
        count = max(8, *args.concurrency)
        return synthetic(model.target.vocab_size, args.input_length, count, args.output_length, **_law(args))
    told = {"chat": args.chat, "options": dict(args.chat_option)}
    ids = tuple(prompt_ids(model.tokenizer, model.name, text, **told) for text in texts)
    return Workload(f"{len(texts)} prompts of {args.prompts}", ids, args.output_length, **_law(args))


def line(texts: Sequence[str]) -> str:
    """One row of the table."""
    return "  ".join(f"{text:>11}" for text in texts)


def cells(figures: Figures) -> list[str]:
    """Cells of a row in the table; a dash for a figure that was not measured."""
    none = {"p50": float("nan"), "p99": float("nan")}
    values = {"first": figures.time_to_first_token_ms or none, "gap": figures.inter_token_ms or none}
    cycles = {str(length): count for length, count in figures.verify_lengths.items()}
    cycles |= {f"~{length}": count for length, count in figures.shared_lengths.items()}  # of slots on average
    most = sorted(cycles, key=lambda length: cycles[length], reverse=True)[:2]
    names = {"draft": "yes" if figures.draft else "no", "verified": ", ".join(most) or "-"}
    shown = [form.format(figures, **names, **values) for _, form in COLUMNS]
    return ["-" if "nan" in text else text for text in shown]


def environment(model: Model) -> dict[str, Any]:
    """Environment of the figures: versions, device and options."""
    device = jax.local_devices()[0]
    return {
        "model": model.name,
        "dtype": str(model.engine.dtype),
        "device": device.device_kind,
        "versions": {name: installed_version(name) for name in PACKAGES},
        "date": datetime.date.today().isoformat(),
    }


def write(path: str, rows: list[dict[str, Any]]) -> None:
    """All rows as one JSON list: to stdout (`-`), or to a file, whole or not at all, where a link to it leads."""
    text = json.dumps(rows, indent=1) + "\n"
    if path in STDOUT:
        print(text, end="")
        return
    if _is_special(Path(path)):
        Path(path).write_text(text)
        return
    with written_whole(Path(path).resolve()) as scratch:
        scratch.write_text(text)
