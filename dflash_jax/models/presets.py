"""Configurations of published models by name: shapes for tests, timing and parameter counts where no checkpoint is at hand.

A checkpoint's own `config.json` always counts; nothing here is read when one is loaded. Values come from the published files, from
mirrors of them in training frameworks, and from model cards; what those do not state is said beside the entry.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from dflash_jax.config import Qwen3Config, RopeConfig
from dflash_jax.models.deepseek import DeepseekConfig
from dflash_jax.models.deepseek_sparse import SparseDeepseekConfig
from dflash_jax.models.deepseek_v4 import HEAVY, SLIDING, SPARSE, DeepseekV4Config
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.gemma3 import Gemma3Config
from dflash_jax.models.gemma4 import Gemma4Config
from dflash_jax.models.gpt_oss import GptOssConfig
from dflash_jax.models.heads import MarkovConfig, SelectorConfig
from dflash_jax.models.inkling import InklingConfig
from dflash_jax.models.llama import LlamaConfig
from dflash_jax.models.mistral import MistralConfig
from dflash_jax.models.nemotron_h import NemotronHConfig
from dflash_jax.models.qwen2 import Qwen2Config
from dflash_jax.models.qwen3_5 import Qwen35Config
from dflash_jax.models.qwen3_moe import Qwen3MoeConfig
from dflash_jax.models.qwen4_exp import Qwen4ExpConfig


def _target(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    """A dense Qwen3 target; head size, key/value heads, vocabulary and positions are the same for all sizes."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rope=RopeConfig(theta=1e6, original_max_position=40_960),
        max_position=40_960,
        windows=(None,) * layers,
        tie_embeddings=tied,
    )


def _moe_target(theta: float, max_position: int) -> Qwen3MoeConfig:
    """A target of 128 experts, of which a token takes eight."""
    return Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rope=RopeConfig(theta=theta, original_max_position=max_position),
        max_position=max_position,
        windows=(None,) * 48,
        num_experts=128,
        experts_per_token=8,
        moe_intermediate_size=768,
        norm_routing_weights=True,
    )


def _hybrid(
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    value_heads: int,
    *,
    vocab: int = 248_320,
    tied: bool = False,
    experts: tuple[int, int] | None = None,
    grouped: bool = False,
) -> Qwen35Config:
    """A hybrid target, every fourth layer of which attends; `heads` are queries and keys, `experts` all and those of a token."""
    mixture = {} if experts is None else {
        "num_experts": experts[0], "experts_per_token": experts[1], "moe_intermediate_size": 512,
        "shared_intermediate_size": 512, "experts_in_one": not grouped,
    }  # fmt: skip
    return Qwen35Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=256,
        rope=RopeConfig(theta=1e7, partial=0.25, original_max_position=262_144),
        max_position=262_144,
        windows=(None,) * layers,
        full_layers=tuple(range(3, layers, 4)),
        linear_key_heads=16,
        linear_value_heads=value_heads,
        linear_key_dim=128,
        linear_value_dim=128,
        grouped_projections=grouped,
        tie_embeddings=tied,
        **mixture,
    )


def _draft(
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int, int],
    taps: tuple[int, ...],
    target_layers: int,
    *,
    vocab: int = 151_936,
    mask: int = 151_669,
    theta: float = 1e6,
    max_position: int = 40_960,
    norm_eps: float = 1e-6,
    block: int = 16,
    rope: RopeConfig | None = None,
) -> DFlashConfig:
    """A drafter with full attention that is not causal; `heads` are queries, keys and head size."""
    return DFlashConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        norm_eps=norm_eps,
        rope=RopeConfig(theta=theta, original_max_position=max_position) if rope is None else rope,
        max_position=max_position,
        windows=(None,) * layers,
        causal=(False,) * layers,
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=taps,
        num_target_layers=target_layers,
        target_hidden_size=hidden,
    )


def _block7(target: Qwen3Config, taps: tuple[int, ...]) -> DFlashConfig:
    """A drafter of five layers in its target's shape that brings embeddings and head and drafts 7 tokens from its anchor."""
    return DFlashConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=5,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rope=target.rope,
        max_position=target.max_position,
        windows=(None,) * 5,
        causal=(False,) * 5,
        block_size=7,
        mask_token_id=151_669,
        target_layer_ids=taps,
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        sample_from_anchor=True,
        own_embedding=True,
        own_head=True,
    )


TARGETS: Mapping[str, Qwen3Config] = MappingProxyType(
    {
        "Qwen3-0.6B": _target(1024, 3072, 28, 16, tied=True),
        "Qwen3-1.7B": _target(2048, 6144, 28, 16, tied=True),
        "Qwen3-4B": _target(2560, 9728, 36, 32, tied=True),
        "Qwen3-8B": _target(4096, 12_288, 36, 32, tied=False),
        "Qwen3-14B": _target(5120, 17_408, 40, 40, tied=False),
        "Qwen3-32B": _target(5120, 25_600, 64, 64, tied=False),
    }
)

MOE_TARGETS: Mapping[str, Qwen3MoeConfig] = MappingProxyType(
    {
        "Qwen3-30B-A3B": _moe_target(1e6, 40_960),
        "Qwen3-Coder-30B-A3B-Instruct": _moe_target(1e7, 262_144),
    }
)

# Qwen3.6-27B and Qwen3.6-35B-A3B have the shapes of the 3.5 of their size. That the 4B shares embedding and head is from second
# hand; positions are those of the published files.
HYBRID_TARGETS: Mapping[str, Qwen35Config] = MappingProxyType(
    {
        "Qwen3.5-4B": _hybrid(2560, 9216, 32, (16, 4), 32, tied=True),
        "Qwen3.5-9B": _hybrid(4096, 12_288, 32, (16, 4), 32),
        "Qwen3.5-27B": _hybrid(5120, 17_408, 64, (24, 4), 48),
        "Qwen3.5-35B-A3B": _hybrid(2048, 5632, 40, (16, 2), 32, experts=(256, 8)),
        "Qwen3-Coder-Next": _hybrid(2048, 5632, 48, (16, 2), 32, vocab=151_936, experts=(512, 10), grouped=True),
    }
)


# Sizes as inference engines' tests give those of the published file, which has not been seen.
FLASH_NEXT_TARGETS: Mapping[str, Qwen4ExpConfig] = MappingProxyType(
    {
        "Qwen3.8-Flash-Next": Qwen4ExpConfig(
            vocab_size=248_320,
            hidden_size=2560,
            intermediate_size=640,
            num_layers=48,
            num_heads=24,
            num_kv_heads=2,
            head_dim=256,
            rope=RopeConfig(theta=1e7, partial=0.25, original_max_position=262_144),
            max_position=262_144,
            windows=(None,) * 48,
            full_layers=tuple(range(3, 48, 4)),
            linear_key_heads=16,
            linear_value_heads=48,
            linear_key_dim=128,
            linear_value_dim=128,
            output_gate="sigmoid",
            num_experts=512,
            experts_per_token=10,
            moe_intermediate_size=640,
            shared_intermediate_size=640,
            streams=4,
            stream_rank=320,
            index_heads=4,
            index_head_dim=128,
            index_block=4,
            index_topk=2048,
            ngram_layers=(1,),
            ngram_end=248_044,
            ngram_size=3,
            ngram_heads=8,
            ngram_least=20_000_000,
            ngram_multiple=128,
            ngram_seed=1234,
            ngram_width=2560,
            ngram_taps=4,
            ngram_parts=128,
        ),
    }
)


def _inkling(
    hidden: int, inner: int, layers: int, heads: int, local_kv_heads: int, expert: int, divisor: float
) -> InklingConfig:
    """An Inkling target, every sixth layer of which sees all keys; `inner` is of dense layers, `expert` of experts."""
    return InklingConfig(
        vocab_size=201_024,
        true_vocab=200_058,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        max_position=1_048_576,
        windows=tuple(512 if (i + 1) % 6 else None for i in range(layers)),
        local_heads=heads,
        local_kv_heads=local_kv_heads,
        local_head_dim=128,
        bias_width=16,
        bias_extent=1024,
        growth_floor=128_000,
        growth_alpha=0.1,
        dense_layers=(0, 1),
        num_experts=256,
        experts_per_token=6,
        moe_intermediate_size=expert,
        num_shared_experts=2,
        logit_divisor=divisor,
        in_turns=True,
    )


# Sizes as inference engines repeat them from the published files.
INKLING_TARGETS: Mapping[str, InklingConfig] = MappingProxyType(
    {
        "Inkling": _inkling(6144, 24_576, 66, 64, 16, 3072, 24.0),
        "Inkling-Small": _inkling(4096, 16_384, 42, 32, 8, 2048, 16.0),
    }
)


def _llama3(factor: float) -> RopeConfig:
    """Rotation of Llama 3.1 and later: 8,192 positions stretched."""
    return RopeConfig(kind="llama3", theta=5e5, factor=factor, original_max_position=8192)


def _llama(
    hidden: int, inner: int, layers: int, heads: tuple[int, int, int], *, factor: float, tied: bool
) -> LlamaConfig:
    """A target of Llama 3.1 or 3.2; `heads` are queries, keys and head size."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        norm_eps=1e-5,
        rope=_llama3(factor),
        max_position=131_072,
        windows=(None,) * layers,
        tie_embeddings=tied,
    )


def _qwen2(vocab: int, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], *, tied: bool) -> Qwen2Config:
    """A target of Qwen2.5 Instruct; `heads` are queries, keys and head size."""
    return Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        rope=RopeConfig(theta=1e6, original_max_position=32_768),
        max_position=32_768,
        windows=(None,) * layers,
        tie_embeddings=tied,
    )


def _mistral(vocab: int, theta: float, window: int | None) -> MistralConfig:
    """A target of seven billion parameters."""
    return MistralConfig(
        vocab_size=vocab,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope=RopeConfig(theta=theta, original_max_position=32_768),
        max_position=32_768,
        windows=(window,) * 32,
    )


LLAMA_TARGETS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        # Instruct releases have the same configurations.
        "Llama-3.1-8B": _llama(4096, 14_336, 32, (32, 8, 128), factor=8.0, tied=False),
        "Llama-3.2-1B": _llama(2048, 8192, 16, (32, 8, 64), factor=32.0, tied=True),
        "Llama-3.2-3B": _llama(3072, 8192, 28, (24, 8, 128), factor=32.0, tied=True),
    }
)

QWEN2_TARGETS: Mapping[str, Qwen2Config] = MappingProxyType(
    {
        "Qwen2.5-0.5B": _qwen2(151_936, 896, 4864, 24, (14, 2, 64), tied=True),
        "Qwen2.5-7B": _qwen2(152_064, 3584, 18_944, 28, (28, 4, 128), tied=False),
    }
)

MISTRAL_TARGETS: Mapping[str, MistralConfig] = MappingProxyType(
    {
        "Mistral-7B-v0.1": _mistral(32_000, 1e4, 4096),
        "Mistral-7B-v0.3": _mistral(32_768, 1e6, None),
    }
)


def _gpt_oss(layers: int, experts: int) -> GptOssConfig:
    """A target of gpt-oss, as released: experts in MXFP4."""
    return GptOssConfig(
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        rope=RopeConfig(kind="yarn", theta=150_000.0, factor=32.0, original_max_position=4096, truncate=False),
        max_position=131_072,
        attention_bias=True,
        windows=(128, None) * (layers // 2),
        num_experts=experts,
        experts_per_token=4,
        mxfp4=True,
    )


GPT_OSS_TARGETS: Mapping[str, GptOssConfig] = MappingProxyType(
    {"gpt-oss-20b": _gpt_oss(24, 32), "gpt-oss-120b": _gpt_oss(36, 128)}
)


def _windowed(layers: int, window: int) -> tuple[int | None, ...]:
    """Windows of layers of which every sixth has none."""
    return tuple(None if i % 6 == 5 else window for i in range(layers))


def _gemma3(
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int, int],
    *,
    window: int = 1024,
    vocab: int = 262_208,
    max_position: int = 131_072,
    factor: float = 8.0,
    query_scalar: float = 256.0,
) -> Gemma3Config:
    """A target of Gemma 3; `heads` are queries, keys and head size, `factor` stretches the rotation of layers without a window."""
    kind = "linear" if factor != 1.0 else "default"
    return Gemma3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        rope=RopeConfig(kind=kind, theta=1e6, factor=factor, original_max_position=max_position),
        local_rope=RopeConfig(theta=1e4, original_max_position=max_position),
        max_position=max_position,
        windows=_windowed(layers, window),
        query_scalar=query_scalar,
    )


# Text models; those from 4B on are published inside vision-language checkpoints.
GEMMA3_TARGETS: Mapping[str, Gemma3Config] = MappingProxyType(
    {
        "gemma-3-1b": _gemma3(1152, 6912, 26, (4, 1, 256), window=512, vocab=262_144, max_position=32_768, factor=1.0),
        "gemma-3-4b": _gemma3(2560, 10_240, 34, (8, 4, 256)),
        "gemma-3-12b": _gemma3(3840, 15_360, 48, (16, 8, 256)),
        "gemma-3-27b": _gemma3(5376, 21_504, 62, (32, 16, 128), query_scalar=168.0),
    }
)


def _gemma4(
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int, int],
    *,
    experts: tuple[int, int, int] = (0, 0, 0),
) -> Gemma4Config:
    """A target of Gemma 4; `heads` are queries, keys with a window and keys without, `experts` all, those of a token and their
    inner width."""
    return Gemma4Config(
        vocab_size=262_144,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=256,
        full_kv_heads=heads[2],
        full_head_dim=512,
        keys_as_values=True,
        rope=RopeConfig(kind="proportional", theta=1e6, partial=0.25, original_max_position=262_144),
        local_rope=RopeConfig(theta=1e4, original_max_position=262_144),
        max_position=262_144,
        windows=_windowed(layers, 1024),
        logit_softcap=30.0,
        num_experts=experts[0],
        experts_per_token=experts[1],
        moe_intermediate_size=experts[2],
    )


# The inner width of the 31B and the layers of the 26B-A4B are what gives their published sizes. The 12B's sizes are in its
# drafter's file, which DeepSpec copies from the target's; that every sixth layer sees everything is the family's way.
GEMMA4_TARGETS: Mapping[str, Gemma4Config] = MappingProxyType(
    {
        "gemma-4-31B": _gemma4(5376, 21_504, 60, (32, 16, 4)),
        "gemma-4-12B": _gemma4(3840, 15_360, 48, (16, 8, 1)),
        "gemma-4-26B-A4B": _gemma4(2816, 2112, 30, (16, 8, 2), experts=(128, 8, 704)),
    }
)

_HEADS = (32, 8, 128)
_QWEN35 = {"vocab": 248_320, "mask": 248_070, "theta": 1e7, "max_position": 262_144}

DRAFTERS: Mapping[str, DFlashConfig] = MappingProxyType(
    {
        "Qwen3-4B-DFlash-b16": _draft(2560, 9728, 5, _HEADS, (1, 9, 17, 25, 33), 36),
        "Qwen3-8B-DFlash-b16": _draft(4096, 12_288, 5, _HEADS, (1, 9, 17, 25, 33), 36),
        "Qwen3.5-4B-DFlash": _draft(2560, 9728, 5, _HEADS, (1, 8, 15, 22, 29), 32, **_QWEN35),
        # No file of it was seen: the shape of Qwen3-8B's drafter with the taps of the 4B's.
        "Qwen3.5-9B-DFlash": _draft(4096, 12_288, 5, _HEADS, (1, 8, 15, 22, 29), 32, **_QWEN35),
        # Inner width and heads are its target family's, from second hand.
        "Qwen3-Coder-30B-A3B-DFlash": _draft(
            2048, 6144, 8, (32, 4, 128), (1, 7, 14, 20, 26, 32, 39, 45), 48, theta=1e7, max_position=262_144,
        ),
        # The first release; the later one has six layers, five of them with a window. Full attention is from second hand.
        "Qwen3.5-27B-DFlash": _draft(5120, 17_408, 5, _HEADS, (1, 16, 31, 46, 61), 64, **_QWEN35),
        # The first release of eight layers; the later one has six.
        "Qwen3.5-35B-A3B-DFlash": _draft(2048, 6144, 8, (32, 4, 128), (1, 10, 19, 28, 37), 40, **_QWEN35),
        # Positions and epsilon are its target's.
        "gemma-4-31B-it-DFlash": dataclasses.replace(
            _draft(
                5376, 10_752, 5, (64, 8, 128), (1, 12, 23, 35, 46, 57), 60, vocab=262_144, mask=4, max_position=262_144
            ),
            windows=(2048,) * 4 + (None,), causal=(True,) * 4 + (False,), logit_softcap=30.0,
        ),
        "LFM2.5-1.2B-DFlash": _draft(
            2048, 6144, 8, (32, 8, 64), (1, 4, 7, 10, 13), 16,
            vocab=65_536, mask=16, max_position=128_000, norm_eps=1e-5,
        ),
        # The norm's epsilon is its target's.
        "Qwen2.5-0.5B-DFlash": _draft(896, 4864, 5, (14, 2, 64), (1, 6, 11, 16, 21), 24, max_position=32_768),
        # Mask id (the first reserved one), rotary settings and epsilon are assumed: its target's. Inner width is from its size.
        "LLaMA3.1-8B-Instruct-DFlash-UltraChat": _draft(
            4096, 12_288, 5, _HEADS, (1, 8, 15, 22, 29), 32,
            vocab=128_256, mask=128_002, max_position=131_072, norm_eps=1e-5, block=10, rope=_llama3(8.0),
        ),
        # Heads, rotary settings and epsilon are its target's, inner width and taps give its published size, 1.46 GiB; the mask id
        # (the first reserved one) is assumed.
        "gpt-oss-20b-DFlash": _draft(
            2880, 7680, 8, (64, 8, 64), (1, 6, 11, 16, 21), 24,
            vocab=201_088, mask=200_000, max_position=131_072, norm_eps=1e-5, block=8, rope=GPT_OSS_TARGETS["gpt-oss-20b"].rope,
        ),
        # Rotary settings and epsilon are their targets'.
        "dflash_qwen3_4b_block7": _block7(TARGETS["Qwen3-4B"], (1, 9, 17, 25, 33)),
        "dflash_qwen3_8b_block7": _block7(TARGETS["Qwen3-8B"], (1, 9, 17, 25, 33)),
        "dflash_qwen3_14b_block7": _block7(TARGETS["Qwen3-14B"], (1, 10, 19, 28, 37)),
    }
)  # fmt: skip

_DSPARK = MarkovConfig(rank=256, confidence="hidden_and_token", confidence_bias=True)
_DSPARK_8B = dataclasses.replace(DRAFTERS["dflash_qwen3_8b_block7"], head=_DSPARK)

# With draft heads.
HEAD_DRAFTERS: Mapping[str, DFlashConfig] = MappingProxyType(
    {
        # Not published: v1's shape with the convolutions and the selector that all published DFlash 2 drafters have.
        "Qwen3-8B-DFlash2-b16": dataclasses.replace(
            DRAFTERS["Qwen3-8B-DFlash-b16"], conv_taps=2, conv_group=16, head=SelectorConfig(rank=256, top_k=16)
        ),
        "dspark_qwen3_8b_block7": _DSPARK_8B,
        # The same where the bias is added to the best few tokens alone.
        "dspark_qwen3_8b_block7_top512": dataclasses.replace(_DSPARK_8B, head=dataclasses.replace(_DSPARK, top_k=512)),
    }
)

_GEMMA4_12B = GEMMA4_TARGETS["gemma-4-12B"]
_GEMMA4_BLOCK7 = DFlashConfig(
    vocab_size=262_144, hidden_size=3840, intermediate_size=15_360, num_layers=5, num_heads=16, num_kv_heads=1, head_dim=512,
    rope=_GEMMA4_12B.rope, max_position=262_144, windows=(None,) * 5, causal=(False,) * 5, block_size=7, mask_token_id=4,
    target_layer_ids=(5, 17, 29, 41, 46), num_target_layers=48, target_hidden_size=3840,
    embedding_scale=_GEMMA4_12B.embedding_scale, logit_softcap=30.0, sample_from_anchor=True, own_embedding=True, own_head=True,
    layer_kind="gemma4", keys_as_values=True,
)  # fmt: skip

# With layers of Gemma 4. No file of the one without a head was seen: DeepSpec trains both in one shape.
GEMMA4_DRAFTERS: Mapping[str, DFlashConfig] = MappingProxyType(
    {
        "dspark_gemma4_12b_block7": dataclasses.replace(_GEMMA4_BLOCK7, head=_DSPARK),
        "dflash_gemma4_12b_block7": _GEMMA4_BLOCK7,
    }
)


def _nemotron(
    pattern: str, hidden: int, mamba_heads: int, experts: tuple[int, int, int, int], *, scale: float, width: int = 0
) -> NemotronHConfig:
    """A Nemotron 3 target; heads, groups of Mamba 2, its state and vocabulary are the same for all sizes.

    Args:
      pattern: of each layer, M for Mamba 2, E for experts, * for attention.
      experts: how many, how many a token takes, their inner width, and that of the one that every token takes.
      width: columns that routed experts take.
    """
    count, taken, inner, shared = experts
    places = {sign: tuple(i for i, one in enumerate(pattern) if one == sign) for sign in "M*E"}
    return NemotronHConfig(
        vocab_size=131_072,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=len(pattern),
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        norm_eps=1e-5,
        max_position=262_144,
        windows=(None,) * len(pattern),
        full_layers=places["*"],
        mamba_layers=places["M"],
        expert_layers=places["E"],
        mamba_heads=mamba_heads,
        mamba_head_dim=64,
        mamba_groups=8,
        state_dim=128,
        num_experts=count,
        experts_per_token=taken,
        moe_intermediate_size=inner,
        shared_intermediate_size=shared,
        expert_width=width,
        routing_scale=scale,
    )


# Of Nemotron 3.5 Lightning the text model is the Nano's, of 3.5 Super VL the Super's. The Ultra's layers are not known here.
NEMOTRON_TARGETS: Mapping[str, NemotronHConfig] = MappingProxyType(
    {
        "NVIDIA-Nemotron-3-Nano-30B-A3B": _nemotron(
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 2688, 64, (128, 6, 1856, 3712), scale=2.5
        ),
        "NVIDIA-Nemotron-3-Super-120B-A12B": _nemotron(
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
            4096, 128, (512, 22, 2688, 5376), scale=5.0, width=1024,
        ),
    }
)  # fmt: skip


def _rope(*, mscale: float, theta: float = 1e4, factor: float = 40.0, beta_fast: float = 32.0) -> RopeConfig:
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=4096,
        beta_fast=beta_fast,
        beta_slow=1.0,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


def _latent_target(
    hidden: int, layers: int, heads: int, inner: tuple[int, int], experts: tuple[int, int, int], *, dense: int
) -> DeepseekConfig:
    """A target of the V2 kind; `inner` widths are of dense layers and experts, `experts` are routed, taken and shared ones."""
    return DeepseekConfig(
        vocab_size=102_400,
        hidden_size=hidden,
        intermediate_size=inner[0],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=192,
        rope=_rope(mscale=0.707),
        max_position=163_840,
        windows=(None,) * layers,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=experts[0],
        experts_per_token=experts[1],
        num_shared_experts=experts[2],
        routing="greedy",
        num_groups=1,
        groups_per_token=1,
        norm_routing_weights=False,
        routing_scale=1.0,
        num_dense_layers=dense,
        moe_intermediate_size=inner[1],
    )


_V2_LITE = dataclasses.replace(
    _latent_target(2048, 27, 16, (10_944, 1408), (64, 6, 2), dense=1),
    q_lora_rank=None,
)
_V2 = dataclasses.replace(
    _latent_target(5120, 60, 128, (12_288, 1536), (160, 6, 2), dense=1),
    routing="group_limited_greedy",
    num_groups=8,
    groups_per_token=3,
    routing_scale=16.0,
)
_V3 = dataclasses.replace(
    _latent_target(7168, 61, 128, (18_432, 2048), (256, 8, 1), dense=3),
    vocab_size=129_280,
    rope=_rope(mscale=1.0),
    routing="noaux_tc",
    num_groups=8,
    groups_per_token=4,
    norm_routing_weights=True,
    routing_scale=2.5,
    num_mtp_layers=1,
)
_K2 = dataclasses.replace(
    _V3,
    vocab_size=163_840,
    num_heads=64,
    num_kv_heads=64,
    num_experts=384,
    num_groups=1,
    groups_per_token=1,
    routing_scale=2.827,
    num_dense_layers=1,
    num_mtp_layers=0,
    rope=_rope(mscale=1.0, theta=5e4, factor=32.0, beta_fast=1.0),
    max_position=131_072,
)
_K25 = dataclasses.replace(_K2, norm_eps=1e-5, rope=_rope(mscale=1.0, theta=5e4, factor=64.0), max_position=262_144)

DEEPSEEK_TARGETS: Mapping[str, DeepseekConfig] = MappingProxyType(
    {
        "DeepSeek-V2-Lite": _V2_LITE,
        "DeepSeek-V2": _V2,
        # DeepSeek-R1 has the same configuration.
        "DeepSeek-V3": _V3,
        "Kimi-K2": _K2,
        # The text model, without its vision tower.
        "Kimi-K2.5": _K25,
    }
)


def _sparse_target(
    base: DeepseekConfig, heads: int, *, interleaved: bool, indexers: tuple[bool, ...]
) -> SparseDeepseekConfig:
    """`base` with indexers of so many heads; their width and what they choose are the same for all."""
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return SparseDeepseekConfig(
        **fields,
        index_topk=2048,
        index_heads=heads,
        index_head_dim=128,
        index_interleaved=interleaved,
        indexers=indexers,
    )


_GLM_5 = dataclasses.replace(
    _latent_target(6144, 78, 64, (12_288, 2048), (256, 8, 1), dense=3),
    vocab_size=154_880,
    head_dim=256,
    qk_nope_head_dim=192,
    v_head_dim=256,
    q_lora_rank=2048,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e6, original_max_position=202_752),
    max_position=202_752,
    routing="noaux_tc",
    norm_routing_weights=True,
    routing_scale=2.5,
    num_mtp_layers=1,
)
_GLM_52 = dataclasses.replace(
    _GLM_5, rope=RopeConfig(theta=8e6, original_max_position=1_048_576), max_position=1_048_576
)

# Rotations of V3.2 are taken to be V3's, and GLM-5.2's sizes are from a survey of its file.
SPARSE_TARGETS: Mapping[str, SparseDeepseekConfig] = MappingProxyType(
    {
        "DeepSeek-V3.2": _sparse_target(_V3, 64, interleaved=False, indexers=(True,) * 61),
        # GLM-5.1 has the same configuration.
        "GLM-5": _sparse_target(_GLM_5, 32, interleaved=True, indexers=(True,) * 78),
        "GLM-5.2": _sparse_target(
            _GLM_52, 32, interleaved=True, indexers=tuple(max(i - 2, 0) % 4 == 0 for i in range(78))
        ),
    }
)

# Of the Pro not all sizes are known here.
DEEPSEEK_V4_TARGETS: Mapping[str, DeepseekV4Config] = MappingProxyType(
    {
        "DeepSeek-V4-Flash": DeepseekV4Config(
            vocab_size=129_280,
            hidden_size=4096,
            intermediate_size=2048,
            num_layers=43,
            num_heads=64,
            num_kv_heads=1,
            head_dim=512,
            rope=RopeConfig(original_max_position=1 << 20),
            max_position=1 << 20,
            windows=(128,) * 43,
            kinds=(SLIDING, SLIDING, *(SPARSE, HEAVY) * 20, SPARSE),
            sparse_rate=4,
            heavy_rate=128,
            compress_rope=RopeConfig(
                kind="yarn", theta=160_000.0, factor=16.0, original_max_position=65_536, attention_factor=1.0
            ),
            rotary_dim=64,
            q_lora_rank=1024,
            out_groups=8,
            out_rank=1024,
            index_topk=512,
            index_heads=64,
            index_head_dim=128,
            streams=4,
            stream_rounds=20,
            stream_eps=1e-6,
            num_experts=256,
            experts_per_token=6,
            moe_intermediate_size=2048,
            scoring="sqrtsoftplus",
            routing_scale=1.5,
            hashed=(True,) * 3 + (False,) * 40,
            swiglu_limit=10.0,
        ),
    }
)
