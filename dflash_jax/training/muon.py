"""Muon: steps along orthogonalised momentum, for matrices that multiply hidden states; AdamW's moments for all else.

Sources: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), for the iteration and its coefficients;
arXiv 2502.16982, section 2.2, for the factor that makes a step as large as one of AdamW's, so that both take the same rates.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

_A, _B, _C = 3.4445, -4.7750, 2.0315
_MOMENTUM, _STEPS, _ADAMW_SIZE = 0.95, 5, 0.2
# Matrices whose rows are tokens'.
_TABLES = ("embed.weight", "lm_head.weight", "_codebook", "markov_w1.weight", "markov_w2.weight")


def multiplies(name: str, value: Array) -> bool:
    """Whether a parameter is a matrix that multiplies hidden states."""
    return value.ndim == 2 and min(value.shape) > 1 and not name.endswith(_TABLES)


def orthogonal(matrix: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Nearly the nearest matrix with orthogonal rows or columns, by Newton and Schulz's iteration: singular values near 1."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(_STEPS):
        square = x @ x.T
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def scale_by_muon(others: optax.GradientTransformation) -> optax.GradientTransformation:
    """Updates of flat parameters, by name: Muon's, and of what it is not for those of `others`. For a learning rate of one."""

    def split(values: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        ours = {name: value for name, value in values.items() if multiplies(name, value)}
        return ours, {name: value for name, value in values.items() if name not in ours}

    def init(params: Any) -> Any:
        ours, theirs = split(params)
        return {"momentum": jax.tree.map(jnp.zeros_like, ours), "others": others.init(theirs)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        ours, theirs = split(updates)
        momentum = jax.tree.map(lambda old, new: _MOMENTUM * old + new, state["momentum"], ours)
        steps = {
            name: _ADAMW_SIZE * max(grad.shape) ** 0.5 * orthogonal(grad + _MOMENTUM * momentum[name])
            for name, grad in ours.items()
        }
        rest, kept = others.update(theirs, state["others"])
        return {**steps, **cast(dict[str, Array], rest)}, {"momentum": momentum, "others": kept}

    return optax.GradientTransformation(init, update)
