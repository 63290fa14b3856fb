"""Words that may not come, as the token ids that spell them."""

from collections.abc import Iterable, Sequence

from dflash_jax.errors import ParameterError, TokenizerError
from dflash_jax.text.tokenizer import Tokenizer


def refused_ids(
    tokenizer: Tokenizer | None, model_name: str, words: Iterable[str | Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The sequences of `SamplingParams.bad_words`, each once: of a text those at the beginning of a text and after a space.

    Raises:
      TokenizerError: a text needs a tokenizer that the model does not have.
      ParameterError: of a text the tokenizer makes no tokens.
    """
    found = dict[tuple[int, ...], None]()
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
        elif tokenizer is None:
            raise TokenizerError(f"{model_name} has no tokenizer.json: bad_words that are texts need one, ids do not")
        else:
            alone = word.lstrip(" ")
            spelled = [tuple(tokenizer.encode(text, special=False)) for text in (alone, f" {alone}")]
            if not all(spelled):
                raise ParameterError(
                    f"bad_words holds {word!r:.80}, of which the tokenizer of {model_name} makes no tokens: leave it out"
                )
            found |= dict.fromkeys(spelled)
    return tuple(found)
