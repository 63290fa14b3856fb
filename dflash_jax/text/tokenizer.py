"""The boundary between strings and token ids: `tokenizer.json`, chat templates, end tokens."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers

from dflash_jax.checkpoints.json_files import read_object
from dflash_jax.errors import ConfigError, PromptError, TokenizerError
from dflash_jax.text.backend import named_errors, read_backend
from dflash_jax.text.chat_template import render
from dflash_jax.text.special_tokens import MAX_ID, complete, is_id, named_tokens
from dflash_jax.text.token_bytes import REPLACEMENT, TokenBytes

MAX_TEMPLATE_BYTES = 1 << 20
MAX_END_TOKENS = 64
_TOO_LARGE = f"is larger than {MAX_TEMPLATE_BYTES} bytes: not a chat template"


class Tokenizer:
    """A Hugging Face fast tokenizer with its chat template.

    Attributes:
      backend: the `tokenizers.Tokenizer`.
      template: the chat template's source, or None.
      special: named special tokens for the template (`bos_token`, `eos_token`, ...).
      tool_template: a second template, for messages with tools, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: str | None = None,
        special: Mapping[str, str] | None = None,
        *,
        tool_template: str | None = None,
    ):
        self.backend, self.template, self.special = backend, template, dict(special or {})
        self.tool_template = tool_template
        self._kinds: dict[int, Literal["text", "special", "unknown"]] = {}
        self._alone: tuple[dict[int, str | None], dict[int, str | None]] = ({}, {})  # without and with special tokens

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a model folder, or None where it has no `tokenizer.json`.

        Raises:
          TokenizerError: a file is there and cannot be used.
          ConfigError: `tokenizer_config.json` is no JSON object.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        backend = read_backend(path)
        # How somebody once prepared batches for training: here a prompt would be cut, or filled up, without a word.
        backend.no_truncation()
        backend.no_padding()
        settings = read_json(folder / "tokenizer_config.json")
        older = read_json(folder / "special_tokens_map.json")
        with named_errors(f"{folder} has tokens beside tokenizer.json that tokenizers cannot take"):
            complete(backend, settings, older, read_json(folder / "added_tokens.json"))
        templates = _templates(folder, settings)
        special = named_tokens(settings, older)
        return cls(backend, templates.get("default"), special, tool_template=templates.get("tool_use"))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, with the tokens its post-processor adds unless `special` is False.

        Raises:
          PromptError: a character has no UTF-8 form, as Python reads bytes that are no UTF-8 from a terminal or a file name.
          TokenizerError: the tokenizer fails on this text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            wrong = f"character {error.start} of the text is {text[error.start]!r}, which no UTF-8 text has"
            raise PromptError(f"{wrong}: give UTF-8, or token ids") from None
        with named_errors("the tokenizer fails on this text"):
            return self.backend.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids, special tokens left out but for `special`. Raises TokenizerError where the tokenizer fails on them."""
        with named_errors("the tokenizer fails on these token ids"):
            return self.backend.decode(list(ids), skip_special_tokens=not special)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Bytes of single tokens."""
        return TokenBytes(self.backend)

    @property
    def joins_bytes(self) -> bool:
        """Whether `decode` joins the bytes of tokens that are not silent; another decoder may regard a token's neighbors."""
        return self.token_bytes.whole and type(self).decode is Tokenizer.decode

    def alone(self, token: int, *, special: bool = False) -> str | None:
        """Text of a token among others that are whole characters, if a text is the bytes of its tokens (`joins_bytes`): nothing
        where it is silent, and None where its bytes may be a part of a character."""
        known = self._alone[special]
        if token not in known:
            silent = self.is_silent(token, special=special)
            text = "" if silent else self.token_bytes.of(token).decode("utf-8", "replace")
            known[token] = None if REPLACEMENT in text else text
        return known[token]

    def is_silent(self, token: int, *, special: bool = False) -> bool:
        """Whether a token is no text among any others: a special one, unless `special` are text, or one that no vocabulary has."""
        if (kind := self._kinds.get(token)) is None:
            with named_errors(f"the tokenizer fails on token id {token}"):
                kind = self._kinds[token] = self._kind(token)
        return kind == "unknown" or (kind == "special" and not special)

    def _kind(self, token: int) -> Literal["text", "special", "unknown"]:
        name = self.backend.id_to_token(token)
        if name is None:
            return "unknown"
        # One that decodes to nothing in any case, as a mark for a space may alone, is no special one.
        hidden = name in self._special_names and bool(self.backend.decode([token], skip_special_tokens=False))
        return "special" if hidden else "text"

    @cached_property
    def _special_names(self) -> frozenset[str]:
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """Token ids of messages through the chat template, ready for the answer.

        The template is data from a model folder: it runs in Jinja's immutable sandbox, in a process of its own whose time and
        memory are bounded, and so is its text (`dflash_jax.text.template_process`). Messages and options reach it as JSON.

        Args:
          messages: objects with at least `role` and `content`.
          **options: further names for the template, for example `enable_thinking=False` or `tools=[...]`.

        Raises:
          PromptError: there is no template, or it refuses these messages.
          ParameterError: the template asks for no such option, or one is nothing that JSON could hold.
          TokenizerError: the template itself is broken, or passes a bound.
        """
        template = self.template if options.get("tools") is None else self.tool_template or self.template
        if template is None and self.tool_template is not None:
            raise PromptError(
                "this model's only chat template is for messages with tools: give chat_options tools=[...]"
            )
        if template is None:
            raise PromptError(
                "this model has no chat template and takes no messages: give a text to continue (without --chat or chat=True), or "
                "a model whose folder has one (chat_template.jinja, or chat_template in tokenizer_config.json)"
            )
        text = render(template, messages, self.special, options)
        return self.encode(text, special=False)


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; "default" is the one without a name. A file of its own counts before `tokenizer_config.json`.

    Raises:
      TokenizerError: the file cannot be a template.
    """
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return {"default": read_template(separate)}
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    named = found if isinstance(found, dict) else {"default": found}
    templates = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    for name, text in templates.items():
        if len(text.encode()) > MAX_TEMPLATE_BYTES:
            raise TokenizerError(f"{folder / 'tokenizer_config.json'}: chat_template {name!r:.40} {_TOO_LARGE}")
    return templates


def read_template(path: Path) -> str:
    """A chat template from a file. Raises TokenizerError for one that is not there, or that cannot be a template."""
    if not path.is_file():
        raise TokenizerError(f"{path} is no file: a chat template was expected")
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise TokenizerError(f"{path} {_TOO_LARGE}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} must be UTF-8 text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty where there is none.

    Raises:
      ConfigError: the file is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        return read_object(path)
    except ValueError as error:
        raise ConfigError(f"{path.parent}: {error}") from error


def end_token_ids(folder: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """End-of-text ids: those of `generation_config.json`, otherwise of `config.json`, and the tokenizer's own `eos_token`.

    Fine-tuning for conversation often changes the tokenizer's alone: the other files name the base model's, which never come.

    Raises:
      ConfigError: a file is not readable JSON, or says something that is no id.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        values = read_json(folder / name)
        inner = values.get("text_config")
        found = values.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, Mapping) else None)
        found = [] if found is None else found if isinstance(found, list) else [found]
        if not all(is_id(token) for token in found):
            raise ConfigError(
                f"{folder / name}: eos_token_id must be an id from 0 to {MAX_ID} or a list of ids, got {found!r:.80}"
            )
        if len(set(found)) > MAX_END_TOKENS:
            raise ConfigError(
                f"{folder / name}: eos_token_id lists {len(set(found))} ids, at most {MAX_END_TOKENS} can end texts"
            )
        ids = ids or found
    if tokenizer is not None and (text := tokenizer.special.get("eos_token")):
        with named_errors(f"{folder}: the eos_token {text!r:.40} is none that tokenizers can take"):
            token = tokenizer.backend.token_to_id(text)
        ids = ids if token is None else [*ids, token]
    return tuple(dict.fromkeys(ids))


def end_notice(ids: tuple[int, ...], vocab_size: int) -> list[str]:
    """Notice for a model whose texts never end by themselves, because no end token is in its vocabulary."""
    if not ids or min(ids) < vocab_size:
        return []
    named = ", ".join(map(str, ids))
    return [
        f"no text ends by itself: end tokens ({named}) lie outside the vocabulary of {vocab_size:,}; set eos_token_id in "
        "generation_config.json"
    ]


def tokenizer_notices(folder: Path) -> list[str]:
    """Notice for a folder whose tokenizer is code, which nothing here runs."""
    if (folder / "tokenizer.json").is_file():
        return []
    code = read_json(folder / "tokenizer_config.json").get("auto_map")
    found = code.get("AutoTokenizer") if isinstance(code, Mapping) else code
    names = [name for name in (found if isinstance(found, list) else [found]) if isinstance(name, str)]
    if not names:
        return []
    return [
        f"the tokenizer is code of its release ({names[0]} in tokenizer_config.json), which is never run, and there is no "
        "tokenizer.json: prompts are token ids, and there is no text"
    ]
