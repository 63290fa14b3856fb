"""Benchmark workloads: prompts of a file or of a length, and models of published shapes with random weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from dflash_jax.checkpoints.weights import (
    completed,
    reading_bytes,
    round_weights,
    spread,
    stored_shapes,
    weight_bytes,
    weight_shapes,
)
from dflash_jax.compile.device import local_device
from dflash_jax.compile.led import lead_or_follow, programs_over
from dflash_jax.engine import Engine
from dflash_jax.engine.planning import (
    check_exact,
    choose_draft_window,
    choose_model_len,
    choose_verify_length,
    plan_for,
    planned,
)
from dflash_jax.engine.sharing import check_sharing
from dflash_jax.errors import ParameterError, PromptError
from dflash_jax.execution.weight_layout import cycle_rows
from dflash_jax.model import Model
from dflash_jax.models import DFlashConfig, count, family_named, fuse_context_projection, init_params
from dflash_jax.models.presets import (
    DRAFTERS,
    GEMMA4_DRAFTERS,
    GEMMA4_TARGETS,
    GPT_OSS_TARGETS,
    HEAD_DRAFTERS,
    HYBRID_TARGETS,
    LLAMA_TARGETS,
    MOE_TARGETS,
    TARGETS,
)
from dflash_jax.options import LoadKeywords, LoadOptions, read_options
from dflash_jax.parallel.ranks import local_ranks
from dflash_jax.quantization.attention_output import check_attention_output
from dflash_jax.text.prompt_files import read_utf8

# Published shapes that can be filled with random weights: family, target, drafter.
SHAPES: Mapping[str, tuple[str, str, str]] = {
    "qwen3-4b": ("qwen3", "Qwen3-4B", "Qwen3-4B-DFlash-b16"),
    "qwen3-8b": ("qwen3", "Qwen3-8B", "Qwen3-8B-DFlash-b16"),
    "qwen3-8b-dflash2": ("qwen3", "Qwen3-8B", "Qwen3-8B-DFlash2-b16"),
    "qwen3-8b-block7": ("qwen3", "Qwen3-8B", "dflash_qwen3_8b_block7"),
    "qwen3-8b-dspark": ("qwen3", "Qwen3-8B", "dspark_qwen3_8b_block7"),
    "qwen3-8b-dspark-top512": ("qwen3", "Qwen3-8B", "dspark_qwen3_8b_block7_top512"),
    "llama-3.1-8b": ("llama", "Llama-3.1-8B", "LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    "gpt-oss-20b": ("gpt_oss", "gpt-oss-20b", "gpt-oss-20b-DFlash"),
    "gemma-4-12b-dspark": ("gemma4", "gemma-4-12B", "dspark_gemma4_12b_block7"),
    "gemma-4-31b": ("gemma4", "gemma-4-31B", "gemma-4-31B-it-DFlash"),
    "qwen3.5-4b": ("qwen3_5", "Qwen3.5-4B", "Qwen3.5-4B-DFlash"),
    "qwen3.5-9b": ("qwen3_5", "Qwen3.5-9B", "Qwen3.5-9B-DFlash"),
    "qwen3.5-27b": ("qwen3_5", "Qwen3.5-27B", "Qwen3.5-27B-DFlash"),
    "qwen3.5-35b-a3b": ("qwen3_5", "Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B-DFlash"),
    "qwen3-coder-30b-a3b": ("qwen3_moe", "Qwen3-Coder-30B-A3B-Instruct", "Qwen3-Coder-30B-A3B-DFlash"),
}
# Keys under which prompt files hold a prompt, in the order they are looked for.
TEXT_KEYS = ("prompt", "text", "question", "problem", "turns")
JSON_NAMES = (".json", ".jsonl")
LAW = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True)
class Workload:
    """Requests of one benchmark.

    Attributes:
      name: for reports.
      prompts: token ids; taken in turn where more requests are made than there are prompts.
      max_tokens: tokens of each request; end tokens are ignored, so that every run does the same work.
      temperature, top_p, top_k, min_p: as of `SamplingParams`.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def law(self) -> dict[str, Any]:
        """Sampling options, as `SamplingParams` takes them."""
        return {name: getattr(self, name) for name in LAW}


def synthetic(vocab_size: int, length: int, count: int, max_tokens: int, **law: Any) -> Workload:
    """`count` different prompts of `length` random tokens; `law`: further fields of the workload."""
    rows = np.random.default_rng(0).integers(0, vocab_size, (count, length))
    return Workload(f"{length} random tokens", tuple(map(tuple, rows.tolist())), max_tokens, **law)


def read_prompts(path: str | Path) -> list[str]:
    """Prompts of a file: a JSON list, JSON lines, or one prompt on each line.

    Items are texts or objects with one of the keys prompt, text, question, problem or turns (the first turn counts).

    Raises:
      PromptError: the file cannot be read, holds no prompt, an item has none of the keys, or a file that is called .json or .jsonl
        holds something else.
    """
    text = read_utf8(path)
    rows: Sequence[Any]
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, list | dict | str):
        rows = whole if isinstance(whole, list) else [whole]
    else:
        # Not `splitlines`: what else separates lines stands inside the strings of JSON.
        lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
        are_json = _are_json(lines)
        if lines and not are_json and Path(path).suffix in JSON_NAMES:  # a file that was cut off, or edited by hand
            raise PromptError(
                f"{path} is neither a JSON list nor JSON lines, all texts or all objects: mend it, or give a file of one prompt a "
                "line another name"
            )
        rows = [json.loads(line) for line in lines] if are_json else lines
    if not rows:
        raise PromptError(f"{path} holds no prompt: write one a line, or a JSON list of them")
    return [_prompt(path, row) for row in rows]


def _are_json(lines: Sequence[str]) -> bool:
    """Whether every line is an object, or every line a string in quotes."""
    try:
        kinds = {type(json.loads(line)) for line in lines}
    except json.JSONDecodeError:
        return False
    return kinds in ({dict}, {str})


def _prompt(path: str | Path, row: Any) -> str:
    if isinstance(row, Mapping):
        found = next((row[key] for key in TEXT_KEYS if key in row), None)
        row = found[0] if isinstance(found, list) and found else found
    if not isinstance(row, str) or not row:
        raise PromptError(f"{path}: each item must be a text, or an object with one under {', '.join(TEXT_KEYS)}")
    return row


# Options of `load` that pairs of random weights have not.
_OF_FILES = (
    "cache_dtype", "cache_dtype_skip_layers", "query_dtype", "draft_cache_dtype", "calibration", "cache_scales", "scale_range",
    "vision", "vision_attention_dtype", "vision_scales", "revision", "draft_revision",
)  # fmt: skip


def published_shape(name: str) -> tuple[str, Any, DFlashConfig]:
    """Family, target and drafter of a key of `SHAPES`. Raises ParameterError for another name."""
    if name not in SHAPES:
        raise ParameterError(f"no shape is called {name!r}; known: {', '.join(SHAPES)}")
    family, target, draft = SHAPES[name]
    targets = {**TARGETS, **MOE_TARGETS, **LLAMA_TARGETS, **HYBRID_TARGETS, **GPT_OSS_TARGETS, **GEMMA4_TARGETS}
    return family, targets[target], {**DRAFTERS, **HEAD_DRAFTERS, **GEMMA4_DRAFTERS}[draft]


def random_pair(name: str, **options: Unpack[LoadKeywords]) -> Model:
    """A model of a published shape (a key of `SHAPES`) whose weights are random: made on the device, no file is read.

    Its time is the published model's; its texts and its acceptance mean nothing.

    Raises:
      ParameterError: the name is unknown, or an option is for files.
      CapacityError: the device has no room for weights and pages.
      DeviceError: JAX starts no device.
    """
    return random_model(name, *published_shape(name), **options)


def random_model(
    name: str, family: str, target: Any, drafter: DFlashConfig, /, **options: Unpack[LoadKeywords]
) -> Model:
    """As `random_pair`, of these configurations; `family` is the target's key in the registry of families."""
    asked, plain = read_options(dict(options), "random_pair"), LoadOptions()
    if unused := [name for name in _OF_FILES if getattr(asked, name) != getattr(plain, name)]:
        raise ParameterError(f"random weights and their pages are made here: leave {', '.join(unused)} out")
    local_device()
    families = family_named(family), family_named("dflash")
    dtype = asked.dtype or "bfloat16"
    kind, pair = jax.numpy.dtype(dtype), [(target, families[0]), (drafter, families[1])]
    check_sharing(target, drafter, asked)
    if asked.exact:
        check_exact(target, drafter, asked)
    dealt = asked.decode_context_parallel_size
    ranks = local_ranks(asked.tp, dealt=dealt)
    rows, stored = cycle_rows(asked.max_batch, drafter), stored_shapes(pair, kind, ranks=ranks)
    kept = weight_shapes(pair, kind, asked.weight_dtype, asked.draft_weight_dtype, rows=rows, ranks=ranks)
    check_attention_output(target, asked.attention_output, asked.tp)
    engine = Engine(
        target=target, draft=drafter, weights=spread(pair, kept, ranks), dtype=kind, programs=programs_over(ranks),
        max_model_len=choose_model_len(target, asked.max_model_len), max_batch=asked.max_batch,
        page_size=dealt * asked.page_size, interleave=asked.cp_kv_cache_interleave_size, proposals=asked.proposals,
        verify_length=choose_verify_length(drafter, asked.verify_length),
        draft_window=choose_draft_window(drafter, asked.draft_window), exact=asked.exact,
    )  # fmt: skip
    memory = plan_for(
        engine, max(weight_bytes(stored), reading_bytes(stored, kept)), asked.num_pages, asked.state_snapshots
    )
    tables = families[0].parameters(target), families[1].parameters(drafter)
    weights = {
        role: init_params(table, jax.random.key(seed), dtype, ranks=ranks)
        for seed, (role, table) in enumerate(zip(("target", "draft"), tables, strict=True))
    }
    if ranks is not None:
        weights = completed(pair, weights, ranks, asked.weight_dtype, asked.draft_weight_dtype)
    else:
        weights["target"] = families[0].derived(target, weights["target"])
        weights["draft"] = fuse_context_projection(drafter, weights["draft"])
        weights = round_weights(weights, target, drafter, kind, asked.weight_dtype, asked.draft_weight_dtype, rows=rows)
    engine = planned(engine, memory, weights=weights)
    lead_or_follow(engine.programs, engine.weights, engine.makers)
    notice = f"random weights, {count(tables[0]) / 1e9:.2f} billion parameters"
    return Model(f"{name} with random weights", engine, None, (), memory, [notice])
