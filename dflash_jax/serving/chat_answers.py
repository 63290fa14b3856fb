"""Answers of chats with thoughts and calls of tools in them, told apart from what is for the reader."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dflash_jax.decoding.grammar_masks import Grammar
from dflash_jax.serving.answers import Answer
from dflash_jax.serving.tools import ChatAsk, template_of
from dflash_jax.text.answers import choice
from dflash_jax.text.answers.events import Arguments, CallBegin, CallEnd, Event, Parser, Text, Thought, merged
from dflash_jax.text.answers.reasoning import BEGIN, END, Start
from dflash_jax.text.completion import Piece
from dflash_jax.text.tokenizer import Tokenizer

_TAIL = 16  # tokens of a prompt that show how the answer begins


class ChatAnswer(Answer):
    """An `Answer` of a chat.

    Args:
      prompt: token ids of the messages.
      tool_parser, reasoning_parser: names of `dflash_jax.text.answers.choice`.
    """

    def __init__(
        self,
        ask: ChatAsk,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        model: str,
        tool_parser: choice.ToolParser = "auto",
        reasoning_parser: choice.ReasoningParser = "auto",
    ):
        super().__init__(ask, tokenizer, chat=True, model=model)
        template = template_of(tokenizer, ask.tools)
        end = tokenizer.backend.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
        self._start: Start | None = choice.start_of(reasoning_parser, template, ask.chat_options, end)
        self._form = choice.tool_parser_of(tool_parser, template)
        self._tools, self._one_call = ask.tools, ask.one_call
        self._parsers: dict[int, Parser | None] = {}
        self._called = set[int]()
        self._think_end = tokenizer.backend.token_to_id(END)

    def whole(self) -> dict[str, Any]:
        """From the completions in `done`."""
        made = super().whole()
        for row in made["choices"]:
            parser = self._parser()
            if parser is None:
                continue
            events = self._kept(choice.parsed(parser, self.done[row["index"]].text))
            message, calls = row["message"], list[dict[str, Any]]()
            for event in events:
                match event:
                    case CallBegin(_, name):
                        calls.append(_call(name))
                    case Arguments(_, text):
                        calls[-1]["function"]["arguments"] += text
            texts = "".join(event.text for event in events if isinstance(event, Text))
            thoughts = "".join(event.text for event in events if isinstance(event, Thought))
            message["content"] = texts or (None if calls or thoughts else "")
            if self._start is not None:
                message |= {"reasoning_content": thoughts or None, "reasoning": thoughts or None}
            if calls:
                message["tool_calls"] = calls
                row["finish_reason"] = _reason(row["finish_reason"], called=True)
        return made

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Chunks of a stream for a piece."""
        made, index = super().chunks(piece), piece.index
        if index not in self._parsers:
            self._parsers[index] = self._parser()
        parser = self._parsers[index]
        if parser is None:
            return made
        told = list[dict[str, Any]]()
        for chunk in made:
            row = chunk["choices"][0]
            if row["finish_reason"] is not None:
                told += self._deltas(index, chunk, parser.finish())
                called = index in self._called
                told.append(_with(chunk, finish_reason=_reason(row["finish_reason"], called=called)))
            elif "role" in row["delta"]:
                told.append(chunk)
            else:
                told += self._deltas(index, chunk, parser.feed(row["delta"]["content"]))
        return told

    def grammar_of(self, grammar: Grammar | None) -> Grammar | None:
        """The grammar, to begin after reasoning: at the token that ends it, if it is one token."""
        if grammar is None or self._start is None or self._think_end is None:
            return grammar
        opens = self.tokenizer.backend.token_to_id(BEGIN) if self.tokenizer is not None else None
        return replace(grammar, opens=opens, closes=self._think_end, inside=self._start == "inside")

    def usage(self) -> dict[str, Any]:
        """Usage with the tokens of reasoning, its mark included."""
        made = super().usage()
        if self._start is not None:
            made["completion_tokens_details"] = {"reasoning_tokens": sum(map(self._thinking, self.done))}
        return made

    def _thinking(self, index: int) -> int:
        tokens = self.done[index].token_ids
        if self._think_end in tokens:
            return tokens.index(self._think_end) + 1
        return len(tokens) if self._start == "inside" else 0

    def _parser(self) -> Parser | None:
        return choice.parser_of(self._form, self._start, self._tools)

    def _kept(self, events: Sequence[Event]) -> list[Event]:
        """Without calls behind the first, where one alone is wanted."""
        return [event for event in events if not (self._one_call and getattr(event, "index", 0) > 0)]

    def _deltas(self, index: int, chunk: dict[str, Any], events: list[Event]) -> list[dict[str, Any]]:
        """Chunks like one, with what a parser says of its text. The first has its log-probabilities."""
        deltas = list[dict[str, Any]]()
        for event in self._kept(merged(events)):
            match event:
                case Text(text):
                    deltas.append({"content": text})
                case Thought(text):
                    deltas.append({"reasoning_content": text, "reasoning": text})
                case CallBegin(place, name):
                    deltas.append({"tool_calls": [{"index": place} | _call(name)]})
                case Arguments(place, text):
                    deltas.append({"tool_calls": [{"index": place, "function": {"arguments": text}}]})
                case CallEnd():
                    self._called.add(index)
        logprobs = chunk["choices"][0]["logprobs"]
        if logprobs is not None and not deltas:
            deltas.append({"content": ""})
        each = [logprobs, *[None] * len(deltas)]
        return [
            _with(chunk, delta=delta, logprobs=of, finish_reason=None) for delta, of in zip(deltas, each, strict=False)
        ]


def _call(name: str) -> dict[str, Any]:
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}


def _reason(reason: str | None, *, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason


def _with(chunk: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A chunk with other fields of its choice."""
    return chunk | {"choices": [chunk["choices"][0] | fields]}
