"""Answers all lines of a file, many at a time, and goes on where it was when it is started again.

    python examples/batch_jsonl.py questions.jsonl answers.jsonl --max-batch 8 --max-tokens 128

A line of the first file is an object with `prompt`, a text, or `messages`. A line of the second is the same object with `text`,
`finish_reason` and `tokens`, in the order in which answers are ready; `line` is its number in the first file.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import dflash_jax as dj


def rows_of(text: str) -> list[dict]:
    """Objects of JSON lines. `splitlines` would also cut at separators that stand inside of texts."""
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def answered_lines(path: Path) -> set[int]:
    """Numbers of the questions that an earlier run has answered. An answer that it could not write whole is cut off."""
    if not path.exists():
        return set()
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text.rfind("\n") + 1
    answered = {row["line"] for row in rows_of(text[:whole])}
    if text[whole:].startswith('{"line": '):
        path.write_text(text[:whole], encoding="utf-8")
    return answered


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Answers all lines of a file.")
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", help="(default: the pair that ships)")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args(arguments)
    try:
        questions, answered = rows_of(args.questions.read_text(encoding="utf-8")), answered_lines(args.answers)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"both files must be JSON lines, the first one of questions, the second one of answers: {error!r}")
    left = [number for number in range(len(questions)) if number not in answered]
    if not left:
        return 0
    model = dj.load(args.model, max_batch=args.max_batch)
    prompts = [questions[number].get("prompt") or questions[number]["messages"] for number in left]
    params = dj.SamplingParams(max_tokens=args.max_tokens)
    # `stream` gives each answer as soon as it is there; what a broken run has written is kept.
    with args.answers.open("a", encoding="utf-8") as file, closing(dj.stream(model, prompts, params)) as pieces:
        for piece in pieces:
            if (done := piece.completion) is None:
                continue
            number = left[piece.index]
            row = {"line": number, **questions[number], "text": done.text, "finish_reason": done.finish_reason}
            file.write(json.dumps(row | {"tokens": len(done.token_ids)}, ensure_ascii=False) + "\n")
            file.flush()
    return len(left)


if __name__ == "__main__":
    main()
