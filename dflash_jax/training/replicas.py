"""Data parallelism: devices share the rows of a step, all have the weights, and each keeps a part of the optimizer's moments.

Source: ZeRO, arXiv 1910.02054, its first stage. Gradients are the mean over devices; what follows from them is computed by parts,
and the parts of new weights are gathered. The numbers are those of one device but for the order in which rows are added up.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.errors import ParameterError

# Not the axis along which ranks share a model: there layers add up what ranks multiply.
AXIS = "rows"


class Replicas:
    """The first `count` devices of this process.

    Raises:
      ParameterError: there are fewer.
    """

    def __init__(self, count: int = 1):
        devices = jax.local_devices()
        if not 1 <= count <= len(devices):
            raise ParameterError(
                f"devices must be from 1 to the {len(devices)} that JAX sees, got {count}: let it see more (CUDA_VISIBLE_DEVICES)"
            )
        self.count = count
        self.mesh = Mesh(np.array(devices[:count]), (AXIS,))

    def shardings(self, state: dict[str, Any]) -> dict[str, Any]:
        """Shardings of a state: `moments` in parts where some axis is a multiple of the devices, all else whole."""
        whole = NamedSharding(self.mesh, P())

        def part(leaf: Any) -> NamedSharding:
            fitting = [axis for axis, size in enumerate(leaf.shape) if size and size % self.count == 0]
            return NamedSharding(self.mesh, P(*(None,) * fitting[0], AXIS)) if fitting else whole

        return {
            name: jax.tree.map(part if name == "moments" else lambda _: whole, tree) for name, tree in state.items()
        }

    def whole(self, tree: Any) -> Any:
        """Arrays on all devices."""
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def gradients(self, loss: Callable[..., Any], params: Any, frozen: Any, batch: Any) -> Any:
        """Value, metrics and gradients of `loss(params, frozen, batch)`, a mean over the rows of `batch`, as `jax.value_and_grad`
        gives them."""
        differentiated = jax.value_and_grad(loss, has_aux=True)
        if self.count == 1:
            return differentiated(params, frozen, batch)

        def own(params: Any, frozen: Any, batch: Any) -> Any:
            return jax.lax.pmean(differentiated(params, frozen, batch), AXIS)

        shared = jax.shard_map(own, mesh=self.mesh, in_specs=(P(), P(), P(AXIS)), out_specs=P(), check_vma=False)
        return shared(params, frozen, batch)
