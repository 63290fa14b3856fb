"""The arguments of `dflash-convert`. Nothing slow is imported: help and mistakes are answered at once."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from dflash_jax.cli.arguments import Parser, path
from dflash_jax.options import FLOAT_DTYPES

DTYPES = ("keep", *FLOAT_DTYPES)
VERIFICATIONS = ("none", "hash", "logits")
EXIT_CODES = (
    "Exit codes: 0 done, 1 unexpected, 2 wrong usage, 3 source not usable, 4 verification failed, 5 output exists or cannot be "
    "written, 130 interrupted."
)


def build_parser() -> argparse.ArgumentParser:
    """Every argument of the command."""
    parser = Parser(
        prog="dflash-convert",
        description="Converts a Hugging Face checkpoint (and its drafter) into a folder that dflash_jax loads.",
        epilog=EXIT_CODES,
    )
    add = parser.add_argument
    add("--version", action=_Version, help="print the version and exit")
    add("source", metavar="SOURCE", help="a folder with config.json and safetensors files, or owner/name on the hub")
    add("--output", metavar="DIR", type=path, help="the folder to write; it appears whole or not at all")
    add("--draft", metavar="SOURCE", help="the DFlash drafter to convert along, into DIR/draft")
    add("--revision", metavar="REV", help="branch, tag or commit of SOURCE on the hub")
    add("--draft-revision", metavar="REV", help="the same for --draft")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of the weights (default: keep)")
    add("--dry-run", action="store_true", help="print the plan and write nothing")
    add(
        "--verify",
        choices=VERIFICATIONS,
        default=VERIFICATIONS[1],
        help="hash: read everything back and compare every bit; logits: that, and run both checkpoints (default: hash)",
    )
    add("--overwrite", action="store_true", help="replace DIR if it is a converted folder, one with conversion.json")
    add("--reverse", action="store_true", help="SOURCE is a converted folder; write a Hugging Face folder")
    add("--json", action="store_true", help="print one JSON object on stdout")
    add("--quiet", action="store_true", help="print errors only")
    return parser


class _Version(argparse.Action):
    """Prints the version and ends the process; argparse's own action would have it read for every conversion."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        try:
            print(version("dflash-jax"), flush=True)
        except OSError as error:  # a disk that is full, a reader that has left
            parser.exit(1, f"{parser.prog}: {error}\n")
        parser.exit()
