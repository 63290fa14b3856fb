"""What a caller may ask of one request, with vLLM's field names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import no_type_check

from dflash_jax._scalars import as_flag, as_integer, as_number
from dflash_jax.errors import ParameterError

MAX_LOGPROBS = 20
MAX_STOP_IDS = 64


@no_type_check  # it checks its own fields: what is wrong is a ParameterError, whoever else watches types
@dataclass(frozen=True, kw_only=False)
class SamplingParams:
    """Sampling parameters of one request. Greedy and 256 tokens unless told otherwise.

    Scalars of numpy or JAX count as the numbers and flags that they are, and are kept as Python's.

    Attributes:
      max_tokens: tokens to produce at most.
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_p: keep the smallest set of tokens whose probabilities reach this sum.
      top_k: keep this many tokens; 0 keeps all.
      min_p: keep tokens at least this fraction as probable as the most probable one.
      seed: makes sampling repeatable; the same seed gives the same text with and without drafting, alone or in a batch, up to
        rounding. (Of a model loaded with `proposals="rejection"`, a text depends on drafting and on the verified length too.) None
        draws a fresh one.
      stop: strings that end the text; the text ends before the first of them.
      stop_token_ids: ids that end the text besides the model's own end tokens.
      ignore_eos: go on past the model's end tokens (stop_token_ids still count).
      min_tokens: before this many tokens, end tokens and stop_token_ids are not chosen (others are, in their place) and stop
        strings not looked for.
      logprobs: None for none; otherwise the chosen token's log-probability and this many most probable ones (at most 20),
        from the target's own logits before temperature and filters.
      include_stop: keep what ended the text in it: the stop string, or the text of the end token or of the id among
        stop_token_ids. Tokens that the tokenizer calls special are never text.

    Raises:
      ParameterError: a value is outside its range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    include_stop: bool = False

    def __post_init__(self):
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self._items("stop"))
        object.__setattr__(self, "stop_token_ids", self._items("stop_token_ids"))
        self._integer("max_tokens", 1, None)
        self._integer("min_tokens", 0, self.max_tokens, limit="max_tokens, which is ")
        self._integer("top_k", 0, None)
        if self.logprobs is not None:
            self._integer("logprobs", 0, MAX_LOGPROBS)
        if self.seed is not None:
            self._integer("seed", 0, 2**64 - 1)
        self._number("temperature", 0.0, 1e4)
        self._number("top_p", 0.0, 1.0, open_below=True)
        self._number("min_p", 0.0, 1.0)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ParameterError(f"stop must hold non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(map(str, self.stop)))
        ids = tuple(as_integer(token) for token in self.stop_token_ids)
        if any(token is None or token < 0 for token in ids) or len(ids) > MAX_STOP_IDS:
            raise ParameterError(
                f"stop_token_ids must hold at most {MAX_STOP_IDS} token ids of at least 0, got {list(self.stop_token_ids)!r}"
            )
        object.__setattr__(self, "stop_token_ids", ids)
        for name in ("ignore_eos", "include_stop"):
            if (flag := as_flag(getattr(self, name))) is None:
                raise ParameterError(f"{name} must be True or False, got {getattr(self, name)!r}")
            object.__setattr__(self, name, flag)

    def _items(self, name: str) -> tuple:
        value = getattr(self, name)
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            kind = (
                "a string or a list of non-empty strings"
                if name == "stop"
                else f"a list of at most {MAX_STOP_IDS} token ids"
            )
            raise ParameterError(f"{name} must be {kind}, got {value!r}")
        return tuple(value)

    def _integer(self, name: str, low: int, high: int | None, *, limit: str = "") -> None:
        value = as_integer(getattr(self, name))
        if value is None or value < low or (high is not None and value > high):
            span = f"of at least {low}" if high is None else f"from {low} to {limit}{high}"
            raise ParameterError(f"{name} must be an integer {span}, got {getattr(self, name)!r}")
        object.__setattr__(self, name, value)

    def _number(self, name: str, low: float, high: float, *, open_below: bool = False) -> None:
        value = as_number(getattr(self, name))
        if value is None or not low <= value <= high or (open_below and value == low):
            span = f"above {low} and at most {high}" if open_below else f"from {low} to {high}"
            raise ParameterError(f"{name} must be a number {span}, got {getattr(self, name)!r}")
        object.__setattr__(self, name, value)
