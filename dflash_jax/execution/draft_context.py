"""The drafter's context projection while decoding: tapped features to keys and values of all its layers."""

from typing import Any

import jax
from dflash_kernels import linear_chain, linear_chain_exchange
from jaxtyping import Array, Float, Int

from dflash_jax.execution.fused_dense import multiplied
from dflash_jax.execution.plan import ContextPlan
from dflash_jax.models.dflash import DFlash


def make_context_workspace(plan: ContextPlan, drafter: DFlash, rows: int) -> Any:
    """A Ref with which `context_products` of so many rows is one launch; None where the plan has none."""
    if plan.form != "one_launch" or drafter.fc is None:
        return None
    first, second = drafter.fc.weight[...], drafter.context_kv_proj.weight[...]
    sizes = {"depth": first.shape[1], "hidden": first.shape[0], "features": second.shape[0]}
    return jax.new_ref(linear_chain_exchange(rows, **sizes))


def context_products(
    drafter: DFlash,
    features: Float[Array, "... nD"],
    *,
    decodes: bool = False,
    live: Int[Array, ""] | None = None,
    workspace: Any = None,
) -> Float[Array, "... F"]:
    """Keys and values of all layers, side by side as `context_kv_proj` has them, neither normed nor rotated.

    Args:
      decodes: rows are those of a cycle, few enough for kernels of their own.
      live: so many rows from the first on are asked for, the others are undefined.
      workspace: of `make_context_workspace` for as many rows.
    """
    projection = drafter.fc
    if workspace is None or projection is None:
        if projection is None or not decodes:
            context = drafter.context(features)
        else:
            context = drafter.of_projected(multiplied(projection, drafter.normed(features), live))
        return multiplied(drafter.context_kv_proj, context, live)
    first, norm, second = projection.weight[...], drafter.hidden_norm, drafter.context_kv_proj.weight[...]
    rows = features.reshape(-1, features.shape[-1])
    products = linear_chain(rows, first, norm.weight[...], second, exchange=workspace, eps=norm.eps)
    return products.reshape(*features.shape[:-1], -1)
