"""A drafter for a target of somebody's own, from a file of data to a folder that `load` takes: what `dflash-jax train` does."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_jax.checkpoints.atomic import written_whole
from dflash_jax.checkpoints.opening import open_checkpoint
from dflash_jax.errors import CheckpointError, DFlashError, ParameterError, PromptError, TokenizerError
from dflash_jax.generation import generate
from dflash_jax.model import load
from dflash_jax.models import DFlashConfig
from dflash_jax.models.dflash import dflash_parameters
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.text.tokenizer import Tokenizer, end_token_ids
from dflash_jax.training.answers import Answer, fitting, given_answers, prompt_ids, read_rows
from dflash_jax.training.curve import curve_svg
from dflash_jax.training.export import write_json, write_weights
from dflash_jax.training.fit import fit_drafter
from dflash_jax.training.fit_settings import FitSettings, drafter_config
from dflash_jax.training.kinds import kind_keys, title
from dflash_jax.training.optimizer import Params, half
from dflash_jax.training.regenerate import regenerated
from dflash_jax.training.stages import Clock, kept_json, latest

_HELD_OUT_SHARE, _MOST_HELD_OUT = 20, 32
# What a run that goes on may have otherwise.
_FREE = ("output", "work", "evaluation_tokens", "devices")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run of `dflash-jax train`.

    Attributes:
      target: what `load` takes.
      data: a file of JSON lines; see `dflash_jax.training.answers`.
      output: the drafter's folder, which must not be there yet.
      work: keeps answers, checkpoints and the log; a second run goes on from there.
      chat: whether texts are a user's messages for the chat template; `chat_options` are for that.
      regenerate: whether the target answers the prompts, at `temperature`, with `max_tokens` tokens at most.
      evaluation_tokens: of each held-out prompt's answer when acceptance is measured; 0 leaves that out.
      devices: that share the rows of a step.
    """

    target: str
    data: Path
    output: Path
    work: Path
    settings: FitSettings = field(default=FitSettings())
    chat: bool = False
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    regenerate: bool = False
    temperature: float = 0.7
    max_tokens: int = 512
    evaluation_tokens: int = 128
    devices: int = 1


def train_any(task: Task, clock: Clock, advance: Callable[[int, Mapping[str, float]], object]) -> dict[str, Any]:
    """Trains, writes `task.output` whole, and returns what was measured: `{temperature: {tokens_per_cycle, by_position}}`.

    Raises:
      ParameterError, PromptError, TokenizerError, CheckpointError: before anything is trained.
      Interrupted: the clock ran out; the same task goes on.
    """
    if task.output.exists() and (not task.output.is_dir() or any(task.output.iterdir())):
        raise ParameterError(f"{task.output} is there already: name another output, or remove it")
    _check_place(task.output, "--output")
    _check_place(task.work, "--work")
    checkpoint = open_checkpoint(task.target)
    if checkpoint.family.role == "draft":
        raise CheckpointError(
            str(task.target), "it is a drafter, which gives no features to another one; name its target"
        )
    target, settings = checkpoint.config, task.settings
    config = drafter_config(target, settings)
    if settings.length > target.max_position:
        raise ParameterError(
            f"length must be at most the target's {target.max_position} positions, got {settings.length}"
        )
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    if tokenizer is None:
        raise TokenizerError(
            f"{checkpoint.folder} has no tokenizer.json, which the texts of {task.data} need: add the target's own"
        )
    _remember(task)
    answers = _answers(task, tokenizer, end_token_ids(checkpoint.folder, tokenizer), clock)
    kept = fitting(answers, settings.length, target.vocab_size)
    if len(kept) < 2:
        raise PromptError(f"{task.data} gives {len(kept)} row to train on: at least two are needed, one is held out")
    held = min(_MOST_HELD_OUT, max(1, len(kept) // _HELD_OUT_SHARE))
    tokens = sum(len(one.ids) - one.start for one in kept[held:])
    clock.report(
        f"{len(kept) - held} rows with {tokens:,} tokens of answers, {held} held out, {len(answers) - len(kept)} too long"
    )
    frozen = checkpoint.load("bfloat16")
    params = fit_drafter(
        settings, target, config, frozen, kept[held:], task.work / "drafter", clock, advance, task.devices
    )
    del frozen
    scratch = task.output.with_name(f".{os.getpid()}-{task.output.name}")
    try:
        scratch.mkdir(parents=True)
        _write(scratch, config, half(params), clock)
        found = _measure(task, scratch, kept[:held])
        write_json(scratch / "evaluation.json", found)
        (scratch / "README.md").write_text(_card(task, config, tokens, found), "utf-8")
        if task.output.exists():
            task.output.rmdir()
        os.replace(scratch, task.output)
    except OSError as error:
        raise DFlashError(
            f"{task.output} cannot be written ({error.strerror or error}), nothing is left of it: make room and give the same "
            "command, which goes on from its last step"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return found


def _check_place(folder: Path, option: str) -> None:
    """Raises ParameterError where no folder can be made or written. A run of hours would find that out at its end."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ParameterError(f"{there} is a file: name another folder with {option}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ParameterError(f"{there} is read-only: name another folder with {option}")


def _remember(task: Task) -> None:
    """Keeps the task beside its checkpoints. Raises ParameterError where another one's answers or checkpoints lie there."""
    path = task.work / "task.json"
    ours = json.loads(json.dumps(dataclasses.asdict(task), default=str))
    ours = {name: value for name, value in ours.items() if name not in _FREE}
    if path.exists():
        theirs = kept_json(path)
        ours_flat, theirs_flat = ({**one, **one["settings"]} for one in (ours, theirs))
        differ = sorted(name for name in ours_flat if name != "settings" and ours_flat[name] != theirs_flat.get(name))
        begun = latest(task.work / "drafter") is not None or any((task.work / "answers").glob("*.json"))
        if differ and begun:
            shown = ", ".join(f"{name} {theirs_flat.get(name)!r:.40}, now {ours_flat[name]!r:.40}" for name in differ)
            raise ParameterError(
                f"{task.work} holds a run with other settings ({shown}): name another work folder, or repeat them"
            )
        if not differ:
            return
    task.work.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as scratch:
        scratch.write_text(json.dumps(ours, indent=1))


def _answers(task: Task, tokenizer: Tokenizer, ends: Sequence[int], clock: Clock) -> list[Answer]:
    rows, how = read_rows(task.data), {"chat": task.chat, "options": task.chat_options}
    if not task.regenerate:
        return list(given_answers(tokenizer, rows, ends[0] if ends else None, **how))
    # A text by itself is a beginning that the target goes on from.
    asked = [dataclasses.replace(row, prompt=row.prompt or row.answer or "") for row in rows]
    prompts = [prompt_ids(tokenizer, row, **how) for row in asked]
    return regenerated(
        task.target, prompts, task.work / "answers", clock, length=task.settings.length, temperature=task.temperature,
        max_tokens=task.max_tokens, seed=task.settings.seed,
    )  # fmt: skip


def drafter_json(config: DFlashConfig) -> dict[str, Any]:
    """`config.json` of a drafter that shares its target's embeddings and head."""
    keys = kind_keys(config)
    return {
        "architectures": keys.pop("architectures"),
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_position,
        "model_type": "qwen3",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "vocab_size": config.vocab_size,
        **keys,
    }


def _write(folder: Path, config: DFlashConfig, params: Params, clock: Clock) -> None:
    write_json(folder / "config.json", drafter_json(config))
    write_weights(folder / "model.safetensors", dflash_parameters(config), params)
    history = clock.log["drafter"]["history"]
    write_json(folder / "training.json", history)
    steps = [row["step"] for row in history]
    picture = curve_svg(f"{title(config)}: cross-entropy of drafts, nats", steps, [row["entropy"] for row in history])
    (folder / "loss.svg").write_text(picture, "utf-8")


def _measure(task: Task, drafter: Path, held: Sequence[Answer]) -> dict[str, Any]:
    """Acceptance of the engine on held-out prompts, greedy and at temperature 1."""
    if not task.evaluation_tokens:
        return {}
    length = task.settings.length
    prompts = [list(one.ids[: max(1, min(one.start, length - 2))]) for one in held]
    found = {}
    model = load(task.target, draft=drafter, max_model_len=min(length + task.evaluation_tokens, _longest(task)))
    room = model.engine.max_model_len
    for temperature in (0.0, 1.0):
        each = [
            SamplingParams(max_tokens=min(task.evaluation_tokens, room - len(prompt)), temperature=temperature, seed=i)
            for i, prompt in enumerate(prompts)
        ]
        done = generate(model, prompts, each)
        lengths = [size for one in done for size in one.acceptance_lengths]
        offered = len(model.acceptance_by_position)
        found[f"{temperature:g}"] = {
            "tokens_per_cycle": sum(lengths) / max(1, len(lengths)),
            "by_position": [
                sum(size > place for size in lengths) / max(1, sum(size >= place for size in lengths))
                for place in range(1, offered + 1)
            ],
        }
    return found


def _longest(task: Task) -> int:
    return open_checkpoint(task.target).config.max_position


def _card(task: Task, config: DFlashConfig, tokens: int, found: Mapping[str, Any]) -> str:
    s = task.settings
    rows = "\n".join(f"| {temperature} | {row['tokens_per_cycle']:.2f} |" for temperature, row in found.items())
    answers = f"by the target at temperature {task.temperature:g}" if task.regenerate else "those of the file"
    return f"""---
tags: [dflash, speculative-decoding, draft-model]
---
# {title(config)} drafter for {task.target}

{s.layers} layers, blocks of {s.block_size}, taps {list(config.target_layer_ids)}, mask {config.mask_token_id}; embeddings and
head are the target's. Trained by `dflash-jax train` on {tokens:,} tokens of answers ({answers}):
{s.steps:,} steps of {s.rows} rows with {s.anchors} blocks each, {s.optimizer}, peak rate {s.rate:g}, weights of places {s.loss}.
`loss.svg` shows the cross-entropy of its drafts.

| temperature | tokens per cycle on held-out prompts |
| --- | ---: |
{rows}
"""
