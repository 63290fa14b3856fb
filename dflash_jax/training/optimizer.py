"""AdamW and Muon whose learning rate is an argument, so that a compiled step does not depend on how long the run is."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float

Params = dict[str, Array]


def optimizer(weight_decay: float, kind: str = "adamw") -> optax.GradientTransformation:
    """Clipped AdamW or Muon for a learning rate of one; matrices decay, norm weights do not. Updates are scaled by `apply`.

    Muon (Jordan et al. 2024) steps along orthogonalised momentum, scaled to the size of AdamW's steps (arXiv 2502.16982), in
    matrices that multiply hidden states; tables of tokens, kernels and norms stay with AdamW.
    """
    moments = optax.scale_by_adam(b1=0.9, b2=0.95)
    if kind == "muon":
        moments = optax.partition({"muon": _muon(), "adamw": moments}, _sides)
    return optax.chain(
        optax.clip_by_global_norm(1.0), moments, optax.add_decayed_weights(weight_decay, mask=matrices)
    )  # fmt: skip


def _muon() -> optax.GradientTransformation:
    return optax.chain(optax.contrib.scale_by_muon(), optax.stateless(_like_adamw))


def _like_adamw(updates: Params, params: Params | None) -> Params:
    """Orthogonal matrices have entries of size `max(shape) ** -0.5`, and AdamW's updates are about 0.2."""
    del params
    return jax.tree.map(lambda update: 0.2 * max(update.shape) ** 0.5 * update, updates)


def _sides(params: Params) -> dict[str, str]:
    return {name: "muon" if value.ndim == 2 and not _is_table(name) else "adamw" for name, value in params.items()}


def _is_table(name: str) -> bool:
    """Whether rows are tokens'."""
    return name.endswith(("embed.weight", "lm_head.weight", "_codebook", "markov_w1.weight", "markov_w2.weight"))


def matrices(params: Params) -> dict[str, bool]:
    """What decays. A convolution's own kernel begins as the identity, and is held to nothing smaller."""
    return {name: value.ndim > 1 and not name.endswith("base_kernel") for name, value in params.items()}


def apply(params: Params, updates: optax.Updates, rate: Float[Array, ""]) -> Params:
    return jax.tree.map(lambda value, update: value - rate * update, params, updates)


def learning_rates(first: int, count: int, total: int, peak: float, warmup: float) -> np.ndarray:
    """float32 rates of steps `first .. first + count - 1`: linear warm-up over the share `warmup`, then a cosine to zero."""
    ramp = max(1, round(total * warmup))
    rates = []
    for step in range(first, first + count):
        through = (step - ramp) / max(1, total - ramp)
        rates.append(peak * ((step + 1) / ramp if step < ramp else 0.5 * (1 + math.cos(math.pi * through))))
    return np.asarray(rates, np.float32)


def half(params: Params) -> Params:
    """The bfloat16 copy that computes; also what is exported."""
    return {name: value.astype(jnp.bfloat16) for name, value in params.items()}
