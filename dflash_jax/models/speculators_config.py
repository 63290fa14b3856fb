"""The `config.json` that the speculators library writes for DFlash drafters, as z-lab's drafters have it.

Its weights have the same names. What differs: the decoder's keys lie under `transformer_layer_config`, tapped layers are counted
from 1 (0 is the embedding's output), and whether sliding layers see a whole block has a key of its own. The library trains sliding
layers with windows that end at the anchor for every slot of a block; here, as in vLLM, each slot has its own, so that the later
ones see up to a block's length fewer of the farthest keys. Drafts alone can differ for it.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.config import KeyReader
from dflash_jax.errors import ConfigError

NESTED = "transformer_layer_config"
# What describes the training run, the library and the target; the target is the one that the drafter is loaded with.
_ABOUT = (
    "speculators_model_type",
    "speculators_config",
    "speculators_version",
    "max_anchors",
    "auto_map",
    "architectures",
)


def from_speculators(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same drafter's file in the layout that `DFlashConfig.from_hf` reads; keys that it does not know stay in it.

    Raises:
      ConfigError: the file is of another kind of drafter, or its tapped layers are no list of ids.
    """
    keys = KeyReader("config.json (speculators)", values)
    if (kind := keys.get("speculators_model_type")) != "dflash":
        raise ConfigError(f"{keys.subject}: speculators_model_type must be dflash, got {kind!r}: not a DFlash drafter")
    layers = KeyReader(f"{keys.subject}, {NESTED}", keys.get(NESTED, {}))
    ids = keys.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"{keys.subject}: aux_hidden_state_layer_ids must be a list of ids, got {ids!r}")
    dflash = {
        "target_layer_ids": [i - 1 for i in ids],
        "mask_token_id": keys.get("mask_token_id"),
        "block_size": keys.integer("block_size", 8, minimum=2),
        "sample_from_anchor": keys.flag("sample_from_anchor"),
        "draft_vocab_size": keys.get("draft_vocab_size"),
        "target_hidden_size": keys.get("target_hidden_size"),
    }
    if keys.flag("sliding_window_non_causal"):
        dflash["causal"] = False
    keys.read.update(_ABOUT)
    rest = {key: value for key, value in values.items() if key not in keys.read}
    return {**layers.values, **rest, "dflash_config": dflash}
