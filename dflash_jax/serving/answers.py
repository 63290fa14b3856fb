"""Answers in OpenAI's shapes: whole ones, chunks of a stream, usage and log-probabilities."""

import codecs
import time
import uuid
from collections.abc import Sequence
from typing import Any

from dflash_jax.decoding.grammar_masks import Grammar
from dflash_jax.serving.bodies import Ask
from dflash_jax.serving.problems import Problem, dumped
from dflash_jax.text.completion import Completion, Piece, TokenLogprob
from dflash_jax.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


def reason_of(finish_reason: str | None) -> str | None:
    """OpenAI's word: an end token and a stop are one."""
    return "stop" if finish_reason == "eos" else finish_reason


class Logprobs:
    """Log-probabilities of one choice, in both shapes, continued from chunk to chunk.

    Args:
      ids: tokens are named by their ids.
      special: special tokens are text.
    """

    def __init__(self, tokenizer: Tokenizer, *, ids: bool, special: bool):
        self._tokenizer, self._bytes, self._ids, self._special = tokenizer, tokenizer.token_bytes, ids, special
        self._offset = 0
        self._text = codecs.getincrementaldecoder("utf-8")("replace")

    def completions(self, tokens: Sequence[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """As `/v1/completions` has them. Of two tokens with one text the more probable counts.

        Args:
          first: a token before them of which nothing is known: a prompt's first.
        """
        rows: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if first is not None:
            self._add(rows, first, None, None)
        for one in tokens:
            tops = dict[str, float]()
            for token, logprob in (*one.top, (one.token_id, one.logprob)):
                tops.setdefault(self._name(token), _number(logprob))
            self._add(rows, one.token_id, _number(one.logprob), tops)
        return rows

    def _add(
        self, rows: dict[str, list[Any]], token: int, logprob: float | None, tops: dict[str, float] | None
    ) -> None:
        values = (self._name(token), logprob, tops, self._offset)
        for name, value in zip(("tokens", "token_logprobs", "top_logprobs", "text_offset"), values, strict=True):
            rows[name].append(value)
        if not self._silent(token):
            self._offset += len(self._text.decode(self._bytes.of(token)))

    def of_prompt(self, tokens: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
        """As vLLM's `prompt_logprobs` are: by ids, with the place among all tokens where it is known."""
        rows = list[dict[str, Any] | None]()
        for one in tokens:
            if one is None:
                rows.append(None)
                continue
            row = {str(one.token_id): self._scored(one.token_id, one.logprob, None)}
            for place, (token, logprob) in enumerate(one.top):
                row[str(token)] = self._scored(token, logprob, place + 1)
            rows.append(row)
        return rows

    def _scored(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = self._bytes.of(token).decode("utf-8", "replace")
        return {"logprob": _number(logprob), "rank": rank, "decoded_token": text}

    def chat(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """As `/v1/chat/completions` has them: of the tokens that are text."""
        content = [
            self._entry(one.token_id, one.logprob) | {"top_logprobs": [self._entry(*top) for top in one.top]}
            for one in tokens
            if not self._silent(one.token_id)
        ]
        return {"content": content, "refusal": None}

    def _silent(self, token: int) -> bool:
        return self._tokenizer.is_silent(token, special=self._special)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": _number(logprob), "bytes": list(self._bytes.of(token))}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._ids else self._bytes.of(token).decode("utf-8", "replace")


def _number(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)


def request_metrics(row: Completion, drafts: int) -> dict[str, Any]:
    """Times and acceptance of one choice, under vLLM's names.

    Args:
      drafts: proposals in a cycle; 0 without a drafter.
    """
    stats, stood = row.stats, [length - 1 for length in row.acceptance_lengths]
    speculative = None
    if drafts and stood:
        speculative = {
            "mean_acceptance_length": stats.tokens_per_cycle, "draft_acceptance_rate": sum(stood) / (drafts * len(stood)),
            "acceptance_histogram": [stood.count(count) for count in range(drafts + 1)], "num_spec_steps": len(stood),
            "num_accepted_draft_tokens": sum(stood), "num_draft_tokens": drafts * len(stood), "num_spec_tokens": drafts,
        }  # fmt: skip
    behind_first = len(row.token_ids) - 1
    return {
        "time_to_first_token_ms": 1e3 * stats.time_to_first_token_s, "generation_time_ms": 1e3 * stats.decode_s,
        "queue_time_ms": 1e3 * max(0.0, stats.time_to_first_token_s - stats.prefill_s),
        "mean_itl_ms": 1e3 * stats.decode_s / behind_first if behind_first > 0 else None,
        "tokens_per_second": stats.tokens_per_s, "speculative_decoding": speculative,
    }  # fmt: skip


class Answer:
    """One request's answer, whole or in chunks.

    Args:
      chat: whether it is a chat's.
      model: the name it was asked for by.

    Attributes:
      drafts: proposals that the drafter makes in a cycle.
    """

    def __init__(self, ask: Ask, tokenizer: Tokenizer | None, *, chat: bool, model: str):
        self.ask, self.is_chat, self.tokenizer = ask, chat, tokenizer
        kind = "chat.completion" if chat else "text_completion"
        self._base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()),
            "model": model, "system_fingerprint": None,
        }  # fmt: skip
        self._logprobs: dict[int, Logprobs] = {}
        self._begun = set[int]()
        self.done: dict[int, Completion] = {}
        self._produced: dict[int, int] = {}
        self._prompts: dict[int, Sequence[int]] = {}
        self.drafts = 0

    def whole(self) -> dict[str, Any]:
        """From the completions in `done`."""
        choices = []
        for index, row in sorted(self.done.items()):
            ends = {"finish_reason": reason_of(row.finish_reason), "stop_reason": row.stop_reason}
            if row.finish_reason == "eos":
                ends["stop_reason"] = None
            logprobs = self._logprobs_of(index, row.logprobs, row.prompt_logprobs)
            if self.is_chat:
                message = {"role": "assistant", "content": row.text, "refusal": None}
                choices.append({"index": index, "message": message, "logprobs": logprobs, **ends})
            else:
                made = {"index": index, "text": self._echo(index) + row.text, "logprobs": logprobs, **ends}
                if self.ask.prompt_logprobs and self.tokenizer is not None:
                    made["prompt_logprobs"] = self._state(index, self.tokenizer).of_prompt(row.prompt_logprobs or [])
                choices.append(made)
        return self._base | {"choices": choices, "usage": self.usage(), **self._metrics()}

    def note(self, piece: Piece) -> None:
        """Counts a piece, and keeps the completion that comes with a choice's last one."""
        index = piece.index
        self._produced[index] = self._produced.get(index, 0) + len(piece.token_ids)
        if piece.completion is not None:
            self.done[index] = piece.completion

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Chunks of a stream for a piece."""
        self.note(piece)
        index, text = piece.index, piece.text
        ends = {"finish_reason": reason_of(piece.finish_reason)}
        if self.ask.echo and index not in self._begun:
            self._begun.add(index)
            text = self._echo(index) + text
        known = self.ask.params.logprobs is not None and bool(piece.logprobs or piece.prompt_logprobs)
        shown = bool(text) or known
        logprobs = self._logprobs_of(index, piece.logprobs, piece.prompt_logprobs) if known else None
        if not self.is_chat:
            told = [{"index": index, "text": text, "logprobs": logprobs, **ends}]
            return [self._chunk(one) for one in told if shown or piece.finish_reason]
        deltas = list[dict[str, Any]]()
        none = {"logprobs": None, "finish_reason": None}
        if index not in self._begun:
            self._begun.add(index)
            deltas.append({"index": index, "delta": {"role": "assistant", "content": ""}, **none})
        if shown:
            told = {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}
            deltas.append(told)
        if piece.finish_reason:
            deltas.append({"index": index, "delta": {}, "logprobs": None, **ends})
        return [self._chunk(one) for one in deltas]

    # What a stream has around its chunks.

    END = b"data: [DONE]\n\n"

    def opening(self) -> list[dict[str, Any]]:
        """Before everything else."""
        return []

    def closing(self) -> list[dict[str, Any]]:
        """Behind the last piece's."""
        return [] if self.ask.usage is None else [self.last_chunk()]

    def failed(self, problem: Problem) -> dict[str, Any]:
        """Error event in place of the rest of a stream."""
        return problem.body()

    def framed(self, chunk: dict[str, Any]) -> bytes:
        """A chunk as it is sent."""
        return b"data: " + dumped(chunk) + b"\n\n"

    def last_chunk(self) -> dict[str, Any]:
        """The one with the usage, behind all others."""
        return self._chunk(None) | {"usage": self.usage(), **self._metrics()}

    def _metrics(self) -> dict[str, Any]:
        """Metrics, if they are asked for; null for several choices, whose times are of all of them."""
        if not self.ask.metrics:
            return {}
        (alone,) = self.done.values() if len(self.done) == 1 else (None,)
        return {"metrics": None if alone is None or self.ask.n > 1 else request_metrics(alone, self.drafts)}

    def grammar_of(self, grammar: Grammar | None) -> Grammar | None:
        """The grammar that texts follow, of the one that a request names."""
        return grammar

    def prompt_seen(self, index: int, ids: Sequence[int]) -> None:
        """A choice's prompt, as the model gets it."""
        self._prompts[index] = ids

    def usage(self) -> dict[str, Any]:
        """Each prompt counts once, completions of all choices count."""
        firsts = [index for index in self._prompts if index % self.ask.n == 0]
        prompt = sum(len(self._prompts[index]) for index in firsts)
        done = {index: len(row.token_ids) for index, row in self.done.items()}
        produced = sum((self._produced | done).values())
        cached = sum(self.done[index].stats.cached_tokens for index in firsts if index in self.done)
        return {
            "prompt_tokens": prompt, "completion_tokens": produced, "total_tokens": prompt + produced,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        made = self._base | {"choices": [] if choice is None else [choice]}
        if self.is_chat:
            made["object"] = "chat.completion.chunk"
        if self.ask.usage is not None:
            made["usage"] = self.usage() if self.ask.usage == "always" else None
        return made

    def _echo(self, index: int) -> str:
        """The prompt's text where it is to come again; of token ids, and where it was shortened, that of its tokens."""
        if not self.ask.echo:
            return ""
        prompt, ids, params = self.ask.prompts[index // self.ask.n], self._prompts[index], self.ask.params
        if isinstance(prompt, str) and params.truncate_prompt_tokens is None:
            return prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(ids, special=not params.skip_special_tokens)

    def _logprobs_of(
        self, index: int, tokens: Sequence[TokenLogprob] | None, prompt: Sequence[TokenLogprob | None] | None = None
    ) -> dict[str, Any] | None:
        if tokens is None or self.tokenizer is None:
            return None
        state = self._state(index, self.tokenizer)
        if self.is_chat:
            return state.chat(tokens)
        if not self.ask.echo or not prompt:
            return state.completions(tokens)
        known = [one for one in prompt if one is not None]
        return state.completions([*known, *tokens], first=self._prompts[index][0])

    def _state(self, index: int, tokenizer: Tokenizer) -> Logprobs:
        if index not in self._logprobs:
            self._logprobs[index] = Logprobs(
                tokenizer, ids=self.ask.ids, special=not self.ask.params.skip_special_tokens
            )
        return self._logprobs[index]
