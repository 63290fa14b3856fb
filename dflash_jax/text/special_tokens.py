"""Tokens that `tokenizer_config.json` and older files beside `tokenizer.json` add, name or put around texts."""

from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from dflash_jax.errors import TokenizerError

# What tokens are on the device: 32 bits with a sign.
MAX_ID = 2**31 - 1

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Tokenizers of this kind put the tokens named here around a text, whatever the post-processor of `tokenizer.json` is.
_SURROUNDS = ("LlamaTokenizer", "LlamaTokenizerFast")


def named_tokens(settings: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name (`bos_token`, `eos_token`, ...), as a chat template sees them.

    Args:
      settings: `tokenizer_config.json`.
      older: `special_tokens_map.json`, which counts where `settings` lists no `added_tokens_decoder`, as in transformers.
    """
    return {name: _content(token) for name, token in _named(settings, older).items()}


def complete(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], older: Mapping[str, Any], added: Mapping[str, Any]
) -> None:
    """Makes a tokenizer read the tokens that stand in the files beside it: a chat template's marks would be read as letters.

    Tokens that are named and in no vocabulary stay letters: no model has an embedding for them.

    Args:
      settings: `tokenizer_config.json`.
      older: `special_tokens_map.json`.
      added: `added_tokens.json`.

    Raises:
      TokenizerError: a token cannot get the id that it has there.
    """
    special = dict(_marks(settings, older))
    _add_listed(backend, settings, added, special)
    known = _known(backend)
    for text, entry in special.items():
        token = known.get(text) or tokenizers.AddedToken(text, **_flags(entry))
        if backend.token_to_id(text) is not None and not (text in known and token.special):
            token.special = True
            backend.add_special_tokens([token])
    # What a user's text or a template holds is then letters, as this setting asks.
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    _surround(backend, settings, named_tokens(settings, older))


def is_id(value: Any) -> bool:
    """Whether a value of a file is a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ID


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, Mapping) else token


def _is_token(value: Any) -> bool:
    return isinstance(value.get("content") if isinstance(value, Mapping) else value, str)


def _named(settings: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of named tokens, as the files hold them: texts, or objects with flags."""
    counts = {} if "added_tokens_decoder" in settings else older
    extra = settings.get("extra_special_tokens")
    named = {
        name: value
        for values in (settings, counts)
        for name, value in values.items()
        if name.endswith("_token") and _is_token(value)
    }
    return named | {
        name: value for name, value in (extra if isinstance(extra, Mapping) else {}).items() if _is_token(value)
    }


def _marks(settings: Mapping[str, Any], older: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Text and entry of every special token that the files name or list."""
    counts = {} if "added_tokens_decoder" in settings else older
    yield from ((_content(token), token) for token in _named(settings, older).values())
    for values in (settings, counts):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = values.get(key)
            yield from (
                (_content(token), token) for token in (listed if isinstance(listed, list) else ()) if _is_token(token)
            )


def _flags(entry: Any) -> dict[str, bool]:
    values = entry if isinstance(entry, Mapping) else {}
    return {name: bool(values.get(name)) for name in _FLAGS}


def _known(backend: tokenizers.Tokenizer) -> dict[str, tokenizers.AddedToken]:
    return {token.content: token for token in backend.get_added_tokens_decoder().values()}


def _add_listed(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], added: Mapping[str, Any], special: Mapping[str, Any]
) -> None:
    """Tokens that the files list with their ids, with the flags that stand there."""
    beside: dict[str, tuple[Any, Mapping[str, Any]]] = {
        text: (number, {"special": text in special, "normalized": text not in special})
        for text, number in added.items()
    }
    decoder = settings.get("added_tokens_decoder")
    for number, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str):
            # As written where it is no number of so few digits: it is named below.
            short = number.isdecimal() and len(number) <= len(str(MAX_ID))
            beside[entry["content"]] = int(number) if short else number, entry
    for text, (number, _) in beside.items():
        if not is_id(number):
            raise TokenizerError(
                f"token {text!r:.40} has id {number!r:.40} in tokenizer_config.json or added_tokens.json, expected a number from "
                f"0 to {MAX_ID}: fetch the files again"
            )
    known = _known(backend)
    for text, (number, entry) in sorted(beside.items(), key=lambda item: str(item[1][0]).zfill(9)):
        flags = _flags(entry)
        if text in known and (text in added or all(getattr(known[text], name) == flags[name] for name in _FLAGS)):
            continue
        token = tokenizers.AddedToken(text, **flags)
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if (found := backend.token_to_id(text)) != number:
            raise TokenizerError(
                f"token {text!r} has id {number} in tokenizer_config.json or added_tokens.json and would be {found} after those of "
                "tokenizer.json: take the files of one release"
            )


def _surround(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`, where a file says them for a tokenizer that heeds them.

    DeepSeek's `tokenizer.json` puts nothing before a text: its beginning is asked for here. transformers 4 heeds it; transformers
    5 passes over it wherever there is a `tokenizer.json`, and a model gets texts without the beginning that it was trained with.
    """
    if settings.get("tokenizer_class") not in _SURROUNDS or not settings.keys() & {"add_bos_token", "add_eos_token"}:
        return
    bos, eos = named.get("bos_token"), named.get("eos_token")
    first = bos if settings.get("add_bos_token", True) else None
    last = eos if settings.get("add_eos_token", False) else None
    around = [(text, backend.token_to_id(text)) for text in (first, last) if text is not None]
    if any(number is None for _, number in around):
        raise TokenizerError(
            f"tokenizer_config.json asks for {' and '.join(repr(text) for text, number in around if number is None)} around "
            "texts, which tokenizer.json does not have: take the files of one release"
        )
    single = [*([first] if first else []), "$A", *([last] if last else [])]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=around)
