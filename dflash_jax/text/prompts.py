"""Forms of prompts, and their token ids."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from dflash_jax.errors import PromptError, TokenizerError
from dflash_jax.options import are_integers, as_integer
from dflash_jax.text.tokenizer import Tokenizer

type Messages = Sequence[Mapping[str, Any]]
type Prompt = str | Sequence[int] | Messages

_ONE_MESSAGE = (
    'a message must be in a list, got one alone: give [{"role": ..., "content": ...}], and of several prompts each in a list of '
    "its own"
)


def is_single(prompts: Any) -> bool:
    """Whether `prompts` is one prompt: a text, token ids, or messages."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, Mapping):
        raise PromptError(_ONE_MESSAGE)
    # Bytes would pass for token ids.
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        raise PromptError(
            f"a prompt must be a text, token ids or messages, or a list of those; got {type(prompts).__name__}: decode bytes, and "
            "give an array of ids, or what yields prompts one by one, as a list"
        )
    return is_chat(prompts) or (len(prompts) > 0 and _is_id(prompts[0]))


def is_chat(prompt: Any) -> bool:
    """Whether it begins as messages do."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _is_id(value: Any) -> bool:
    return as_integer(value) is not None


def prompt_ids(
    tokenizer: Tokenizer | None, model_name: str, prompt: Any, *, chat: bool, options: Mapping[str, Any] | None
) -> tuple[int, ...]:
    """Token ids of one prompt, for a model of this name with this tokenizer.

    Raises:
      PromptError: it is neither text, token ids nor messages, or the model has no chat template, or that refuses the messages.
      TokenizerError: it needs a tokenizer that the model does not have, or the chat template is broken.
    """
    if isinstance(prompt, str) and chat:
        prompt = [{"role": "user", "content": prompt}]
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
    if listed and are_integers(prompt):
        return tuple(map(operator.index, cast(Sequence[int], prompt)))
    if isinstance(prompt, Mapping):
        raise PromptError(_ONE_MESSAGE)
    if is_chat(prompt) and (others := [type(one).__name__ for one in prompt if not isinstance(one, Mapping)]):
        raise PromptError(
            f"a list that begins with a message must hold messages alone, got {others[0]} among them: of several prompts, each "
            "that is made of messages is a list of its own"
        )
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise PromptError(
            f"a prompt must be a text, token ids or messages, got {type(prompt).__name__} {prompt!r:.80}: decode bytes, and give "
            "an array of ids as a list"
        )
    if tokenizer is None:
        raise TokenizerError(
            f"{model_name} has no tokenizer.json: pass token ids, or add the file to the model's folder (transformers writes it: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), unless the tokenizer is code of its release, as Kimi-K2's)"
        )
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    return tuple(tokenizer.encode_chat(prompt, **(options or {})))
