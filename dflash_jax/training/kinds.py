"""The kinds of drafter that training knows: v1, DFlash 2 and DSpark. What each adds to v1's configuration, file and first weights.

All kinds have the same backbone, block and taps, and draft one token fewer than a block has slots, so that what a comparison of
them shows is the convolutions and the heads.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from dflash_jax.errors import ParameterError
from dflash_jax.models import DFlashConfig, init_params
from dflash_jax.models.dflash import dflash_parameters
from dflash_jax.models.heads import MarkovConfig, SelectorConfig, head_tables
from dflash_jax.training.optimizer import Params, half

KINDS = ("v1", "dflash2", "dspark")
_TITLES = {"v1": "DFlash", "dflash2": "DFlash 2", "dspark": "DSpark"}


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Sizes of what later kinds add. Published drafters have 2, 16, 256 and 16.

    Attributes:
      conv_taps, conv_group: of DFlash 2's convolutions: slots that one reaches over, channels that share a weight.
      rank: width of a token's vector in a selector or in a Markov head.
      form: of a Markov head: "vanilla", "gated" or "rnn".
      top_k: a selector's candidates of each place.
    """

    conv_taps: int = 2
    conv_group: int = 16
    rank: int = 64
    form: str = "vanilla"
    top_k: int = 16


def with_kind(config: DFlashConfig, kind: str, sizes: HeadSizes) -> DFlashConfig:
    """v1's configuration as one of `kind`."""
    if kind == "dflash2":
        head = SelectorConfig(rank=sizes.rank, top_k=sizes.top_k)
        return replace(config, conv_taps=sizes.conv_taps, conv_group=sizes.conv_group, head=head)
    if kind == "dspark":
        return replace(
            config,
            head=MarkovConfig(rank=sizes.rank, form=sizes.form, confidence="hidden_and_token", confidence_bias=True),
        )
    return config


def kind_of(config: DFlashConfig) -> str:
    """Name in `KINDS` of a configuration made by `with_kind`."""
    return "v1" if config.head is None else {"selector": "dflash2", "markov": "dspark"}[config.head.kind]


def title(config: DFlashConfig) -> str:
    """Name of the kind in titles."""
    return _TITLES[kind_of(config)]


def kind_keys(config: DFlashConfig) -> dict[str, Any]:
    """Keys of the drafter's config.json beside the decoder's. DSpark's names are DeepSpec's, the others' are z-lab's."""
    block = {"block_size": config.block_size}
    shared = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    layers = {"num_target_layers": config.num_target_layers}
    head: Any = config.head
    if kind_of(config) == "dspark":
        names = {
            "markov_rank": head.rank, "markov_head_type": head.form, "enable_confidence_head": True,
            "confidence_head_with_markov": True, "sample_from_anchor": False,
        }  # fmt: skip
        return {"architectures": ["Qwen3DSparkModel"], **block, **shared, **names, **layers}
    if kind_of(config) == "dflash2":
        shared |= {"conv_kernel_size": config.conv_taps, "conv_group_size": config.conv_group}
        shared |= {"selector_rank": head.rank, "selector_top_k": head.top_k}
        return {"architectures": ["DFlash2DraftModel"], **block, "dflash_config": shared, **layers}
    return {"architectures": ["DFlashDraftModel"], **block, "dflash_config": shared, **layers}


def initial_weights(config: DFlashConfig, seed: int) -> Params:
    """Random float32 weights that draft as v1's of the same seed do: convolutions pass on what they get, heads add nothing yet."""
    table = dflash_parameters(config)
    plain = dflash_parameters(replace(config, conv_taps=0, conv_group=0, head=None))
    names = {parameter.name for parameter in plain}
    added = [parameter for parameter in table if parameter.name not in names]
    params = init_params(plain, jax.random.key(seed)) | init_params(added, jax.random.fold_in(jax.random.key(seed), 1))
    for name, value in params.items():
        if name.endswith("_conv.base_kernel"):
            params[name] = jnp.zeros_like(value).at[:, 0].set(1.0)
        elif name.endswith("_conv.kernel_projection.weight") or name in _SILENT:
            params[name] = jnp.zeros_like(value)
    return params


def carried(config: DFlashConfig, start: Params, seed: int) -> Params:
    """Weights of another drafter with those that it lacks, which draft as it did, as nearly as the form of a Markov head allows.

    Its head may be none, one as in `config`, or a vanilla one of a rank that is no higher. A gate begins at 1/2 everywhere, a
    recurrent head as the tanh of the token before, made small, with a state that nothing reads yet.

    Raises:
      ParameterError: its head is of a higher rank, or of another form that is not vanilla.
    """
    params, start = initial_weights(config, seed), dict(start)
    if config.head is not None and config.head.kind == "markov" and "head.markov_w2.weight" in start:
        head, rank = cast(MarkovConfig, config.head), start["head.markov_w1.weight"].shape[1]
        forms = {"head.gate_proj.weight": "gated", "head.joint_proj.weight": "rnn"}
        form = next((form for name, form in forms.items() if name in start), "vanilla")
        if rank > head.rank or form not in ("vanilla", head.form) or (form != "vanilla" and rank != head.rank):
            raise ParameterError(
                f"a head of form {head.form!r} and rank {head.rank} cannot begin as one of form {form!r} and rank {rank}: "
                f"set form to {form!r} and rank to {rank}, or take a vanilla head of no higher rank"
            )
        for name in ("head.markov_w1.weight", "head.markov_w2.weight", "head.confidence_proj.weight"):
            rest = params[name][:, start[name].shape[1] :]
            start[name] = jnp.concatenate([start[name], rest if name == "head.markov_w1.weight" else 0 * rest], axis=1)
        if head.form == "gated" and "head.gate_proj.weight" not in start:
            gate = ("head.gate_proj.weight", "head.gate_proj.bias")
            start |= {name: jnp.zeros_like(params[name]) for name in gate}
            start["head.markov_w2.weight"] = 2 * start["head.markov_w2.weight"]
        if head.form == "rnn" and "head.joint_proj.weight" not in start:
            joint, r = params["head.joint_proj.weight"], head.rank
            joint = joint.at[2 * r :].set(0).at[2 * r :, r : 2 * r].set(_SMALL * jnp.eye(r))
            start |= {"head.joint_proj.weight": joint, "head.joint_proj.bias": jnp.zeros(3 * r)}
            start["head.markov_w2.weight"] = start["head.markov_w2.weight"] / _SMALL
    return params | start


_SMALL = 0.25  # of a token's vector, so that its tanh is nearly itself: the shipped head's entries are 0.4 on average, 2.5 at most
# Of each head, the matrix whose zeros make its scores those of the base logits.
_SILENT = ("head.successor_codebook", "head.markov_w2.weight", "head.confidence_proj.weight")


def working(config: DFlashConfig, params: Params) -> Params:
    """The bfloat16 copy that computes, but for tables that tokens are looked up in.

    The gradient of a frequent token's row is a sum over thousands of places; taken in bfloat16 it would stop growing.
    """
    tables = () if config.head is None else head_tables(config.head)
    return half(params) | {name: params[name] for name in tables}
