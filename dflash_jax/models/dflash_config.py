"""Configuration of a DFlash drafter (arXiv 2602.06036), read from the `config.json` its checkpoints carry.

Which member of the family a checkpoint is, v1, DFlash 2 or DSpark, is told by its keys and by its tensors, and so is whether its
layers are Qwen3's, Gemma 4's or Laguna's. Names of architectures mean different things to different engines and are only held
against what is there.

Files are read in z-lab's layout. `models.draft_layouts` turns those of other libraries into it.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_jax.config import (
    FINAL_HIDDEN,
    HEAD_NORMS,
    MAX_BLOCK,
    MAX_LAYERS,
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    NO_EXPERTS,
    DecoderConfig,
    KeyReader,
    architectures_of,
    decoder_fields,
    shown,
    turns_pairs,
)
from dflash_jax.errors import ConfigError
from dflash_jax.models.draft_gemma import (
    NEUTRAL_BESIDE_GEMMA4,
    NEUTRAL_OF_GEMMA4,
    gemma4_draft_fields,
    gemma4_of,
    has_gemma4_layers,
)
from dflash_jax.models.draft_laguna import ARCHITECTURE as LAGUNA
from dflash_jax.models.draft_laguna import UNGATED, has_laguna_layers, laguna_draft_fields
from dflash_jax.models.draft_layouts import MUSE_ASSISTANT, in_zlab_layout
from dflash_jax.models.gemma4 import Gemma4Config
from dflash_jax.models.heads import HeadConfig, Sizes, Source, head_from_dict, read_head
from dflash_jax.models.heads.reading import missing
from dflash_jax.models.laguna import PER_ELEMENT, PER_HEAD
from dflash_jax.models.traits import Activation

# DeepSpec's names, the one of SpecForge and of its kin, and Liquid AI's: their trainers always draft from the anchor.
GEMMA4 = ("Gemma4DSparkModel",)
FROM_ANCHOR = ("Qwen3DSparkModel", "DSparkDraftModel", "Lfm2DSparkDraftModel", *GEMMA4)
LAYER_KINDS = ("qwen3", "gemma4", "laguna")
# Of the feed-forwards of Qwen3's layers: trainers copy their target's.
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Parts of a target's rotation that trainers copy and layers of Qwen3 do not read: how pictures turn, whose tokens are places to a
# drafter as others are, and how Mistral Small 4's queries grow.
_ROPE_NEUTRAL = ("llama_4_scaling_beta", "max_position_embeddings", "mrope_interleaved", "mrope_section")
# What names promise.
DFLASH2 = (
    "DFlash2DraftModel",
    "DFlash2BeamDraftModel",
    "DFlash2Speculator",
    "MiniMaxDFlash2DraftModel",
    "Qwen3DFlash2Model",
)
# Names of one layout: z-lab's, those of the speculators library, and NeMo Automodel's.
ARCHITECTURES = (
    "DFlashDraftModel", "DFlashForCausalLM", "DFlashSpeculator", "Qwen3DFlashDraftModel", LAGUNA, MUSE_ASSISTANT, *DFLASH2,
    "DSparkSpeculator", *FROM_ANCHOR, "DominoDraftModel", "LiLiCorrDraftModel", "Qwen3XPressModel", "XPressSpeculator",
)  # fmt: skip
# Keys of the published files that describe the target or the training run and change nothing here.
_NEUTRAL = NEUTRAL_KEYS | {
    "confidence_head_alpha", "has_embed_tokens", "has_lm_head", "has_own_lm_head", "loss_decay_gamma", "max_anchors",
    "num_anchors", "num_aux_layers", "num_target_layers", "pard_token", "speculators_version", "target_model_type",
    "target_text_model_type", "tie_word_embeddings", "train_embed_tokens",
}  # fmt: skip
# Parts of later members of the family, and of one trainer's options, with what says that a drafter has none.
_NEUTRAL_VALUES = {
    **NEUTRAL_VALUES, **NO_EXPERTS, **HEAD_NORMS,
    "attention_mode": (None, "gqa"), "confidence_head_with_markov": (None, False), "dspark_draft_topk": (None, 0),
    "dspark_fixup_head_type": (None, "markov"),
    "enable_confidence_head": (None, False), "markov_head_type": (None,), "pure_draft_prefix_len": (None, 0),
    "shift_label": (None, False), "use_confidence_head": (None, False),
}  # fmt: skip


def default_target_layer_ids(num_target_layers: int, features: int) -> tuple[int, ...]:
    """Tapped layers where a checkpoint names none: evenly spaced from 1 to N - 3 (arXiv 2602.06036, section 4.1)."""
    if features == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (features - 1)
    return tuple(round(1 + i * step) for i in range(features))


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DecoderConfig):
    """A DFlash drafter.

    Attributes:
      block_size: slots of one draft block, the anchor included (G).
      mask_token_id: id whose embedding fills the slots after the anchor.
      target_layer_ids: tapped target layers in feature order; -1 is the embedding output. `FINAL_HIDDEN` alone is what a drafter
        without a projection of features reads (`use_aux_hidden_state` false).
      num_target_layers: layers of the target it was trained for, or 0 where the file does not say.
      target_hidden_size: width of one tapped feature.
      causal: per layer, whether slots of a block see only earlier slots.
      embedding_scale: factor on embeddings of tokens; None where the file does not say, which `fitted` makes the target's.
      head_scale: factor on products with a head that it borrows, before `logit_scale`, which is also one on what a draft head adds;
        the target's, by `fitted`.
      sample_from_anchor: slot k predicts the token after its own position instead of the one at it.
      draft_vocab_size: rows of the drafter's own head where it is smaller than the vocabulary, otherwise 0.
      own_embedding, own_head, mask_embedding: which tensors the checkpoint brings itself.
      conv_taps, conv_group: slots that its layers' convolutions reach over, and channels that share weights of one's own; 0 for
        layers without.
      head: what makes proposals; None for v1, which takes each place's best token.
      layer_kind: whose layers it has, one of `LAYER_KINDS`.
      activation: of the feed-forwards of Qwen3's layers.
      keys_as_values: of Gemma 4's layers, whether they have no projection to values and take keys for them.
      gating: of Laguna's layers, whether gates are heads' or their entries', or there are none.
      joined_rows: of Laguna's layers, whether a checkpoint has queries, keys and values in one tensor.
    """

    block_size: int = 16
    mask_token_id: int = 0
    target_layer_ids: tuple[int, ...] = ()
    num_target_layers: int = 0
    target_hidden_size: int = 0
    causal: tuple[bool, ...] = ()
    sinks: bool = False
    value_scale: float = 1.0
    embedding_scale: float | None = None
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    head_scale: float = 1.0
    sample_from_anchor: bool = False
    draft_vocab_size: int = 0
    own_embedding: bool = False
    own_head: bool = False
    mask_embedding: bool = False
    conv_taps: int = 0
    conv_group: int = 0
    head: HeadConfig | None = None
    layer_kind: str = "qwen3"
    activation: str = "silu"
    keys_as_values: bool = False
    gating: str = UNGATED
    joined_rows: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_token_id < 0 or self.block_size < 1 or len(self.causal) not in (0, self.num_layers):
            raise ConfigError(
                f"{type(self).__name__}: mask_token_id={self.mask_token_id}, block_size={self.block_size} and "
                f"{len(self.causal)} flags of causality for {self.num_layers} layers cannot be"
            )
        group = self.conv_group
        if (self.conv_taps > 0) != (group > 0) or (group > 0 and self.hidden_size % group):
            raise ConfigError(
                f"{type(self).__name__}: conv_taps={self.conv_taps} and conv_group={group} must both be at least 1, or 0, and "
                f"hidden_size={self.hidden_size} a multiple of the latter"
            )
        if self.activation not in ACTIVATIONS.values():
            raise ConfigError(f"{type(self).__name__}: activation cannot be {shown(self.activation)}")
        if self.layer_kind not in LAYER_KINDS or (self.keys_as_values and not self.gemma4):
            raise ConfigError(
                f"{type(self).__name__}: layer_kind must be {', '.join(LAYER_KINDS)}, gemma4 where keys are taken for values, got "
                f"{shown(self.layer_kind)}"
            )
        if self.gating not in (UNGATED, PER_HEAD, PER_ELEMENT) or (self.gating != UNGATED and not self.laguna):
            raise ConfigError(
                f"{type(self).__name__}: gating cannot be {shown(self.gating)} of layers of {self.layer_kind}"
            )
        other = self.conv_taps or self.sinks or self.value_scale != 1.0
        if (self.gemma4 and (other or any(self.windows))) or (self.laguna and (other or not self.projects)):
            raise ConfigError(
                f"{type(self).__name__}: convolutions, attention sinks and a factor on values are not known of drafters with "
                f"layers of {self.layer_kind}, nor windows with Gemma 4's and no projection of features with Laguna's; expected "
                "none of them"
            )
        if self.gemma4:
            _ = self.gemma4_layers  # which checks that heads can be

    def fitted(self, target: DecoderConfig) -> "DFlashConfig":
        """The same with what its file leaves to the target: the factor on embeddings that it borrows, and the soft cap and factor
        on logits of a head that it borrows, as vLLM reads files that are silent about them (its pull request 41703, of Gemma 4), or
        on its products alone, as SGLang reads those for a target with a muP multiplier (its DSpark worker, of Inkling).
        """
        scale: float = getattr(target, "embedding_scale", 1.0)
        cap: float = getattr(target, "logit_softcap", 0.0)
        changes: dict[str, float] = {}
        if scale != 1.0 and self.embedding_scale is None and not self.own_embedding:
            changes["embedding_scale"] = scale
        if cap and not (self.logit_softcap or self.own_head or self.head):
            changes["logit_softcap"] = cap
            if self.logit_scale == 1.0:
                changes["logit_scale"] = getattr(target, "logit_scale", 1.0)
        if (factor := getattr(target, "head_scale", 1.0)) != 1.0 and not self.own_head:
            changes["head_scale"] = factor
        return replace(self, **changes) if changes else self

    @property
    def gemma4(self) -> bool:
        """Whether its layers are Gemma 4's."""
        return self.layer_kind == "gemma4"

    @property
    def laguna(self) -> bool:
        """Whether its layers are Laguna's."""
        return self.layer_kind == "laguna"

    @property
    def gemma4_layers(self) -> Gemma4Config:
        """A Gemma 4 decoder with its layers."""
        return gemma4_of(self, keys_as_values=self.keys_as_values)

    @property
    def input_scale(self) -> float:
        """Factor on embeddings, 1 where nobody says another."""
        return 1.0 if self.embedding_scale is None else self.embedding_scale

    @property
    def projects(self) -> bool:
        """Whether features go through a projection (`fc`), as all do but the target's hidden states after its final norm."""
        return self.target_layer_ids != (FINAL_HIDDEN,)

    @property
    def num_drafts(self) -> int:
        """Tokens one block proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def signs(self) -> int:
        """Log-odds that say how likely a proposal is to stand: those of its law, and those that a head gives which estimates it."""
        return 1 if self.head is None or not self.head.confident else 2

    @property
    def head_sizes(self) -> Sizes:
        """Sizes of its draft head."""
        rows = self.draft_vocab_size or self.vocab_size
        return Sizes(
            hidden=self.hidden_size, vocab=self.vocab_size, rows=rows, slots=self.block_size, logit_scale=self.logit_scale,
            norm_eps=self.norm_eps,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DFlashConfig":
        """See `DecoderConfig.from_dict`. Folders that were converted before there were convolutions and heads are v1's, and before
        there were other layers Qwen3's."""
        given = {
            "conv_taps": 0, "conv_group": 0, "head": None, "layer_kind": "qwen3", "keys_as_values": False, "activation": "silu",
            "gating": UNGATED, "joined_rows": False, "head_scale": 1.0,
            **values,
        }  # fmt: skip
        config = super().from_dict(given | {"head": head_from_dict(given["head"])})
        assert isinstance(config, cls)
        return config

    @classmethod
    def from_hf(
        cls, values: Mapping[str, Any], tensor_names: Collection[str] = (), notices: list[str] | None = None
    ) -> "DFlashConfig":
        """Reads a drafter's `config.json`.

        Args:
          values: the file, in z-lab's layout or in that of the speculators library. A field is looked up in `dflash_config`, in
            `eagle_config`, then at the top level.
          tensor_names: canonical names of the checkpoint's tensors; they decide what the drafter brings itself.
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, or a key is present that this package does not implement.
        """
        top, nested, source = _readers(values, notices)
        fields, causal = _layers(source, top, nested, tensor_names)
        hidden, gemma4 = fields["hidden_size"], fields.get("layer_kind") == "gemma4"
        fields |= _taps(source, nested, fields, tensor_names)
        projector = source("projector_type").get("projector_type", "linear")
        if projector not in ("linear", "dflash", "dspark", "domino"):
            raise ConfigError(
                f"{nested.subject}: projector_type must be linear, dspark or domino, got {shown(projector)}"
            )
        fields |= _vocabulary(source, top, fields, tensor_names)
        fields |= _head(source, top, fields, tensor_names)
        config = cls(
            **fields,
            mask_token_id=source("mask_token_id").integer("mask_token_id", minimum=0),
            causal=_causality(top, nested, causal),
            sinks=source("attention_sink_bias").flag(
                "attention_sink_bias", default=top.flag("add_swa_attention_sink_bias")
            ),
            value_scale=source("attention_value_scale").number("attention_value_scale", 1.0),
            embedding_scale=_embedding_scale(source, math.sqrt(hidden) if gemma4 else None),
            sample_from_anchor=_from_anchor(source, top, fields["head"], projector),
            mask_embedding="mask_embedding" in tensor_names,
        )
        _check_rank(source)
        _note_base(source, top, fields["rope"].theta)
        nested.refuse_rest(_NEUTRAL, _NEUTRAL_VALUES)
        values = {**_NEUTRAL_VALUES, "v_head_dim": (None, fields["head_dim"])}
        if gemma4:
            top.refuse_rest(_NEUTRAL.union(NEUTRAL_BESIDE_GEMMA4), {**values, **NEUTRAL_OF_GEMMA4})
        else:
            top.refuse_rest(_NEUTRAL, values)
        return config


def _readers(values: Mapping[str, Any], notices: list[str] | None) -> tuple[KeyReader, KeyReader, Source]:
    """The file in z-lab's layout, its `dflash_config` (beside which `eagle_config` counts where the former is silent), and which of
    both has a key."""
    top = KeyReader("config.json (DFlash)", values, notices)
    top = KeyReader(top.subject, in_zlab_layout(top.values, top.notices), top.notices)
    inner: dict[str, Any] = {}
    for key in ("eagle_config", "dflash_config"):  # the later one counts
        inner |= KeyReader(f"config.json (DFlash), {key}", top.get(key, {})).values
    nested = KeyReader("config.json (DFlash), dflash_config", inner, top.notices)

    def source(key: str) -> KeyReader:
        top.read.add(key)
        nested.read.add(key)
        return top if nested.values.get(key) is None else nested

    return top, nested, source


def _taps(source: Source, nested: KeyReader, layers: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The fields that say which layers of the target are tapped, and how wide a feature is.

    Args:
      layers: fields of the layers.

    Raises:
      ConfigError: ids are missing or cannot be, or keys say two things.
    """
    hidden = layers["hidden_size"]
    target_layers = source("num_target_layers").integer("num_target_layers", 0, minimum=0)
    ids = source("target_layer_ids").get("target_layer_ids", source("layer_ids").get("layer_ids"))
    tapped = source("use_aux_hidden_state").flag("use_aux_hidden_state", default=True)
    if not tapped:
        named = source("eagle_aux_hidden_state_layer_ids").get("eagle_aux_hidden_state_layer_ids")
        ids = _final_hidden(nested, ids or named, names)
    if ids is None and target_layers < 4:
        raise ConfigError(
            f"{nested.subject}: target_layer_ids is missing and num_target_layers does not give a default"
        )
    ids = default_target_layer_ids(target_layers, layers["num_layers"]) if ids is None else ids
    plain = isinstance(ids, list | tuple) and 0 < len(ids) <= MAX_LAYERS
    if tapped and (not plain or not all(type(i) is int and -1 <= i < MAX_LAYERS for i in ids)):
        raise ConfigError(
            f"{nested.subject}: target_layer_ids must be integers of at least -1 and below {MAX_LAYERS}, got {shown(ids)}"
        )
    ids = tuple(ids)
    if target_layers and max(ids) >= target_layers:
        raise ConfigError(
            f"{nested.subject}: target_layer_ids {shown(list(ids))} reach past num_target_layers={target_layers}"
        )
    if tapped:
        _check_taps(source, ids)
    width = source("target_hidden_size").integer("target_hidden_size", hidden)
    # A target with several residual streams hands over all of them; the file may name the width of one.
    streams = source("hc_mult").integer("hc_mult", 1)
    width *= 1 if width == streams * hidden else streams
    if not tapped and width != hidden:
        raise ConfigError(
            f"{nested.subject}: with use_aux_hidden_state=false target_hidden_size={width} must be hidden_size={hidden}: no "
            "projection comes between"
        )
    return {"target_layer_ids": ids, "num_target_layers": target_layers, "target_hidden_size": width}


def _vocabulary(source: Source, top: KeyReader, layers: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The fields that say which tables of tokens the checkpoint brings, and how many rows its own head has.

    Raises:
      ConfigError: it brings one of two that belong together, or the head that its rows are of is missing.
    """
    own_embedding, own_head = (f"{name}.weight" in names for name in ("embed_tokens", "lm_head"))
    if layers.get("layer_kind") == "gemma4" and own_embedding != own_head:
        raise ConfigError(
            f"{top.subject}: a drafter with layers of Gemma 4 must bring embed_tokens and lm_head, or neither, got one of them"
        )
    vocab = layers["vocab_size"]
    rows = source("draft_vocab_size").integer("draft_vocab_size", vocab)
    if rows > vocab or (rows < vocab and names and not own_head):
        raise ConfigError(
            f"{top.subject}: draft_vocab_size={rows} needs a head of its own and at most vocab_size={vocab}"
        )
    return {"own_embedding": own_embedding, "own_head": own_head, "draft_vocab_size": 0 if rows == vocab else rows}


def _head(source: Source, top: KeyReader, fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The fields of a block: its slots, the convolutions along it, factor and cap of logits, and the head that scores them.

    Args:
      fields: of the layers, and those of `_vocabulary`.

    Raises:
      ConfigError: parts of a head are missing, or logits are changed in a way that is not known beside it.
    """
    hidden, vocab, gemma4 = fields["hidden_size"], fields["vocab_size"], fields.get("layer_kind") == "gemma4"
    block = source("block_size").integer("block_size", 16, minimum=2)
    softcap = source("final_logit_softcapping").number("final_logit_softcapping", 0.0)
    scale = source("output_multiplier").number("output_multiplier", source("logit_scale").number("logit_scale", 1.0))
    sizes = Sizes(
        hidden=hidden, vocab=vocab, rows=fields["draft_vocab_size"] or vocab, slots=block, logit_scale=scale,
        norm_eps=fields["norm_eps"],
    )  # fmt: skip
    taps, group = _convolution(source, names, hidden)
    head = read_head(source, names, sizes)
    _check_names(architectures_of(top.values), head, top)
    # Of a selector it is known, and of a factor on a Markov head's bias. DeepSpec adds one to Gemma 4's capped logits.
    capped = softcap != 0 and not (gemma4 and head is not None and head.kind == "markov")
    if head is not None and head.kind != "selector" and (capped or (scale != 1.0 and head.kind != "markov")):
        raise ConfigError(
            f"{top.subject}: final_logit_softcapping={softcap} and a factor of {scale} on logits beside a draft head of kind "
            f"{head.kind} are not implemented: no published drafter says whether they hold for the head's scores as well"
        )
    return {
        "block_size": block, "conv_taps": taps, "conv_group": group, "logit_softcap": softcap, "logit_scale": scale, "head": head,
    }  # fmt: skip


def _layers(
    source: Source, top: KeyReader, nested: KeyReader, names: Collection[str]
) -> tuple[dict[str, Any], tuple[bool, ...]]:
    """The fields that describe layers, and whether each is causal where no key of its own says so."""
    if has_gemma4_layers(top, names):
        fields = gemma4_draft_fields(top)
        return fields, (False,) * fields["num_layers"]
    if set(architectures_of(top.values)) & set(GEMMA4):
        raise ConfigError(
            f"{top.subject} names {', '.join(GEMMA4)}, but neither its keys (global_head_dim) nor its tensors (layer_scalar) are "
            "of layers of Gemma 4; name DFlashDraftModel, or take them from the drafter's training run"
        )
    fields = decoder_fields(top, activations=tuple(ACTIVATIONS), rope_neutral=_ROPE_NEUTRAL)
    fields["activation"] = ACTIVATIONS[top.get("hidden_act", "silu")]
    if turns_pairs(top, nested):
        fields["rope"] = replace(fields["rope"], paired=True)
    windows, causal = _windows(source, fields["windows"], top)
    if has_laguna_layers(top, names):
        fields = laguna_draft_fields(top, fields, names)
    return fields | {"windows": windows}, causal


def _note_base(source: Source, top: KeyReader, theta: float) -> None:
    """A notice where a file names its target's rotation beside the drafter's own (XiaomiMiMo's first drafters)."""
    base = source("backbone_rotary_base").get("backbone_rotary_base")
    if base is not None and base != theta:
        top.notices.append(
            f"backbone_rotary_base={shown(base)} is left alone, as in vLLM: heads of the drafter turn by rope_theta={theta}; if "
            "hardly any draft is accepted, set rope_theta to it in config.json"
        )


def _embedding_scale(source: Source, absent: float | None) -> float | None:
    """Factor on embeddings; `absent`, None for the target's, where the file does not say."""
    keys = source("input_embedding_scale")
    return absent if keys.get("input_embedding_scale") is None else keys.number("input_embedding_scale")


def _final_hidden(keys: KeyReader, ids: Any, names: Collection[str]) -> tuple[int, ...]:
    """The one tap of a drafter that reads the target's last hidden states alone. Raises ConfigError where the file names others, or
    has the projection of several."""
    if ids:
        raise ConfigError(
            f"{keys.subject}: use_aux_hidden_state=false leaves no use for tapped layers, here {shown(ids)}"
        )
    if "fc.weight" in names:
        raise ConfigError(
            f"{keys.subject}: use_aux_hidden_state=false beside fc.weight, which projects tapped features: leave out one of them"
        )
    return (FINAL_HIDDEN,)


def _convolution(source: Source, names: Collection[str], hidden: int) -> tuple[int, int]:
    """Taps and channels of a group of the layers' convolutions; 0 where neither keys nor tensors speak of any."""
    keys = {key: source(key) for key in ("conv_kernel_size", "conv_group_size")}
    said = {key: reader.get(key) is not None for key, reader in keys.items()}
    if not any(said.values()) and not any(name.endswith("_conv.base_kernel") for name in names):
        return 0, 0
    missing(keys, said, "convolutions along the block")
    taps, group = (reader.integer(key) for key, reader in keys.items())
    if hidden % group or taps > MAX_BLOCK:
        raise ConfigError(
            f"{keys['conv_group_size'].subject}: conv_kernel_size={taps} must be at most {MAX_BLOCK} and conv_group_size={group} "
            f"divide hidden_size={hidden}"
        )
    return taps, group


def _check_names(architectures: Collection[str], head: HeadConfig | None, keys: KeyReader) -> None:
    """Raises ConfigError where the architecture's name promises a selector, and neither keys nor tensors are of one."""
    if set(architectures) & set(DFLASH2) and (head is None or head.kind != "selector"):
        raise ConfigError(
            f"{keys.subject} names {', '.join(architectures)}, but neither its keys (selector_rank, selector_top_k) nor its "
            "tensors (candidate_selector.*) are DFlash 2's; take them from the drafter's training run, or name DFlashDraftModel"
        )


def _check_taps(source: Source, ids: tuple[int, ...]) -> None:
    """Raises ConfigError where the taps as vLLM counts them, from 1 on, are not those of `target_layer_ids`."""
    keys = source("eagle_aux_hidden_state_layer_ids")
    theirs = keys.get("eagle_aux_hidden_state_layer_ids")
    if theirs is not None and theirs != [i + 1 for i in ids]:
        raise ConfigError(
            f"{keys.subject}: eagle_aux_hidden_state_layer_ids={shown(theirs)} are not target_layer_ids {shown(list(ids))} counted "
            "from 1; keep those that the drafter was trained with"
        )


def _check_rank(source: Source) -> None:
    """Raises ConfigError where NVIDIA's name for a Markov head's rank says another one."""
    ours, theirs = (source(key).get(key) for key in ("markov_rank", "dspark_markov_rank"))
    if theirs is not None and theirs != ours:
        raise ConfigError(
            f"{source('markov_rank').subject}: dspark_markov_rank={shown(theirs)} must be markov_rank={shown(ours)}"
        )


def _from_anchor(source: Source, keys: KeyReader, head: HeadConfig | None, projector: str) -> bool:
    """Whether slots predict the token after their own position.

    v1, DFlash 2, XPress and LiLiCorr fill in, Domino does unless `shift_label` is true. DSpark's files need not say what theirs do:
    `sample_from_anchor` counts, or `dspark_bonus_anchor`, which is its opposite, or Model Optimizer's `shift_label`. Without any,
    files of trainers that always draft from the anchor do so for every engine that reads them. What is left engines read in two
    ways.

    Raises:
      ConfigError: the file says two things, or engines differ in what it leaves out.
    """
    markov = head is not None and head.kind == "markov"
    anchor, bonus = (
        None if (reader := source(key)).get(key) is None else reader.flag(key)
        for key in ("sample_from_anchor", "dspark_bonus_anchor")
    )
    if anchor and bonus:
        raise ConfigError(
            f"{keys.subject}: sample_from_anchor=True and dspark_bonus_anchor=True cannot both be; keep the one that the drafter "
            "was trained with"
        )
    if head is not None and head.kind == "domino":
        return source("shift_label").flag("shift_label", default=bool(anchor))
    if head is not None and head.kind in ("xpress", "lilicorr") and anchor:
        raise ConfigError(f"{keys.subject}: sample_from_anchor must be false with a draft head of kind {head.kind}")
    if markov and (reader := source("shift_label")).get("shift_label") is not None:
        shifts = reader.flag("shift_label")
        if anchor is (not shifts) or bonus is shifts:
            raise ConfigError(
                f"{keys.subject}: shift_label={shifts} contradicts sample_from_anchor={anchor} or dspark_bonus_anchor={bonus}: "
                "keep the one that the drafter was trained with"
            )
        return shifts
    if anchor is not None:
        return anchor
    if bonus is not None and (bonus or markov):
        return not bonus
    anchored = bool(set(architectures_of(keys.values)) & set(FROM_ANCHOR)) or projector == "dspark"
    if not markov:
        return anchored and head is None
    if not anchored:
        raise ConfigError(
            f"{keys.subject}: sample_from_anchor is missing, and engines differ in what that means with a Markov head; set it to "
            "true for block_size drafts (DSpark's layout) or to false for one less (DFlash's), as the drafter was trained"
        )
    keys.notices.append(
        "sample_from_anchor is absent: the drafter is taken to predict from its anchor on, as engines take it; if hardly any draft "
        "is accepted, set it to false in config.json"
    )
    return True


def _windows(
    source: Source, layers: tuple[int | None, ...], top: KeyReader
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Per layer its window, and whether it is causal where no key of its own says so.

    `layers` are the windows of `layer_types`: sliding ones are causal, full ones are not. Where none slides, `use_swa` makes every
    layer slide without making it causal, as vLLM reads the files that have this key; `swa_window_size` counts before
    `sliding_window`.
    """
    use, size = source("use_swa").flag("use_swa"), source("swa_window_size")
    width = size.get("swa_window_size")
    width = None if width is None else size.integer("swa_window_size")
    if any(window is not None for window in layers):
        windows = tuple(None if window is None else width or window for window in layers)
        return windows, tuple(window is not None for window in windows)
    if not use:
        return layers, (False,) * len(layers)
    if width is None and top.get("sliding_window") is None:
        raise ConfigError(f"{size.subject}: use_swa needs swa_window_size or sliding_window")
    width = width or top.integer("sliding_window")
    if top.get("layer_types") is not None:
        top.notices.append(
            f"use_swa counts before layer_types: every layer of the drafter sees {width} keys and the whole block, as in vLLM"
        )
    return (width,) * len(layers), (False,) * len(layers)


def _causality(top: KeyReader, nested: KeyReader, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """`is_causal` at the top, then `causal` in dflash_config, then NVIDIA's `dflash_query_causal`, then what the layers' types
    say."""
    names = "is_causal", "causal", "dflash_query_causal"
    for keys in (top, nested):
        keys.read.update(names)  # where one decides, the others are still known keys
    for keys, key in ((top, names[0]), (nested, names[0]), (nested, names[1]), (top, names[1]), (top, names[2])):
        if keys.get(key) is not None:
            return (keys.flag(key),) * len(default)
    return default
