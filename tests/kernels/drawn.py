"""Random arguments of a call, drawn by one program: one for each array would take seconds to compile."""

import functools
from typing import Any

import jax

# Shape, standard deviation, mean.
Part = tuple[tuple[int, ...], float, float]


def drawn(seed: int, dtype: Any, **parts: Part) -> dict[str, jax.Array]:
    """Normal numbers of each shape. Where shapes alone are wanted (`jax.eval_shape`) nothing is drawn."""
    return _drawn(seed, dtype, tuple(parts.items()))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _drawn(seed: int, dtype: Any, parts: tuple[tuple[str, Part], ...]) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(parts))
    return {
        name: (mean + jax.random.normal(key, shape) * scale).astype(dtype)
        for key, (name, (shape, scale, mean)) in zip(keys, parts, strict=True)
    }
