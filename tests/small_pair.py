"""A target and a drafter in the published architectures, of a size that compiles in a second."""

from dataclasses import replace

from dflash_jax.config import Qwen3Config
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.presets import DRAFTERS, TARGETS


def small_pair(
    *, hidden: int, inner: int, vocab: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 32
) -> tuple[Qwen3Config, DFlashConfig]:
    """Two layers and one; the drafter's mask is the last token."""
    sizes = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_heads": heads,
        "num_kv_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip
    target = replace(TARGETS["Qwen3-4B"], num_layers=2, windows=(None,) * 2, **sizes)
    draft = replace(
        DRAFTERS["Qwen3-4B-DFlash-b16"], num_layers=1, windows=(None,), causal=(False,), mask_token_id=vocab - 1,
        target_layer_ids=(0, 1), num_target_layers=2, target_hidden_size=hidden, **sizes,
    )  # fmt: skip
    return target, draft
