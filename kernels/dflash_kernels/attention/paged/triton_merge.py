"""Parts of an attention over pages put together, for kernels that leave them side by side."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def merged(
    parts: Float[Array, "B T N splits H"],
    parts_lse: Float[Array, "B T N splits"],
    dtype: Any,
    sinks: Float[Array, "N"] | None = None,
    q_lens: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Output and natural lse over all parts and, in rows before `q_lens`, the sink.

    Written part by part instead of as a reduction, so that XLA makes one fusion of it; a launch of that is cheaper than one of a
    kernel through jax-triton.

    Args:
      parts: each normalised over its own keys, float32; zeros where it has none.
      parts_lse: natural lse of each, -inf where it has no keys.
      dtype: of the output.
      sinks: logit per head that counts as one more key without a value; `q_lens` is needed with it.
    """
    logits = [parts_lse[..., split] for split in range(parts_lse.shape[-1])]
    if sinks is not None and q_lens is not None:
        live = jnp.arange(parts.shape[1]) < q_lens[:, None]
        logits.append(jnp.where(live[..., None], sinks.astype(jnp.float32), -jnp.inf))
    top = functools.reduce(jnp.maximum, logits)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weights = [jnp.exp(logit - base) for logit in logits]
    total = functools.reduce(jnp.add, weights)
    share = 1 / jnp.where(total > 0, total, 1.0)
    shares = [(weight * share)[..., None] for weight in weights[: parts.shape[-2]]]
    out = functools.reduce(jnp.add, [parts[..., split, :] * part for split, part in enumerate(shares)])
    return out.astype(dtype), base + jnp.log(total)
