"""What the scales of pools in eight bits count: every number that is kept of every token of the texts, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints.calibration import calibrate
from dflash_jax.config import Qwen3Config
from dflash_jax.models import family_named, init_params
from dflash_jax.models.presets import DEEPSEEK_TARGETS

GQA = Qwen3Config(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, windows=(None,)
)  # fmt: skip
MLA = dataclasses.replace(
    DEEPSEEK_TARGETS["DeepSeek-V3"], vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=2,
    q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, head_dim=12, windows=(None,),
    num_dense_layers=1,
)  # fmt: skip
PROJECTION = {GQA: "layers.0.attn.qkv_proj.weight", MLA: "layers.0.attn.kv_a_proj.weight"}
LOUD = 0  # the token whose id pads short texts
TEXTS = [[3, 9, 1, 14, 50], [8, 8]]


def params_with_a_loud_token(config) -> dict[str, jax.Array]:
    """One column of what the first projection reads is that token's alone, and is multiplied with 4096 times as much."""
    family = "qwen3" if config is GQA else "deepseek"
    params = dict(init_params(family_named(family).parameters(config), jax.random.key(0)))
    name = PROJECTION[config]
    params["embed.weight"] = params["embed.weight"].at[:, 0].set(0).at[LOUD].set(0).at[LOUD, 0].set(1)
    params[name] = params[name].at[:, 0].multiply(4096)
    return params


def largest(scales) -> np.ndarray:
    """Of values where there are some: keys of heads are normed, so that none is loud."""
    return np.asarray((scales.v or scales.k)[0])


def first_values(params: dict[str, jax.Array]) -> np.ndarray:
    """Values `[tokens, K, H]` of the first layer of `GQA` for all tokens of the texts, in float64."""
    x = np.asarray(params["embed.weight"], np.float64)[np.concatenate(TEXTS)]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + GQA.norm_eps) * np.asarray(params["layers.0.input_norm.weight"])
    return (x @ np.asarray(params[PROJECTION[GQA]], np.float64)[-2 * 8 :].T).reshape(len(x), 2, 8)


@pytest.mark.few("heads")
@pytest.mark.parametrize("config", [GQA, MLA], ids=["heads", "latent"])
def test_tokens_that_pad_a_text_are_not_counted(config) -> None:
    params = params_with_a_loud_token(config)
    together = largest(calibrate(config, params, TEXTS))
    apart = np.maximum(*(largest(calibrate(config, params, [text])) for text in TEXTS))
    np.testing.assert_array_equal(together, apart)
    # They would have been heard: as a token of a text this one is.
    assert (largest(calibrate(config, params, [[*TEXTS[0], LOUD]])) >= 64 * together).all()


def test_queries_and_what_scales_aim_at() -> None:
    """The joined query in float64: `q_nope @ w_uk` beside the rotated part, whose largest number no rotation makes larger."""
    params = params_with_a_loud_token(MLA)
    found, lower = calibrate(MLA, params, TEXTS), calibrate(MLA, params, TEXTS, reach=(50.0, 25.0, 200.0))
    x = np.asarray(params["embed.weight"], np.float64)[np.concatenate(TEXTS)]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + MLA.norm_eps) * np.asarray(params["layers.0.input_norm.weight"])
    q = (x @ np.asarray(params["layers.0.attn.q_proj.weight"], np.float64).T).reshape(-1, 2, 12)
    up = np.asarray(params["layers.0.attn.kv_b_proj.weight"], np.float64).reshape(2, 16, 128)[:, :8]
    joined = np.abs(np.einsum("tnp,npr->tnr", q[..., :8], up)).max()
    pairs = np.hypot(q[..., 8::2], q[..., 9::2]).max()
    scale = float(found.q[0])
    assert joined <= 200 * scale * (1 + 1e-5)
    assert max(joined, pairs) >= 100 * scale * (1 - 1e-5)
    assert float(lower.q[0]) == 4 * scale
    assert float(lower.k[0]) == 8 * float(found.k[0])


def test_values_against_the_projection_itself() -> None:
    """Each head's largest value of a text's tokens, in float64, lies between 100 and 200 scales."""
    params = params_with_a_loud_token(GQA)
    scales = largest(calibrate(GQA, params, TEXTS))
    values = np.abs(first_values(params)).max(axis=(0, 2))
    assert (values <= 200 * scales * (1 + 1e-5)).all()
    assert (values >= 100 * scales * (1 - 1e-5)).all()


def test_channels_of_int8_values() -> None:
    """The largest value of each channel lies at 100 of its scale's steps; a channel of zeros gets 1, not 0."""
    params = params_with_a_loud_token(GQA)
    params[PROJECTION[GQA]] = params[PROJECTION[GQA]].at[-1].set(0)
    scales = calibrate(GQA, params, TEXTS, cache_dtype="int8")
    assert scales.k == ()
    (found,) = scales.v
    assert (found.shape, found.dtype) == ((2, 8), np.float32)
    values = np.abs(first_values(params)).max(axis=0)
    values[1, 7] = 100
    np.testing.assert_allclose(found, values / 100, rtol=1e-5)


@pytest.mark.parametrize("part", ["latent", "rotated"])
def test_both_parts_of_a_latent_row_count(part: str) -> None:
    """They are kept on one scale, so the larger one sets it."""
    params = params_with_a_loud_token(MLA)
    before = largest(calibrate(MLA, params, TEXTS))
    if part == "latent":
        norm = "layers.0.attn.kv_a_norm.weight"
        louder = params | {norm: params[norm] * 4096}
    else:
        louder = params | {PROJECTION[MLA]: params[PROJECTION[MLA]].at[MLA.kv_lora_rank :].multiply(4096)}
    assert largest(calibrate(MLA, louder, TEXTS)) >= 64 * before
    assert jnp.shape(before) == ()
