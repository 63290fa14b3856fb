"""Arrays of one number, made by NumPy: `jnp` compiles a program for each shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def ones(shape: int | tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.ones(shape, jnp.dtype(dtype)))


def zeros(shape: int | tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.zeros(shape, jnp.dtype(dtype)))
