"""Strings in, results out. `generate` and `stream` are one thing: the first waits for what the second yields."""

import itertools
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypedDict, Unpack, overload

import jax

from dflash_jax.engine.acceptance import acceptance_by_position, low_acceptance
from dflash_jax.engine.progress import progress_bar
from dflash_jax.engine.requests import Request, Update
from dflash_jax.errors import ParameterError, PromptError, TokenizerError
from dflash_jax.model import Model
from dflash_jax.options import as_flag, as_integer
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.text.completion import Completion, Piece, Stats, TokenLogprob
from dflash_jax.text.detokenizer import TextStream
from dflash_jax.text.pictures.encoder import VisionEncoder
from dflash_jax.text.pictures.films import Film
from dflash_jax.text.pictures.messages import films_in, pictures_in, without_pictures
from dflash_jax.text.pictures.placed import Picture, Pictures, Spread, expanded, three_axes
from dflash_jax.text.prompts import Prompt, is_chat, is_single, prompt_ids
from dflash_jax.text.refused_words import refused_ids

type Params = SamplingParams | Sequence[SamplingParams] | None

GENERATE_CYCLES = 32
STREAM_CYCLES = 4


class Options(TypedDict, total=False):
    """Keywords of `generate`."""

    draft: bool
    chat: bool
    progress: bool
    chat_options: Mapping[str, Any] | None


# A text is a sequence of texts too; the first overload that fits counts.
@overload
def generate(  # pyright: ignore[reportOverlappingOverload]
    model: Model, prompts: Prompt, params: Params = None, **options: Unpack[Options]
) -> Completion: ...
@overload
def generate(
    model: Model, prompts: Sequence[Prompt], params: Params = None, **options: Unpack[Options]
) -> list[Completion]: ...


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    params: Params = None,
    *,
    draft: bool = True,
    chat: bool = False,
    progress: bool = False,
    chat_options: Mapping[str, Any] | None = None,
) -> Completion | list[Completion]:
    """Continues one prompt or several. Threads that call at once share one batch; each waits for its own prompts.

    Args:
      model: from `load`.
      prompts: a text, a list of token ids, a list of messages (`{"role": ..., "content": ...}`), or a list of any of those. Where
        the model has a vision tower, a content may be a list with pictures among texts: `{"type": "text", "text": ...}` and
        `{"type": "image", "image": ...}` with a path, bytes, a data URL, an array or an image of Pillow. `max_pixels` beside it
        bounds what is seen of it, and so the tokens that it takes. A film is `{"type": "video", "video": ...}` with a path, bytes
        or a data URL of an animated picture or a film's file; or with a list of pictures, or an array `[T, height, width, 3]`,
        and `fps` beside it. `num_frames` is how many of its frames are looked at, `max_pixels` bounds all of them together.
      params: one `SamplingParams` for all prompts or a list with one each; greedy with 256 tokens where None.
      draft: False decodes with the target alone.
      chat: read each text as one user message and use the chat template.
      progress: show a bar with tokens per second.
      chat_options: names for the chat template, for example `{"enable_thinking": False}`.

    Returns:
      One `Completion` for one prompt, otherwise a list in the prompts' order, with all `n` of a prompt side by side.

    Raises:
      PromptError, CapacityError, ParameterError, TokenizerError: before any work starts.
    """
    draft, chat = check_flags(model, draft, chat, chat_options)
    single = is_single(prompts)
    check_single(params, single=single)
    options = {"draft": draft, "chat": chat, "chat_options": chat_options, "cycles": GENERATE_CYCLES}
    served = pieces_of(model, [prompts] if single else list(prompts), params, **options)
    done, total = (
        dict[int, Completion](),
        sum(one.n for one in params_of_prompts(params, 1 if single else len(prompts))),
    )
    # Closed here, not when it is collected: a traceback that somebody keeps would keep the pages too.
    with closing(served) as pieces, progress_bar(total=total, unit="prompt", disable=not progress) as bar:
        tokens, started = 0, time.perf_counter()
        for piece in pieces:
            tokens += len(piece.token_ids)
            if piece.completion is not None:
                done[piece.index] = piece.completion
                bar.update()
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s", refresh=False)
    return done[0] if single else [done[place] for place in range(total)]


def stream(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    params: Params = None,
    *,
    draft: bool = True,
    chat: bool = False,
    chat_options: Mapping[str, Any] | None = None,
    cycles: int = STREAM_CYCLES,
) -> Generator[Piece]:
    """As `generate`, yielding a `Piece` whenever a text gains tokens; its `index` is the text's among all. Closing it, or
    leaving it early, gives its pages back.

    While nobody asks for the next piece, its prompts go on only where another thread generates with the model, and keep their
    pages. As every generator, it is stepped and closed by one thread at a time: whoever takes its steps in threads of their own,
    from asyncio for example, awaits the last one before closing.

    Args:
      cycles: decode cycles between two looks; 1 shows every cycle as it happens, more cost less, and more than 32 are 32.

    Raises:
      PromptError, CapacityError, ParameterError, TokenizerError: at once, not at the first piece.
    """
    count = check_cycles(cycles)
    draft, chat = check_flags(model, draft, chat, chat_options)
    single = is_single(prompts)
    options = {"draft": draft, "chat": chat, "chat_options": chat_options, "cycles": count}
    return pieces_of(model, [prompts] if single else list(prompts), params, **options)


def check_flags(model: Any, draft: Any, chat: Any, chat_options: Any) -> tuple[bool, bool]:
    """`draft` and `chat`. Raises ParameterError for what would end in an error of Python's, or be taken for something else in
    silence."""
    if not isinstance(model, Model):
        raise ParameterError(f"model must be what dflash_jax.load returns, got {type(model).__name__} {model!r:.80}")
    drafting, chatting = as_flag(draft), as_flag(chat)
    if drafting is None:
        raise ParameterError(f"draft must be True or False, got {draft!r:.80}: which drafter is for load to say")
    if chatting is None:
        raise ParameterError(f"chat must be True or False, got {chat!r:.80}")
    named = isinstance(chat_options, Mapping) and all(isinstance(name, str) for name in chat_options)
    if chat_options is not None and not named:
        raise ParameterError(
            f'chat_options must be names with values, such as {{"enable_thinking": False}}, got {chat_options!r:.80}'
        )
    return drafting, chatting


def check_cycles(cycles: Any) -> int:
    """Cycles between two looks. Raises ParameterError."""
    if (count := as_integer(cycles)) is None or count < 1:
        raise ParameterError(f"cycles must be an integer of at least 1, got {cycles!r}")
    return count


def check_single(params: Params, *, single: bool) -> None:
    """Raises ParameterError where one prompt alone, which has one completion, is asked for several."""
    if single and (n := params_of_prompts(params, 1)[0].n) > 1:
        raise ParameterError(f"n={n} gives a list of completions: give the prompt in a list too")


def make_requests(
    model: Model,
    prompts: Sequence[Any],
    params: Params = None,
    *,
    chat: bool = False,
    chat_options: Mapping[str, Any] | None = None,
) -> list[Request]:
    """Requests as the engine wants them, one for each completion, numbered in order. Arguments and errors are `generate`'s."""
    each = params_of_prompts(params, len(prompts))
    if chat_options and not chat and not any(is_chat(prompt) for prompt in prompts):
        raise ParameterError("chat_options are for the chat template: pass chat=True, or messages in place of a text")
    if model.engine.imposed_acceptance is not None:
        raise ParameterError(
            "an imposed acceptance is for benchmarks: set model.engine.imposed_acceptance back to None"
        )
    if model.tokenizer is None and any(one.stop for one in each):
        raise TokenizerError(f"{model.name} has no tokenizer.json: stop strings need one, stop_token_ids do not")
    requests = []
    for place, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        try:
            ids, shown = prompted(model, prompt, chat=chat, chat_options=chat_options)
        except PromptError as error:
            if len(prompts) == 1:
                raise
            raise PromptError(f"prompts[{place}]: {error}") from None
        refused = refused_ids(model.tokenizer, model.name, one.bad_words)
        ids, pictures = shortened(ids, shown, one, model.engine.max_model_len), None
        if shown is not None and model.vision is not None:
            model.engine.check_length(len(ids), one.max_tokens)
            pictures = shown.seen(model.vision)
        grammar = None if one.structured is None else model.grammars.compiled(one.structured)
        for choice in one.choices():
            requests.append(
                Request(len(requests), ids, choice, model.eos_ids, refused=refused, grammar=grammar, pictures=pictures)
            )
    return requests


class Shown(NamedTuple):
    """Pictures of a prompt whose places are known and which no tower has looked at yet.

    Attributes:
      starts: the places of their first tokens.
      tokens: of the prompt.
    """

    pictures: tuple[Picture, ...]
    starts: tuple[int, ...]
    tokens: int

    def seen(self, vision: VisionEncoder) -> Pictures:
        """The same once the tower has, which takes a while."""
        marks = tuple((start, one.digest) for start, one in zip(self.starts, self.pictures, strict=True))
        grids = [one.grid for one in self.pictures]
        positions, shift = three_axes(self.tokens, self.starts, grids, vision.config.merge_size)
        return Pictures(marks, tuple(vision.rows(self.pictures)), positions, shift)


class Prompted(NamedTuple):
    """Token ids of one prompt, and its pictures, those of films too, where it has some."""

    ids: tuple[int, ...]
    shown: Shown | None


def prompted(model: Model, prompt: Any, *, chat: bool, chat_options: Mapping[str, Any] | None) -> Prompted:
    """Reads one prompt; one that was read stays as it is.

    Raises:
      PromptError, TokenizerError: as `prompt_ids`; or a picture or a film is none, or the model sees none.
    """
    if isinstance(prompt, Prompted):
        return prompt
    sources, films = (pictures_in(prompt), films_in(prompt)) if is_chat(prompt) else ([], [])
    if not sources and not films:
        return Prompted(prompt_ids(model.tokenizer, model.name, prompt, chat=chat, options=chat_options), None)
    if (vision := model.vision) is None:
        raise PromptError(
            f"{model.name} was loaded without a vision tower, so no message may hold a picture or a film: leave out the "
            f"{len(sources) + len(films)} that are there, or load a model that has one (model.notices says what was left out)"
        )
    text = without_pictures(prompt)
    ids = prompt_ids(model.tokenizer, model.name, text, chat=chat, options=chat_options)
    shown = [vision.processor.picture(*source) for source in sources]
    played = [_spread(model, vision, vision.films.film(*source)) for source in films]
    ids, starts, pictures = expanded(ids, vision.config, shown, played)
    return Prompted(ids, Shown(pictures, starts, len(ids)))


def _spread(model: Model, vision: VisionEncoder, film: Film) -> Spread:
    """What stands in a film's place: of each pair of frames its time, and between two tokens its rows."""
    start, end = vision.config.vision_start_token_id, vision.config.vision_end_token_id
    if start is None or end is None or model.tokenizer is None:
        raise PromptError(
            f"{model.name} was converted before there were films, and does not know the tokens that stand for one: convert it again"
        )
    spread = list[Sequence[int] | Picture]()
    for pair, time_s in zip(film.pairs, film.times, strict=True):
        spread += [(*model.tokenizer.encode(f"<{time_s:.1f} seconds>", special=False), start), pair, (end,)]
    return spread


def shortened(ids: tuple[int, ...], shown: Shown | None, params: SamplingParams, longest: int) -> tuple[int, ...]:
    """See `SamplingParams.shortened`. Raises ParameterError where that would cut a prompt with pictures."""
    kept = params.shortened(ids, longest)
    if shown is not None and kept != ids:
        raise ParameterError(
            "truncate_prompt_tokens may not cut a prompt with pictures: leave it out, or leave pictures out"
        )
    return kept


def params_of_prompts(params: Params, count: int) -> list[SamplingParams]:
    """The parameters of so many prompts. Raises ParameterError where they are for others."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed = isinstance(params, Sequence)
    each = list(params) if listed else []
    wrong = [type(one).__name__ for one in each if not isinstance(one, SamplingParams)]
    if wrong or not listed or len(each) != count:
        came = f"{len(each)}{f', among them {wrong[0]}' if wrong else ''}" if listed else type(params).__name__
        raise ParameterError(f"params must be one SamplingParams or one for each of {count} prompts, got {came}")
    return each


def pieces_of(
    model: Model, prompts: list, params: Params, *, draft, chat=False, chat_options=None, cycles=STREAM_CYCLES
) -> Generator[Piece]:
    """What `stream` yields; prompts may be such as `prompted` has read."""
    requests = make_requests(model, prompts, params, chat=chat, chat_options=chat_options)
    run = model.engine.run(requests, draft=draft, cycles=cycles)
    return _serve(model, requests, run)


def _serve(model: Model, requests: list[Request], run) -> Generator[Piece]:
    writers = [Writer(model, request) for request in requests]
    try:
        for update in run:
            writer = writers[update.index]
            if writer.finished:
                continue
            piece = writer.write(update)
            if writer.stopped_by_text:
                run.cancel(update.index)
            yield piece
    finally:
        run.close()


class Writer:
    """Turns one request's updates into pieces and, at the end, its completion."""

    def __init__(self, model: Model, request: Request):
        self.model, self.request = model, request
        p = request.params
        self.text = TextStream(model.tokenizer, p.stop, include_stop=p.include_stop, special=not p.skip_special_tokens)
        self.tokens: list[int] = []
        self.ends: list[int] = []
        self.from_draft: list[bool] = []
        self.counts: list[int] = []
        self.drafts: list[tuple[int, int]] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.finished = self.stopped_by_text = False
        self.prefill_s = self.decode_s = self.first_s = 0.0
        self.cached = 0
        self.started, self.compiled = time.perf_counter(), model.engine.programs.compile_s

    def write(self, update: Update) -> Piece:
        params, seen = self.request.params, len(self.tokens)
        compile_s = self.model.engine.programs.compile_s - self.compiled
        if update.first:
            self.prefill_s, self.first_s = update.seconds, time.perf_counter() - self.started - compile_s
            self.cached = update.cached
            if params.prompt_logprobs is not None:
                each = zip(self.request.prompt[1:], update.prompt_logprobs, strict=True)
                self.prompt_logprobs = [None, *(TokenLogprob(token, one, tuple(top)) for token, (one, top) in each)]
        else:
            self.decode_s += update.seconds
        reason, stop = update.finish_reason, update.stop_reason
        # One rule for whatever ended it: a token that did is text where `include_stop` asks for it, and a special one never is.
        count = self._add(update.tokens, silent_end=reason in ("eos", "stop") and not params.include_stop)
        self.tokens += update.tokens[:count]
        self.from_draft += update.from_draft[:count]
        if params.logprobs is not None:
            each = zip(update.tokens[:count], update.logprobs[:count], strict=True)
            self.logprobs += [TokenLogprob(token, one, tuple(top)) for token, (one, top) in each]
        if self.text.found is not None:
            reason, stop, self.stopped_by_text = "stop", self.text.found, True
        if reason is not None and self.text.finish(watch=len(self.tokens) > params.min_tokens):
            reason, stop, self.stopped_by_text = "stop", self.text.found, True
        # A stop string may end the text in one of several cycles: nothing of those behind it is in the text.
        gained = _cycles_of(update.counts, len(self.tokens) - seen)
        self.counts += gained
        drafts = update.drafts[: len(gained)]
        if drafts and gained and sum(gained) > (kept := len(self.tokens) - seen):
            last = kept - sum(gained[:-1])
            drafts[-1] = last, last  # the text ended at a draft
        self.drafts += drafts
        if drafts and (low := self.model.drafting.observe(drafts)) is not None:
            self.model.tell(low_acceptance(low))
        self.finished = reason is not None
        shown = self.text.take(everything=self.finished)
        result = self._completion(reason, stop, compile_s) if reason is not None else None
        drafted, logprobs, scores = self.from_draft[seen:], self.logprobs[seen:], self.prompt_logprobs
        return Piece(
            update.index, shown, self.tokens[seen:], drafted, gained, reason, result, logprobs,
            scores if update.first else [],
        )  # fmt: skip

    def _add(self, tokens: Sequence[int], *, silent_end: bool) -> int:
        """Adds the texts of tokens, of the last one not with `silent_end`, up to one that completes a stop string, and returns how
        many tokens that are."""
        shown = len(tokens) - (silent_end and len(tokens) > 0)
        if not self.text.stops:
            self.ends += self.text.add_all(tokens[:shown])
            self.ends += [len(self.text.text)] * (len(tokens) - shown)
            return len(tokens)
        for place, token in enumerate(tokens):
            watch = len(self.tokens) + place >= self.request.params.min_tokens
            stopped = place < shown and self.text.add(token, watch=watch)
            self.ends.append(len(self.text.text))
            if stopped:
                return place + 1
        return len(tokens)

    def so_far(self) -> Completion:
        """Completion of an aborted text."""
        self.text.finish(watch=False)
        return self._completion("abort", None, self.model.engine.programs.compile_s - self.compiled)

    def _completion(self, reason: str, stop: str | int | None, compile_s: float) -> Completion:
        after_first = len(self.tokens) - 1
        memory = jax.local_devices()[0].memory_stats() or {}
        stats = Stats(
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            compile_s=compile_s,
            time_to_first_token_s=self.first_s,
            tokens_per_s=after_first / self.decode_s if self.decode_s > 0 else 0.0,
            target_steps=len(self.counts),
            tokens_per_cycle=sum(self.counts) / len(self.counts) if self.counts else 0.0,
            peak_bytes=memory.get("peak_bytes_in_use"),
            cached_tokens=self.cached,
            acceptance_by_position=acceptance_by_position(Counter(self.drafts)),
        )
        whole = len(
            self.text.text
        )  # the last token has what waited for its end; a stop string takes back what others had
        ends = [min(end, whole) for end in self.ends[:-1]] + [whole] * bool(self.ends)
        return Completion(
            text=self.text.text, token_ids=self.tokens, finish_reason=reason, stop_reason=stop,
            prompt_token_ids=list(self.request.prompt), acceptance_lengths=self.counts, from_draft=self.from_draft,
            seed=self.request.seed, stats=stats, logprobs=self.logprobs if self.request.params.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs if self.request.params.prompt_logprobs is not None else None,
            text_ends=ends,
        )  # fmt: skip


def _cycles_of(counts: Sequence[int], tokens: int) -> list[int]:
    """The cycles, with what each gained, that it took to gain the first `tokens` tokens."""
    before = itertools.accumulate(counts, initial=0)
    return [count for count, start in zip(counts, before, strict=False) if start < tokens]
