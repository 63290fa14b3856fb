"""Configuration of a DFlash drafter (arXiv 2602.06036), read from the `config.json` its checkpoints carry."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_jax.config import NEUTRAL_KEYS, DecoderConfig, KeyReader, decoder_fields
from dflash_jax.errors import ConfigError
from dflash_jax.models.speculators_config import NESTED, from_speculators

# Keys of the published files that describe the target or the training run and change nothing here.
_NEUTRAL = NEUTRAL_KEYS | {
    "tie_word_embeddings", "num_target_layers", "loss_decay_gamma", "num_anchors", "speculators_version", "markov_rank"
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
      target_layer_ids: tapped target layers in feature order; -1 is the embedding output.
      num_target_layers: layers of the target it was trained for, or 0 where the file does not say.
      target_hidden_size: width of one tapped feature.
      causal: per layer, whether slots of a block see only earlier slots.
      sample_from_anchor: slot k predicts the token after its own position instead of the one at it.
      draft_vocab_size: rows of the drafter's own head where it is smaller than the vocabulary, otherwise 0.
      own_embedding, own_head, mask_embedding: which tensors the checkpoint brings itself.
    """

    block_size: int = 16
    mask_token_id: int = 0
    target_layer_ids: tuple[int, ...] = ()
    num_target_layers: int = 0
    target_hidden_size: int = 0
    causal: tuple[bool, ...] = ()
    sinks: bool = False
    value_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    sample_from_anchor: bool = False
    draft_vocab_size: int = 0
    own_embedding: bool = False
    own_head: bool = False
    mask_embedding: bool = False

    @property
    def num_drafts(self) -> int:
        """Tokens one block proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], tensor_names: Collection[str] = ()) -> "DFlashConfig":
        """Reads a drafter's `config.json`.

        Args:
          values: the file, in z-lab's layout or in that of the speculators library. A field is looked up in `dflash_config`, in
            `eagle_config`, then at the top level.
          tensor_names: canonical names of the checkpoint's tensors; they decide what the drafter brings itself.

        Raises:
          ConfigError: a needed key is missing or malformed, or a key is present that this package does not implement.
        """
        top = KeyReader("config.json (DFlash)", values)
        if NESTED in top.values:
            top = KeyReader(top.subject, from_speculators(top.values))
        if not top.flag("is_neox_style", default=True):
            raise ConfigError(
                f"{top.subject}: is_neox_style must be true; rotary pairs next to each other are not read"
            )
        inner: dict[str, Any] = {}
        for key in ("eagle_config", "dflash_config"):  # the later one counts
            inner |= KeyReader(f"config.json (DFlash), {key}", top.get(key, {})).values
        nested = KeyReader("config.json (DFlash), dflash_config", inner)

        def source(key: str) -> KeyReader:
            top.read.add(key)
            nested.read.add(key)
            return top if nested.values.get(key) is None else nested

        fields: dict[str, Any] = decoder_fields(top)
        layers, hidden = fields["num_layers"], fields["hidden_size"]
        windows = _windows(source, fields["windows"], declared=top.get("layer_types") is not None)
        target_layers = source("num_target_layers").integer("num_target_layers", 0, minimum=0)
        ids = source("target_layer_ids").get("target_layer_ids", source("layer_ids").get("layer_ids"))
        if ids is None and target_layers < 4:
            raise ConfigError(
                f"{nested.subject}: target_layer_ids is missing and num_target_layers does not give a default"
            )
        ids = default_target_layer_ids(target_layers, layers) if ids is None else ids
        if not isinstance(ids, list | tuple) or not ids or not all(type(i) is int and i >= -1 for i in ids):
            raise ConfigError(f"{nested.subject}: target_layer_ids must be integers of at least -1, got {ids!r}")
        ids = tuple(ids)
        if target_layers and max(ids) >= target_layers:
            raise ConfigError(
                f"{nested.subject}: target_layer_ids {list(ids)} reach past num_target_layers={target_layers}"
            )
        if not source("use_aux_hidden_state").flag("use_aux_hidden_state", default=True):
            raise ConfigError(
                f"{nested.subject}: use_aux_hidden_state=false is not DFlash, which drafts from target features"
            )
        if (projector := source("projector_type").get("projector_type", "linear")) not in ("linear", "dflash"):
            raise ConfigError(f"{nested.subject}: projector_type must be linear, got {projector!r}")
        if source("markov_rank").get("markov_rank", 0):
            raise ConfigError(
                f"{nested.subject}: markov_rank must be 0; drafters with a Markov head are not implemented"
            )
        block = source("block_size").integer("block_size", 16, minimum=2)
        own_head = "lm_head.weight" in tensor_names
        draft_vocab = source("draft_vocab_size").integer("draft_vocab_size", fields["vocab_size"])
        if draft_vocab > fields["vocab_size"] or (draft_vocab < fields["vocab_size"] and tensor_names and not own_head):
            raise ConfigError(
                f"{top.subject}: draft_vocab_size={draft_vocab} needs a head of its own and at most "
                f"vocab_size={fields['vocab_size']}"
            )
        softcap = source("final_logit_softcapping").number("final_logit_softcapping", 0.0)
        fields["windows"] = windows
        config = cls(
            **fields,
            block_size=block,
            mask_token_id=source("mask_token_id").integer("mask_token_id", minimum=0),
            target_layer_ids=ids,
            num_target_layers=target_layers,
            target_hidden_size=source("target_hidden_size").integer("target_hidden_size", hidden),
            causal=_causality(top, nested, windows),
            sinks=source("attention_sink_bias").flag("attention_sink_bias"),
            value_scale=source("attention_value_scale").number("attention_value_scale", 1.0),
            embedding_scale=source("input_embedding_scale").number("input_embedding_scale", 1.0),
            logit_scale=source("output_multiplier").number(
                "output_multiplier", source("logit_scale").number("logit_scale", 1.0)
            ),
            logit_softcap=softcap,
            # This architecture always drafts from its anchor, and its files do not say so.
            sample_from_anchor=source("sample_from_anchor").flag(
                "sample_from_anchor", default="Qwen3DSparkModel" in top.get("architectures", ())
            ),
            draft_vocab_size=0 if draft_vocab == fields["vocab_size"] else draft_vocab,
            own_embedding="embed_tokens.weight" in tensor_names,
            own_head=own_head,
            mask_embedding="mask_embedding" in tensor_names,
        )
        nested.refuse_rest(_NEUTRAL)
        top.refuse_rest(_NEUTRAL)
        return config


def _windows(source, windows: tuple[int | None, ...], *, declared: bool) -> tuple[int | None, ...]:
    """`use_swa` with `swa_window_size` sets the window of sliding layers, or of every layer where no layer types are listed."""
    use, size = source("use_swa").flag("use_swa"), source("swa_window_size")
    width = size.get("swa_window_size")
    if not use:
        return windows
    if width is None and None in windows and not declared:
        raise ConfigError(f"{size.subject}: use_swa needs swa_window_size")
    reach = size.integer("swa_window_size") if width is not None else None
    return tuple((reach or window) if window is not None or not declared else None for window in windows)


def _causality(top: KeyReader, nested: KeyReader, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """`is_causal` at the top, then `causal` in dflash_config, then: sliding layers are causal, full ones are not."""
    for keys in (top, nested):
        keys.read.update(("is_causal", "causal"))  # where one decides, the others are still known keys
    for keys, key in ((top, "is_causal"), (nested, "is_causal"), (nested, "causal"), (top, "causal")):
        if keys.get(key) is not None:
            return (keys.flag(key),) * len(windows)
    return tuple(window is not None for window in windows)
