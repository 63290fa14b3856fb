"""Trains the target: next-token prediction on random windows of the corpus."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import Qwen3Config
from dflash_jax.models import bind, init_params
from dflash_jax.models.qwen3 import qwen3_parameters
from dflash_jax.training.attention import causal_attend
from dflash_jax.training.optimizer import Params, apply, half, optimizer
from dflash_jax.training.settings import Settings
from dflash_jax.training.stages import Clock, run_steps


class MasterEmbedding(nnx.Module):
    """Looks up the float32 table and computes in bfloat16.

    The gradient of a frequent token is a sum over thousands of positions; taken in bfloat16 it would stop growing.
    """

    def __init__(self, table: Float[Array, "V D"]):
        self.table = nnx.Param(table)

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        return self.table[...][ids].astype(jnp.bfloat16)

    @property
    def weight(self) -> Float[Array, "V D"]:
        return self.table[...].astype(jnp.bfloat16)


def next_token_loss(config: Qwen3Config, params: Params, windows: Int[Array, "B T1"]) -> Float[Array, ""]:
    """Mean cross-entropy in nats of every token of `windows` but the first, computed in bfloat16."""
    model = bind(config, half(params))
    model.embed = MasterEmbedding(params["embed.weight"])
    ids = windows[:, :-1]
    hidden, _ = model(ids, positions_like(ids), causal_attend())
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), windows[:, 1:]).mean()


def positions_like(ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    return jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)


def initial_target(settings: Settings) -> Params:
    """Random float32 weights; what writes into the residual stream starts small."""
    params = init_params(qwen3_parameters(settings.target_config), jax.random.key(settings.seed))
    return damped(params, settings.target_layers)


def damped(params: Params, layers: int) -> Params:
    ends = ("o_proj.weight", "down_proj.weight")
    return {name: value * (2 * layers) ** -0.5 if name.endswith(ends) else value for name, value in params.items()}


def train_target(settings: Settings, tokens: np.ndarray, folder: Path, clock: Clock) -> Params:
    """Trains to `settings.target_steps` from whatever `folder` holds; returns float32 weights.

    Raises:
      Interrupted: the clock ran out; the state is in `folder`.
    """
    config, transform = settings.target_config, optimizer(settings.weight_decay)
    windows = jnp.arange(settings.target_length + 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def chunk(state, corpus, key, first, rates):
        def step(state, inputs):
            number, rate = inputs
            last = corpus.shape[0] - settings.target_length
            starts = jax.random.randint(jax.random.fold_in(key, number), (settings.target_rows,), 0, last)
            batch = corpus[starts[:, None] + windows].astype(jnp.int32)
            loss, grads = jax.value_and_grad(functools.partial(next_token_loss, config))(state["params"], batch)
            updates, moments = transform.update(grads, state["moments"], state["params"])
            return {"params": apply(state["params"], updates, rate), "moments": moments}, loss

        state, losses = jax.lax.scan(step, state, (first + jnp.arange(rates.shape[0]), rates))
        return state, {"loss": losses.mean()}

    params = initial_target(settings)
    state = {"params": params, "moments": transform.init(params)}
    corpus, key = jnp.asarray(tokens), jax.random.fold_in(jax.random.key(settings.seed), 1)
    state = run_steps(
        "target", state, lambda state, first, rates: chunk(state, corpus, key, first, rates), folder, clock,
        total=settings.target_steps, peak=settings.target_rate, settings=settings,
    )  # fmt: skip
    return state["params"]


def heldout_loss(settings: Settings, params: Params, windows: np.ndarray, rows: int = 16) -> float:
    """Mean next-token loss over held-out windows, in nats."""
    loss = jax.jit(functools.partial(next_token_loss, settings.target_config))
    whole = windows[: len(windows) // rows * rows] if len(windows) >= rows else windows
    rows = min(rows, len(whole))
    return float(np.mean([float(loss(params, jnp.asarray(part))) for part in np.split(whole, len(whole) // rows)]))
