"""Training data of a drafter: prompts and answers of a file as token ids, or prompts that the target itself answers.

Each line is an object, in one of the forms that data sets have:

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
    {"prompt": ..., "response": ...}
    {"text": ...}

Of a conversation the last answer is learned, of a text all.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.errors import PromptError
from dflash_jax.text.prompt_files import read_utf8
from dflash_jax.text.tokenizer import Tokenizer

PROMPT_KEYS, ANSWER_KEYS = ("prompt", "question", "instruction"), ("response", "answer", "completion", "output")
_ROLES = {"human": "user", "gpt": "assistant"}
_FORMS = "messages, conversations, text, or one of prompt, question and instruction"


@dataclass(frozen=True)
class Row:
    """One line of the file.

    Attributes:
      place: file and line, for errors.
      prompt: a text, or the messages before the answer.
      answer: None where the file has none.
    """

    place: str
    prompt: str | list[dict[str, str]]
    answer: str | None


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt and its answer, which begins at `start`."""

    ids: tuple[int, ...]
    start: int


def read_rows(path: Path) -> list[Row]:
    """All lines of a file of JSON lines.

    Raises:
      PromptError: the file cannot be read or is empty, or a line is of none of the forms.
    """
    lines = read_utf8(path).split("\n")
    rows = [_row(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise PromptError(f"{path} holds no line: give JSON lines with {_FORMS}")
    return rows


def _row(place: str, line: str) -> Row:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{place} is no JSON ({error}): give one object a line") from None
    if not isinstance(value, Mapping):
        raise PromptError(f"{place} must be an object with {_FORMS}, got {line:.60}")
    for key in ("messages", "conversations"):
        if key in value:
            return _conversation(place, value[key])
    prompt = next((value[key] for key in PROMPT_KEYS if key in value), None)
    answer = next((value[key] for key in ANSWER_KEYS if key in value), None)
    if prompt is None and "text" in value:
        prompt, answer = "", value["text"]
    if not isinstance(prompt, str) or not (answer is None or isinstance(answer, str)):
        raise PromptError(f"{place} must have texts under {_FORMS}; its keys are {', '.join(map(str, value))}")
    return Row(place, prompt, answer)


def _conversation(place: str, messages: Any) -> Row:
    found = []
    for one in messages if isinstance(messages, list) else ():
        role, content = (
            (one.get("role", one.get("from")), one.get("content", one.get("value")))
            if isinstance(one, Mapping)
            else (None, None)
        )
        if not isinstance(role, str) or not isinstance(content, str):
            raise PromptError(f"{place}: each message must have texts as role and content, got {one!r:.60}")
        found.append({"role": _ROLES.get(role, role), "content": content})
    answer = found.pop()["content"] if found and found[-1]["role"] == "assistant" else None
    if not found:
        raise PromptError(f"{place}: a conversation must begin with a message that is no assistant's")
    return Row(place, found, answer)


def prompt_ids(tokenizer: Tokenizer, row: Row, *, chat: bool, options: Mapping[str, Any]) -> list[int]:
    """A row's prompt as the model is asked it: messages, and with `chat` texts as well, through the chat template.

    Raises:
      PromptError: the model has no chat template, or it refuses the messages.
    """
    if isinstance(row.prompt, str) and not (chat and row.prompt):
        return tokenizer.encode(row.prompt)
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    return tokenizer.encode_chat(messages, **options)


def given_answers(
    tokenizer: Tokenizer, rows: Sequence[Row], end: int | None, *, chat: bool, options: Mapping[str, Any]
) -> Iterator[Answer]:
    """The answers that the file has, each with the end token behind it.

    Raises:
      PromptError: a row has none.
    """
    for row in rows:
        if row.answer is None:
            raise PromptError(
                f"{row.place} has no answer: add --regenerate, which has the target answer, or give {', '.join(ANSWER_KEYS)}"
            )
        before = prompt_ids(tokenizer, row, chat=chat, options=options)
        ids = [*before, *tokenizer.encode(row.answer, special=False), *([] if end is None else [end])]
        # What stands in front of a text is given, not learned; a text alone needs one token to begin from.
        yield Answer(tuple(ids), max(1, len(before)))


def fitting(answers: Sequence[Answer], length: int, vocab: int) -> list[Answer]:
    """Answers with at least two tokens within `length`, cut there.

    Raises:
      PromptError: a token is not in the target's vocabulary, or none fits.
    """
    largest = max((max(answer.ids) for answer in answers if answer.ids), default=0)
    if largest >= vocab:
        raise PromptError(
            f"the tokenizer gives token {largest}, the target has {vocab} tokens: its folder has another model's tokenizer.json"
        )
    kept = [Answer(answer.ids[:length], answer.start) for answer in answers]
    kept = [answer for answer in kept if len(answer.ids) - answer.start >= 2]
    if not kept:
        shortest = min(answer.start for answer in answers)
        raise PromptError(
            f"none of {len(answers)} rows has two tokens of its answer within --length {length}, the shortest prompt has "
            f"{shortest}; give a greater length, or rows with longer answers"
        )
    return kept
