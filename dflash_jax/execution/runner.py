"""The runner of an execution plan: hands a stack of layers to the code that the plan names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from dflash_kernels import RankExchange, embed_norm
from jaxtyping import Array, Float, Int

from dflash_jax.execution.fused_dense import run_fused_dense
from dflash_jax.execution.fused_float8 import run_fused_float8
from dflash_jax.execution.fused_moe import run_fused_moe
from dflash_jax.execution.persistent import Workspace, make_workspace, run_persistent
from dflash_jax.execution.plan import PLAIN, ExecutionPlan
from dflash_jax.models.layers import ONE_BY_ONE, Cache, Rotary
from dflash_jax.parallel.collectives import adding_in
from dflash_jax.quantization.weights import Quantized


@dataclass(frozen=True)
class Planned:
    """A `Runner` that follows a plan. Nobody takes gradients through it, but for a plain one.

    Attributes:
      plan: chosen for the calls that it runs.
      workspace: of `make_workspace`, where it outlives a call.
    """

    plan: ExecutionPlan
    workspace: Workspace | None = None

    def embed(
        self, layers: Sequence[Any], table: Float[Array, "V D"] | Quantized, ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | None]:
        """Rows of a table, and after the first layer's norm where a fused runner needs them so: one launch gives both."""
        if isinstance(table, Quantized) or self.plan.runner == "plain":
            return table[ids], None
        norm = layers[0].input_norm
        if norm.rounds_last and not norm.zero_centered:
            return table[ids], None  # for which `embed_norm` has no form
        x, normed = embed_norm(
            table, ids.reshape(-1), norm.weight[...], eps=norm.eps, zero_centered=norm.zero_centered
        )  # fmt: skip
        return x.reshape(*ids.shape, -1), normed.reshape(*ids.shape, -1)

    def __call__(
        self,
        layers: Sequence[Any],
        norm: Any,
        x: Float[Array, "B T *streams D"],
        rotary: Rotary,
        attend: Any,
        cache: Cache,
        *,
        normed: Float[Array, "B T D"] | None = None,
    ) -> tuple[list[Float[Array, "B T *streams D"]], Float[Array, "B T D"], Cache]:
        with adding_in(self._ranks(layers, x, apart=True)):
            if self.plan.runner == "plain":
                return ONE_BY_ONE(layers, norm, x, rotary, attend, cache)
            first: jax.Array = layers[0].input_norm(x) if normed is None else normed
            match self.plan.runner:
                case "persistent":
                    return run_persistent(self.plan, layers, norm, x, first, rotary, attend, cache, self.workspace)
                case "fused_dense":
                    return run_fused_dense(layers, norm, x, first, rotary, attend, cache, ranks=self._ranks(layers, x))
                case "fused_float8":
                    return run_fused_float8(layers, norm, x, first, rotary, attend, cache)
                case "fused_moe":
                    return run_fused_moe(layers, norm, x, first, rotary, attend, cache, ranks=self._ranks(layers, x))

    def _ranks(self, layers: Sequence[Any], x: Array, *, apart: bool = False) -> RankExchange | None:
        """Memory for exchanges of ranks in a runner's launches, or in those that add up `apart`; None where JAX's collectives do
        that, or the other ones."""
        if apart != (self.plan.workspace == "sums"):
            return None
        held = self.workspace or make_workspace(self.plan, layers, x)
        return None if held is None else held.ranks


LAYER_BY_LAYER = Planned(PLAIN)
