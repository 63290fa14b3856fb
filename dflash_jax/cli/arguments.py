"""Command-line arguments: a parser that helps with typing errors, and types of options that are paths. All commands share them."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

MOST_USAGE_LINES = 6


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that names the option which was probably meant.

    What a subcommand does not know is its own error, under its own usage line; argparse would leave it to the parser above.
    Subcommands of a `Parser` are `Parser`s as well.
    """

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The namespace and an empty list: an unknown argument ends the process with exit code 2."""
        self._given = sys.argv[1:] if args is None else list(args)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Prints usage and message, with what was probably meant, and ends the process with exit code 2."""
        # What stands behind the name of a subcommand is that one's.
        own = takewhile(lambda word: word.startswith("-"), self._given) if self._subparsers else self._given
        hints = [f"{word}: did you mean {meant}?" for word in own if (meant := self._meant(word))]
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            close = difflib.get_close_matches(choice[1], re.findall(r"[\w.-]+", choice[2]), n=1)
            hints += [f"did you mean {meant}?" for meant in close]
        self._print_message(self._short_usage(), sys.stderr)
        self.exit(2, f"{self.prog}: error: {'; '.join([message, *hints])}\n")

    def _short_usage(self) -> str:
        """Usage without the options where these fill a screen, which would hide what the error is."""
        usage = self.format_usage()
        if usage.count("\n") <= MOST_USAGE_LINES:
            return usage
        formatter = self._get_formatter()
        formatter.add_usage(None, [action for action in self._actions if not action.option_strings], [])
        places = formatter.format_help().partition(self.prog)[2].strip()
        return f"usage: {self.prog} [OPTION ...] {places}".rstrip() + f"\n       {self.prog} --help tells the options\n"

    def _meant(self, word: str) -> str | None:
        """The option that looks most like an unknown one; None for words that are no options, known ones and their prefixes."""
        name = word.partition("=")[0]
        options = [option for option in self._option_string_actions if option.startswith("--")]
        if not name.startswith("--") or name == "--" or any(option.startswith(name) for option in options):
            return None
        # Without the dashes, which all have in common: `--model` is not much like `--help`.
        close = difflib.get_close_matches(name[2:], [option[2:] for option in options], n=1)
        return f"--{close[0]}" if close else None


def path(text: str) -> Path:
    """An argument that is a path: "~" is a home, also behind "=", where shells leave it as it is."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path was given")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        message = f"{text} begins with the home of a user whom this machine does not know"
        raise argparse.ArgumentTypeError(message) from None


def file_path(text: str) -> Path:
    """An argument that is the path of a file, which may not be there yet."""
    if text.endswith(os.sep):
        raise argparse.ArgumentTypeError(f"{text} is a folder's name; name a file")
    return path(text)


def file_or_stream(text: str) -> str:
    """An argument that is the path of a file, or "-" for a standard stream."""
    return text if text == "-" else str(file_path(text))
