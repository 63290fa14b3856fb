"""Feed-forwards without a gate, `down(relu(up x)^2)`, dense or of experts, which may work on a narrower projection of the stream.

Source: transformers' NemotronHMLP and NemotronHMoE; the projections are "LatentMoE", arXiv 2601.18089.
"""

from collections.abc import Sequence
from typing import Protocol

from flax import nnx
from jaxtyping import Array, Float

from dflash_jax.models.layers import ACTIVATIONS, Linear
from dflash_jax.models.moe import Experts, ExpertsConfig, Router
from dflash_jax.models.parameters import Parameter, Source, single

ACTIVATION = "relu2"


class UngatedExpertsConfig(ExpertsConfig, Protocol):
    """Interface of a configuration with such experts."""

    @property
    def expert_width(self) -> int:
        """Columns that experts take and give; 0 for the stream's."""
        ...

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the expert that every token takes."""
        ...


class UngatedMLP(nnx.Module):
    """Dense one."""

    def __init__(self, hidden: int, inner: int):
        self.up_proj, self.down_proj = Linear(inner, hidden), Linear(hidden, inner)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return self.down_proj(ACTIVATIONS[ACTIVATION](self.up_proj(x)))


class UngatedMoE(nnx.Module):
    """Routed experts, plus one that every token takes at the stream's width."""

    def __init__(self, config: UngatedExpertsConfig):
        d, width = config.hidden_size, config.expert_width
        self.router = Router(config)
        self.experts = Experts(config, activation=ACTIVATION, gated=False, width=width or None)
        self.narrow, self.widen = (Linear(width, d), Linear(d, width)) if width else (None, None)
        self.shared = UngatedMLP(d, config.shared_intermediate_size)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        rows = x.reshape(-1, x.shape[-1])
        taken = self.router(rows)
        routed = self.experts(rows if self.narrow is None else self.narrow(rows), *taken)
        routed = routed if self.widen is None else self.widen(routed)
        return routed.reshape(x.shape) + self.shared(x)


def ungated_parameters(hidden: int, inner: int, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one `UngatedMLP` whose checkpoint names start with `theirs`."""
    return [
        single(f"{ours}up_proj.weight", f"{theirs}up_proj.weight", (inner, hidden)),
        single(f"{ours}down_proj.weight", f"{theirs}down_proj.weight", (hidden, inner)),
    ]


def ungated_moe_parameters(config: UngatedExpertsConfig, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one `UngatedMoE` whose checkpoint names start with `theirs`."""
    e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
    width = config.expert_width or d

    def of_experts(name: str, shape: tuple[int, int]) -> Sequence[Source]:
        return [Source(f"{theirs}experts.{index}.{name}.weight", shape) for index in range(e)]

    table = [
        single(f"{ours}router.weight", f"{theirs}gate.weight", (e, d)),
        single(f"{ours}router.bias", f"{theirs}gate.e_score_correction_bias", (e,), "float32"),
        Parameter(f"{ours}experts.up_proj.weight", tuple(of_experts("up_proj", (f, width)))),
        Parameter(f"{ours}experts.down_proj.weight", tuple(of_experts("down_proj", (width, f)))),
    ]
    if config.expert_width:
        table += [
            single(f"{ours}narrow.weight", f"{theirs}fc1_latent_proj.weight", (width, d)),
            single(f"{ours}widen.weight", f"{theirs}fc2_latent_proj.weight", (d, width)),
        ]
    shared = config.shared_intermediate_size
    return table + ungated_parameters(d, shared, f"{ours}shared.", f"{theirs}shared_experts.")
