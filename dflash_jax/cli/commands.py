"""The command `dflash-jax`.

    dflash-jax demo
    dflash-jax generate "def quicksort(" --max-tokens 128 --stats
    echo "Why is the sky blue?" | dflash-jax generate - --model Qwen/Qwen3-4B --chat
    dflash-jax chat --model Qwen/Qwen3-4B
    dflash-jax bench --concurrency 1 8
    dflash-jax serve --model Qwen/Qwen3-4B
    dflash-jax train --target Qwen/Qwen3-4B --data answers.jsonl --output drafter
    dflash-jax info

Text goes to stdout, everything else to stderr. Exit codes: 0 done, 1 unexpected, 2 wrong usage or a wrong value of an option, 3
model not usable, 4 request not usable (its prompt, or its length), 130 interrupted.
"""

import argparse
import dataclasses
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from dflash_jax.cli.parser import MODEL_DEFAULTS, build_parser
from dflash_jax.cli.progress import announced, told_if_slow
from dflash_jax.cli.signals import interrupts, was_interrupted
from dflash_jax.cli.streams import leave_stdout, open_closed_streams
from dflash_jax.cli.terminal import json_line, note, printable, shows_all
from dflash_jax.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DFlashError,
    PairError,
    ParameterError,
    PromptError,
    TokenizerError,
)  # fmt: skip
from dflash_jax.options import FLAGS, read_options
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.text.completion import Completion, Piece

OK, UNEXPECTED, USAGE, MODEL, REQUEST, INTERRUPTED = 0, 1, 2, 3, 4, 130


class UsageError(DFlashError):
    """The arguments contradict each other."""


_EXIT_CODES: tuple[tuple[type[DFlashError], int], ...] = (
    (UsageError, USAGE),
    (ParameterError, USAGE),
    (CheckpointError, MODEL),
    (ConfigError, MODEL),
    (PairError, MODEL),
    (TokenizerError, MODEL),
    (PromptError, REQUEST),
    (CapacityError, REQUEST),
    (DFlashError, UNEXPECTED),
)
MOST_PROBLEMS = 6  # of a folder, in the one line that tells them


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of `dflash_jax.load` that the command line gave; the others keep their defaults."""
    options: dict[str, Any] = {"draft": False if args.no_draft else args.draft}
    given = {option: getattr(args, option, None) for option in FLAGS}
    options |= {name: value for name, value in given.items() if value is not None}
    if args.calibration is not None:
        from dflash_jax.bench.workload import read_prompts as read_texts

        options["calibration"] = read_texts(args.calibration)
    return options


def check_models(args: argparse.Namespace) -> None:
    """Raises CheckpointError for names that are no folder here and no model elsewhere, before seconds of imports."""
    from dflash_jax.checkpoints.hub import find_here

    named = ((args.model, args.revision), (None if args.no_draft else args.draft, args.draft_revision))
    for name, revision in named:
        if name is not None:
            find_here(name, revision)


def begin(args: argparse.Namespace) -> None:
    """Before anything slow is imported: files are read ahead, compiled programs are kept, the device starts."""
    from dflash_jax.cli import startup as early

    if getattr(args, "chat", False):
        from dflash_jax.text import template_process

        template_process.start()
    early.read_models(args.model, False if args.no_draft else args.draft)
    from dflash_jax.compile.cache_folders import enable_compilation_cache

    try:
        enable_compilation_cache(note)
    except OSError as error:
        note(f"compiled programs are not kept: {error}")
    early.start_device()


def read_prompts(prompts: Sequence[str]) -> list[str]:
    """The prompts of the command line; `-` is all of stdin without its final line break, of Unix or of Windows."""
    if prompts.count("-") > 1:
        raise UsageError("- may be given once: stdin holds one prompt")
    if "-" in prompts and sys.stdin.isatty():
        note("the prompt is read from the terminal; Ctrl-D on a line of its own ends it")
    return [re.sub(r"\r?\n\Z", "", sys.stdin.read()) if prompt == "-" else prompt for prompt in prompts]


def chat_options_of(args: argparse.Namespace) -> dict:
    """Options of the chat template."""
    if args.chat_option and not args.chat:
        raise UsageError("--chat-option is for the chat template: add --chat")
    return dict(args.chat_option)


def run_generate(args: argparse.Namespace) -> int:
    """`dflash-jax generate`: texts to stdout as they come."""
    given = {name: value for name in MODEL_DEFAULTS if (value := getattr(args, name)) is not None} | {
        "max_tokens": args.max_tokens, "seed": args.seed, "stop": args.stop, "stop_token_ids": args.stop_token_ids,
        "ignore_eos": args.ignore_eos, "min_tokens": args.min_tokens, "logprobs": args.logprobs,
        "include_stop": args.include_stop, "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty, "logit_bias": args.logit_bias,
        "allowed_token_ids": args.allowed_token_ids, "bad_words": args.bad_word,
        "skip_special_tokens": not args.keep_special_tokens, "truncate_prompt_tokens": args.truncate_prompt_tokens,
        "prompt_logprobs": args.prompt_logprobs, "n": args.n, "structured": args.structured,
    }  # fmt: skip
    SamplingParams(**given)  # what is wrong is told before a model is loaded
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(args, name) is not None and not args.json:
            raise UsageError(f"--{name.replace('_', '-')} are part of the rows of --json: add it")
    check_models(args)
    chat = {"chat": args.chat, "chat_options": chat_options_of(args)}
    prompts = read_prompts(args.prompts)
    for name in ("image", "video"):
        if getattr(args, name) and not args.chat:
            raise UsageError(f"--{name} is part of a message: add --chat")
    with told_if_slow() as ready:
        return _generate(args, prompts, given, chat, ready)


def _generate(
    args: argparse.Namespace, prompts: list[str], given: dict[str, Any], chat: dict, ready: Callable[[], None]
) -> int:
    begin(args)
    from dflash_jax.cli.report import stats_lines
    from dflash_jax.engine import Run
    from dflash_jax.generation import GENERATE_CYCLES, STREAM_CYCLES, make_requests, stream
    from dflash_jax.model import Model, load

    cycles = GENERATE_CYCLES if args.json else STREAM_CYCLES
    shown = [{"type": kind, kind: str(path)} for kind in ("image", "video") for path in getattr(args, kind)]
    asked: list[Any] = [
        [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}] if shown else text for text in prompts
    ]

    def params_of(model: Model) -> SamplingParams:
        return (
            SamplingParams.from_model(model, **given) if args.generation_config == "auto" else SamplingParams(**given)
        )

    def first_run(model: Model) -> Run:
        return model.engine.run(make_requests(model, asked, params_of(model), **chat), cycles=cycles)

    model = load(args.model, **load_options(args), ahead=first_run)
    model.tell = note
    for notice in model.notices:
        note(notice)
    pieces = stream(model, asked, params_of(model), **chat, cycles=cycles)
    longest = 1 if model.draft is None else model.draft.num_drafts + 1
    each = [prompt for prompt in prompts for _ in range(args.n)]
    for completion in show(announced(pieces, ready), each, as_json=args.json):
        if args.stats:
            for line in stats_lines(completion, longest, bars=shows_all(sys.stderr)):
                print(line, file=sys.stderr)
    return OK


def show(pieces: Iterable[Piece], prompts: Sequence[str], *, as_json: bool) -> Iterator[Completion]:
    """Prints texts in the prompts' order, the first unfinished one as it comes, and yields each completion when it is out."""
    waiting: list[list[str]] = [[] for _ in prompts]
    done: dict[int, Completion] = {}
    current = 0
    _header(prompts, current, as_json=as_json)
    for piece in pieces:
        waiting[piece.index].append(printable(piece.text, sys.stdout))
        if piece.completion is not None:
            done[piece.index] = piece.completion
        while current in range(len(prompts)):
            if not as_json:
                print("".join(waiting[current]), end="", flush=True)
                waiting[current].clear()
            if current not in done:
                break
            row = {"prompt": prompts[current], **dataclasses.asdict(done[current])}
            print(json_line(row, sys.stdout) if as_json else "", flush=True)
            yield done[current]
            current += 1
            _header(prompts, current, as_json=as_json)


def _header(prompts: Sequence[str], index: int, *, as_json: bool) -> None:
    if not as_json and 1 < len(prompts) > index:
        print(f"==> {prompts[index]!r:.70} <==", flush=True)


def run_chat(args: argparse.Namespace) -> int:
    """`dflash-jax chat`: a conversation at the terminal."""
    from dflash_jax.cli.session import Session

    session = Session.begun(args)
    check_models(args)
    args.chat = True  # the process of chat templates starts now
    with told_if_slow() as ready:
        begin(args)
        from dflash_jax.cli.chat import converse, open_chat

        chat = open_chat(args.model, load_options(args), session)
        ready()
    converse(chat, session, stats=args.stats)
    return OK


def run_demo(args: argparse.Namespace) -> int:
    """`dflash-jax demo`: the same prompts with and without drafting."""
    check_models(args)
    begin(args)
    from dflash_jax.cli.demo import demo

    return demo(args.prompts, args.max_tokens, args.model, load_options(args), bars=shows_all(sys.stdout))


def run_bench(args: argparse.Namespace) -> int:
    """`dflash-jax bench`: what users wait for, with and without drafting."""
    made = {"--model": args.model, "--draft": args.draft, "--weight-dtype": args.weight_dtype}
    made |= {"--draft-weight-dtype": args.draft_weight_dtype}
    made |= {"--revision": args.revision, "--draft-revision": args.draft_revision}
    made |= {"--cache-dtype": args.cache_dtype, "--calibration": args.calibration}
    made |= {"--cache-dtype-skip-layers": args.cache_dtype_skip_layers, "--draft-cache-dtype": args.draft_cache_dtype}
    given = [name for name, value in made.items() if value is not None]
    if args.shapes is not None and given:
        raise UsageError(f"--shapes makes its own weights and pages, in --dtype: leave {', '.join(given)} out")
    if args.imposed_acceptance is not None and args.shapes is None:
        raise UsageError("--imposed-acceptance is for random weights: name --shapes")
    if args.imposed_acceptance is not None and args.no_draft:
        raise UsageError("--imposed-acceptance is for drafting: leave --no-draft out")
    if args.shapes is not None and args.prompts is not None:
        raise UsageError("--shapes has no tokenizer for the texts of --prompts: say --input-length")
    chat_options_of(args)
    with told_if_slow():
        begin(args)
        from dflash_jax.cli.bench import bench

        bench(args, load_options(args))
    return OK


def run_serve(args: argparse.Namespace) -> int:
    """`dflash-jax serve`: an OpenAI-compatible server."""
    for name, least in (("port", 0), ("max_queue", 0), ("max_body_mb", 0.001), ("shutdown_timeout", 0)):
        if not getattr(args, name) >= least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.port > 65535:
        raise UsageError(f"--port must be at most 65535, got {args.port}")
    if args.request_timeout is not None and not args.request_timeout > 0:
        raise UsageError(f"--request-timeout must be above 0, got {args.request_timeout}")
    check_models(args)
    if missing := [name for name in ("starlette", "uvicorn", "prometheus_client") if find_spec(name) is None]:
        raise UsageError(f"serve needs {', '.join(missing)}: pip install 'dflash-jax[serve]'")
    args.chat = True  # the process of chat templates starts now
    begin(args)
    from dflash_jax.cli.serve import serve_model

    serve_model(args, load_options(args))
    return OK


def run_info(args: argparse.Namespace) -> int:
    """`dflash-jax info`: what `load` would do, without reading weights unless memory is to be measured."""
    check_models(args)
    from dflash_jax.cli.info import collect, lines

    options = load_options(args)
    read_options(options)
    # Sizes do not depend on texts, which plans do without.
    facts = collect(args.model, **(options | {"calibration": (), "scale_range": None}), hashes=args.hashes)
    if args.measure_memory:
        from dflash_jax.model import load

        facts["measured"] = load(args.model, **options).measure_memory().facts()
    print(json.dumps(facts, indent=2) if args.json else printable("\n".join(lines(facts)), sys.stdout))
    return OK


def run_train(args: argparse.Namespace) -> int:
    """`dflash-jax train`: a drafter for any target."""
    chat_options_of(args)
    if missing := [name for name in ("optax", "orbax.checkpoint") if not _is_there(name)]:
        raise UsageError(f"train needs {', '.join(missing)}: pip install 'dflash-jax[train]'")
    from dflash_jax.cli.train import train

    return train(args)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def run_version(_: argparse.Namespace) -> int:
    """`dflash-jax --version`."""
    from importlib.metadata import version

    print(version("dflash-jax"))
    return OK


COMMANDS = {
    "generate": run_generate, "chat": run_chat, "demo": run_demo, "bench": run_bench, "serve": run_serve, "train": run_train,
    "info": run_info, "--version": run_version,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; errors are one line on stderr."""
    parser = build_parser()
    args = parser.parse_args(argv)
    open_closed_streams()
    command = "--version" if args.version else args.command
    if command is None:
        parser.print_help(sys.stderr)
        return USAGE
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        with interrupts():
            code = COMMANDS[command](args)
            sys.stdout.flush()  # here, where a disk that is full can be told of
            return code
    except DFlashError as error:
        head, *problems = str(error).split("\n  - ")
        if (more := len(problems) - MOST_PROBLEMS) > 0:
            problems[MOST_PROBLEMS:] = [f"and {more} more, which dflash-convert --dry-run lists"]
        print(printable(f"error: {head} {'; '.join(problems)}".rstrip(), sys.stderr), file=sys.stderr)
        return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))
    except (KeyboardInterrupt, ImportError) as error:
        if not was_interrupted(error):
            raise
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left.
        leave_stdout()
        return UNEXPECTED
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        leave_stdout()
        return UNEXPECTED


if __name__ == "__main__":
    sys.exit(main())
