"""Answers by the target itself, which is what a drafter has to guess: prompts through the engine, kept as they come."""

import json
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.checkpoints.atomic import written_whole
from dflash_jax.errors import PromptError
from dflash_jax.generation import generate
from dflash_jax.model import load
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.training.answers import Answer
from dflash_jax.training.stages import Clock, Interrupted, kept_json

_AT_ONCE = 256


def regenerated(
    target: str | Path,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    clock: Clock,
    *,
    length: int,
    temperature: float,
    max_tokens: int,
    seed: int,
) -> list[Answer]:
    """The target's answers to prompts of token ids, within `length` tokens. `folder` keeps what is done.

    Raises:
      Interrupted: the clock ran out between two parts.
      PromptError: no prompt leaves room for two tokens.
    """
    usable = [list(prompt) for prompt in prompts if 1 <= len(prompt) <= length - 2]
    if not usable:
        raise PromptError(f"no prompt leaves room for an answer within --length {length}: give a greater length")
    folder.mkdir(parents=True, exist_ok=True)
    parts = [usable[first : first + _AT_ONCE] for first in range(0, len(usable), _AT_ONCE)]
    model, out = None, []
    for number, part in enumerate(parts):
        path = folder / f"{number:06d}.json"
        if not path.exists():
            if clock.expired():
                raise Interrupted(f"answers: stopped after {number} of {len(parts)} parts")
            model = load(target, draft=False, max_model_len=length) if model is None else model
            params = [
                SamplingParams(
                    max_tokens=min(max_tokens, length - len(prompt)), temperature=temperature, seed=seed + number * _AT_ONCE + i
                )
                for i, prompt in enumerate(part)
            ]  # fmt: skip
            done = generate(model, part, params)
            with written_whole(path) as scratch:
                scratch.write_text(json.dumps([one.token_ids for one in done]))
            clock.report(f"answers: part {number + 1} of {len(parts)}")
        answers = kept_json(path)
        out += [Answer((*prompt, *answer), len(prompt)) for prompt, answer in zip(part, answers, strict=True)]
    return out
