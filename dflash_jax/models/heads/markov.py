"""DSpark's Markov head: a low-rank bias on each place's logits by the token before it (arXiv 2607.05147).

    vanilla  l_k = U_k + W2 e                                   e = W1[token before place k]
    gated    l_k = U_k + W2 (sigmoid(gate [h_k ; e]) * e)
    rnn      [g, c, o] = joint [s ; e ; h_k],  s = sigmoid(g) s + (1 - sigmoid(g)) tanh(c),  l_k = U_k + W2 tanh(o)

Places go one after the other, each through all rows of W2, or through those of its best candidates by U alone (`top_k`). Where
these are few, and one token before is all that counts, the scores of all pairs come from one product, as a selector's do, and the
walk only follows them. Where proposals are judged by the law that they are drawn from, it is that of all rows. A head may come with
another one that estimates whether a place's proposal will stand, from the place's state and the token before it.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import KeyReader, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.heads.base import Block, HeadConfig, Law, Pick, Sizes
from dflash_jax.models.heads.pairs import walk
from dflash_jax.models.heads.places import one_by_one, products_of
from dflash_jax.models.heads.reading import Source, missing
from dflash_jax.models.layers import Linear
from dflash_jax.models.parameters import Parameter, single

PREFIX, CONFIDENCE_PREFIX = "markov_head.", "confidence_head."
FORMS = ("vanilla", "gated", "rnn")
CONFIDENCES = ("none", "hidden", "hidden_and_token")
MOST_PAIRED = 32  # candidates of a place: pairs grow with their square


@dataclass(frozen=True, kw_only=True)
class MarkovConfig(HeadConfig):
    """A Markov head.

    Attributes:
      form: "vanilla", "gated" or "rnn".
      confidence: what the confidence head reads, "hidden" or "hidden_and_token"; "none" where there is none.
      confidence_bias: whether that one has a bias.
    """

    kind: Literal["markov"] = "markov"
    form: str = "vanilla"
    confidence: str = "none"
    confidence_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, known in (("form", self.form, FORMS), ("confidence", self.confidence, CONFIDENCES)):
            if value not in known:
                raise ConfigError(f"{type(self).__name__}: {name} must be {' or '.join(known)}, got {shown(value)}")

    @property
    def regards(self) -> int:
        """See `HeadConfig`."""
        return self.top_k

    @property
    def confident(self) -> bool:
        """See `HeadConfig`."""
        return self.confidence != "none"

    def of_all_tokens(self) -> "MarkovConfig":
        """See `HeadConfig`."""
        return replace(self, top_k=0)


def read_markov(source: Source, names: Collection[str], sizes: Sizes) -> MarkovConfig | None:
    """The configuration that a file's keys, found by `source`, and its tensors' names say; None where neither speaks of a Markov
    head.

    Raises:
      ConfigError: a key is missing, or cannot be.
    """
    reader = source("markov_rank")
    rank, there = reader.integer("markov_rank", 0, minimum=0), any(name.startswith(PREFIX) for name in names)
    if not rank and not there:
        return None
    missing({"markov_rank": reader}, {"markov_rank": rank > 0}, "a Markov head")
    kinds = source("markov_head_type")
    form = kinds.get("markov_head_type", "vanilla")
    if form not in FORMS:
        raise ConfigError(
            f"{kinds.subject}: markov_head_type must be {', '.join(FORMS[:-1])} or {FORMS[-1]}, got {shown(form)}"
        )
    top = source("dspark_draft_topk")
    top_k = top.integer("dspark_draft_topk", 0, minimum=0)
    if top_k > sizes.rows:
        raise ConfigError(
            f"{top.subject}: dspark_draft_topk={top_k} is more than the {sizes.rows} tokens that are drafted from"
        )
    return MarkovConfig(rank=rank, top_k=top_k, form=form, **_confidence(source, names))


def _confidence(source: Source, names: Collection[str]) -> dict[str, Any]:
    """What a confidence head reads, and whether it has a bias. It is there where its tensors are, or where a key says so, which
    Model Optimizer calls `use_confidence_head`."""
    tensors = [name for name in names if name.startswith(CONFIDENCE_PREFIX)]
    used: KeyReader = source("use_confidence_head")
    said: KeyReader = source("enable_confidence_head")
    there = used.flag("use_confidence_head", default=bool(tensors))
    reads_token = source("confidence_head_with_markov").flag("confidence_head_with_markov", default=True)
    if not said.flag("enable_confidence_head", default=there):
        return {"confidence": "none"}
    bias = f"{CONFIDENCE_PREFIX}proj.bias" in tensors if tensors else True
    return {"confidence": "hidden_and_token" if reads_token else "hidden", "confidence_bias": bias}


class Markov(nnx.Module):
    """See the module. `markov_w1` holds a row for each token of the target, `markov_w2` one for each that is drafted."""

    def __init__(self, config: MarkovConfig, sizes: Sizes):
        d, r = sizes.hidden, config.rank
        self.config, self.logit_scale = config, sizes.logit_scale
        self.markov_w1, self.markov_w2 = Linear(sizes.vocab, r), Linear(sizes.rows, r)
        self.gate_proj = Linear(r, d + r, bias=True) if config.form == "gated" else None
        self.joint_proj = Linear(3 * r, 2 * r + d, bias=True) if config.form == "rnn" else None
        width = {"none": 0, "hidden": d, "hidden_and_token": d + r}[config.confidence]
        self.confidence_proj = Linear(1, width, bias=config.confidence_bias) if width else None

    def propose(self, block: Block, pick: Pick) -> tuple[Int[Array, "B g"], Law]:
        """See `DraftHead`."""
        if 0 < self.config.top_k <= MOST_PAIRED and self.config.form != "rnn":
            unary, rows, tokens = block.best(self.config.top_k)
            return walk(self.pairs(block, unary, rows, tokens), tokens, pick)
        first = jnp.zeros((block.hidden.shape[0], self.config.rank), block.hidden.dtype)

        def bias(place: int, before: Array, rows: Array | None, state: Array) -> tuple[Array, Array]:
            latent, state = self.latent(before, block.hidden[:, place], state)
            return products_of(latent, self.markov_w2.weight[...], rows) * self.logit_scale, state

        return one_by_one(block, self.config.top_k, bias, first, pick)

    def pairs(
        self, block: Block, unary: Float[Array, "B g C"], rows: Int[Array, "B g C"], tokens: Int[Array, "B g C"]
    ) -> Float[Array, "B g C C"]:
        """float32 scores of each place's candidates, the last axis, after each candidate of the place before."""
        first = jnp.broadcast_to(block.anchor[:, None, None], tokens[:, :1].shape)
        before = jnp.concatenate([first, tokens[:, :-1]], axis=1)
        hidden = jnp.broadcast_to(block.hidden[:, :, None], (*before.shape, block.hidden.shape[-1]))
        latent, _ = self.latent(before, hidden, jnp.zeros((*before.shape, self.config.rank), hidden.dtype))
        wide = latent.astype(jnp.float32), self.markov_w2.weight[...][rows].astype(jnp.float32)
        bias = jnp.einsum("bgpr,bgcr->bgpc", *wide, precision=jax.lax.Precision.HIGHEST) * self.logit_scale
        return unary[:, :, None] + bias

    def latent(
        self, before: Int[Array, "*R"], hidden: Float[Array, "*R D"], state: Float[Array, "*R r"]
    ) -> tuple[Float[Array, "*R r"], Float[Array, "*R r"]]:
        """The operand of W2 after these tokens, and the recurrent state, which only the form "rnn" uses."""
        embedded = self.markov_w1.weight[...][before]
        if self.gate_proj is not None:
            gate = self.gate_proj(jnp.concatenate([hidden, embedded], axis=-1))
            return jax.nn.sigmoid(gate) * embedded, state
        if self.joint_proj is not None:
            joint = self.joint_proj(jnp.concatenate([state, embedded, hidden], axis=-1))
            gate, new, out = jnp.split(joint, 3, axis=-1)
            kept = jax.nn.sigmoid(gate)
            return jnp.tanh(out), kept * state + (1 - kept) * jnp.tanh(new)
        return embedded, state

    def log_odds(self, block: Block, before: Int[Array, "B g"]) -> Float[Array, "B g"]:
        """See `ConfidentHead`."""
        return self.confidence_logits(before, block.hidden)

    def confidence(self, before: Int[Array, "*R"], hidden: Float[Array, "*R D"]) -> Float[Array, "*R"]:
        """Estimates, in float32, of the chances that proposals stand which follow these tokens."""
        return jax.nn.sigmoid(self.confidence_logits(before, hidden))

    def confidence_logits(self, before: Int[Array, "*R"], hidden: Float[Array, "*R D"]) -> Float[Array, "*R"]:
        """float32 log-odds of the same chances."""
        if self.confidence_proj is None:
            raise ValueError("this drafter has no confidence head")
        both = (
            [hidden, self.markov_w1.weight[...][before]] if self.config.confidence == "hidden_and_token" else [hidden]
        )
        products = jnp.concatenate(both, axis=-1).astype(jnp.float32) * self.confidence_proj.weight[0].astype(
            jnp.float32
        )
        bias = 0.0 if self.confidence_proj.bias is None else self.confidence_proj.bias[0].astype(jnp.float32)
        return jnp.sum(products, axis=-1) + bias


def markov_parameters(config: MarkovConfig, sizes: Sizes) -> list[Parameter]:
    """Two tensors, those of a gate or of a recurrence, and those of a confidence head."""
    d, r = sizes.hidden, config.rank
    table = [
        single("markov_w1.weight", f"{PREFIX}markov_w1.weight", (sizes.vocab, r)),
        single("markov_w2.weight", f"{PREFIX}markov_w2.weight", (sizes.rows, r)),
    ]
    shapes = {"gated": ("gate_proj", (r, d + r)), "rnn": ("joint_proj", (3 * r, 2 * r + d))}
    if config.form in shapes:
        name, shape = shapes[config.form]
        table.append(single(f"{name}.weight", f"{PREFIX}{name}.weight", shape))
        table.append(single(f"{name}.bias", f"{PREFIX}{name}.bias", shape[:1]))
    if config.confidence != "none":
        width = d + (r if config.confidence == "hidden_and_token" else 0)
        table.append(single("confidence_proj.weight", f"{CONFIDENCE_PREFIX}proj.weight", (1, width)))
    if config.confidence_bias:
        table.append(single("confidence_proj.bias", f"{CONFIDENCE_PREFIX}proj.bias", (1,)))
    return table


def markov_tables(config: MarkovConfig) -> tuple[str, ...]:
    """Parameters of which a cycle reads a few rows alone."""
    return ("markov_w1.weight", "markov_w2.weight") if config.top_k else ("markov_w1.weight",)
