"""The arguments of `dflash-jax`."""

import argparse
from typing import Any

from dflash_jax.cli.arguments import Parser, file_or_stream, file_path, path
from dflash_jax.cli.values import chat_option, layer_ids, spoken_value, token_bias, token_ids
from dflash_jax.options import FLAGS
from dflash_jax.text.answers.choice import REASONING_PARSERS, TOOL_PARSERS

# What a model may have defaults of.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def build_parser() -> argparse.ArgumentParser:
    """Every command's arguments. `COMMANDS` in `dflash_jax.cli.commands` runs what `command` names."""
    parser = Parser(
        prog="dflash-jax", description="DFlash speculative decoding in pure JAX.",
        epilog="dflash-jax COMMAND --help tells the options of a command. Exit codes: 0 done, 1 unexpected, 2 wrong usage or a "
        "wrong value, 3 model not usable, 4 request not usable, 130 interrupted.",
    )  # fmt: skip
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    add_generate(commands)
    add_demo(commands)
    add_chat(commands)
    add_bench(commands)
    add_serve(commands)
    add_train(commands)
    add_info(commands)
    return parser


def add_generate(commands: Any) -> None:
    """Arguments of `generate`."""
    generate = commands.add_parser("generate", help="continue prompts, showing text as it comes")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text to continue; - reads it from stdin")
    _add_model(generate, "--model")
    _add_chat(generate)
    generate.add_argument(
        "--image", type=file_path, action="append", default=[], metavar="FILE",
        help="with --chat: a picture that is shown with every prompt, before its text; may be repeated (extra: vision)",
    )  # fmt: skip
    generate.add_argument(
        "--video", type=file_path, action="append", default=[], metavar="FILE",
        help="the same of a film: an animated GIF, WEBP or PNG, or an mp4, mov, mkv, webm or avi file",
    )  # fmt: skip
    generate.add_argument("--stats", action="store_true", help="speed and acceptance on stderr")
    generate.add_argument("--json", action="store_true", help="one JSON object for each prompt, on a line of its own")
    sampling = _add_sampling(generate, max_tokens=256)
    sampling.add_argument(
        "--n", type=int, default=1, metavar="N",
        help="completions of each prompt, with --seed S the next one has S + 1 (default: 1)",
    )  # fmt: skip
    sampling.add_argument(
        "--generation-config", choices=["auto", "none"], default="none",
        help="whether temperature, top_p, top_k, min_p and repetition_penalty are the model's own where they are not given "
        "(default: none, they are not)",
    )  # fmt: skip
    sampling.add_argument(
        "--structured", type=spoken_value, metavar="FORM",
        help='what a text has to be: {"json": SCHEMA}, {"regex": "[0-9]+"}, {"choice": ["yes", "no"]} or {"grammar": "..."} '
        "(extra: structured)",
    )  # fmt: skip
    # None is what was not given.
    generate.set_defaults(**dict.fromkeys(MODEL_DEFAULTS))
    sampling.add_argument("--keep-special-tokens", action="store_true", help="special tokens are text")
    sampling.add_argument(
        "--truncate-prompt-tokens", type=int, metavar="N",
        help="the last N tokens of a prompt alone; -1 as many as leave room for --max-tokens (default: all)",
    )  # fmt: skip
    sampling.add_argument(
        "--logprobs", type=int, metavar="N",
        help="with --json: log-probabilities of each token and of the N likeliest ones at its place",
    )  # fmt: skip

    sampling.add_argument(
        "--prompt-logprobs", type=int, metavar="N",
        help="with --json: the same of each token of the prompt; then --max-tokens may be 0",
    )  # fmt: skip


def add_demo(commands: Any) -> None:
    """Arguments of `demo`."""
    demo = commands.add_parser("demo", help="what drafting does, shown with the pair that ships")
    demo.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="code to continue (default: three held-out beginnings)"
    )
    _add_model(demo, "--model", max_batch=False)
    demo.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens of an answer (default: 128)")


def add_chat(commands: Any) -> None:
    """Arguments of `chat`."""
    chat = commands.add_parser("chat", help="a conversation at the terminal, for models with a chat template")
    _add_model(chat, "--model", max_batch=False)
    _add_chat_option(chat, "a name for the chat template")
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before everything else")
    chat.add_argument("--stats", action="store_true", help="speed and acceptance behind each answer, on stderr")
    chat.add_argument(
        "--session", type=file_path, metavar="FILE",
        help="keep conversation and options in this file, and go on with those that it has",
    )  # fmt: skip
    sampling = _add_sampling(chat, max_tokens=1024)
    # None is what was not given: those of the session's file count then.
    names = [action.dest for action in sampling._group_actions]
    chat.set_defaults(**dict.fromkeys(names), chat_option=None)


def add_bench(commands: Any) -> None:
    """Arguments of `bench`."""
    bench = commands.add_parser("bench", help="speed as users see it, with and without drafting")
    _add_model(bench, "--model", max_batch=False)
    bench.add_argument("--shapes", metavar="NAME", help="instead of --model: a published shape with random weights")
    bench.add_argument(
        "--prompts",
        type=file_path,
        metavar="FILE",
        help="JSON list, JSON lines or one prompt a line (default: random tokens)",
    )
    bench.add_argument("--input-length", type=int, default=128, metavar="N", help="of random prompts (default: 128)")
    bench.add_argument(
        "--output-length", type=int, default=128, metavar="N", help="tokens of each answer (default: 128)"
    )
    bench.add_argument("--requests", type=int, metavar="N", help="of each run (default: 4 for each user, at least 8)")
    bench.add_argument(
        "--concurrency", type=int, nargs="+", default=[1], metavar="N", help="users at once (default: 1)"
    )
    _add_law(bench.add_argument_group("sampling"))
    _add_chat(bench)
    bench.add_argument(
        "--imposed-acceptance",
        type=float,
        metavar="M",
        help="with --shapes: each cycle gains M tokens; no model's text",
    )
    bench.add_argument("--json", type=file_or_stream, metavar="FILE", help="write all figures there; - is stdout")


def add_serve(commands: Any) -> None:
    """Arguments of `serve`."""
    serve = commands.add_parser("serve", help="an OpenAI-compatible server (extra: serve)")
    _add_model(serve, "--model")
    server = serve.add_argument_group("server")
    server.add_argument(
        "--host", default="127.0.0.1", metavar="HOST", help="address to listen at (default: this machine alone)"
    )
    server.add_argument("--port", type=int, default=8000, metavar="N", help="(default: 8000)")
    server.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what clients call the model (default: what --model says)",
    )
    server.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="a key that clients must give; may be repeated (default: DFLASH_JAX_API_KEY of the environment, where it is set)",
    )  # fmt: skip
    server.add_argument(
        "--max-queue", type=int, default=256, metavar="N", help="requests that wait at most (default: 256)"
    )
    server.add_argument(
        "--max-body-mb", type=float, default=8.0, metavar="N", help="megabytes of a request (default: 8)"
    )
    server.add_argument("--request-timeout", type=float, metavar="S", help="seconds of an answer (default: any)")
    server.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that answers have at SIGTERM (default: 30)",
    )
    server.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="of browsers that may ask; * is all (default: none)",
    )
    server.add_argument(
        "--generation-config", choices=["auto", "none"], default="auto",
        help="whether temperature, top_p, top_k, min_p and repetition_penalty are the model's own where a request names none "
        "(default: auto, they are)",
    )  # fmt: skip
    server.add_argument(
        "--default-max-tokens", type=int, metavar="N",
        help="tokens at most of a chat's answer that names no number (default: what the model has room for)",
    )  # fmt: skip
    server.add_argument(
        "--chat-template", type=file_path, metavar="FILE", help="a template of Jinja's in place of the model's"
    )
    server.add_argument(
        "--request-metrics", action="store_true", help="times and acceptance in every answer, not on demand alone"
    )
    server.add_argument(
        "--tool-parser",
        choices=TOOL_PARSERS,
        default="auto",
        help="form of calls of tools (default: the chat template's)",
    )
    server.add_argument(
        "--reasoning-parser", choices=REASONING_PARSERS, default="auto", help="form of thoughts (default: likewise)"
    )
    server.add_argument("--root-path", default="", metavar="PATH", help="where a proxy shows the server")
    server.add_argument("--no-warmup", action="store_true", help="compile programs when requests first need them")
    server.add_argument("--no-metrics", action="store_true", help="leave /metrics out")
    server.add_argument("--access-log", action="store_true", help="a line for each request on stderr")


def _add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> Any:
    """The group of what `SamplingParams` takes, but for log-probabilities."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N",
        help=f"tokens of an answer at most (default: {max_tokens})",
    )  # fmt: skip
    group.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="tokens of an answer at least (default: 0)"
    )
    _add_law(group)
    _add_adjustments(group)
    group.add_argument("--seed", type=int, metavar="S", help="makes sampling repeatable")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    group.add_argument(
        "--stop-token-ids", type=token_ids, action="extend", default=[], metavar="ID[,ID]",
        help="tokens that end the text beside the model's end tokens; may be repeated",
    )  # fmt: skip
    group.add_argument("--include-stop", action="store_true", help="keep what ended the text in it")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end tokens")
    return group


def add_train(commands: Any) -> None:
    """Arguments of `train`; docs/training.md tells what they do."""
    train = commands.add_parser("train", help="a drafter for a target of your own (extra: train)")
    train.add_argument(
        "--target",
        metavar="PATH",
        help="a converted folder, a Hugging Face folder, or a hub id (default: the one that ships)",
    )
    train.add_argument(
        "--data",
        required=True,
        type=file_path,
        metavar="FILE",
        help="JSON lines: messages, prompt and response, or text",
    )
    train.add_argument(
        "--output", required=True, type=path, metavar="DRAFTER", help="the folder to write, which must not be there yet"
    )
    train.add_argument(
        "--work", type=path, metavar="PATH", help="keeps answers and checkpoints to go on from (default: DRAFTER.work)"
    )
    _add_chat(train)
    answers = train.add_argument_group("answers")
    answers.add_argument(
        "--regenerate", action="store_true", help="have the target answer the prompts: what a drafter must guess"
    )
    answers.add_argument("--temperature", type=float, default=0.7, metavar="T", help="of those answers (default: 0.7)")
    answers.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="of each of them at most (default: 512)"
    )
    shape = train.add_argument_group("drafter")
    shape.add_argument("--kind", choices=["v1", "dflash2", "dspark"], help="(default: dflash2)")
    shape.add_argument("--head-rank", type=int, metavar="N", help="of its selector or Markov head (default: 256)")
    shape.add_argument("--mask-id", type=int, metavar="ID", help="the mask's token (default: the vocabulary's last)")
    shape.add_argument(
        "--taps", type=layer_ids, metavar="I[,I]", help="layers of the target to read (default: five, spaced)"
    )
    for option, value in (("block-size", 16), ("layers", 5)):
        shape.add_argument(f"--{option}", type=int, metavar="N", help=f"(default: {value})")
    run = train.add_argument_group("training")
    for option, about in (
        ("length", "tokens of a row, longer ones are cut (default: 1024)"), ("rows", "of a step (default: 8)"),
        ("anchors", "blocks of each row (default: 64)"), ("steps", "(default: 10000)"), ("seed", "(default: 0)"),
    ):  # fmt: skip
        run.add_argument(f"--{option}", type=int, metavar="N", help=about)
    run.add_argument("--rate", type=float, metavar="R", help="peak learning rate (default: 0.0006)")
    run.add_argument("--optimizer", choices=["adamw", "muon"], help="(default: adamw)")
    run.add_argument("--loss", choices=["dpace", "decay"], help="weights of a block's places (default: dpace)")
    run.add_argument(
        "--teacher",
        choices=["distribution", "tokens"],
        help="learn the target's law or the answers' tokens (default: distribution)",
    )
    run.add_argument(
        "--evaluation-tokens",
        type=int,
        default=128,
        metavar="N",
        help="of each held-out answer; 0 measures nothing (default: 128)",
    )
    run.add_argument(
        "--devices", type=int, default=1, metavar="N", help="GPUs that share the rows of a step (default: 1)"
    )
    run.add_argument("--stop-after", type=float, metavar="S", help="save and end with status 75 after S seconds")


def add_info(commands: Any) -> None:
    """Arguments of `info`."""
    info = commands.add_parser("info", help="models, sizes, memory of pages, versions, device")
    _add_model(info, "model")
    info.add_argument("--json", action="store_true", help="one JSON object")
    info.add_argument(
        "--hashes", action="store_true", help="read a converted folder's files and compare each with what was recorded"
    )
    info.add_argument(
        "--measure-memory", action="store_true",
        help="load the models, serve as many requests of full length as fit, and print what memory that took beside the plan",
    )  # fmt: skip


def _add_law(group: Any) -> None:
    """Adds the options of sampling."""
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    for name, kind, default, value, about in (
        ("--top-p", float, 1.0, "P", "among the likeliest tokens that make up P (default: 1, all)"),
        ("--top-k", int, 0, "K", "among the K likeliest tokens (default: 0, all)"),
        ("--min-p", float, 0.0, "P", "among tokens at least P times as likely as the likeliest (default: 0, all)"),
    ):
        group.add_argument(name, type=kind, default=default, metavar=value, help=about)


def _add_adjustments(group: Any) -> None:
    """Adds the options of penalties, biases and refused words."""
    for name, default, about in (
        ("--presence-penalty", 0.0, "less for tokens that the text holds (default: 0)"),
        ("--frequency-penalty", 0.0, "less for each time that the text holds a token (default: 0)"),
        ("--repetition-penalty", 1.0, "logits of tokens that prompt or text hold are divided by it (default: 1)"),
    ):
        group.add_argument(name, type=float, default=default, metavar="P", help=about)
    group.add_argument(
        "--logit-bias", type=token_bias, action="append", default=[], metavar="ID=B",
        help="added to the logit of a token, from -100 to 100; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--allowed-token-ids", type=token_ids, action="extend", metavar="ID[,ID]",
        help="choose no other tokens; may be repeated",
    )  # fmt: skip
    group.add_argument("--bad-word", action="append", default=[], metavar="TEXT", help="does not come; may be repeated")


def _add_model(parser: argparse.ArgumentParser, name: str, *, max_batch: bool = True) -> None:
    """Adds the options of `load`. `name` is an option's, or an argument's that may be left out and is an option as well."""
    group = parser.add_argument_group("model")
    about = "target: a converted folder, a Hugging Face folder, or a hub id (default: the pair that ships)"
    if name.startswith("-"):
        group.add_argument(name, metavar="PATH", help=about)
    else:
        place = group.add_mutually_exclusive_group()
        place.add_argument(name, metavar="PATH", help=about, nargs="?", default=argparse.SUPPRESS)
        place.add_argument(f"--{name}", metavar="PATH", help="the same, as other commands have it")
    drafts = group.add_mutually_exclusive_group()
    drafts.add_argument("--draft", metavar="PATH", help="drafter: a folder or a hub id (default: the target's own)")
    drafts.add_argument("--no-draft", action="store_true", help="decode with the target alone")
    for option, flag in FLAGS.items():
        if option == "max_batch" and not max_batch:
            continue
        if flag.switch:
            group.add_argument(f"--{option.replace('_', '-')}", help=flag.about, action="store_true", default=None)
            continue
        group.add_argument(
            f"--{option.replace('_', '-')}", help=flag.about, choices=flag.choices,
            type=file_path if flag.metavar == "FILE" else flag.kind,
            metavar=flag.metavar or (None if flag.choices else "N"),
        )  # fmt: skip


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message for the chat template")
    _add_chat_option(parser, "with --chat: a name for the template")


def _add_chat_option(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument(
        "--chat-option", type=chat_option, action="append", default=[], metavar="NAME=VALUE",
        help=f"{about}, such as enable_thinking=false or style=\"two words\"; may be repeated",
    )  # fmt: skip
