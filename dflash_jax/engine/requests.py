"""Requests and outputs of the engine, and how a request looks on the device."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.cache import Pages
from dflash_jax.cache.recurrent import make_states
from dflash_jax.decoding.adjustments import Adjustments
from dflash_jax.decoding.grammar_masks import NO_GRAMMAR, Grammar
from dflash_jax.decoding.sampling import Mode, RequestArrays
from dflash_jax.decoding.state import DecodeState, Emitted, Setup
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.text.pictures.placed import Pictures

MODES: tuple[Mode, ...] = get_args(Mode)  # each serves the ones before it too
ADJUSTING = MODES[MODES.index("adjusted") :]  # their states hold what changes logits
STOP_WIDTH = 8  # stop ids that a slot has room for at least
MOST_WORDS, LONGEST_WORD = 32, 8  # refused sequences of several tokens in a slot, and their tokens, at most


@dataclass
class Request:
    """One prompt as token ids.

    Attributes:
      index: the caller's number for it, repeated in every update.
      eos_ids: the model's end tokens.
      seed: drawn here when the parameters name none.
      refused: token ids of `params.bad_words`.
      grammar: of `params.structured`.
      pictures: those that the prompt holds, each as tokens that stand for its rows; None for a text alone.
    """

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    seed: int = -1
    refused: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    pictures: Pictures | None = None

    def __post_init__(self):
        if self.seed < 0:
            self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed

    @property
    def marks(self) -> tuple[tuple[int, bytes], ...]:
        """Hashes of its pictures, which are a part of its pages' keys; see `cache.prefix.extend_keys`."""
        return () if self.pictures is None else self.pictures.marks

    @property
    def stop_ids(self) -> tuple[int, ...]:
        eos = () if self.params.ignore_eos else self.eos_ids
        return tuple(dict.fromkeys((*eos, *self.params.stop_token_ids)))

    @property
    def mode(self) -> Mode:
        """The simplest program that serves it."""
        p = self.params
        if self.grammar is not None:
            return "structured" if self.grammar.automaton is None else "regular"
        if self.adjusts:
            return "adjusted"
        if p.min_tokens > 0 or (p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)):
            return "full"
        return "sampled" if p.temperature > 0 else "greedy"

    @property
    def adjusts(self) -> bool:
        """Whether it changes logits before anything else looks at them."""
        p = self.params
        penalties = p.presence_penalty, p.frequency_penalty, p.repetition_penalty
        biased = p.logit_bias or p.allowed_token_ids is not None or self.refused
        return penalties != (0.0, 0.0, 1.0) or bool(biased)

    @property
    def needs(self) -> "Needs":
        p = self.params
        return Needs(self.mode, p.logprobs is not None, stop_bucket(len(self.stop_ids)), p.temperature > 0)


class Needs(NamedTuple):
    """Program features that requests of one batch need. A program that offers more serves them too.

    Attributes:
      mode: the simplest that serves all of them.
      logprobs: whether somebody wants log-probabilities.
      stop_width: stop ids of a slot, a bucket.
      sampling: whether somebody samples.
    """

    mode: Mode = "greedy"
    logprobs: bool = False
    stop_width: int = STOP_WIDTH
    sampling: bool = False

    @classmethod
    def of(cls, each: Iterable["Needs"]) -> "Needs":
        """Needs that cover all of these."""
        mode, logprobs, stop_width, sampling = cls()
        for one in each:
            mode = one.mode if MODES.index(one.mode) > MODES.index(mode) else mode
            logprobs, stop_width = logprobs or one.logprobs, max(stop_width, one.stop_width)
            sampling = sampling or one.sampling
        return cls(mode, logprobs, stop_width, sampling)

    def covers(self, other: "Needs") -> bool:
        return Needs.of((self, other)) == self


def stop_bucket(stops: int) -> int:
    """Stop ids of a slot in the smallest program that holds so many: 8, 16, 32, ..."""
    return max(STOP_WIDTH, 1 << (stops - 1).bit_length() if stops else 0)


@dataclass
class Update:
    """Tokens that one request gained since its last update.

    Attributes:
      tokens: new token ids.
      from_draft: for each token, whether the drafter proposed it.
      counts: tokens gained in each cycle; empty for the first token, which the prompt's prefill gives.
      logprobs: for each token its log-probability and the most probable `(id, log-probability)` pairs, where asked for.
      finish_reason: "eos", "stop" (a stop token id), "length", or None while it goes on.
      stop_reason: the id that ended it.
      seconds: time of the device call that gave this update, compilation excluded.
      start: tokens that the request had before.
      cached: with the first token, tokens of the prompt that were found in pages.
      prompt_logprobs: with the first token, for each token of the prompt but its first the same as `logprobs`, where asked for.
      drafts: of each cycle, the drafts offered and those accepted; see `engine.acceptance.acceptance_by_position`.
    """

    index: int
    tokens: list[int]
    from_draft: list[bool]
    counts: list[int]
    first: bool
    seconds: float
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    start: int = 0
    cached: int = 0
    drafts: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)

    @classmethod
    def collect(
        cls,
        request: Request,
        rows: Emitted,
        column: int,
        *,
        first: bool,
        seconds: float,
        start: int = 0,
        drafts: bool = True,
    ) -> "Update":
        """From emitted rows `[cycles, slots, ...]` on the host, one slot's column.

        Args:
          start: tokens that the request had before.
          drafts: whether proposals might stand; else none counts as offered.
        """
        update = cls(request.index, [], [], [], first, seconds, start=start)
        wanted, tokens = request.params.logprobs, rows.tokens[:, column]
        counts, lengths = rows.counts[:, column].tolist(), [rows.tokens.shape[-1]] * len(rows.counts)
        if rows.lengths is not None:
            lengths = rows.lengths[:, column].tolist()
        if not drafts:
            lengths = [1] * len(counts)
        each = zip(counts, rows.accepted[:, column].tolist(), lengths, strict=True)
        for cycle, (count, accepted, verified) in enumerate(each):
            if count == 0:
                continue
            update.tokens += tokens[cycle, :count].tolist()
            update.from_draft += [place < accepted for place in range(count)]
            if not first:
                update.counts.append(count)
                # Where an accepted draft ended the text, nothing is known of those behind it.
                update.drafts.append((verified - 1, accepted) if count > accepted else (count, count))
            if wanted is not None:
                for place in range(count):
                    ids = rows.top_ids[cycle, column, place, :wanted].tolist()
                    tops = rows.top_logprobs[cycle, column, place, :wanted].tolist()
                    update.logprobs.append(
                        (float(rows.logprobs[cycle, column, place]), list(zip(ids, tops, strict=True)))
                    )
        return update

    def behind(self, given: int) -> "Update | None":
        """The part of it after the first `given` tokens of the request, which were given out before; None if there is none."""
        skipped = given - self.start
        if skipped <= 0:
            return self
        if skipped >= len(self.tokens) and self.finish_reason is None:
            return None
        counts, drafts = list(self.counts), list(self.drafts)
        left = skipped - (len(self.tokens) - sum(counts))  # a first token is no cycle's
        while counts and left >= counts[0]:
            left -= counts.pop(0)
            drafts.pop(0)
        if counts and left > 0:
            counts[0] -= left
        return replace(
            self, tokens=self.tokens[skipped:], from_draft=self.from_draft[skipped:], logprobs=self.logprobs[skipped:],
            counts=counts, drafts=drafts, start=given, first=False, cached=0, prompt_logprobs=[],
        )  # fmt: skip

    def score(self, request: Request, parts: Sequence[tuple[Any, int, int]]) -> None:
        """Takes the scores of a prompt, and leaves out the first token where none was asked for.

        Args:
          parts: `decoding.prefill.Scores` on the host, each with the row and the number of tokens that are the prompt's, in order.
        """
        wanted = request.params.prompt_logprobs
        for scores, row, count in parts:
            ids, tops = (
                scores.top_ids[row, :count, :wanted].tolist(),
                scores.top_logprobs[row, :count, :wanted].tolist(),
            )
            pairs = [list(zip(*each, strict=True)) for each in zip(ids, tops, strict=True)]
            self.prompt_logprobs += list(zip(scores.logprobs[row, :count].tolist(), pairs, strict=True))
        del self.prompt_logprobs[len(request.prompt) - 1 :]  # of what follows the prompt
        if request.params.max_tokens == 0:
            self.tokens, self.from_draft, self.logprobs = [], [], []

    def finish(self, request: Request) -> None:
        """Sets the finish reason from the last token and the count."""
        last, produced = self.tokens[-1] if self.tokens else None, self.start + len(self.tokens)
        if last is not None and last in request.stop_ids and produced > request.params.min_tokens:
            ends = last in request.eos_ids and not request.params.ignore_eos
            self.finish_reason, self.stop_reason = ("eos" if ends else "stop"), last
        elif produced >= request.params.max_tokens:
            self.finish_reason = "length"


def on_host(rows: Emitted, *, logprobs: bool) -> Emitted:
    """Emitted rows as numpy arrays; log-probabilities, each of which would cost a transfer, only where somebody wants them."""
    return jax.device_get(_read(rows, logprobs=logprobs))


def begin_copies(rows: Emitted, *, logprobs: bool) -> None:
    """Has what `on_host` reads copied as soon as it is computed, not once somebody waits for it."""
    for leaf in jax.tree.leaves(_read(rows, logprobs=logprobs)):
        leaf.copy_to_host_async()


def _read(rows: Emitted, *, logprobs: bool) -> Emitted:
    none: dict[str, Any] = {} if logprobs else dict.fromkeys(("logprobs", "top_ids", "top_logprobs"))
    return replace(rows, **none)


_GREEDY = SamplingParams()


def request_arrays(requests: list[Request | None], stop_width: int) -> RequestArrays:
    """Sampling parameters of slots; an empty slot is greedy without stops."""
    rows = [_GREEDY if request is None else request.params for request in requests]
    seeds = np.array([0 if request is None else request.seed for request in requests], np.uint64)
    stops = np.full((len(requests), stop_width), -1, np.int32)
    for row, request in enumerate(requests):
        ids = () if request is None else request.stop_ids
        stops[row, : len(ids)] = ids
    host: dict[str, Any] = {
        "seed": np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32),
        "temperature": np.array([row.temperature for row in rows], np.float32),
        "top_p": np.array([row.top_p for row in rows], np.float32),
        "top_k": np.array([min(row.top_k, 2**31 - 1) for row in rows], np.int32),
        "min_p": np.array([row.min_p for row in rows], np.float32),
        "min_tokens": np.array([row.min_tokens for row in rows], np.int32),
        "stop_ids": stops,
    }
    return RequestArrays(**host)


def adjustments(
    requests: Sequence[tuple[Request, Sequence[int]] | None], vocab: int, grammars: Sequence[int] | None = None
) -> Adjustments:
    """Logits processors of the slots, on the host; an empty slot changes nothing.

    Args:
      requests: as of `request_rows`.
      grammars: of `Adjustments`; None for none.
    """
    count = len(requests)
    bias, seen = np.zeros((count, vocab), np.float32), np.zeros((count, vocab), np.int32)
    words, tail = (
        np.full(shape, -1, np.int32) for shape in ((count, MOST_WORDS, LONGEST_WORD), (count, LONGEST_WORD - 1))
    )
    rows = [_GREEDY if item is None else item[0].params for item in requests]
    for row, item in enumerate(requests):
        if item is None or not item[0].adjusts:
            continue
        request, emitted = item
        if (allowed := request.params.allowed_token_ids) is not None:
            bias[row] = -np.inf
            bias[row, list(allowed)] = 0.0
        for token, amount in dict(request.params.logit_bias).items():
            bias[row, token] += amount
        bias[row, [word[0] for word in request.refused if len(word) == 1]] = -np.inf
        seen[row, list(request.prompt)] = 1
        np.add.at(seen[row], list(emitted), 2)
        for place, word in enumerate(word for word in request.refused if len(word) > 1):
            words[row, place, -len(word) :] = word
        if last := emitted[-tail.shape[1] :]:
            tail[row, -len(last) :] = last
    penalties = {
        name: np.array([getattr(one, f"{name}_penalty") for one in rows], np.float32)
        for name in ("presence", "frequency", "repetition")
    }
    host: dict[str, Any] = {"bias": bias, "seen": seen, **penalties, "words": words, "tail": tail}
    host["grammar"] = np.array([NO_GRAMMAR] * count if grammars is None else grammars, np.int32)
    return Adjustments(**host)


def _slots(
    setup: Setup, requests: RequestArrays, dtype: jnp.dtype, pools: tuple[Pages, Pages], **given: Any
) -> DecodeState:
    count = requests.temperature.shape[0]
    features = 0 if setup.draft is None else len(setup.taps) * setup.draft.target_hidden_size
    host: dict[str, Any] = {
        "pending": np.zeros((count,), np.int32),
        "seq_lens": np.zeros((count,), np.int32),
        "features": np.zeros((count, setup.offered, features), dtype),
        "fresh": np.zeros((count,), np.int32),
        "produced": np.zeros((count,), np.int32),
        "remaining": np.zeros((count,), np.int32),
        "done": np.ones((count,), bool),
        "request": requests,
        "target_pages": pools[0],
        "draft_pages": pools[1],
        "shift": np.zeros((count,), np.int32) if setup.pictures else None,
    }
    return DecodeState(**(host | given))


def empty_state(setup: Setup, slots: int, stop_width: int, dtype: jnp.dtype, pools: tuple[Pages, Pages]) -> DecodeState:
    """A state of empty slots that owns the pools."""
    adjust = adjustments([None] * slots, setup.target.vocab_size) if setup.mode in ADJUSTING else None
    none = Pages((), ())  # pools are on their devices, some of which may be another process's
    state = jax.device_put(
        _slots(setup, request_arrays([None] * slots, stop_width), dtype, (none, none), adjust=adjust)
    )
    recurrent = make_states(setup.target, slots, dtype)
    return replace(state, recurrent=recurrent, target_pages=pools[0], draft_pages=pools[1])


def request_rows(
    setup: Setup,
    requests: Sequence[tuple[Request, Sequence[int]] | None],
    stop_width: int,
    dtype: jnp.dtype,
    grammars: Sequence[int] | None = None,
) -> DecodeState:
    """Prefilled requests as a state of so many slots, without pages, on the host, for `dflash_jax.decoding.prefill.admit`.

    Args:
      requests: each with the tokens it had emitted before it lost its slot, where all but the last one are in the pages again. None
        stands for a row that nobody needs.
      grammars: as of `adjustments`.
    """

    def each(value: Callable[[Request, Sequence[int]], int]) -> np.ndarray:
        return np.array([0 if item is None else value(*item) for item in requests], np.int32)

    none, arrays = Pages((), ()), request_arrays([item and item[0] for item in requests], stop_width)
    features = np.zeros(
        (len(requests), 0, 0), dtype
    )  # nothing of them is left to write: zeros would be megabytes to copy
    return _slots(
        setup, arrays, dtype, (none, none),
        pending=each(lambda _, emitted: emitted[-1] if emitted else -1),
        seq_lens=each(lambda request, emitted: len(request.prompt) + max(0, len(emitted) - 1)),
        produced=each(lambda _, emitted: len(emitted)),
        remaining=each(lambda request, emitted: request.params.max_tokens - len(emitted)),
        done=np.array([item is None for item in requests]),
        features=features,
        shift=each(lambda request, _: request.pictures.shift if request.pictures else 0) if setup.pictures else None,
        adjust=adjustments(requests, setup.target.vocab_size, grammars) if setup.mode in ADJUSTING else None,
    )  # fmt: skip
