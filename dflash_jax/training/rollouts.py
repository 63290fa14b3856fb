"""Batched continuations by the target over dense keys: what the drafter learns from and is measured on."""

import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.checkpoints.atomic import written_whole
from dflash_jax.config import Qwen3Config
from dflash_jax.errors import ParameterError
from dflash_jax.models import bind
from dflash_jax.training.attention import growing_attend
from dflash_jax.training.optimizer import Params, half
from dflash_jax.training.settings import Rollouts, Settings
from dflash_jax.training.stages import Clock, Interrupted


def position_noise(key: Array, position: Int[Array, ""] | int, rows: int, vocab: int) -> Float[Array, "B V"]:
    """Gumbel noise of one absolute position; the token sampled there is the argmax of logits plus this noise."""
    return jax.random.gumbel(jax.random.fold_in(key, position), (rows, vocab))


@functools.partial(jax.jit, static_argnames=("config", "new", "sampled"))
def continue_prompts(
    config: Qwen3Config,
    params: Params,
    prompts: Int[Array, "B P"],
    key: Array,
    *,
    new: int,
    sampled: bool,
    temperature: float | Float[Array, ""] = 1.0,
) -> Int[Array, "B T"]:
    """Prompts followed by `new` tokens of the target's, greedy or sampled at a temperature."""
    rows, prompt = prompts.shape
    model = bind(config, params)
    shape = (rows, prompt + new, config.num_kv_heads, config.head_dim)
    empty = (jnp.zeros(shape, params["norm.weight"].dtype),) * config.num_layers

    def forward(ids, at, cache):
        positions = jnp.broadcast_to(at + jnp.arange(ids.shape[1]), ids.shape)
        hidden, _, cache = model(ids, positions, growing_attend(at), cache=cache)
        logits = model.logits(hidden[:, -1])
        if sampled:
            logits = logits + temperature * position_noise(key, at + ids.shape[1], rows, config.vocab_size)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    def step(carry, at):
        token, cache = carry
        return forward(token[:, None], at, cache), token

    first = forward(prompts, 0, (empty, empty))
    _, tokens = jax.lax.scan(step, first, prompt + jnp.arange(new))
    return jnp.concatenate([prompts, tokens.T], axis=1)


def roll_out(
    settings: Settings,
    target: Params,
    tokens: np.ndarray,
    folder: Path,
    clock: Clock,
    *,
    part: tuple[int, int] = (0, 1),
    patience: float = 60.0,
) -> list[dict[str, np.ndarray]]:
    """Continuations of random windows of `tokens`, per entry of `settings.rollouts`: `greedy` and `sampled`, uint16.

    Args:
      part: (i, n) for every n-th batch from the i-th on. The other parts are those of processes that share `folder`, each by itself
        a run over fewer continuations; one that is not there `patience` seconds after this one's is done without.

    Raises:
      Interrupted: the clock ran out; finished files are in `folder`.
      ParameterError: there are more parts than batches.
    """
    index, count = part
    if count == 1:
        return _own(settings, target, tokens, folder, clock, part)
    batches = min(-(-min(plan.greedy, plan.sampled) // plan.batch) for plan in settings.rollouts)
    if count > batches:
        raise ParameterError(f"part must be one of at most {batches}, the batches of a kind, got {count}")
    own = _own(settings, target, tokens, folder / f"{index}-{count}", clock, part)
    began, found = clock.elapsed(), {index: own}
    while len(found) < count and clock.elapsed() - began < patience:
        for other in set(range(count)) - set(found):
            paths = _paths(settings, folder / f"{other}-{count}")
            if all(path.exists() for plan in paths for path in plan.values()):
                found[other] = [{kind: np.load(path) for kind, path in plan.items()} for plan in paths]
        time.sleep(0.2)
    clock.report(f"rollouts: parts {sorted(found)} of {count}")
    ordered = [found[i] for i in sorted(found)]
    return [
        {kind: np.concatenate([piece[at][kind] for piece in ordered]) for kind in own[at]} for at in range(len(own))
    ]


def _paths(settings: Settings, folder: Path) -> list[dict[str, Path]]:
    return [
        {kind: folder / f"{plan.prompt}-{kind}.npy" for kind in ("greedy", "sampled")} for plan in settings.rollouts
    ]


def _own(
    settings: Settings, target: Params, tokens: np.ndarray, folder: Path, clock: Clock, part: tuple[int, int]
) -> list[dict[str, np.ndarray]]:
    """`roll_out` of one part."""
    folder.mkdir(parents=True, exist_ok=True)
    params = half(target)
    out = []
    for index, (plan, paths) in enumerate(zip(settings.rollouts, _paths(settings, folder), strict=True)):
        parts = {}
        for kind, count in (("greedy", plan.greedy), ("sampled", plan.sampled)):
            path = paths[kind]
            if not path.exists():
                seed = settings.seed * 1000 + 10 * index + (kind == "sampled")
                began = clock.elapsed()
                ids = _continuations(settings, params, plan, tokens, count, seed, kind == "sampled", clock, part)
                with written_whole(path) as scratch:
                    np.save(scratch, ids)
                clock.note("rollouts", seconds=clock.elapsed() - began)
                clock.report(f"rollouts: {len(ids)} {kind} continuations of {plan.prompt} + {plan.new} tokens")
            parts[kind] = np.load(path)
        out.append(parts)
    return out


def _continuations(
    settings: Settings,
    params: Params,
    plan: Rollouts,
    tokens: np.ndarray,
    count: int,
    seed: int,
    sampled: bool,
    clock: Clock,
    part: tuple[int, int],
) -> np.ndarray:
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    parts = []
    for batch in range(-(-count // plan.batch)):
        if clock.expired():
            raise Interrupted(f"rollouts: stopped before batch {batch}; finished kinds are kept")
        starts = rng.integers(0, len(tokens) - plan.prompt, plan.batch)
        if batch % part[1] != part[0]:
            continue
        prompts = jnp.asarray(tokens[starts[:, None] + np.arange(plan.prompt)].astype(np.int32))
        ids = continue_prompts(
            settings.target_config, params, prompts, jax.random.fold_in(key, batch), new=plan.new, sampled=sampled
        )
        parts.append(np.asarray(ids.astype(jnp.uint16)))
    return np.concatenate(parts)[: -(-count // part[1])]
