"""Sessions of `dflash-jax chat`: messages and options, kept in a file if one is named."""

import argparse
import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_jax.checkpoints.json_files import read_object
from dflash_jax.errors import ParameterError
from dflash_jax.sampling_params import SamplingParams

DEFAULT_TOKENS = 1024
FIELDS = tuple(one.name for one in dataclasses.fields(SamplingParams))
_OPTION_OF = {"bad_words": "bad_word"}  # fields whose option on the command line has another name


@dataclass
class Session:
    """A conversation's messages and options.

    Attributes:
      file: where they are kept; None for nowhere.
      params: fields of `SamplingParams` by name, those that are not their defaults.
    """

    file: Path | None = None
    system: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    chat_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begun(cls, args: argparse.Namespace) -> "Session":
        """Session of the command line's options, and of its file for the rest. Raises ParameterError for a file of another kind."""
        made = cls(args.session)
        if made.file is not None and made.file.exists():
            made._read(made.file)
        elif made.file is not None and not made.file.absolute().parent.is_dir():
            raise ParameterError(f"there is no folder for {made.file}: make it, or name another file with --session")
        given = {name: getattr(args, _OPTION_OF.get(name, name), None) for name in FIELDS}
        made.params |= {name: value for name, value in given.items() if value is not None}
        made.chat_options |= dict(args.chat_option or ())
        made.system = made.system if args.system is None else args.system
        made.sampling()  # what is wrong is told before a model is loaded
        return made

    def sampling(self) -> SamplingParams:
        """Raises ParameterError."""
        values: Any = {"max_tokens": DEFAULT_TOKENS} | self.params
        return SamplingParams(**values)

    def keep(self) -> None:
        """Writes the file, where there is one: another one in its place, so that it is whole at any time."""
        if self.file is None:
            return
        told = {name: value for name, value in dataclasses.asdict(self).items() if name != "file"}
        beside = self.file.with_name(f"{self.file.name}.new")
        beside.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(beside, self.file)

    def _read(self, file: Path) -> None:
        try:
            told = read_object(file)
            self.system, self.history = told["system"], told["history"]
            self.params, self.chat_options = dict(told["params"]), dict(told["chat_options"])
            whole = (self.system is None or isinstance(self.system, str)) and all(
                isinstance(message["role"], str) and isinstance(message["content"], str | list)
                for message in self.history
            )
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise ParameterError(f"{file} is not the file of a conversation: name another one with --session")
