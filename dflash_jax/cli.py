"""The command `dflash-jax`.

    dflash-jax demo
    dflash-jax generate "def quicksort(" --max-tokens 128 --stats
    echo "Why is the sky blue?" | dflash-jax generate - --model Qwen/Qwen3-4B --chat
    dflash-jax bench --concurrency 1 8
    dflash-jax info

Text goes to stdout, everything else to stderr. Exit codes: 0 done, 1 unexpected, 2 wrong usage, 3 model not usable, 4 request not
usable, 130 interrupted.
"""

import argparse
import dataclasses
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dflash_jax.completion import Completion, Piece
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
from dflash_jax.interrupts import interrupts
from dflash_jax.sampling_params import SamplingParams

OK, UNEXPECTED, USAGE, MODEL, REQUEST, INTERRUPTED = 0, 1, 2, 3, 4, 130


class UsageError(DFlashError):
    """The arguments contradict each other."""


_EXIT_CODES: tuple[tuple[type[DFlashError], int], ...] = (
    (UsageError, USAGE),
    (CheckpointError, MODEL),
    (ConfigError, MODEL),
    (PairError, MODEL),
    (TokenizerError, MODEL),
    (PromptError, REQUEST),
    (ParameterError, REQUEST),
    (CapacityError, REQUEST),
    (DFlashError, UNEXPECTED),
)
# A model may say anything; a terminal would obey some of it.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash-jax", description="DFlash speculative decoding in pure JAX.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    models = argparse.ArgumentParser(add_help=False)
    group = models.add_argument_group("model")
    drafts = group.add_mutually_exclusive_group()
    drafts.add_argument("--draft", metavar="PATH", help="drafter: a folder or a hub id (default: the target's own)")
    drafts.add_argument("--no-draft", action="store_true", help="decode with the target alone")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights, activations and pages")
    group.add_argument(
        "--weight-dtype", choices=("int8", "fp8"), help="large matrices in eight bits, a scale for each row"
    )
    group.add_argument(
        "--verify-length", type=verify_length, metavar="N",
        help="tokens verified in a cycle: a number, or auto for what pays (default: the whole block)",
    )  # fmt: skip
    group.add_argument("--max-model-len", type=int, metavar="N", help="prompt and produced tokens of a request at most")

    group.add_argument("--max-batch", type=int, default=8, metavar="N", help="prompts that run side by side at most")

    generate = commands.add_parser("generate", parents=[models], help="continue prompts, showing text as it comes")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text to continue; - reads it from stdin")
    _add_model(generate, "--model")
    generate.add_argument("--chat", action="store_true", help="each prompt is a user's message for the chat template")
    generate.add_argument("--stats", action="store_true", help="speed and acceptance on stderr")
    generate.add_argument("--json", action="store_true", help="one JSON object for each prompt, on a line of its own")
    sampling = generate.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256, metavar="N")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sampling.add_argument("--seed", type=int, metavar="S", help="makes sampling repeatable")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    generate.set_defaults(run=run_generate)

    demo = commands.add_parser("demo", parents=[models], help="what drafting does, shown with the pair that ships")
    demo.add_argument("prompts", nargs="*", metavar="PROMPT", help="code to continue (default: three short beginnings)")
    _add_model(demo, "--model")
    demo.add_argument("--max-tokens", type=int, default=128, metavar="N")
    demo.set_defaults(run=run_demo)

    add_bench(commands, models)

    info = commands.add_parser("info", parents=[models], help="models, sizes, memory of pages, versions, device")
    _add_model(info, "model")
    info.add_argument("--json", action="store_true", help="one JSON object")
    info.set_defaults(run=run_info)
    return parser


def add_bench(commands: Any, models: argparse.ArgumentParser) -> None:
    bench = commands.add_parser("bench", parents=[models], help="speed as users see it, with and without drafting")
    _add_model(bench, "--model")
    bench.add_argument("--shapes", metavar="NAME", help="instead of --model: a published shape with random weights")
    bench.add_argument(
        "--prompts", metavar="FILE", help="JSON list, JSON lines or one prompt a line (default: random tokens)"
    )
    bench.add_argument("--input-length", type=int, default=128, metavar="N", help="of random prompts (default: 128)")
    bench.add_argument(
        "--output-length", type=int, default=128, metavar="N", help="tokens of each answer (default: 128)"
    )
    bench.add_argument("--requests", type=int, metavar="N", help="of each run (default: 4 for each user, at least 8)")
    bench.add_argument("--concurrency", type=int, nargs="+", default=[1], metavar="N", help="users at once")
    bench.add_argument("--temperature", type=float, default=0.0, metavar="T")
    bench.add_argument("--chat", action="store_true", help="each prompt is a user's message for the chat template")
    bench.add_argument(
        "--imposed-acceptance",
        type=float,
        metavar="M",
        help="with --shapes: each cycle gains M tokens; no model's text",
    )
    bench.add_argument("--json", metavar="FILE", help="write all figures there; - is stdout")
    bench.set_defaults(run=run_bench)


def _add_model(parser: argparse.ArgumentParser, name: str) -> None:
    about = "target: a converted folder, a Hugging Face folder, or a hub id (default: the pair that ships)"
    if name.startswith("-"):
        parser.add_argument(name, metavar="PATH", help=about)
    else:
        parser.add_argument(name, metavar="PATH", help=about, nargs="?")


def verify_length(text: str) -> int | str:
    """An argument of the command line; `load` says what is wrong with others."""
    return int(text) if text.lstrip("-").isdigit() else text


def load_options(args: argparse.Namespace) -> dict:
    """Arguments of `dflash_jax.load` as the command line gave them."""
    options = {"path": args.model, "draft": False if args.no_draft else args.draft}
    options |= {"dtype": args.dtype, "weight_dtype": args.weight_dtype, "verify_length": args.verify_length}
    return options | {"max_model_len": args.max_model_len, "max_batch": args.max_batch}


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def begin(args: argparse.Namespace) -> None:
    """Before anything slow is imported: files are read ahead, compiled programs are kept, the device starts."""
    from dflash_jax import early

    early.read_models(args.model, False if args.no_draft else args.draft)
    from dflash_jax.compilation_cache import enable_compilation_cache

    try:
        enable_compilation_cache(note)
    except OSError as error:
        note(f"compiled programs are not kept: {error}")
    early.start_device()


def read_prompts(prompts: Sequence[str]) -> list[str]:
    """The prompts of the command line; `-` is all of stdin without its final line break."""
    if prompts.count("-") > 1:
        raise UsageError("- may be given once: stdin holds one prompt")
    return [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]


def run_generate(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p,
        seed=args.seed, stop=args.stop,
    )  # fmt: skip
    prompts = read_prompts(args.prompts)
    begin(args)
    from dflash_jax.engine import Run
    from dflash_jax.generation import GENERATE_CYCLES, STREAM_CYCLES, make_requests, stream
    from dflash_jax.model import Model, load
    from dflash_jax.report import stats_lines

    cycles = GENERATE_CYCLES if args.json else STREAM_CYCLES

    def first_run(model: Model) -> Run:
        return model.engine.run(make_requests(model, prompts, params, chat=args.chat), cycles=cycles)

    model = load(**load_options(args), ahead=first_run)
    for notice in model.notices:
        note(notice)
    pieces = stream(model, prompts, params, chat=args.chat, cycles=cycles)
    longest = 1 if model.draft is None else model.draft.num_drafts + 1
    for completion in show(pieces, prompts, as_json=args.json):
        if args.stats:
            for line in stats_lines(completion, longest, bars=can_show_bars(sys.stderr.encoding)):
                print(line, file=sys.stderr)
    return OK


def show(pieces: Iterable[Piece], prompts: Sequence[str], *, as_json: bool) -> Iterator[Completion]:
    """Prints texts in the prompts' order, the first unfinished one as it comes, and yields each completion when it is out."""
    waiting: list[list[str]] = [[] for _ in prompts]
    done: dict[int, Completion] = {}
    current = 0
    safe = _CONTROLS if sys.stdout.isatty() else {}
    _header(prompts, current, as_json=as_json)
    for piece in pieces:
        waiting[piece.index].append(piece.text.translate(safe))
        if piece.completion is not None:
            done[piece.index] = piece.completion
        while current in range(len(prompts)):
            if not as_json:
                print("".join(waiting[current]), end="", flush=True)
                waiting[current].clear()
            if current not in done:
                break
            row = {"prompt": prompts[current], **dataclasses.asdict(done[current])}
            print(json.dumps(row, ensure_ascii=False) if as_json else "", flush=True)
            yield done[current]
            current += 1
            _header(prompts, current, as_json=as_json)


def _header(prompts: Sequence[str], index: int, *, as_json: bool) -> None:
    if not as_json and 1 < len(prompts) > index:
        print(f"==> {prompts[index]!r:.70} <==", flush=True)


def can_show_bars(encoding: str | None) -> bool:
    return (encoding or "").lower().replace("-", "").startswith("utf")


def run_demo(args: argparse.Namespace) -> int:
    begin(args)
    from dflash_jax.demo import demo

    return demo(args.prompts, args.max_tokens, load_options(args), bars=can_show_bars(sys.stdout.encoding))


def run_bench(args: argparse.Namespace) -> int:
    if args.shapes is not None and args.model is not None:
        raise UsageError("--shapes makes its own weights: leave --model out")
    if args.imposed_acceptance is not None and args.shapes is None:
        raise UsageError("--imposed-acceptance is for random weights: name --shapes")
    begin(args)
    from dflash_jax.bench.command import bench

    bench(args, load_options(args))
    return OK


def run_info(args: argparse.Namespace) -> int:
    from dflash_jax.info import collect, lines

    facts = collect(**{name: value for name, value in load_options(args).items() if name != "verify_length"})
    print(json.dumps(facts, indent=2) if args.json else "\n".join(lines(facts)))
    return OK


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        from importlib.metadata import version

        print(version("dflash-jax"))
        return OK
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        with interrupts():
            return args.run(args)
    except DFlashError as error:
        head, *problems = str(error).split("\n  - ")
        print(f"error: {head} {'; '.join(problems)}".rstrip(), file=sys.stderr)
        return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left. Python would complain once more while it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNEXPECTED


if __name__ == "__main__":
    sys.exit(main())
