"""What benchmarks/tune.py tunes: for each op its cases, the choices to try, and a program for a choice."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import attention
import jax
import jax.numpy as jnp
import mla
import prefill
from dflash_kernels.attention.mla.launch import Tuning as LatentTuning
from dflash_kernels.attention.mla.mosaic_gpu import tuned as tuned_latent
from dflash_kernels.attention.mla.mosaic_gpu import tuning_key as latent_key
from dflash_kernels.attention.paged.launch import Tuning as PagedTuning
from dflash_kernels.attention.paged.mosaic_gpu import tuned as tuned_paged
from dflash_kernels.attention.paged.mosaic_gpu import tuning_key as paged_key
from dflash_kernels.attention.ragged.launch import Tuning as PromptTuning
from dflash_kernels.attention.ragged.mosaic_gpu import tuning_key as prompt_key

Choice = dict[str, Any]
Key = tuple[dict[str, Any], dict[str, int]]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One case with its inputs.

    Attributes:
      name: of the case.
      key: what the table knows it by: `exact` and `sizes`.
      program: a choice to a function that runs a few calls and returns seconds of one, and what is wrong with its result, or None.
    """

    name: str
    key: Key
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


def prompts(case: prefill.Case, calls: int = 8) -> Trial:
    packed, rest = prefill.inputs(case)

    def program(tuning: PromptTuning) -> tuple[Callable[[], float], str | None]:
        many = prefill.looped(prefill.ours(case, tuning, interpreted()), calls if interpreted() is None else 1)
        error = prefill.error_of(case, packed, many(packed[0], *rest))
        wrong = None if error < prefill.ALLOWED else f"error {error:.2e} against float64"
        return functools.partial(prefill.seconds_of_one, calls, functools.partial(many, packed[0], *rest)), wrong

    return Trial(case.name, prompt_key(packed[0], rest[0], rest[1], case.causal), program)


def prompt_choices(case: prefill.Case) -> list[Choice]:
    """Tiles of 64 keys are left out for long prompts: they were a sixth slower wherever they were measured."""
    if case.length < prefill.Case.length:
        return [{}, {"keys": 64}]
    at_once = [{"kv_heads_at_once": count} for count in (2, 4) if count <= case.kv_heads]
    return [{}, *at_once, {"stages": 3}]


def cold() -> int:
    """Bytes of pages that follow one another: twice what the L2 holds, as little as possible under the interpreter."""
    return 128 * 2**20 if interpreted() is None else 1


def looped(call: Callable[..., Any], tables: jax.Array, rounds: int) -> Callable[..., Any]:
    """Compiled: `rounds` times a call with each of the tables, whose pages follow one another through more than the L2 holds."""

    @jax.jit
    def many(tables, *arrays):
        def once(tables):
            return tuple(call(table, *arrays) for table in tables)

        def body(_, carry):
            # The tables move, so that nothing of a round is taken out of the loop.
            tables = jnp.roll(carry[0], 1, axis=0)
            return tables, once(tables)

        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(once, tables))
        return jax.lax.fori_loop(0, rounds, body, (tables, empty))[1]

    return functools.partial(many, tables)


def paged_trial(
    name: str, key: Key, call: Callable[..., Any], tables: jax.Array, arrays: tuple[Any, ...], floor_us: float,
    error_of: Callable[[Any], float], allowed: float,
) -> Trial:  # fmt: skip
    """A trial of `call(tuning, table, *arrays)`; `error_of` is told a tuning."""
    # About 10 ms on a GPU.
    rounds = 1 if interpreted() else max(round(10e3 / (max(floor_us, 8) * len(tables))), 1)

    def program(tuning: Any) -> tuple[Callable[[], float], str | None]:
        error = error_of(tuning)
        if not error < allowed:
            return float, f"error {error:.2e} against float64"
        run = functools.partial(looped(functools.partial(call, tuning), tables, rounds), *arrays)
        jax.block_until_ready(run())
        return functools.partial(prefill.seconds_of_one, rounds * len(tables), run), None

    return Trial(name, key, program)


def paged(case: attention.Case) -> Trial:
    given = attention.inputs(case, cold())
    sample = attention.ragged(case, given)
    true = attention.truth(case, sample, given.scales)
    options = case.mask | {"interpret": interpreted()} | given.scales
    live = jnp.full((case.b,), case.t, jnp.int32)

    dealt = attention.deals(case)

    def shared(lens):
        # Made again for each call, which takes the same time with all choices.
        return {"schedule": attention.dealt(case, lens)} if dealt else {}

    def call(tuning, table, q, k, v, lens):
        return tuned_paged(q, k, v, table, lens, live, **options, **shared(lens), tuning=tuning)[0]

    def error_of(tuning):
        return attention.error_of(true, tuned_paged(*sample, **options, **shared(sample[4]), tuning=tuning)[0])

    key = paged_key(given.q, given.k, given.tables[0], case.causal, dealt=dealt)
    arrays = (given.q, given.k, given.v, given.lens)
    return paged_trial(case.name, key, call, given.tables, arrays, case.floor_us, error_of, 0.02)


def paged_choices(case: attention.Case) -> list[Choice]:
    """Nothing to choose for a dry run's case, which the interpreter takes long for."""
    if case.length < 4096:
        return [{}]
    if case.b * case.kv_heads >= 256:
        return [{}, {"splits": 2}, {"stages": 3}, {"keys": 128}]
    # One CTA on most multiprocessors, with room for more stages than the two that share one have.
    stages = [{"stages": 3}, {"stages": 4}]
    if attention.deals(case):
        return [{}, *stages]
    # Around the number of parts that fills the multiprocessors.
    filling = 132 // (case.b * case.kv_heads)
    return [{}, *stages, {"splits": filling // 2, "stages": 4}, {"splits": filling * 3 // 4, "stages": 4}]


def latent(case: mla.Case) -> Trial:
    q, pool, tables, lens, live = mla.inputs(case, cold(), mla.CALLS)
    sample = mla.ragged(case, (q, pool, tables, lens, live))
    true = mla.truth(sample)
    options = case.options | {"interpret": interpreted()}

    def call(tuning, table, q, pool, lens):
        return tuned_latent(q, pool, table, lens, live, **options, tuning=tuning)[0]

    def error_of(tuning):
        out = tuned_latent(*sample[:2], sample[2][-1], *sample[3:], **options, tuning=tuning)
        return mla.errors(true, out)["error_float64"]

    key = latent_key(q, pool, tables[0], True)
    return paged_trial(case.name, key, call, jnp.stack(tables), (q, pool, lens), case.floor_us, error_of, 8e-4)


def latent_choices(case: mla.Case) -> list[Choice]:
    """Parts for a quarter to all of the multiprocessors, where whole sequences do not fill them; nothing for a dry run."""
    if case.length < 4096:
        return [{}]
    tiles = case.b * -(-case.t * case.heads // 64)
    splits = {max(round(132 / tiles * part), 1) for part in (0.5, 1)} if tiles < 100 else {2}
    return [{}, *({"splits": count} for count in sorted(splits)), {"min_tiles": 1}]


SUBJECTS = {
    "attention/ragged": Subject(
        PromptTuning, prefill.CASES, prefill.Case(1, 1, 64, 64, True, b=1, length=70), prompt_choices, prompts
    ),
    "attention/paged": Subject(
        PagedTuning, attention.PEER_CASES + attention.RAGGED_CASES, attention.Case(1, 64, 1), paged_choices, paged
    ),
    "attention/mla": Subject(
        LatentTuning, mla.PEER_CASES, mla.Case(1, 64, 1, 8), latent_choices, latent
    ),
}  # fmt: skip
