"""Results of `generate` and `stream`."""

from dataclasses import dataclass, field

_SHOWN = 60  # characters of a text where it is named


@dataclass(frozen=True)
class Stats:
    """Times and acceptance of one request. Compilation is counted apart and in none of the other figures.

    Attributes:
      prefill_s: seconds from this prompt's first chunk to its first token, with the cycles others ran in between.
      decode_s: seconds of device calls from the first token to the last, shared with the requests that ran beside it. The chunk of
        another prompt that ran between two calls counts with the second.
      compile_s: seconds the whole call spent compiling.
      time_to_first_token_s: seconds from the call to this request's first token, waiting included.
      tokens_per_s: tokens after the first one for each second of `decode_s`; 0 where there was none.
      target_steps: forward passes of the target after the prompt, up to the one in which the text ended.
      tokens_per_cycle: mean of `acceptance_lengths`; 0 where there was no cycle.
      peak_bytes: most device memory in use so far, where the device tells.
      cached_tokens: tokens of the prompt that were found in pages of earlier ones.
      acceptance_by_position: for each place of a block, the share of the cycles that offered a draft there in which that draft was
        accepted. A cycle offers the drafts that it verified; where an accepted one ended the text, those up to it alone. A draft
        behind a refused one was offered and not accepted. Empty where nothing was drafted.
    """

    prefill_s: float
    decode_s: float
    compile_s: float
    time_to_first_token_s: float
    tokens_per_s: float
    target_steps: int
    tokens_per_cycle: float
    peak_bytes: int | None = None
    cached_tokens: int = 0
    acceptance_by_position: tuple[float, ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target, and of the most probable tokens at its place, natural log."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """One prompt's result.

    Attributes:
      text: what followed the prompt, without what ended it unless `include_stop` asked for that; empty without a tokenizer.
      token_ids: emitted ids, with the end token or stop id that ended the text.
      finish_reason: "eos", "stop" (stop string or stop token id) or "length"; "abort" of what `show` was interrupted in.
      stop_reason: the stop string or id, None otherwise.
      prompt_token_ids: the prompt as the model saw it.
      acceptance_lengths: tokens gained in each cycle, the target's own included. Their sum and the prefill's one token make
        `len(token_ids)`, unless a stop string ended the text inside a cycle.
      from_draft: for each token, whether the drafter had proposed it.
      seed: the seed that repeats a sampled text.
      stats: where the time went.
      logprobs: one for each token where they were asked for, None otherwise.
      prompt_logprobs: where they were asked for, one for each token of the prompt, the first of which is None; None otherwise.
      text_ends: for each token, how many characters of `text` were there with it: one that ends inside a character adds none.

    What has an entry for each token or cycle is not in its `repr`.
    """

    text: str
    token_ids: list[int] = field(repr=False)
    finish_reason: str
    stop_reason: str | int | None
    prompt_token_ids: list[int] = field(repr=False)
    acceptance_lengths: list[int] = field(repr=False)
    from_draft: list[bool] = field(repr=False)
    seed: int
    stats: Stats
    logprobs: list[TokenLogprob] | None = field(default=None, repr=False)
    prompt_logprobs: list[TokenLogprob | None] | None = field(default=None, repr=False)
    text_ends: list[int] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        shown = repr(self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}...")
        return (
            f"{shown} ({len(self.token_ids)} tokens, {self.stats.tokens_per_cycle:.2f} per cycle, {self.finish_reason})"
        )

    def _repr_html_(self) -> str:
        """HTML for notebooks: tokens coloured by where they came from, and what each cycle gained."""
        from dflash_jax.text.completion_html import completion_html

        return completion_html(self)


@dataclass(frozen=True)
class Piece:
    """A part of a text while it is made.

    Attributes:
      index: which prompt it belongs to.
      text: new text, always whole characters; may be empty while a stop string could be beginning.
      token_ids: new ids.
      from_draft: for each of them, whether the drafter had proposed it.
      accepted: tokens gained in each cycle this piece covers.
      finish_reason: None until the last piece of a prompt.
      completion: with the last piece, the whole result.
      logprobs: one for each new id where they were asked for.
      prompt_logprobs: with the first piece of a prompt, as those of `Completion`; empty otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    from_draft: list[bool] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    completion: Completion | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
