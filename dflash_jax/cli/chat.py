"""The command `dflash-jax chat`: messages and commands from the terminal, streamed answers."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

from dflash_jax.cli.report import mean_acceptance, stats_lines, tokens_per_second
from dflash_jax.cli.session import FIELDS, Session
from dflash_jax.cli.signals import interrupts
from dflash_jax.cli.terminal import note, printable, shows_all
from dflash_jax.cli.values import chat_option
from dflash_jax.errors import DFlashError, ParameterError, PromptError
from dflash_jax.generation import STREAM_CYCLES
from dflash_jax.interactive.chat import Chat
from dflash_jax.model import Model, load
from dflash_jax.text.pictures.clips import clip_of
from dflash_jax.text.pictures.reading import opened

PROMPT = "> "
HELP = """/reset             forget what was said
/undo              forget the last message and its answer
/system [TEXT]     what the model is told before everything else; without TEXT nothing
/image FILE        a picture that is shown with the next message
/video FILE        a film that is shown with it
/set [NAME=VALUE]  an option of sampling or of the chat template, such as temperature=0.7; alone it lists them
/stats [on|off]    speed and tokens per cycle so far; on or off: behind each answer
/exit              end, as Ctrl-D does
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one; // begins a message with a slash."""


def open_chat(path: str | None, options: Mapping[str, Any], session: Session) -> Chat:
    """Loads a model and compiles what the first answer calls while weights are read. Raises what `load` and `Chat` raise."""
    params = session.sampling()
    made: list[Chat] = []

    def first_run(model: Model) -> Any:
        chat = Chat(
            model, params, system=session.system, chat_options=session.chat_options
        )  # refused before weights are read
        chat.history += session.history
        made.append(chat)
        return model.engine.run([chat.request("Hello")], cycles=STREAM_CYCLES)

    asked: Any = {**options, "max_batch": 1}
    model = load(path, ahead=first_run, **asked)
    model.tell = note
    for notice in model.notices:
        note(notice)
    return made[0]


def lines() -> Iterator[str]:
    """Messages: at a terminal with its editing, elsewhere one a line. A backslash at a line's end joins the next one to it."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # gives `input` its editing and its history

    said = ""
    while True:
        try:
            with interrupts():
                line = input(PROMPT if not said else ". ") if interactive else sys.stdin.readline()
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit ends)", file=sys.stderr)
            said = ""
            continue
        except EOFError:
            print()
            return
        if not interactive and not line:
            return
        line = line.rstrip("\r\n")
        if line.endswith("\\"):
            said += line[:-1] + "\n"
            continue
        yield said + line
        said = ""


def converse(chat: Chat, session: Session, *, stats: bool = False) -> None:
    """Answers messages until there are no more."""
    if sys.stdin.isatty():
        print(f"{chat.model!r}\n/help tells the commands", file=sys.stderr)
    shown = Commands(chat, session, stats=stats)
    for line in lines():
        if not line.strip():
            continue
        try:
            with interrupts():
                if line.startswith("/") and not line.startswith("//"):
                    if not shown.obey(line):
                        return
                else:
                    shown.answer(line[1:] if line.startswith("//") else line)
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
        except DFlashError as error:
            print(printable(f"error: {error}", sys.stderr), file=sys.stderr)
        session.history[:] = chat.history
        session.keep()


class Commands:
    """Handler of one line of input."""

    def __init__(self, chat: Chat, session: Session, *, stats: bool):
        self.chat, self.session, self.stats = chat, session, stats
        self.images: list[str] = []
        self.videos: list[str] = []

    def answer(self, text: str) -> None:
        """Prints the answer to a message as it comes."""
        pieces = self.chat.stream(text, images=self.images, videos=self.videos)
        self.images, self.videos = [], []
        with closing(pieces):
            for piece in pieces:
                print(printable(piece.text, sys.stdout), end="", flush=True)
        print(flush=True)
        if self.stats:
            self._tell_last()

    def obey(self, line: str) -> bool:
        """Does what a command says. False for the one that ends it."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        match name:
            case "/exit" | "/quit":
                return False
            case "/help":
                print(HELP, file=sys.stderr)
            case "/reset":
                self.chat.reset()
            case "/undo":
                if not self.chat.undo():
                    note("nothing was said")
            case "/system":
                self.chat.system = self.session.system = rest or None
            case "/image":
                self.images.append(self._shown(rest, opened))
            case "/video":
                self.videos.append(self._shown(rest, clip_of))
            case "/set":
                self._set(rest)
            case "/stats":
                self._stats(rest)
            case _:
                raise ParameterError(f"there is no {name}: /help tells the commands")
        return True

    def _shown(self, name: str, read: Callable[[str], Any]) -> str:
        """A file's whole path. Raises PromptError for one that cannot be read, or where the model sees nothing."""
        if self.chat.model.vision is None:
            raise PromptError("this model was loaded without a vision tower, so it sees no picture")
        path = str(Path(name).expanduser().absolute())  # what a session's file names is found from anywhere
        read(path)
        return path

    def _set(self, text: str) -> None:
        session, chat = self.session, self.chat
        if not text:
            changed = {one.name: getattr(chat.params, one.name) for one in fields(chat.params)}
            told = {
                name: value for name, value in changed.items() if value not in (None, (), False)
            } | chat.chat_options
            print(printable(" ".join(f"{name}={value}" for name, value in told.items()), sys.stderr), file=sys.stderr)
            return
        try:
            name, value = chat_option(text)
        except argparse.ArgumentTypeError as error:
            raise ParameterError(str(error)) from None
        if name in FIELDS:
            before = dict(session.params)
            session.params[name] = value
            try:
                chat.params = session.sampling()
            except DFlashError:
                session.params = before
                raise
        else:
            chat.set_options(session.chat_options | {name: value})
            session.chat_options = dict(chat.chat_options)

    def _stats(self, text: str) -> None:
        if text in ("on", "off"):
            self.stats = text == "on"
            return
        done = self.chat.completions
        if not done:
            note("nothing was answered")
            return
        self._tell_last()
        print(
            f"{len(done)} answer{'s' * (len(done) != 1)}: {mean_acceptance(done):.2f} tokens per cycle, "
            f"{tokens_per_second(done):.0f} tokens/s",
            file=sys.stderr,
        )

    def _tell_last(self) -> None:
        drafter = self.chat.model.draft
        longest = 1 if drafter is None else drafter.num_drafts + 1
        for line in stats_lines(self.chat.completions[-1], longest, bars=shows_all(sys.stderr)):
            print(line, file=sys.stderr)
