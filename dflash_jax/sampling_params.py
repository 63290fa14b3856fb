"""Sampling parameters of one request, with vLLM's field names."""

import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, no_type_check

from dflash_jax.errors import ParameterError
from dflash_jax.options import as_flag, as_integer, as_number, is_list

if TYPE_CHECKING:
    from dflash_jax.model import Model

MAX_LOGPROBS = 20
MAX_STOP_IDS = 64
MAX_CHOICES = 128
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
# What other libraries call a field, where its own name is not the nearest one.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens", "max_length": "max_tokens", "max_completion_tokens": "max_tokens", "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens", "eos_token_id": "stop_token_ids", "eos_token_ids": "stop_token_ids", "stop_strings": "stop",
    "do_sample": "temperature", "top_logprobs": "logprobs", "sequence_bias": "logit_bias", "bad_words_ids": "bad_words",
    "allowed_tokens": "allowed_token_ids", "num_return_sequences": "n", "response_format": "structured",
    "guided_json": "structured", "guided_regex": "structured", "guided_choice": "structured", "guided_grammar": "structured",
}  # fmt: skip


type Kind = Literal["json", "regex", "grammar"]

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_STRUCTURE_BYTES = 256 << 10
MAX_SCHEMA_DEPTH = 64  # of a schema's objects and lists within each other
MAX_TEXTS = 1024
# Between the parts of a JSON document: a model that writes nothing else would never come to an end.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"


@dataclass(frozen=True)
class _Form:
    kind: Kind
    text: str


@no_type_check  # it checks what it is given: what is wrong is a ParameterError, whoever else watches types
@dataclass(frozen=True, init=False)
class Structured:
    """Structured output: exactly one of the fields of vLLM's `StructuredOutputsParams`.

    It needs the extra `structured` (llguidance). Wherever a token is chosen, those that no such text could go on with are refused
    before anything else looks at the logits: what is sampled follows the law of the tokens that are left, with and without
    drafting. A text that `max_tokens` cuts short is the beginning of one.

    Args:
      json: a JSON schema, as an object or as its JSON. White space is free between what it asks for, at most 64 in a row.
      regex: a regular expression of Rust's for the whole text; it has no look-around.
      choice: texts, of which it is one.
      grammar: a context-free grammar, in llguidance's form of Lark or in llama.cpp's GBNF.
      json_object: True for any JSON object.

    Raises:
      ParameterError: none or several are given, or one is not of its kind. What a grammar says is looked at with the first prompt.
    """

    form: _Form

    def __init__(
        self,
        *,
        json: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
    ):
        asked = None if as_flag(json_object) is False else json_object
        given = {"json": json, "regex": regex, "choice": choice, "grammar": grammar, "json_object": asked}
        named = {name: value for name, value in given.items() if value is not None}
        if len(named) != 1:
            came = " and ".join(named) or "none"
            raise ParameterError(f"structured must have exactly one of {', '.join(KINDS)}, got {came}")
        ((name, value),) = named.items()
        form = _READ[name](value)
        if len(form.text.encode("utf-8", "replace")) > MAX_STRUCTURE_BYTES:
            raise ParameterError(
                f"structured {name} may have {MAX_STRUCTURE_BYTES} bytes, got {len(form.text)} characters"
            )
        object.__setattr__(self, "form", form)

    def __repr__(self) -> str:
        return f"Structured({self.form.kind}={self.form.text!r:.80})"

    @classmethod
    def of(cls, value: Any) -> "Structured":
        """From one of these, or from a mapping with one of their names, as it comes from JSON. Raises ParameterError."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ParameterError(
                f'structured must be a dflash_jax.Structured or a mapping such as {{"regex": "[0-9]+"}}, got {value!r:.80}'
            )
        if unknown := [name for name in value if name not in KINDS]:
            raise ParameterError(f"structured takes {', '.join(KINDS)}, got {unknown[0]!r:.40}")
        return cls(**value)


def quoted(text: str) -> str:
    """A text as grammars of Lark's form write it."""
    return json.dumps(text, ensure_ascii=False)


def _schema(value: Any) -> _Form:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"structured json must be a JSON schema: {error!s:.200}") from None
    if not isinstance(value, Mapping):
        raise ParameterError(f"structured json must be a JSON schema, which is an object, got {value!r:.80}")
    if _deep(value):
        raise ParameterError(f"structured json may be nested {MAX_SCHEMA_DEPTH} deep, got a schema that is deeper")
    try:
        return _Form("json", json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ParameterError(f"structured json must be a JSON schema: {error!s:.200}") from None


def _deep(value: Any) -> bool:
    """Whether objects and lists are nested too deeply. Not by recursion: the value is anybody's."""
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            part
            for one in level
            for part in (one.values() if isinstance(one, Mapping) else one)
            if isinstance(part, Mapping | list | tuple)
        ]
        if not level:
            return False
    return True


def _object(value: Any) -> _Form:
    if value is not True:
        raise ParameterError(f"structured json_object must be True or left out, got {value!r:.80}")
    return _Form("json", '{"type": "object"}')


def _pattern(value: Any) -> _Form:
    return _Form("regex", _text("regex", value))


def _grammar(value: Any) -> _Form:
    return _Form("grammar", _text("grammar", value))


def _choice(value: Any) -> _Form:
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not listed or not 0 < len(value) <= MAX_TEXTS or not all(isinstance(one, str) and one for one in value):
        raise ParameterError(
            f"structured choice must be a list of 1 to {MAX_TEXTS} texts that are not empty, got {value!r:.80}"
        )
    return _Form("grammar", "start: " + " | ".join(map(quoted, value)))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ParameterError(f"structured {name} must be a text that is not empty, got {value!r:.80}")
    return value


_READ = {"json": _schema, "regex": _pattern, "choice": _choice, "grammar": _grammar, "json_object": _object}


def _names_fields[T](made: type[T]) -> type[T]:
    """Makes a ParameterError, with the field that was meant, of a name that no field has. A dataclass has a TypeError without."""
    take, known = made.__init__, list(made.__dataclass_fields__)  # type: ignore[attr-defined]

    @functools.wraps(take)
    def checked(self: T, *values: Any, **named: Any) -> None:
        if unknown := next((name for name in named if name not in known), None):
            meant = _OTHER_NAMES.get(unknown) or next(iter(difflib.get_close_matches(unknown, known, 1)), None)
            hint = f"did you mean {meant}?" if meant else f"it takes {', '.join(known)}"
            raise ParameterError(f"{made.__name__} takes no {unknown}: {hint}")
        take(self, *values, **named)

    made.__init__ = checked
    return made


@no_type_check  # it checks its own fields: what is wrong is a ParameterError, whoever else watches types
@_names_fields
@dataclass(frozen=True, kw_only=False)
class SamplingParams:
    """Sampling parameters of one request. Greedy and 256 tokens unless told otherwise.

    Scalars of numpy or JAX count as the numbers and flags that they are, and are kept as Python's.

    Attributes:
      max_tokens: tokens to produce at most; 0 only with prompt_logprobs.
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_p: keep the smallest set of tokens whose probabilities reach this sum.
      top_k: keep this many tokens; 0 keeps all, and so does -1, which is kept as 0.
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
        from the target's own logits before temperature, filters, penalties and biases.
      prompt_logprobs: None for none; otherwise the log-probability of every token of the prompt but its first, given those before
        it, and this many most probable ones at its place (at most 20). Such a prompt is computed whole, whatever pages hold of it.
      include_stop: keep what ended the text in it: the stop string, or the text of the end token or of the id among
        stop_token_ids. Tokens that the tokenizer calls special are text only where `skip_special_tokens` is False.
      skip_special_tokens: leave tokens that the tokenizer calls special out of the text.
      truncate_prompt_tokens: keep this many tokens of a prompt, the last ones; -1 as many as leave room for max_tokens, None all.
      presence_penalty: taken from the logit of every token that the text holds, from -2 to 2.
      frequency_penalty: the same for each time that the text holds it.
      repetition_penalty: divides the positive logits of tokens that prompt or text hold and multiplies their negative ones, above 0
        and at most 2; 1 changes nothing.
      logit_bias: added to the logits of tokens, by their ids, from -100 to 100; a mapping, kept as pairs.
      allowed_token_ids: no other token is chosen; None allows all.
      bad_words: texts, or sequences of ids, that do not come: their last token is not chosen where the text ends with the others. A
        text stands for its tokens at the beginning of a text and after a space; what other tokens may spell it is not looked for.
      n: completions of each prompt, which is then in a list; the i-th has seed + i. `generate` gives them side by side.
      structured: what the text has to be, a `Structured` or a mapping with one of its names; None for anything.
      structured_outputs: `structured` by vLLM's name.
      include_stop_str_in_output: `include_stop` by vLLM's name; ask for it by its own.

    Raises:
      ParameterError: a value is outside its range, or no field has a name.
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
    prompt_logprobs: int | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    n: int = 1
    structured: Structured | Mapping[str, Any] | None = None
    structured_outputs: InitVar[Structured | Mapping[str, Any] | None] = None
    include_stop_str_in_output: InitVar[bool | None] = None

    def __post_init__(self, structured_outputs, include_stop_str_in_output):
        if include_stop_str_in_output is not None:
            self._include(include_stop_str_in_output)
        if as_integer(self.top_k) == -1:
            object.__setattr__(self, "top_k", 0)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self._items("stop"))
        object.__setattr__(self, "stop_token_ids", self._items("stop_token_ids"))
        self._integer("max_tokens", 1 if self.prompt_logprobs is None else 0, None)
        self._integer("min_tokens", 0, self.max_tokens, limit="max_tokens, which is ")
        self._integer("top_k", 0, None)
        self._integer("n", 1, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, MAX_LOGPROBS)
        if self.seed is not None:
            self._integer("seed", 0, 2**64 - 1)
        if self.truncate_prompt_tokens is not None and as_integer(self.truncate_prompt_tokens) != -1:
            self._integer("truncate_prompt_tokens", 1, None)
        elif self.truncate_prompt_tokens is not None:
            object.__setattr__(self, "truncate_prompt_tokens", -1)
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
        self._number("presence_penalty", -MAX_PENALTY, MAX_PENALTY)
        self._number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY)
        self._number("repetition_penalty", 0.0, MAX_PENALTY, open_below=True)
        object.__setattr__(self, "logit_bias", self._biases())
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", self._allowed())
        object.__setattr__(self, "bad_words", self._words())
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            if (flag := as_flag(getattr(self, name))) is None:
                raise ParameterError(f"{name} must be True or False, got {getattr(self, name)!r}")
            object.__setattr__(self, name, flag)
        self._structure(structured_outputs)

    @classmethod
    def from_model(cls, model: "Model", **changes) -> "SamplingParams":
        """Parameters as the model's `generation_config.json` has them (temperature, top_p, top_k, min_p, repetition_penalty), with
        `changes`. What neither names is as ever: greedy, where the file says nothing.

        Raises:
          ParameterError: see `SamplingParams`.
        """
        return cls(**{**model.sampling_defaults, **changes})

    def choices(self) -> list["SamplingParams"]:
        """Parameters of each of its `n` completions."""
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else (self.seed + i) % 2**64 for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    def shortened(self, ids: Sequence[int], longest: int) -> tuple[int, ...]:
        """A prompt as `truncate_prompt_tokens` has it, for a model that takes `longest` tokens of prompt and text."""
        kept = self.truncate_prompt_tokens
        if kept is None:
            return tuple(ids)
        return tuple(ids[-(max(1, longest - self.max_tokens) if kept == -1 else kept) :])

    def _biases(self) -> tuple[tuple[int, float], ...]:
        """Ids with what is added to their logits, in order of the ids."""
        given, found = self.logit_bias, dict[int, float]()
        pairs = given.items() if isinstance(given, Mapping) else given
        try:
            for token, bias in pairs:
                number, amount = as_integer(token), as_number(bias)
                if number is None or number < 0 or amount is None or not abs(amount) <= MAX_BIAS:
                    raise ValueError
                found[number] = amount
        except (TypeError, ValueError):
            raise ParameterError(
                f"logit_bias must hold token ids of at least 0 with numbers from {-MAX_BIAS} to {MAX_BIAS}, got {given!r:.200}"
            ) from None
        return tuple(sorted(found.items()))

    def _allowed(self) -> tuple[int, ...]:
        given, ids = self.allowed_token_ids, list[int]()
        for token in given if given is not None and is_list(given) else ():
            number = as_integer(token)
            ids.append(-1 if number is None else number)
        if not ids or min(ids) < 0:
            raise ParameterError(
                f"allowed_token_ids must be a list of token ids of at least 0, or None for all, got {given!r:.200}"
            )
        return tuple(dict.fromkeys(ids))

    def _words(self) -> tuple[str | tuple[int, ...], ...]:
        """Texts, and sequences of ids as tuples."""
        given, found = self.bad_words, []
        if is_list(given):
            given = tuple(given)
            for word in given:
                ids = tuple(map(as_integer, word)) if is_list(word) else ()
                if isinstance(word, str) and word.strip():
                    found.append(str(word))
                elif ids and all(token is not None and token >= 0 for token in ids):
                    found.append(ids)
            if len(found) == len(given):
                return tuple(found)
        raise ParameterError(
            "bad_words must be a list of texts that are not empty, or of lists of token ids of at least 0, "
            f"got {self.bad_words!r:.200}"
        )

    def _structure(self, named) -> None:
        """Takes `structured`, be it by vLLM's name, and refuses what could leave no token of its grammar's."""
        if named is not None and self.structured is not None:
            raise ParameterError("structured and structured_outputs are one thing: give one of them")
        given = self.structured if named is None else named
        if given is None:
            return
        object.__setattr__(self, "structured", Structured.of(given))
        besides = {
            "min_tokens": self.min_tokens > 0, "ignore_eos": self.ignore_eos, "bad_words": bool(self.bad_words),
            "allowed_token_ids": self.allowed_token_ids is not None,
        }  # fmt: skip
        if wrong := [name for name, there in besides.items() if there]:
            raise ParameterError(
                f"{wrong[0]} cannot be beside structured: its text is what it says, and ends where it says"
            )

    def _include(self, value) -> None:
        """Takes `include_stop` by vLLM's name."""
        flag = as_flag(value)
        if flag is None:
            raise ParameterError(f"include_stop_str_in_output must be True or False, got {value!r}")
        if as_flag(self.include_stop) and not flag:
            raise ParameterError("include_stop and include_stop_str_in_output are one thing: give one of them")
        object.__setattr__(self, "include_stop", flag)

    def _items(self, name: str) -> tuple:
        value = getattr(self, name)
        if not is_list(value):
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
