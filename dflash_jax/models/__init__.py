"""Model families: which configuration, parameters and module belong to a checkpoint. A new one is one file and one row here."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash_jax.config import DecoderConfig, Qwen3Config, architectures_of, shown
from dflash_jax.errors import UnsupportedModelError
from dflash_jax.models.deepseek import Deepseek, deepseek_canonical, deepseek_parameters, is_mtp_tensor
from dflash_jax.models.deepseek_config import ARCHITECTURES, MODEL_TYPES, DeepseekConfig
from dflash_jax.models.dflash import DFlash, dflash_canonical, dflash_parameters, fuse_context_projection
from dflash_jax.models.dflash_config import ARCHITECTURES as DRAFT_ARCHITECTURES
from dflash_jax.models.dflash_config import DFlashConfig, default_target_layer_ids
from dflash_jax.models.parameters import Parameter, Source, count, init_params, to_huggingface
from dflash_jax.models.qwen3 import Qwen3, qwen3_canonical, qwen3_parameters
from dflash_jax.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig, qwen3_moe_canonical, qwen3_moe_parameters
from dflash_jax.models.registry import bind, parameter_names

__all__ = [
    "DFlash", "DFlashConfig", "Deepseek", "DeepseekConfig", "Family", "Parameter", "Qwen3", "Qwen3Config", "Qwen3Moe",
    "Qwen3MoeConfig", "Source", "bind", "count", "default_target_layer_ids", "family_named", "family_of",
    "fuse_context_projection", "init_params", "parameter_names", "to_huggingface",
]  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Attributes:
      name: our name for it.
      role: whether it is decoded from or drafts.
      architectures: the names checkpoints of it carry in `architectures`.
      config_class: our configuration dataclass.
      parameters: the weights a configuration declares.
      canonical: a checkpoint's tensor name as declared, None for a tensor that is ignored on purpose.
      model_types: what `model_type` says where `architectures` is absent; None: the family's name.
      surplus: whether a canonical name belongs to a tensor that this configuration leaves out on purpose.
    """

    name: str
    role: Literal["target", "draft"]
    architectures: tuple[str, ...]
    config_class: type[Qwen3Config] | type[Qwen3MoeConfig] | type[DFlashConfig] | type[DeepseekConfig]
    parameters: Callable[[Any], tuple[Parameter, ...]]
    canonical: Callable[[str], str | None]
    model_types: tuple[str, ...] | None = None
    surplus: Callable[[Any, str], bool] | None = None

    def config(
        self,
        hf_config: Mapping[str, Any],
        tensor_names: Collection[str] = (),
        notices: list[str] | None = None,
    ) -> DecoderConfig:
        """Our configuration from a Hugging Face one and the names of the tensors beside it.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: see `from_hf` of the family's `config_class`.
        """
        if issubclass(self.config_class, DFlashConfig):
            names = [canonical for name in tensor_names if (canonical := self.canonical(name)) is not None]
            return self.config_class.from_hf(hf_config, names, notices)
        return self.config_class.from_hf(hf_config, notices)

    def canonical_for(self, config: DecoderConfig) -> Callable[[str], str | None]:
        """`canonical`, which for this configuration also ignores what its layers have no place for."""

        def canonical(name: str) -> str | None:
            known = self.canonical(name)
            return None if known is not None and self.surplus is not None and self.surplus(config, known) else known

        return canonical


FAMILIES = (
    Family("qwen3", "target", ("Qwen3ForCausalLM",), Qwen3Config, qwen3_parameters, qwen3_canonical),
    Family(
        "qwen3_moe", "target", ("Qwen3MoeForCausalLM",), Qwen3MoeConfig, qwen3_moe_parameters, qwen3_moe_canonical,
    ),
    Family(
        "deepseek", "target", ARCHITECTURES, DeepseekConfig, deepseek_parameters, deepseek_canonical, MODEL_TYPES,
        is_mtp_tensor,
    ),
    Family(
        "dflash", "draft", DRAFT_ARCHITECTURES, DFlashConfig, dflash_parameters, dflash_canonical,
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
        name = "dflash" if "dflash_config" in hf_config else hf_config.get("model_type")
        for family in FAMILIES:
            if name in (family.model_types or (family.name,)):
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
