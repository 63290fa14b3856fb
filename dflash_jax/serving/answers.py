"""Answers in OpenAI's shapes: whole ones, chunks of a stream, usage and log-probabilities."""

import codecs
import time
import uuid
from collections.abc import Sequence
from typing import Any

from dflash_jax.completion import Completion, Piece, TokenLogprob
from dflash_jax.serving.bodies import Ask
from dflash_jax.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


def reason_of(finish_reason: str | None) -> str | None:
    """OpenAI's word: an end token and a stop are one."""
    return "stop" if finish_reason == "eos" else finish_reason


class TokenBytes:
    """Bytes of single tokens, from the vocabulary: a token may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in repr(tokenizer.backend.decoder)
        kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in kept]
        # GPT-2's alphabet: bytes that are no printable letter are those from 256 on.
        self._letters = {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}

    def of(self, token: int) -> bytes:
        name = self._tokenizer.backend.id_to_token(token) or ""
        if self._byte_level and all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode("utf-8", "replace")


class Logprobs:
    """Log-probabilities of one choice, in both shapes, continued from chunk to chunk.

    Args:
      ids: tokens are named by their ids.
      special: special tokens are text.
    """

    def __init__(self, tokenizer: Tokenizer, *, ids: bool, special: bool):
        self._tokenizer, self._bytes, self._ids, self._special = tokenizer, TokenBytes(tokenizer), ids, special
        self._offset = 0
        self._text = codecs.getincrementaldecoder("utf-8")("replace")

    def completions(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """As `/v1/completions` has them. Of two tokens with one text the more probable counts."""
        rows: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in tokens:
            tops = dict[str, float]()
            for token, logprob in (*one.top, (one.token_id, one.logprob)):
                tops.setdefault(self._name(token), _number(logprob))
            rows["tokens"].append(self._name(one.token_id))
            rows["token_logprobs"].append(_number(one.logprob))
            rows["top_logprobs"].append(tops)
            rows["text_offset"].append(self._offset)
            if not self._silent(one.token_id):
                self._offset += len(self._text.decode(self._bytes.of(one.token_id)))
        return rows

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


class Answer:
    """One request's answer, whole or in chunks.

    Args:
      chat: whether it is a chat's.
      model: the name it was asked for by.
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
        self._prompts: dict[int, int] = {}

    def whole(self) -> dict[str, Any]:
        """From the completions in `done`."""
        choices = []
        for index, row in sorted(self.done.items()):
            ends = {"finish_reason": reason_of(row.finish_reason), "stop_reason": row.stop_reason}
            if row.finish_reason == "eos":
                ends["stop_reason"] = None
            logprobs = self._logprobs_of(index, row.logprobs)
            if self.is_chat:
                message = {"role": "assistant", "content": row.text, "refusal": None}
                choices.append({"index": index, "message": message, "logprobs": logprobs, **ends})
            else:
                choices.append({"index": index, "text": row.text, "logprobs": logprobs, **ends})
        return self._base | {"choices": choices, "usage": self.usage()}

    def note(self, piece: Piece) -> None:
        """Counts a piece, and keeps the completion that comes with a choice's last one."""
        index = piece.index
        self._produced[index] = self._produced.get(index, 0) + len(piece.token_ids)
        if piece.completion is not None:
            self.done[index] = piece.completion

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """What a stream says of a piece."""
        self.note(piece)
        index = piece.index
        ends = {"finish_reason": reason_of(piece.finish_reason)}
        shown = bool(piece.text) or bool(piece.logprobs)
        logprobs = self._logprobs_of(index, piece.logprobs) if piece.logprobs else None
        if not self.is_chat:
            told = [{"index": index, "text": piece.text, "logprobs": logprobs, **ends}]
            return [self._chunk(one) for one in told if shown or piece.finish_reason]
        deltas = list[dict[str, Any]]()
        none = {"logprobs": None, "finish_reason": None}
        if index not in self._begun:
            self._begun.add(index)
            deltas.append({"index": index, "delta": {"role": "assistant", "content": ""}, **none})
        if shown:
            told = {"index": index, "delta": {"content": piece.text}, "logprobs": logprobs, "finish_reason": None}
            deltas.append(told)
        if piece.finish_reason:
            deltas.append({"index": index, "delta": {}, "logprobs": None, **ends})
        return [self._chunk(one) for one in deltas]

    def last_chunk(self) -> dict[str, Any]:
        """The one with the usage, behind all others."""
        return self._chunk(None) | {"usage": self.usage()}

    def prompt_seen(self, index: int, tokens: int) -> None:
        """How long a choice's prompt is."""
        self._prompts[index] = tokens

    def usage(self) -> dict[str, Any]:
        """Each prompt counts once, completions of all choices count."""
        firsts = [index for index in self._prompts if index % self.ask.n == 0]
        prompt = sum(self._prompts[index] for index in firsts)
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

    def _logprobs_of(self, index: int, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if tokens is None or self.tokenizer is None:
            return None
        if index not in self._logprobs:
            self._logprobs[index] = Logprobs(
                self.tokenizer, ids=self.ask.ids, special=not self.ask.params.skip_special_tokens
            )
        state = self._logprobs[index]
        return state.chat(tokens) if self.is_chat else state.completions(tokens)
