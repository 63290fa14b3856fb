"""Files of drafters that other libraries wrote, as `DFlashConfig.from_hf` reads them: in z-lab's layout.

The speculators library has the decoder's keys under `transformer_layer_config`, counts tapped layers from 1 (0 is the embedding's
output), and has a key of its own for whether sliding layers see a whole block; its weights have the same names. transformers has v1
under names of its own, for one target.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.config import NEUTRAL_KEYS, KeyReader, architectures_of, shown
from dflash_jax.errors import ConfigError

MUSE_ASSISTANT = "MuseGlimmerAssistantModel"  # transformers' v1
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
# By kind of drafter, what the library takes for keys of its head that are absent.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
    "dspark": {},
    "xpress": {},
}


def in_zlab_layout(values: Mapping[str, Any], notices: list[str]) -> Mapping[str, Any]:
    """The same file in z-lab's layout, which most are in already; keys that a layout does not know stay in it.

    Args:
      notices: takes what was decided where engines differ.

    Raises:
      ConfigError: see `from_speculators`.
    """
    if NESTED in values:
        return from_speculators(values, notices)
    return from_muse_assistant(values) if MUSE_ASSISTANT in architectures_of(values) else values


def from_muse_assistant(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same drafter's file in z-lab's layout.

    It has no vocabulary of its own: absent, that is its one target's. Its windows reach as many keys back as they say, and so see
    one more with the query's own, on both sides.
    """
    width = KeyReader("config.json (Muse assistant)", values).integer("sliding_window", 2048)
    absent = {"vocab_size": 202_048, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    return absent | dict(values) | {"sliding_window": width + 1, "is_causal": False}


def from_speculators(values: Mapping[str, Any], notices: list[str]) -> dict[str, Any]:
    """The same drafter's file in z-lab's layout; keys that it does not know stay in it.

    The library trains sliding layers with windows that end at the anchor for every slot of a block; here, as in vLLM, each slot has
    its own, so that the later ones see up to a block's length fewer of the farthest keys. Drafts alone can differ for it.
    `sliding_window_non_causal` is read as the library trains: absent is false (true for DFlash 2), false makes sliding layers
    causal, and full layers see the whole block whatever it says. vLLM differs in both cases, and a notice says so.

    Args:
      notices: takes what was decided where engines differ.

    Raises:
      ConfigError: the file is of another kind of drafter, its tapped layers are no list of ids, or it says one thing in two ways.
    """
    keys = KeyReader("config.json (speculators)", values, notices)
    kind, known = keys.get("speculators_model_type"), list(_DEFAULTS)
    if kind not in known:
        raise ConfigError(
            f"{keys.subject}: speculators_model_type must be {', '.join(known[:-1])} or {known[-1]}, got {shown(kind)}: not a "
            "DFlash drafter"
        )
    layers = KeyReader(f"{keys.subject}, {NESTED}", keys.get(NESTED, {}))
    ids = keys.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"{keys.subject}: aux_hidden_state_layer_ids must be a list of ids, got {shown(ids)}")
    dflash = {
        "target_layer_ids": [i - 1 for i in ids],
        "mask_token_id": keys.get("mask_token_id"),
        "block_size": keys.integer("block_size", 8, minimum=2),
        "sample_from_anchor": keys.get("sample_from_anchor", None if kind == "dspark" else False),
        "draft_vocab_size": keys.get("draft_vocab_size"),
        "target_hidden_size": keys.get("target_hidden_size"),
        **{key: keys.get(key, default) for key, default in _DEFAULTS[kind].items()},
    }
    if keys.flag("sliding_window_non_causal", default=kind == "dflash2"):
        dflash["causal"] = False
    else:
        notices += _differences(layers.get("layer_types"), absent=keys.values.get("sliding_window_non_causal") is None)
    keys.read.update(_ABOUT)
    rest = {key: value for key, value in values.items() if key not in keys.read}
    if twice := [key for key in ("dflash_config", "eagle_config") if rest.get(key)]:
        raise ConfigError(f"{keys.subject}: {', '.join(twice)} beside {NESTED} says one drafter in two ways; keep one")
    # The library's own keys of bookkeeping stand in both places, with values of their own.
    both = (rest.keys() & layers.values.keys()) - NEUTRAL_KEYS - {"tie_word_embeddings"}
    if differ := sorted(key for key in both if rest[key] != layers.values[key]):
        raise ConfigError(f"{keys.subject} says {', '.join(differ)} in two ways, beside and in {NESTED}; keep one")
    return {**layers.values, **rest, "dflash_config": dflash}


def _differences(types: Any, *, absent: bool) -> list[str]:
    """One sentence where vLLM reads causal sliding layers otherwise than the library trains them."""
    if not isinstance(types, list) or "sliding_attention" not in types:
        return []
    if absent:
        return [
            "sliding_window_non_causal is absent: sliding layers of the drafter are causal, as the speculators library trains "
            "them; vLLM takes them for not causal"
        ]
    if "full_attention" in types:
        return [
            "sliding_window_non_causal is false: sliding layers of the drafter are causal and full ones see the whole block, as "
            "the speculators library trains them; vLLM makes all of them causal"
        ]
    return []
