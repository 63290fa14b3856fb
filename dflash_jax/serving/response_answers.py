"""Answers of `/v1/responses`: items in place of a message, and events in place of chunks."""

import time
import uuid
from typing import Any

from dflash_jax.serving.chat_answers import ChatAnswer
from dflash_jax.serving.problems import Problem, dumped
from dflash_jax.serving.responses import ResponseAsk
from dflash_jax.text.completion import Piece

_KINDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseAnswer(ChatAnswer):
    """A `ChatAnswer` as `/v1/responses` tells it. Arguments are those of one."""

    ask: ResponseAsk
    END = b""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._items = list[dict[str, Any]]()  # whole ones
        self._item: dict[str, Any] | None = None  # that goes on
        self._reason: str | None = None
        self._number = 0

    def whole(self) -> dict[str, Any]:
        """From the completion in `done`."""
        made = super().whole()
        (choice,) = made["choices"]
        message, items = choice["message"], list[dict[str, Any]]()
        if message.get("reasoning_content"):
            items.append(_begun("reasoning") | {"content": [_part("reasoning_text", message["reasoning_content"])]})
        calls = message.get("tool_calls", ())
        if message["content"] or not (calls or items):
            items.append(_begun("message") | {"content": [_part("output_text", message["content"] or "")]})
        for call in calls:
            told = {"call_id": call["id"], **call["function"]}
            items.append(_begun("function_call") | told)
        cut = choice["finish_reason"] == "length"
        self._items = [item | {"status": "incomplete" if cut and item is items[-1] else "completed"} for item in items]
        self._reason = choice["finish_reason"]
        return self._object() | {name: made[name] for name in ("metrics",) if name in made}

    # A stream.

    def opening(self) -> list[dict[str, Any]]:
        begun = self._object(status="in_progress")
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Events of what a stream gains by a piece."""
        told = list[dict[str, Any]]()
        for chunk in super().chunks(piece):
            (choice,) = chunk["choices"]
            delta = choice["delta"]
            if text := delta.get("reasoning_content"):
                told += self._gained("reasoning", "reasoning_text", text)
            if text := delta.get("content"):
                told += self._gained("message", "output_text", text)
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    told += self._end()
                    told += self._begin("function_call", call_id=call["id"], **call["function"])
                elif self._item is not None:
                    text = call["function"]["arguments"]
                    self._item["arguments"] += text
                    told.append(self._of_item("response.function_call_arguments.delta", delta=text))
            if choice["finish_reason"] is not None:
                self._reason = choice["finish_reason"]
        return told

    def closing(self) -> list[dict[str, Any]]:
        told = self._end()
        if not self._items:  # a text of nothing is a message all the same
            told += [*self._begin("message"), *self._end()]
        name = "incomplete" if self._reason == "length" else "completed"
        return [*told, self._event(f"response.{name}", response=self._object())]

    def failed(self, problem: Problem) -> dict[str, Any]:
        return self._event("error", code=problem.code, message=problem.body()["error"]["message"], param=problem.param)

    def framed(self, chunk: dict[str, Any]) -> bytes:
        return f"event: {chunk['type']}\n".encode() + b"data: " + dumped(chunk) + b"\n\n"

    def _gained(self, kind: str, part: str, text: str) -> list[dict[str, Any]]:
        """Events of a text of an item, which begins here where another one, or none, goes on."""
        told = list[dict[str, Any]]()
        if self._item is None or self._item["type"] != kind:
            told = [*self._end(), *self._begin(kind)]
        assert self._item is not None
        self._item["content"][0]["text"] += text
        logprobs = {"logprobs": []} if kind == "message" else {}
        return [*told, self._of_item(f"response.{part}.delta", content_index=0, delta=text, **logprobs)]

    def _begin(self, kind: str, /, **told: Any) -> list[dict[str, Any]]:
        self._item = item = _begun(kind) | told
        events = [self._event("response.output_item.added", output_index=len(self._items), item=_copy(item))]
        if kind == "function_call":
            return events
        part = _part("output_text" if kind == "message" else "reasoning_text", "")
        item["content"] = [part]
        return [*events, self._of_item("response.content_part.added", content_index=0, part=dict(part))]

    def _end(self) -> list[dict[str, Any]]:
        if (item := self._item) is None:
            return []
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        events = list[dict[str, Any]]()
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._of_item("response.function_call_arguments.done", **done))
        else:
            (part,) = item["content"]
            logprobs = {"logprobs": []} if item["type"] == "message" else {}
            done = {"content_index": 0, "text": part["text"], **logprobs}
            events.append(self._of_item(f"response.{part['type']}.done", **done))
            events.append(self._of_item("response.content_part.done", content_index=0, part=dict(part)))
        events.append(self._event("response.output_item.done", output_index=len(self._items), item=_copy(item)))
        self._items.append(item)
        self._item = None
        return events

    def _of_item(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self._items), **fields)

    def _event(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _object(self, status: str | None = None) -> dict[str, Any]:
        """The response as far as it has come."""
        body, params, cut = self.ask.body, self.ask.params, self._reason == "length"
        usage = None
        if status is None:
            made = self.usage()
            usage = {
                "input_tokens": made["prompt_tokens"],
                "input_tokens_details": made["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": made["completion_tokens"],
                "output_tokens_details": made.get("completion_tokens_details", {"reasoning_tokens": 0}),
                "total_tokens": made["total_tokens"],
            }  # fmt: skip
        return {
            "id": self._id, "object": "response", "created_at": self._created,
            "status": status or ("incomplete" if cut else "completed"), "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut and status is None else None,
            "instructions": body.get("instructions"), "max_output_tokens": body.get("max_output_tokens"),
            "model": self._base["model"], "output": [_copy(item) for item in self._items] if status is None else [],
            "parallel_tool_calls": body.get("parallel_tool_calls", True), "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | dict(body.get("reasoning", {})), "store": False,
            "temperature": params.temperature, "text": body.get("text", {"format": {"type": "text"}}),
            "tool_choice": body.get("tool_choice", "auto"), "tools": body.get("tools", []), "top_p": params.top_p,
            "truncation": "disabled", "usage": usage, "user": body.get("user"), "metadata": body.get("metadata", {}),
        }  # fmt: skip


def _begun(kind: str) -> dict[str, Any]:
    made: dict[str, Any] = {"id": f"{_KINDS[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
    if kind == "message":
        return made | {"role": "assistant", "content": []}
    return made | ({"summary": [], "content": []} if kind == "reasoning" else {})


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text} | ({"annotations": [], "logprobs": []} if kind == "output_text" else {})


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As an item is now: it goes on."""
    return item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})
