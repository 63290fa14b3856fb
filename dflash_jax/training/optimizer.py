"""AdamW and Muon whose learning rate is an argument, so that a compiled step does not depend on how long the run is."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from dflash_jax.training.muon import scale_by_muon

Params = dict[str, Array]


def optimizer(weight_decay: float, kind: str = "adamw") -> optax.GradientTransformation:
    """Clipped AdamW or Muon for a learning rate of one; matrices decay, norm weights do not. Updates are scaled by `apply`."""
    moments = optax.scale_by_adam(b1=0.9, b2=0.95)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        scale_by_muon(moments) if kind == "muon" else moments,
        optax.add_decayed_weights(weight_decay, mask=matrices),
    )


def matrices(params: Params) -> dict[str, bool]:
    """Matrices that decay. A convolution's own kernel begins as the identity, and is held to nothing smaller."""
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
