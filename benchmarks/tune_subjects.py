"""What benchmarks/tune.py tunes: for each op its cases, the choices to try, and a program for a choice."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import prefill
from dflash_kernels.ragged_attention.mosaic_gpu import described
from dflash_kernels.ragged_attention.mosaic_gpu_schedule import Tuning as PromptTuning

Choice = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One case with its inputs.

    Attributes:
      name: of the case.
      key: what the table knows it by: `exact` and `sizes`.
      program: a choice to a function that runs a few calls and returns seconds of one, and what is wrong with its result, or None.
    """

    name: str
    key: tuple[dict[str, Any], dict[str, int]]
    program: Callable[[Any], tuple[Callable[[], float], str | None]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """An op that has a table.

    Attributes:
      make: a choice from its keyword arguments.
      cases: measured on a GPU; tiny: one that the interpreter takes seconds for.
      candidates: choices to try for a case. The first one is the default: {}.
      prepare: makes the inputs of a case.
    """

    make: Callable[..., Any]
    cases: Sequence[Any]
    tiny: Any
    candidates: Callable[[Any], list[Choice]]
    prepare: Callable[[Any], Trial]


def interpreted() -> Any:
    """For machines without a GPU, where the kernels of a dry run go through Pallas's interpreter."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return None if jax.default_backend() == "gpu" else plgpu.InterpretGPUParams()


def seconds_of_one(calls: int, many: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(many())
    return (time.perf_counter() - started) / calls


def prompts(case: prefill.Case, calls: int = 8) -> Trial:
    packed, rest = prefill.inputs(case)

    def program(tuning: PromptTuning) -> tuple[Callable[[], float], str | None]:
        many = prefill.looped(prefill.ours(case, tuning, interpreted()), calls if interpreted() is None else 1)
        error = prefill.error_of(case, packed, many(packed[0], *rest))
        wrong = None if error < prefill.ALLOWED else f"error {error:.2e} against float64"
        return lambda: seconds_of_one(calls, lambda: many(packed[0], *rest)), wrong

    return Trial(case.name, described(packed[0], rest[0], rest[1], case.causal), program)


def prompt_choices(case: prefill.Case) -> list[Choice]:
    """Tiles of 64 keys are left out for long prompts: they were a sixth slower wherever they were measured."""
    if case.length < prefill.Case.length:
        return [{}, {"keys": 64}]
    at_once = [{"kv_heads_at_once": count} for count in (2, 4) if count <= case.kv_heads]
    return [{}, *at_once, {"stages": 3}]


SUBJECTS = {
    "ragged_attention": Subject(
        PromptTuning, prefill.CASES, prefill.Case(1, 1, 64, 64, True, b=1, length=70), prompt_choices, prompts
    )
}
