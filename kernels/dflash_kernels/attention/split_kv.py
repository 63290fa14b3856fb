"""Split-KV in plain JAX: how many CTAs share a sequence's keys, and their results combined by log-sum-exp."""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MOST_SPLITS = 32


def best_splits(ctas: int, slots: int, longest: int, keys: int, rows: int) -> int:
    """Splits of a sequence that cost least, for `ctas` CTAs of whole sequences and as many evenly loaded `slots`.

    A wave of CTAs that leaves slots empty wastes them; a part costs the bytes of its float32 result, written and read, against
    those of the keys and values of `longest` tokens; parts at all cost a second launch.
    """
    most = max(min(MOST_SPLITS, longest // keys), 1)

    def cost(splits: int) -> float:
        waves = ctas * splits / slots
        merging = 0.0 if splits == 1 else 0.05 + 2.0 * splits * rows / longest
        return math.ceil(waves) / waves + merging

    return min(range(1, most + 1), key=cost)


def combine_splits(
    parts: Float[Array, "B T N splits H"],
    parts_lse: Float[Array, "B T N splits"],
    dtype: Any,
    sinks: Float[Array, "N"] | None = None,
    q_lens: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Output and natural lse over all splits and, in rows before `q_lens`, the sink.

    Written split by split instead of as a reduction, so that XLA makes one fusion of it; a launch of that is cheaper than one of a
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
    row_max = functools.reduce(jnp.maximum, logits)
    base = jnp.where(row_max == -jnp.inf, 0.0, row_max)
    weights = [jnp.exp(logit - base) for logit in logits]
    total = functools.reduce(jnp.add, weights)
    share = 1 / jnp.where(total > 0, total, 1.0)
    shares = [(weight * share)[..., None] for weight in weights[: parts.shape[-2]]]
    out = functools.reduce(jnp.add, [parts[..., split, :] * part for split, part in enumerate(shares)])
    return out.astype(dtype), base + jnp.log(total)
