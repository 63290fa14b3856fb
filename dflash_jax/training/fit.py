"""Trains a drafter on answers, for any target: frozen target, many anchors of an answer in one pass."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.attention.dense import dense_attend
from dflash_jax.config import DecoderConfig
from dflash_jax.errors import ParameterError
from dflash_jax.models import DFlashConfig, bind, layer_traits
from dflash_jax.training.answers import Answer
from dflash_jax.training.attention import causal_attend
from dflash_jax.training.drafter import block_hidden
from dflash_jax.training.fit_settings import FitSettings
from dflash_jax.training.head_losses import Places, terms
from dflash_jax.training.kinds import initial_weights, working
from dflash_jax.training.losses import weighted
from dflash_jax.training.optimizer import Params, apply, optimizer
from dflash_jax.training.replicas import Replicas
from dflash_jax.training.stages import Clock, run_steps
from dflash_jax.training.target import damped, positions_like

type Batch = tuple[Int[Array, "B C"], Int[Array, "B"], Int[Array, "B A"]]


def answer_arrays(answers: Sequence[Answer], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids `[n, length]` filled up with zeros, where answers begin, and where they end."""
    ids = np.zeros((len(answers), length), np.int32)
    for row, answer in zip(ids, answers, strict=True):
        row[: len(answer.ids)] = answer.ids
    return (
        ids,
        np.array([one.start for one in answers], np.int32),
        np.array([len(one.ids) for one in answers], np.int32),
    )


def frozen_pass(
    target: DecoderConfig, params: Params, ids: Int[Array, "B C"], taps: tuple[int, ...]
) -> tuple[Float[Array, "B C D"], Float[Array, "B C nD"]]:
    """The target's final hidden states and tapped features of whole rows."""
    traits = layer_traits(target)
    states = traits.delta is not None or traits.short_conv or traits.mamba2
    plain = traits.attention == "heads" and not (states or traits.window or traits.sinks or traits.gated)
    attend = causal_attend() if plain else dense_attend()
    hidden, features, _ = bind(target, params)(ids, positions_like(ids), attend, taps)
    return jax.lax.stop_gradient((hidden, features))


def answer_anchors(key: Array, start: Int[Array, "B"], end: Int[Array, "B"], count: int) -> Int[Array, "B A"]:
    """`count` anchors of each row, one in each of as many equal stretches of its answer but for the last token."""
    width = (end - 1 - start)[:, None] / count
    places = (jnp.arange(count) + jax.random.uniform(key, (len(start), count))) * width
    return jnp.minimum(start[:, None] + places.astype(jnp.int32), end[:, None] - 2)


def answer_loss(
    settings: FitSettings,
    target: DecoderConfig,
    config: DFlashConfig,
    params: Params,
    frozen: Params,
    batch: Batch,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Loss of one batch of ids, ends of answers, and anchors in them. `params` are the drafter's, in float32.

    Logits are those of one row at a time, and are computed again on the way back: all rows' would fill a device.
    """
    ids, end, anchors = batch
    slots, last = config.block_size - 1, ids.shape[1] - 1
    weights, table = working(config, params), frozen["embed.weight"]
    final, features = frozen_pass(target, frozen, ids, config.target_layer_ids)
    hidden = block_hidden(config, weights, table, ids, features, anchors)[:, :, 1:]
    positions = anchors[:, :, None] + 1 + jnp.arange(slots)
    seen = positions < end[:, None, None]
    rows = jnp.arange(len(ids))[:, None, None]
    tokens, states = ids[rows, jnp.minimum(positions, last)], final[rows, jnp.minimum(positions - 1, last)]
    pending = jnp.take_along_axis(ids, anchors, axis=1)

    @jax.checkpoint
    def of_row(inputs: tuple[Array, Array, Array, Array, Array]) -> tuple[Array, Array, Array]:
        slot_states, before, labels, taught, mask = inputs
        model = bind(target, frozen)
        teacher = model.logits(taught) if settings.teacher == "distribution" else None
        found = terms(bind(config, weights), Places(slot_states, before, labels, teacher), model.head_weight)
        loss = weighted(found.loss, found.match, settings.loss, mask)
        accept = jnp.cumprod(jnp.where(mask, found.match, 0.0), axis=-1).sum(-1) + 1
        return loss.mean(), (found.entropy * mask).sum() / mask.sum(), accept.mean()

    loss, entropy, accept = jax.lax.map(of_row, (hidden, pending, tokens, states, seen))
    return loss.mean(), {"entropy": entropy.mean(), "accept": accept.mean()}


def fit_drafter(
    settings: FitSettings,
    target: DecoderConfig,
    config: DFlashConfig,
    frozen: Params,
    answers: Sequence[Answer],
    folder: Path,
    clock: Clock,
    advance: Callable[[int, Mapping[str, float]], object] = lambda step, metrics: None,
    devices: int = 1,
) -> Params:
    """Trains to `settings.steps` from whatever `folder` holds; returns float32 weights.

    Args:
      frozen: the target's weights, in bfloat16.
      advance: told of every chunk: the step that is done, and its figures.
      devices: that share the rows of a step; see `training.replicas`. Checkpoints are the same for any number.

    Raises:
      ParameterError: there are not so many devices, or they do not divide the rows.
      Interrupted: the clock ran out; the state is in `folder`.
    """
    if settings.rows % devices:
        raise ParameterError(f"devices must divide rows={settings.rows}, got {devices}")
    replicas, transform = Replicas(devices), optimizer(settings.weight_decay, settings.optimizer)
    ids, start, end = answer_arrays(answers, settings.length)

    @functools.partial(jax.jit, donate_argnums=0)
    def chunk(state, frozen, batches, key, first, rates):
        def step(state, inputs):
            (ids, start, end), number, rate = inputs
            loss = functools.partial(answer_loss, settings, target, config)
            # Of all rows at once, whichever device has them.
            anchors = answer_anchors(jax.random.fold_in(key, number), start, end, settings.anchors)
            (value, metrics), grads = replicas.gradients(loss, state["params"], frozen, (ids, end, anchors))
            updates, moments = transform.update(grads, state["moments"], state["params"])
            state = {"params": apply(state["params"], updates, rate), "moments": moments}
            return jax.lax.with_sharding_constraint(state, kept), {"loss": value, **metrics}

        state, metrics = jax.lax.scan(step, state, (batches, first + jnp.arange(rates.shape[0]), rates))
        return state, jax.tree.map(jnp.mean, metrics)

    def run(state, first, rates):
        # What a step sees depends on its number alone.
        picks = np.stack(
            [
                np.random.default_rng((settings.seed, step)).integers(len(ids), size=settings.rows)
                for step in range(first, first + len(rates))
            ]
        )
        batches = (ids[picks], start[picks], end[picks])
        state, metrics = chunk(state, frozen, batches, key, first, rates)
        metrics = {name: float(value) for name, value in metrics.items()}
        advance(first + len(rates), metrics)
        return state, metrics

    params = damped(initial_weights(config, settings.seed), settings.layers)
    state = {"params": params, "moments": transform.init(params)}
    kept = replicas.shardings(state)
    state, frozen = jax.device_put(state, kept), replicas.whole(frozen)
    key = jax.random.fold_in(jax.random.key(settings.seed), 2)
    state = run_steps(
        "drafter", state, run, folder, clock, total=settings.steps, peak=settings.rate, settings=settings
    )  # fmt: skip
    return state["params"]
