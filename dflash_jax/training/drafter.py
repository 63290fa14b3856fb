"""Trains the drafter on the target's own continuations: frozen target, many anchors of a sequence in one pass."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.models import DFlashConfig, bind
from dflash_jax.training.attention import block_attend, causal_attend
from dflash_jax.training.head_losses import VARIATION, Places, terms
from dflash_jax.training.kinds import initial_weights, working
from dflash_jax.training.losses import cycle_weights, weighted
from dflash_jax.training.optimizer import Params, apply, half, optimizer
from dflash_jax.training.settings import Settings
from dflash_jax.training.stages import Clock, run_steps
from dflash_jax.training.target import damped, positions_like


def target_pass(
    settings: Settings, target: Params, ids: Int[Array, "B C"]
) -> tuple[Float[Array, "B C D"], Float[Array, "B C nD"]]:
    """The frozen target's final hidden states and tapped features of whole sequences."""
    model = bind(settings.target_config, target)
    hidden, features, _ = model(ids, positions_like(ids), causal_attend(), settings.taps)
    return jax.lax.stop_gradient((hidden, features))


def block_hidden(
    config: DFlashConfig,
    params: Params,
    embed_weight: Float[Array, "V D"],
    ids: Int[Array, "B C"],
    features: Float[Array, "B C nD"],
    anchors: Int[Array, "B A"],
) -> Float[Array, "B A G D"]:
    """Hidden states of the blocks that start at `anchors`, all of a sequence in one pass.

    A block sees features strictly before its anchor (the anchor's own does not exist yet when a block is drafted), and itself.
    """
    draft = bind(config, params)
    b, a, g = *anchors.shape, config.block_size
    context = draft.context_kv(draft.context(features), positions_like(ids))
    pending = jnp.take_along_axis(ids, anchors, axis=1)
    x = draft.block_embeddings(pending.reshape(-1), embed_weight)  # a row is a block: convolutions end with it
    positions = (anchors[:, :, None] + jnp.arange(g)).reshape(b * a, g)
    hidden, _ = draft(x, positions, block_attend(anchors, context, g))
    return hidden.reshape(b, a, g, -1)


def spread_anchors(key: Array, rows: int, count: int, first: int, last: int) -> Int[Array, "B A"]:
    """`count` anchors a row, one in each of as many equal stretches of `[first, last)`."""
    width = (last - first) / count
    places = (jnp.arange(count) + jax.random.uniform(key, (rows, count))) * width
    return first + jnp.minimum(places.astype(jnp.int32), last - first - 1)


def gather_slots(values: Array, anchors: Int[Array, "B A"], slots: int, shift: int) -> Array:
    """`values[b, anchor + shift + k]` for k = 0 .. slots - 1, blocks of all rows one after the other: `[B*A, slots, ...]`."""
    places = anchors[:, :, None] + shift + jnp.arange(slots)
    rows = jnp.arange(values.shape[0])[:, None, None]
    return values[rows, places].reshape(-1, slots, *values.shape[2:])


def block_loss(
    settings: Settings, params: Params, target: Params, batch: list[tuple[Array, int]], key: Array
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Loss of one batch.

    Args:
      params: the drafter's float32 weights; `target` is bfloat16 and frozen.
      batch: per prompt length, rows of ids with the greedy ones first, and the prompt length.
    """
    config, slots = settings.draft_config, settings.block_size - 1
    weights, table = working(config, params), target["embed.weight"]
    model = bind(settings.target_config, target)
    parts: dict[str, list[Places]] = {"greedy": [], "sampled": []}
    for (ids, prompt), plan in zip(batch, settings.rollouts, strict=True):
        key, draw = jax.random.split(key)
        anchors = spread_anchors(draw, len(ids), settings.anchors, prompt, ids.shape[1] - slots)
        final, features = target_pass(settings, target, ids)
        hidden = block_hidden(config, weights, table, ids, features, anchors)[:, :, 1:]
        for kind, rows in (("greedy", slice(plan.greedy_rows)), ("sampled", slice(plan.greedy_rows, None))):
            at, seen = anchors[rows], ids[rows]
            states = gather_slots(final[rows], at, slots, 0) if kind == "sampled" else None
            parts[kind].append(
                Places(
                    hidden[rows].reshape(-1, slots, hidden.shape[-1]), gather_slots(seen, at, 1, 0)[:, 0],
                    gather_slots(seen, at, slots, 1), states,
                )
            )  # fmt: skip
    draft = bind(config, weights)
    greedy, sampled = (jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *parts[kind]) for kind in parts)
    hard = terms(draft, greedy, table)
    taught = sampled._replace(teacher=model.logits(sampled.teacher))
    soft = terms(draft, taught, table, whole=settings.sampled_loss == "block")
    losses = []
    for kind in (hard, soft):
        loss = weighted(kind.loss, kind.match, settings.loss)
        loss = loss if kind.stopped is None else loss + kind.stopped.mean(-1)
        if settings.blocks == "cycles":
            gained = jnp.cumprod(kind.match, -1).sum(-1) + 1
            loss = loss * cycle_weights(gained.reshape(-1, settings.anchors)).reshape(-1)
        losses.append(loss)
    total = jnp.concatenate(losses).mean()
    accept = jnp.cumprod(hard.match, -1).sum(-1).mean() + 1
    metrics = {"greedy": hard.entropy.mean(), "sampled": soft.entropy.mean(), "accept": accept}
    if soft.stopped is not None:
        metrics["stands"] = soft.stopped.shape[1] - soft.stopped.sum(-1).mean() / VARIATION + 1
    return total, metrics


def initial_drafter(settings: Settings) -> Params:
    return damped(initial_weights(settings.draft_config, settings.seed + 1), settings.draft_layers)


def train_drafter(
    settings: Settings,
    target: Params,
    data: list[dict[str, np.ndarray]],
    folder: Path,
    clock: Clock,
    *,
    start: Params | None = None,
    until: float | None = None,
) -> Params:
    """Trains to `settings.draft_steps` from whatever `folder` holds; returns float32 weights.

    Args:
      until: seconds of the clock at which to end, in place of the number of steps.
      start: weights to begin with where `folder` is empty, by name; those that it lacks are `initial_drafter`'s.

    Raises:
      Interrupted: the clock ran out; the state is in `folder`.
    """
    transform = optimizer(settings.weight_decay, settings.optimizer)

    def draw(key, plan, parts):
        rows = []
        for kind, count in (("greedy", plan.greedy_rows), ("sampled", plan.sampled_rows)):
            key, pick = jax.random.split(key)
            rows.append(parts[kind][jax.random.randint(pick, (count,), 0, len(parts[kind]))])
        return jnp.concatenate(rows).astype(jnp.int32), plan.prompt

    @functools.partial(jax.jit, donate_argnums=0)
    def chunk(state, frozen, data, key, first, rates):
        def step(state, inputs):
            number, rate = inputs
            keys = jax.random.split(jax.random.fold_in(key, number), len(data) + 1)
            batch = [draw(k, plan, parts) for k, plan, parts in zip(keys[1:], settings.rollouts, data, strict=True)]
            loss = functools.partial(block_loss, settings)
            (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], frozen, batch, keys[0])
            updates, moments = transform.update(grads, state["moments"], state["params"])
            return {"params": apply(state["params"], updates, rate), "moments": moments}, {"loss": value, **metrics}

        state, metrics = jax.lax.scan(step, state, (first + jnp.arange(rates.shape[0]), rates))
        return state, jax.tree.map(jnp.mean, metrics)

    params = initial_drafter(settings) | {name: jnp.asarray(value) for name, value in (start or {}).items()}
    state = {"params": params, "moments": transform.init(params)}
    frozen, on_device = half(target), jax.tree.map(jnp.asarray, data)
    key = jax.random.fold_in(jax.random.key(settings.seed), 2)
    state = run_steps(
        "drafter", state, lambda state, first, rates: chunk(state, frozen, on_device, key, first, rates), folder, clock,
        total=settings.draft_steps, peak=settings.draft_rate, settings=settings, until=until,
    )  # fmt: skip
    return state["params"]
