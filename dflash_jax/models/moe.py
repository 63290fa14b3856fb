"""Mixture of experts: which experts a token takes (float32), and the experts themselves.

On Hopper up to some hundred tokens stream the weights of the experts they take, each once (`routed_experts`), and more are sorted
into blocks by expert and multiplied block by block (`grouped_linear`). One alone, and a few elsewhere, gather the weights of their
experts; others go through every expert, and what a token did not take is left out of its sum. No expert has a capacity: nothing is
dropped, and a token's result does not depend on the other tokens of the batch. `benchmarks/moe.py` measures all four, and
`jax.lax.ragged_dot`, which XLA computes as every expert on every row of the sorted tokens: the work of every expert times a
token's experts.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from dflash_kernels import (
    dense_scores,
    grouped_linear,
    grouped_linear_refusal,
    mixture,
    routed_experts,
    routed_experts_refusal,
    share_of_choices,
)
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.models.layers import ACTIVATIONS, MLP, Linear, gated
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import Activation, ExpertTraits
from dflash_jax.parallel.collectives import own_rank, ranks_here, reduced
from dflash_jax.parallel.cut import by_columns, by_rows

# Keeps the sum of a token's weights away from zero, as the released models' code does; a configuration may have another one, its
# `routing_eps`.
_NORM_EPS = 1e-20
# Of experts that are chosen with a correction: what makes scores of a router's products, by a configuration's `scoring`.
SCORES: Mapping[str, Callable[[Array], Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "softmax": functools.partial(jax.nn.softmax, axis=-1),
    "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}
# Rows an expert from which blocks of them pay: 512 tokens of 6 experts among 64 take 0.58 ms in blocks and 0.89 through every
# expert, 128 tokens 0.46 and 0.39 (an H200, bfloat16).
MANY = 16


@runtime_checkable
class ExpertsConfig(Protocol):
    """Interface of a configuration with experts; `DeepseekConfig` tells what each field means."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def num_shared_experts(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def routing(self) -> str: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def groups_per_token(self) -> int: ...
    @property
    def norm_routing_weights(self) -> bool: ...
    @property
    def routing_scale(self) -> float: ...


def route(
    config: ExpertsConfig, logits: Float[Array, "T E"], bias: Float[Array, "E"] | None = None
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Experts of every token and their float32 weights.

    greedy: the largest of a softmax. group_limited_greedy: the same among the groups whose best expert scores highest.
    noaux_tc: scores are sigmoids, or what a configuration's `scoring` names in `SCORES`; experts are chosen by score plus `bias`,
    among the groups with the highest sum of their two best choices, and weighted by the score alone.

    Args:
      logits: float32.
      bias: `e_score_correction_bias`, for noaux_tc.
    """
    wide = logits.astype(jnp.float32)
    if config.routing == "noaux_tc":
        scores = SCORES[getattr(config, "scoring", "sigmoid")](wide)
        choice = scores if bias is None else scores + bias.astype(jnp.float32)
        best_of_group, masked = 2, -jnp.inf
    else:
        scores = choice = jax.nn.softmax(wide, axis=-1)
        best_of_group, masked = 1, 0.0
    if config.num_groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], config.num_groups, -1)
        group_scores = jax.lax.top_k(grouped, best_of_group)[0].sum(axis=-1)
        groups = jax.lax.top_k(group_scores, config.groups_per_token)[1]
        open_groups = jax.nn.one_hot(groups, config.num_groups, dtype=bool).any(axis=-2)
        choice = jnp.where(open_groups[..., None], grouped, masked).reshape(choice.shape)
    experts = jax.lax.top_k(choice, config.experts_per_token)[1]
    return experts, expert_weights(config, scores, experts)


def expert_weights(
    config: ExpertsConfig, scores: Float[Array, "T E"], experts: Int[Array, "T k"]
) -> Float[Array, "T k"]:
    """Weights of the experts that tokens take, from the scores of all."""
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_routing_weights:
        eps = getattr(config, "routing_eps", _NORM_EPS)
        weights = weights / (weights.sum(axis=-1, keepdims=True) + eps)
    return weights * config.routing_scale


def own_choices(
    experts: Int[Array, "T k"], weights: Float[Array, "T k"], count: int, *, shared: bool = False
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """`share_of_choices` of a rank that has `count` experts, a shared one of all ranks among them."""
    return share_of_choices(experts, weights, own_rank() * (count - shared), count, shared=shared)


class Router(nnx.Module):
    """Scores of the experts, in float32 whatever the model's dtype.

    Args:
      shared: every token takes one more expert, the last one, weighted by the sigmoid of its score.
    """

    score_bias = None  # added to what the weight's rows give; `bias` below counts for the choice alone

    def __init__(self, config: ExpertsConfig, *, shared: bool = False):
        self.config, self.shared = config, shared
        self.weight = nnx.Param(jnp.zeros((config.num_experts + shared, config.hidden_size)))
        self.bias = nnx.Param(jnp.zeros((config.num_experts,))) if config.routing == "noaux_tc" else None

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        return self.choose(dense_scores(x, self.weight[...]))

    def choose(self, logits: Float[Array, "T E"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """See `route`; logits are products of x with the weight's rows."""
        bias = None if self.bias is None else self.bias[...]
        if not self.shared:
            return route(self.config, logits, bias)
        experts, weights = route(self.config, logits[..., :-1], bias)
        last = jnp.full_like(experts[..., :1], self.config.num_experts)
        own = jax.nn.sigmoid(logits[..., -1:].astype(jnp.float32))
        return jnp.concatenate([experts, last], axis=-1), jnp.concatenate([weights, own], axis=-1)


class Experts(nnx.Module):
    """All routed experts: gate and up rows of expert after expert in one matrix `[E*2F, D]`, down rows in another `[E*D, F]`.

    Args:
      shared: there is one more, the last one, which every token takes.
      activation: of the gates. Kernels have silu; others are XLA's.
      gated: otherwise the first matrix has up rows alone `[E*F, D]`, and the activation is of their products.
      width: columns D that experts take and give; None for the stream's.
      limit: see `layers.gated`; of XLA alone.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        shared: bool = False,
        activation: Activation = "silu",
        gated: bool = True,
        width: int | None = None,
        limit: float | None = None,
    ):
        self.activation: Activation = activation
        self.limit, self.in_kernels = limit, activation == "silu" and limit is None and gated
        self.shared, self.gated = shared, gated
        e, f = config.num_experts + shared, config.moe_intermediate_size
        d = config.hidden_size if width is None else width
        self.hidden, self.inner = d, f
        self.gate_up_proj: Any = Linear(e * 2 * f, d) if gated else None
        self.up_proj: Any = None if gated else Linear(e * f, d)
        self.down_proj = Linear(e * d, f)

    @property
    def first(self) -> Linear:
        """The matrix that a token is multiplied with first."""
        return self.gate_up_proj if self.gated else self.up_proj

    @property
    def count(self) -> int:
        """Experts whose matrices are here: of several devices, each has a share of them."""
        return self.down_proj.weight[...].shape[0] // self.hidden

    def __call__(
        self, x: Float[Array, "T D"], experts: Int[Array, "T k"], weights: Float[Array, "T k"]
    ) -> Float[Array, "T D"]:
        """Sum over each token's experts, weighted and added in float32; where ranks share them, over those of this one."""
        if ranks_here() > 1:
            experts, weights = own_choices(experts, weights, self.count, shared=self.shared)
        # One token's are faster gathered: 40.1 us and not 41.7 of V2-Lite's, 32.8 and not 38.6 of Qwen3-30B-A3B's.
        if x.shape[0] > 1 and self.streams(x.shape[0], experts.shape[1], x.dtype):
            gate_up, down = (self._by_expert(matrix) for matrix in (self.first, self.down_proj))
            return routed_experts(x, experts, weights, gate_up, down).sum(axis=0).astype(x.dtype)
        # Gathering 48 experts of 64 takes 0.25 ms, all of them in place 0.32 (an H200, bfloat16).
        if experts.size <= self.count:
            return self.chosen(x, experts, weights)
        if (
            self.in_kernels
            and experts.size >= MANY * self.count
            and grouped_linear_refusal(x.dtype, hidden=self.hidden, inner=self.inner) is None
        ):
            return self.grouped(x, experts, weights)
        return self.every(x, experts, weights)

    def streams(self, tokens: int, taken: int, dtype: Any) -> bool:
        """Whether `parts` is the fastest way for so many tokens: wherever its kernel takes them.

        512 tokens of 8 experts among 128 (an H200, bfloat16) take 0.42 ms, 0.73 in blocks; of 6 among 64, 0.38 and 0.56.
        """
        sizes = {"experts": self.count, "hidden": self.hidden, "inner": self.inner}
        return self.in_kernels and routed_experts_refusal(tokens, taken, dtype, **sizes) is None

    def parts(
        self, x: Float[Array, "T D"], router: Router, logits: Float[Array, "T E"], exchange: Any = None
    ) -> Float[Array, "k T D"]:
        """Weighted outputs of a token's experts, float32, still to be added; if ranks share experts, those of this one. Nothing
        differentiates this where a kernel does it."""
        gate_up, down = (self._by_expert(matrix) for matrix in (self.first, self.down_proj))
        config, ranks = router.config, ranks_here()
        if config.routing == "greedy" and config.num_groups == 1:
            how = {
                "taken": config.experts_per_token,
                "normed": config.norm_routing_weights,
                "scale": config.routing_scale,
                "shared": router.shared,
                "first": None if ranks == 1 else own_rank() * (self.count - self.shared),
            }
            return mixture(logits, x, gate_up, down, exchange=exchange, **how)
        experts, weights = router.choose(logits)
        if ranks > 1:
            experts, weights = own_choices(experts, weights, self.count, shared=self.shared)
        return routed_experts(x, experts, weights, gate_up, down, exchange=exchange)

    def chosen(
        self, x: Float[Array, "T D"], experts: Int[Array, "T k"], weights: Float[Array, "T k"]
    ) -> Float[Array, "T D"]:
        """Each token times the gathered weights of its experts. Sums of products, not matrix products: those would write the
        gathered weights to memory first.
        """
        gate_up, down = (self._by_expert(matrix)[experts] for matrix in (self.first, self.down_proj))
        both = rows_times(gate_up, x[:, None]).astype(x.dtype)
        out = rows_times(down, self._gated(both)).astype(x.dtype)
        return (out.astype(jnp.float32) * weights[..., None]).sum(axis=-2).astype(x.dtype)

    def grouped(
        self,
        x: Float[Array, "T D"],
        experts: Int[Array, "T k"],
        weights: Float[Array, "T k"],
        implementation: str | None = None,
    ) -> Float[Array, "T D"]:
        """Rows of a token for each of its experts, in blocks of one expert; nothing differentiates this."""
        rows = 128 if experts.size > 96 * self.count else 64
        blocks = _blocks(experts, self.count, rows)
        sorted_x = x[blocks.tokens]
        matrices = [self._by_expert(matrix) for matrix in (self.first, self.down_proj)]
        used: dict[str, Any] = {"groups": blocks.experts, "count": blocks.used, "implementation": implementation}
        inner = grouped_linear(sorted_x, matrices[0], gated=True, **used)
        out = grouped_linear(inner, matrices[1], **used)[blocks.places]
        return (out.astype(jnp.float32) * weights[..., None]).sum(axis=-2).astype(x.dtype)

    def every(
        self, x: Float[Array, "T D"], experts: Int[Array, "T k"], weights: Float[Array, "T k"]
    ) -> Float[Array, "T D"]:
        """All experts on all tokens; the weights are read in place, once."""
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        taken = jax.nn.one_hot(experts, self.count, dtype=jnp.float32)
        share = jnp.einsum("tke,tk->et", taken, weights, precision=jax.lax.Precision.HIGHEST)[..., None]
        inner = self._gated(self.first(x).reshape(x.shape[0], self.count, -1))
        out = jnp.einsum("tef,edf->etd", inner, self._by_expert(self.down_proj), precision=precision)
        # Left out, not weighted with 0: an expert that a token did not take may overflow on it.
        kept = jnp.where(taken.any(axis=1).T[..., None], out.astype(jnp.float32) * share, 0.0)
        return kept.sum(axis=0).astype(x.dtype)

    def _gated(self, both: Float[Array, "... F2"]) -> Float[Array, "... F"]:
        return gated(both, self.activation, self.limit) if self.gated else ACTIVATIONS[self.activation](both)

    def _by_expert(self, matrix: Linear) -> Float[Array, "E out in"]:
        weight = matrix.weight[...]
        return weight.reshape(self.count, -1, weight.shape[-1])


class _Blocks(NamedTuple):
    """Rows in blocks of one expert each.

    Attributes:
      tokens: of each row; rows that fill up an expert's last block are token 0's.
      places: the row of each token and expert.
      experts: of each block; used: blocks, the first ones.
    """

    tokens: Int[Array, "rows"]
    places: Int[Array, "T k"]
    experts: Int[Array, "blocks"]
    used: Int[Array, ""]


def _blocks(experts: Int[Array, "T k"], count: int, rows: int) -> _Blocks:
    """Blocks of `rows` rows, of an expert's tokens in order."""
    taken = jax.nn.one_hot(experts, count, dtype=jnp.int32).sum(axis=1)
    before = jnp.cumsum(taken, axis=0) - taken  # how many tokens before this one took the expert
    ends = jnp.cumsum(-(-taken.sum(axis=0) // rows))
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    places = starts[experts] * rows + jnp.take_along_axis(before, experts, axis=1)
    most = min(count, experts.size) + experts.size // rows  # every expert has one block that is not full at most
    tokens = (
        jnp.zeros(most * rows, jnp.int32).at[places].set(jnp.arange(experts.shape[0])[:, None], unique_indices=True)
    )
    of_blocks = jnp.searchsorted(ends, jnp.arange(most), side="right")
    return _Blocks(tokens, places, jnp.minimum(of_blocks, count - 1).astype(jnp.int32), ends[-1])


def rows_times(matrices: Float[Array, "T k out in"], x: Float[Array, "T #k in"]) -> Float[Array, "T k out"]:
    """Products with a matrix for each row, in float32: sums, so that XLA reads each matrix where it was gathered from."""
    return (matrices.astype(jnp.float32) * x[:, :, None].astype(jnp.float32)).sum(axis=-1)


class MoE(nnx.Module):
    """Routed experts plus the shared experts, if any, which are one feed-forward of their joint width.

    One that is gated and as wide as a routed one is the last of the routed ones, which every token takes, and its gate the last row
    of the router: five launches of a layer are none then.

    Args:
      shared: that width; None for that of `num_shared_experts` routed ones.
      gated: whether a token weights what its shared experts give, by the sigmoid of one product.
      activation, limit: of all experts, see `layers.gated`.
    """

    routed = True

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        shared: int | None = None,
        gated: bool = False,
        activation: Activation = "silu",
        limit: float | None = None,
    ):
        shared = config.moe_intermediate_size * config.num_shared_experts if shared is None else shared
        among = gated and shared_among_routed(config, shared)
        how: dict[str, Any] = {"activation": activation, "limit": limit}
        self.router, self.experts = Router(config, shared=among), Experts(config, shared=among, **how)
        self.shared = MLP(config.hidden_size, shared, summed=False, **how) if shared and not among else None
        self.shared_gate = Linear(1, config.hidden_size) if gated and not among else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        rows = x.reshape(-1, x.shape[-1])
        routed = self.experts(rows, *self.router(rows)).reshape(x.shape)
        shared = self.beside(x)
        # One all-reduce for both.
        return reduced(routed if shared is None else routed + shared)

    def beside(self, x: Float[Array, "... D"]) -> Float[Array, "... D"] | None:
        """Output of the shared experts, with their gate if they have one, and of ranks each one's part; None without shared
        experts."""
        if self.shared is None:
            return None
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(self.shared_gate(x).astype(jnp.float32)).astype(x.dtype)
        return shared


def shared_among_routed(config: ExpertsConfig, shared: int) -> bool:
    """Whether a gated shared expert of this inner width is the last of the routed ones; see `MoE`."""
    return shared == config.moe_intermediate_size


def expert_traits(
    config: ExpertsConfig, *, shared: bool = False, gated: bool = True, width: int | None = None
) -> ExpertTraits:
    """Traits of a configuration's experts, for the execution plan; `shared`: with one that every token takes."""
    count, taken = config.num_experts + shared, config.experts_per_token + shared
    return ExpertTraits(count, taken, config.moe_intermediate_size, shared, gated, width)


def moe_parameters(
    config: ExpertsConfig,
    ours: str,
    theirs: str,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Parameter]:
    """Parameters of one `MoE` whose checkpoint names start with `theirs`; `names` are those of a routed expert's matrices."""
    e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
    shared, gates = f * config.num_shared_experts, ("gate_proj", "up_proj")
    experts = [f"{theirs}experts.{index}." for index in range(e)]
    table = [single(f"{ours}router.weight", f"{theirs}gate.weight", (e, d))]
    if config.routing == "noaux_tc":
        table.append(single(f"{ours}router.bias", f"{theirs}gate.e_score_correction_bias", (e,), "float32"))
    table += [
        Parameter(
            f"{ours}experts.gate_up_proj.weight",
            tuple(Source(f"{expert}{name}.weight", (f, d)) for expert in experts for name in names[:2]),
            cut=by_rows((2 * e * f, e)),
        ),
        Parameter(
            f"{ours}experts.down_proj.weight",
            tuple(Source(f"{expert}{names[2]}.weight", (d, f)) for expert in experts),
            cut=by_rows((e * d, e)),
        ),
    ]
    if not shared:
        return table
    return [
        *table,
        Parameter(
            f"{ours}shared.gate_up_proj.weight",
            tuple(Source(f"{theirs}shared_experts.{name}.weight", (shared, d)) for name in gates),
            cut=by_rows((shared, shared), (shared, shared)),
        ),
        single(
            f"{ours}shared.down_proj.weight",
            f"{theirs}shared_experts.down_proj.weight",
            (d, shared),
            cut=by_columns((shared, shared)),
        ),
    ]
