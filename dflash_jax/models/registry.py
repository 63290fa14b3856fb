"""The table of model families: configuration, parameters, layer traits and module of each kind of checkpoint.

A new family is one file in this folder and one row of `FAMILIES`; nothing else asks which family a configuration is of. `bind`
makes a module of flat parameters: compiled programs take a flat dict of arrays, modules exist only while tracing. Walking an nnx
graph costs milliseconds of Python for each call, so the module is split once and merged inside the trace.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flax import nnx

from dflash_jax.config import DecoderConfig, Qwen3Config, architectures_of, shown
from dflash_jax.errors import UnsupportedModelError
from dflash_jax.models.deepseek import (
    ARCHITECTURES,
    MODEL_TYPES,
    Deepseek,
    DeepseekConfig,
    deepseek_canonical,
    deepseek_parameters,
    deepseek_traits,
    is_mtp_tensor,
)
from dflash_jax.models.deepseek_sparse import (
    SPARSE_ARCHITECTURES,
    SPARSE_TYPES,
    SparseDeepseek,
    SparseDeepseekConfig,
    sparse_parameters,
)
from dflash_jax.models.deepseek_v4 import ARCHITECTURES as DEEPSEEK_V4_ARCHITECTURES
from dflash_jax.models.deepseek_v4 import (
    DeepseekV4,
    DeepseekV4Config,
    deepseek_v4_canonical,
    deepseek_v4_parameters,
    deepseek_v4_traits,
)
from dflash_jax.models.dflash import DFlash, dflash_canonical, dflash_parameters, dflash_traits, fuse_context_projection
from dflash_jax.models.dflash_config import ARCHITECTURES as DRAFT_ARCHITECTURES
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.gemma3 import ARCHITECTURES as GEMMA3_ARCHITECTURES
from dflash_jax.models.gemma3 import MODEL_TYPES as GEMMA3_TYPES
from dflash_jax.models.gemma3 import Gemma3, Gemma3Config, gemma3_canonical, gemma3_parameters, gemma3_traits
from dflash_jax.models.gemma4 import ARCHITECTURES as GEMMA4_ARCHITECTURES
from dflash_jax.models.gemma4 import MODEL_TYPES as GEMMA4_TYPES
from dflash_jax.models.gemma4 import (
    Gemma4,
    Gemma4Config,
    gemma4_canonical,
    gemma4_is_shared,
    gemma4_parameters,
    gemma4_traits,
)
from dflash_jax.models.glm5_next import ARCHITECTURES as GLM5_NEXT_ARCHITECTURES
from dflash_jax.models.glm5_next import MODEL_TYPES as GLM5_NEXT_TYPES
from dflash_jax.models.glm5_next import (
    Glm5Next,
    Glm5NextConfig,
    glm5_next_canonical,
    glm5_next_parameters,
    glm5_next_traits,
)
from dflash_jax.models.gpt_oss import (
    GptOss,
    GptOssConfig,
    gpt_oss_canonical,
    gpt_oss_derived,
    gpt_oss_parameters,
    gpt_oss_traits,
)
from dflash_jax.models.inkling import ARCHITECTURES as INKLING_ARCHITECTURES
from dflash_jax.models.inkling import MODEL_TYPES as INKLING_TYPES
from dflash_jax.models.inkling import (
    Inkling,
    InklingConfig,
    inkling_canonical,
    inkling_derived,
    inkling_parameters,
    inkling_traits,
)
from dflash_jax.models.kimi_linear import (
    KimiLinear,
    KimiLinearConfig,
    kimi_linear_canonical,
    kimi_linear_parameters,
    kimi_linear_traits,
)
from dflash_jax.models.laguna import Laguna, LagunaConfig, laguna_canonical, laguna_parameters, laguna_traits
from dflash_jax.models.lfm2 import ARCHITECTURES as LFM2_ARCHITECTURES
from dflash_jax.models.lfm2 import MODEL_TYPES as LFM2_TYPES
from dflash_jax.models.lfm2 import Lfm2, Lfm2Config, lfm2_canonical, lfm2_parameters, lfm2_traits
from dflash_jax.models.llama import Llama, LlamaConfig, llama_canonical, llama_parameters, llama_traits
from dflash_jax.models.mellum import Mellum, MellumConfig, mellum_canonical, mellum_parameters, mellum_traits
from dflash_jax.models.mimo_v2 import ARCHITECTURES as MIMO_V2_ARCHITECTURES
from dflash_jax.models.mimo_v2 import MODEL_TYPES as MIMO_V2_TYPES
from dflash_jax.models.mimo_v2 import MimoV2, MimoV2Config, mimo_v2_canonical, mimo_v2_parameters, mimo_v2_traits
from dflash_jax.models.minimax_m2 import (
    MiniMaxM2,
    MiniMaxM2Config,
    minimax_m2_canonical,
    minimax_m2_parameters,
    minimax_m2_traits,
)
from dflash_jax.models.minimax_m3 import ARCHITECTURES as MINIMAX_M3_ARCHITECTURES
from dflash_jax.models.minimax_m3 import MODEL_TYPES as MINIMAX_M3_TYPES
from dflash_jax.models.minimax_m3 import (
    MiniMaxM3,
    MiniMaxM3Config,
    minimax_m3_canonical,
    minimax_m3_parameters,
    minimax_m3_traits,
)
from dflash_jax.models.mistral import Mistral, MistralConfig, mistral_canonical, mistral_parameters, mistral_traits
from dflash_jax.models.mistral4 import ARCHITECTURES as MISTRAL4_ARCHITECTURES
from dflash_jax.models.mistral4 import (
    Mistral4,
    Mistral4Config,
    mistral4_canonical,
    mistral4_parameters,
    mistral4_traits,
)
from dflash_jax.models.muse_glimmer import ARCHITECTURES as MUSE_ARCHITECTURES
from dflash_jax.models.muse_glimmer import MODEL_TYPES as MUSE_TYPES
from dflash_jax.models.muse_glimmer import (
    MuseGlimmer,
    MuseGlimmerConfig,
    muse_glimmer_canonical,
    muse_glimmer_parameters,
    muse_glimmer_traits,
)
from dflash_jax.models.nemotron_h import ARCHITECTURES as NEMOTRON_ARCHITECTURES
from dflash_jax.models.nemotron_h import (
    NemotronH,
    NemotronHConfig,
    nemotron_h_canonical,
    nemotron_h_parameters,
    nemotron_h_traits,
)
from dflash_jax.models.parameters import Parameter
from dflash_jax.models.qwen2 import Qwen2, Qwen2Config, qwen2_canonical, qwen2_parameters, qwen2_traits
from dflash_jax.models.qwen3 import Qwen3, qwen3_canonical, qwen3_parameters
from dflash_jax.models.qwen3_5 import ARCHITECTURES as HYBRID_ARCHITECTURES
from dflash_jax.models.qwen3_5 import MODEL_TYPES as HYBRID_TYPES
from dflash_jax.models.qwen3_5 import Qwen35, Qwen35Config, qwen35_canonical, qwen35_parameters, qwen35_traits
from dflash_jax.models.qwen3_5_vision import (
    VisionConfig,
    VisionTower,
    vision_canonical,
    vision_parameters,
)
from dflash_jax.models.qwen3_moe import (
    Qwen3Moe,
    Qwen3MoeConfig,
    qwen3_moe_canonical,
    qwen3_moe_parameters,
    qwen3_moe_traits,
)
from dflash_jax.models.qwen4_exp import ARCHITECTURES as QWEN4_EXP_ARCHITECTURES
from dflash_jax.models.qwen4_exp import MODEL_TYPES as QWEN4_EXP_TYPES
from dflash_jax.models.qwen4_exp import (
    Qwen4Exp,
    Qwen4ExpConfig,
    qwen4_exp_canonical,
    qwen4_exp_computed,
    qwen4_exp_parameters,
    qwen4_exp_traits,
)
from dflash_jax.models.traits import LayerTraits, decoder_traits
from dflash_jax.quantization.cache_scheme import take_cache_scheme
from dflash_jax.quantization.weights import Weight


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Attributes:
      name: our name for it.
      role: whether it is decoded from, drafts, or makes rows of pictures.
      architectures: the names checkpoints of it carry in `architectures`.
      config_class: our configuration dataclass.
      module: the Flax module of a configuration.
      parameters: the weights a configuration declares.
      canonical: a checkpoint's tensor name as declared, None for a tensor that is ignored on purpose.
      traits: of a configuration's layers.
      model_types: what `model_type` says where `architectures` is absent; None: the family's name.
      surplus: whether a canonical name belongs to a tensor that this configuration leaves out on purpose.
      derive: flat parameters with the arrays that the module has beside declared ones, or in place of some, which it takes out of
        the dict it is given.
      reads_names: whether `config_class.from_hf` also takes the names of a checkpoint's tensors.
      facts: what `dflash-jax info` tells of a configuration beside its sizes.
      computed: whole numbers that follow from a configuration and that checkpoints may repeat, by how their tensors' names end.
      vision: the family of the tower that checkpoints may have beside the text model, by our name; None where none is known.
    """

    name: str
    role: Literal["target", "draft", "vision"]
    architectures: tuple[str, ...]
    config_class: type[Any]
    module: Callable[[Any], nnx.Module]
    parameters: Callable[[Any], tuple[Parameter, ...]]
    canonical: Callable[[str], str | None]
    traits: Callable[[Any], LayerTraits] = decoder_traits
    model_types: tuple[str, ...] | None = None
    surplus: Callable[[Any, str], bool] | None = None
    derive: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None
    reads_names: bool = False
    facts: Callable[[Any], dict[str, Any]] = lambda config: {}
    computed: Callable[[Any], dict[str, tuple[int, ...]]] | None = None
    vision: str | None = None

    def config(
        self,
        hf_config: Mapping[str, Any],
        tensor_names: Collection[str] = (),
        notices: list[str] | None = None,
    ) -> Any:
        """Our configuration from a Hugging Face one and the names of the tensors beside it. What that says of keys and values in
        float8 alone is no part of it; see `quantization.cache_scheme`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: see `from_hf` of the family's `config_class`.
        """
        hf_config, _ = take_cache_scheme(hf_config)
        if not self.reads_names:
            return self.config_class.from_hf(hf_config, notices)
        names = [canonical for name in tensor_names if (canonical := self.canonical(name)) is not None]
        return self.config_class.from_hf(hf_config, names, notices)

    def canonical_for(self, config: DecoderConfig) -> Callable[[str], str | None]:
        """`canonical`, which for this configuration also ignores what its layers have no place for."""

        def canonical(name: str) -> str | None:
            known = self.canonical(name)
            return None if known is not None and self.surplus is not None and self.surplus(config, known) else known

        return canonical

    def derived(self, config: Any, params: dict[str, Any]) -> dict[str, Any]:
        """`params`, which may be tracers, with the arrays that are made from them; see `derive`."""
        return params if self.derive is None else self.derive(config, params)


def _experts(config: Any) -> dict[str, Any]:
    return {"experts": config.num_experts, "experts_per_token": config.experts_per_token}


def _latent(config: DeepseekConfig) -> dict[str, Any]:
    return {"latent_width": config.latent_width} | _experts(config)


def _indexed(config: SparseDeepseekConfig) -> dict[str, Any]:
    index = {
        "index_width": config.index_head_dim,
        "index_layers": sum(config.indexers),
        "index_topk": config.index_topk,
    }
    return _latent(config) | index


def _compressed(config: DeepseekV4Config) -> dict[str, Any]:
    sizes = {"compressed_layers": len(config.compressed_layers), "compressed_topk": config.index_topk}
    return {"streams": config.streams} | sizes | _experts(config)


def _pooled(config: Glm5NextConfig) -> dict[str, Any]:
    index = {
        "index_width": config.index_row_width,
        "index_layers": config.cached_layers,
        "index_topk": config.index_topk,
    }
    return {"full_attention_layers": config.cached_layers, "streams": config.streams} | _latent(config) | index


def _latent_hybrid(config: KimiLinearConfig) -> dict[str, Any]:
    return {"full_attention_layers": config.cached_layers} | _latent(config)


def _hybrid(config: Qwen35Config) -> dict[str, Any]:
    return {"full_attention_layers": config.cached_layers} | (_experts(config) if config.num_experts else {})


def _hybrid_streams(config: Qwen4ExpConfig) -> dict[str, Any]:
    index = {
        "index_width": config.index_head_dim,
        "index_layers": config.cached_layers,
        "index_topk": config.index_topk,
    }
    return _hybrid(config) | {"streams": config.streams, "ngram_layers": len(config.ngram_layers)} | index


def _convolutional(config: Lfm2Config) -> dict[str, Any]:
    return {"full_attention_layers": config.cached_layers} | (_experts(config) if config.num_experts else {})


def _sublayers(config: NemotronHConfig) -> dict[str, Any]:
    kinds = {"full_attention_layers": config.cached_layers, "mamba2_layers": config.state_layers}
    return kinds | (_experts(config) if config.num_experts else {})


def _two_shapes(config: Gemma4Config) -> dict[str, Any]:
    full = {"full_attention_kv_heads": config.full_kv_heads, "full_attention_head_dim": config.full_head_dim}
    return full | (_experts(config) if config.num_experts else {})


def _own_heads(config: LagunaConfig) -> dict[str, Any]:
    return {"layer_heads": list(config.layer_heads)} | _experts(config)


def _blocks(config: MiniMaxM3Config) -> dict[str, Any]:
    sizes = {
        "index_block": config.index_block,
        "index_blocks": config.index_blocks,
        "index_layers": sum(config.indexers),
    }
    return sizes | _experts(config)


def _local_heads(config: InklingConfig) -> dict[str, Any]:
    full = sum(window is None for window in config.windows)
    return {"full_attention_layers": full, "window_kv_heads": config.local_kv_heads} | _experts(config)


def _own_values(config: MimoV2Config) -> dict[str, Any]:
    full = {"full_attention_kv_heads": config.full_kv_heads, "full_attention_head_dim": config.head_dim}
    return full | {"value_dim": config.value_dim} | _experts(config)


def _block(config: DFlashConfig) -> dict[str, Any]:
    head = "v1" if config.head is None else config.head.kind
    taps = list(config.target_layer_ids) if config.projects else "none, the final norm's output"
    facts = {"block_size": config.block_size, "tapped_layers": taps, "draft_head": head}
    return facts | ({} if config.layer_kind == "qwen3" else {"layers_of": config.layer_kind})


FAMILIES = (
    Family("qwen3", "target", ("Qwen3ForCausalLM",), Qwen3Config, Qwen3, qwen3_parameters, qwen3_canonical),
    Family(
        "qwen3_moe", "target", ("Qwen3MoeForCausalLM",), Qwen3MoeConfig, Qwen3Moe, qwen3_moe_parameters, qwen3_moe_canonical,
        traits=qwen3_moe_traits, facts=_experts,
    ),
    Family(
        "llama", "target", ("LlamaForCausalLM",), LlamaConfig, Llama, llama_parameters, llama_canonical, traits=llama_traits,
    ),
    Family(
        "qwen2", "target", ("Qwen2ForCausalLM",), Qwen2Config, Qwen2, qwen2_parameters, qwen2_canonical, traits=qwen2_traits,
    ),
    Family(
        "mistral", "target", ("MistralForCausalLM",), MistralConfig, Mistral, mistral_parameters, mistral_canonical,
        traits=mistral_traits,
    ),
    Family(
        "gpt_oss", "target", ("GptOssForCausalLM",), GptOssConfig, GptOss, gpt_oss_parameters, gpt_oss_canonical,
        traits=gpt_oss_traits, derive=gpt_oss_derived, reads_names=True, facts=_experts,
    ),
    Family(
        "gemma3", "target", GEMMA3_ARCHITECTURES, Gemma3Config, Gemma3, gemma3_parameters, gemma3_canonical,
        traits=gemma3_traits, model_types=GEMMA3_TYPES,
    ),
    Family(
        "gemma4", "target", GEMMA4_ARCHITECTURES, Gemma4Config, Gemma4, gemma4_parameters, gemma4_canonical,
        traits=gemma4_traits, model_types=GEMMA4_TYPES, surplus=gemma4_is_shared, facts=_two_shapes,
    ),
    Family(
        "deepseek", "target", ARCHITECTURES, DeepseekConfig, Deepseek, deepseek_parameters, deepseek_canonical,
        traits=deepseek_traits, model_types=MODEL_TYPES, surplus=is_mtp_tensor, facts=_latent,
    ),
    Family(
        "deepseek_sparse", "target", SPARSE_ARCHITECTURES, SparseDeepseekConfig, SparseDeepseek, sparse_parameters,
        deepseek_canonical, traits=deepseek_traits, model_types=SPARSE_TYPES, surplus=is_mtp_tensor, facts=_indexed,
    ),
    Family(
        "deepseek_v4", "target", DEEPSEEK_V4_ARCHITECTURES, DeepseekV4Config, DeepseekV4, deepseek_v4_parameters,
        deepseek_v4_canonical, traits=deepseek_v4_traits, facts=_compressed,
    ),
    Family(
        "glm5_next", "target", GLM5_NEXT_ARCHITECTURES, Glm5NextConfig, Glm5Next, glm5_next_parameters, glm5_next_canonical,
        traits=glm5_next_traits, model_types=GLM5_NEXT_TYPES, surplus=is_mtp_tensor, facts=_pooled,
    ),
    Family(
        "inkling", "target", INKLING_ARCHITECTURES, InklingConfig, Inkling, inkling_parameters, inkling_canonical,
        traits=inkling_traits, model_types=INKLING_TYPES, derive=inkling_derived, reads_names=True, facts=_local_heads,
    ),
    Family(
        "kimi_linear", "target", ("KimiLinearForCausalLM",), KimiLinearConfig, KimiLinear, kimi_linear_parameters,
        kimi_linear_canonical, traits=kimi_linear_traits, facts=_latent_hybrid,
    ),
    Family(
        "qwen3_5", "target", HYBRID_ARCHITECTURES, Qwen35Config, Qwen35, qwen35_parameters, qwen35_canonical,
        traits=qwen35_traits, model_types=HYBRID_TYPES, reads_names=True, facts=_hybrid, vision="qwen3_5_vision",
    ),
    Family(
        "qwen4_exp", "target", QWEN4_EXP_ARCHITECTURES, Qwen4ExpConfig, Qwen4Exp, qwen4_exp_parameters, qwen4_exp_canonical,
        traits=qwen4_exp_traits, model_types=QWEN4_EXP_TYPES, reads_names=True, facts=_hybrid_streams,
        computed=qwen4_exp_computed,
    ),
    Family(
        "lfm2", "target", LFM2_ARCHITECTURES, Lfm2Config, Lfm2, lfm2_parameters, lfm2_canonical, traits=lfm2_traits,
        model_types=LFM2_TYPES, facts=_convolutional,
    ),
    Family(
        "nemotron_h", "target", NEMOTRON_ARCHITECTURES, NemotronHConfig, NemotronH, nemotron_h_parameters, nemotron_h_canonical,
        traits=nemotron_h_traits, facts=_sublayers,
    ),
    Family(
        "muse_glimmer", "target", MUSE_ARCHITECTURES, MuseGlimmerConfig, MuseGlimmer, muse_glimmer_parameters,
        muse_glimmer_canonical, traits=muse_glimmer_traits, model_types=MUSE_TYPES,
    ),
    Family(
        "mellum", "target", ("MellumForCausalLM",), MellumConfig, Mellum, mellum_parameters, mellum_canonical,
        traits=mellum_traits, facts=_experts,
    ),
    Family(
        "minimax_m2", "target", ("MiniMaxM2ForCausalLM",), MiniMaxM2Config, MiniMaxM2, minimax_m2_parameters,
        minimax_m2_canonical, traits=minimax_m2_traits, facts=_experts,
    ),
    Family(
        "minimax_m3", "target", MINIMAX_M3_ARCHITECTURES, MiniMaxM3Config, MiniMaxM3, minimax_m3_parameters, minimax_m3_canonical,
        traits=minimax_m3_traits, model_types=MINIMAX_M3_TYPES, facts=_blocks,
    ),
    Family(
        "mistral4", "target", MISTRAL4_ARCHITECTURES, Mistral4Config, Mistral4, mistral4_parameters, mistral4_canonical,
        traits=mistral4_traits, reads_names=True, facts=_latent,
    ),
    Family(
        "laguna", "target", ("LagunaForCausalLM",), LagunaConfig, Laguna, laguna_parameters, laguna_canonical,
        traits=laguna_traits, facts=_own_heads,
    ),
    Family(
        "mimo_v2", "target", MIMO_V2_ARCHITECTURES, MimoV2Config, MimoV2, mimo_v2_parameters, mimo_v2_canonical,
        traits=mimo_v2_traits, model_types=MIMO_V2_TYPES, reads_names=True, facts=_own_values,
    ),
    Family(
        "dflash", "draft", DRAFT_ARCHITECTURES, DFlashConfig, DFlash, dflash_parameters, dflash_canonical,
        traits=dflash_traits, derive=fuse_context_projection, reads_names=True, facts=_block,
    ),
    Family(
        "qwen3_5_vision", "vision", (), VisionConfig, VisionTower, vision_parameters, vision_canonical, model_types=(),
    ),
)  # fmt: skip


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`: by `architectures`, otherwise by `dflash_config` or `model_type`.

    Raises:
      ConfigError: `architectures` is no list of names.
      UnsupportedModelError: no family answers; the message names the known ones.
    """
    architectures = architectures_of(hf_config)
    for family in FAMILIES:
        if set(architectures) & set(family.architectures):
            return family
    if not architectures:
        drafts = "dflash_config" in hf_config or "speculators_model_type" in hf_config
        name = "dflash" if drafts else hf_config.get("model_type")
        for family in FAMILIES:
            if name in ((family.name,) if family.model_types is None else family.model_types):
                return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise UnsupportedModelError(
        f"config.json names architectures={shown(list(architectures))}, "
        f"model_type={shown(hf_config.get('model_type'))}; known architectures: "
        f"{known}; give a checkpoint of one of these"
    )


def family_named(name: str) -> Family:
    """The family with our name for it.

    Raises:
      UnsupportedModelError: the name is unknown.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise UnsupportedModelError(
        f"no model family is called {name!r}; known: {', '.join(family.name for family in FAMILIES)}"
    )


def family_for(config: Any) -> Family:
    """The family whose configuration this is.

    Raises:
      UnsupportedModelError: no row has its class.
    """
    for family in FAMILIES:
        if type(config) is family.config_class:
            return family
    raise UnsupportedModelError(
        f"{type(config).__name__} is no model family's configuration; known: "
        f"{', '.join(family.config_class.__name__ for family in FAMILIES)}"
    )


def layer_traits(config: DecoderConfig) -> LayerTraits:
    """Traits of a configuration's layers."""
    return family_for(config).traits(config)


@functools.lru_cache(maxsize=64)
def _skeleton(config: Any) -> tuple[nnx.GraphDef, dict[tuple, str]]:
    """The module graph of a config without arrays, and the dotted parameter name of every path in it."""
    abstract = nnx.eval_shape(functools.partial(family_for(config).module, config))
    graph, state = nnx.split(abstract)
    return graph, {path: ".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}


def bind(config: Any, params: Mapping[str, Weight]) -> Any:
    """A module of `config`'s family holding `params`, one array for each declared parameter name.

    Cheap inside `jax.jit`: it only places tracers. Derived arrays are made here when `params` lacks them, so that gradients reach
    the parameters they are made from; decoding passes parameters that hold them already.

    Raises:
      KeyError: a parameter is missing (checkpoints are checked before they get here).
    """
    graph, names = _skeleton(config)
    if not params.keys() >= set(names.values()):
        params = family_for(config).derived(config, dict(params))
    state = nnx.from_flat_state([(path, nnx.Param(params[name])) for path, name in names.items()])
    return nnx.merge(graph, state)


def parameter_names(config: Any) -> frozenset[str]:
    """Names of the module graph's arrays; equal to the declared parameters' names."""
    return frozenset(_skeleton(config)[1].values())
