"""MiniMax-M3: attention over pages to chosen blocks against float64, what files say, and what is refused.

Logits, taps, texts and the way back are held with those of other families with experts in `test_other_experts`.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache import check_cache_dtype, layer_specs, make_pages
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import ParameterError
from dflash_jax.execution.plan import CallShape, choose
from dflash_jax.models import count, family_for, family_of, layer_traits
from dflash_jax.models.layers import rotary_tables
from dflash_jax.models.minimax_m3 import BlockAttention

from ..published_layouts import LAYOUTS, TARGETS

FILE, DRAFTER = TARGETS["MiniMax-M3"], LAYOUTS["Model Optimizer DSpark"]
TEXT, SPARSE = FILE["text_config"], FILE["text_config"]["sparse_attention_config"]


def read(**changes: Any) -> Any:
    file = FILE | {"text_config": {key: value for key, value in (TEXT | changes).items() if value is not ...}}
    return family_of(file).config(file)


def random_layer(config: Any) -> BlockAttention:
    layer, rng = BlockAttention(config, 1, layer_traits(config)), np.random.default_rng(0)
    for norm in (layer.q_norm, layer.k_norm, layer.index_q_norm, layer.index_k_norm):
        assert norm is not None
        norm.weight[...] = jnp.array(rng.uniform(-0.5, 0.5, size=norm.weight[...].shape), jnp.float32)
    return layer


def oracle(layer: BlockAttention, projected: np.ndarray) -> np.ndarray:
    """float64: what attention gives each token of a text `[T,W]`, one query and one key head at a time."""
    c: Any = layer.config
    tokens = len(projected)
    n, k, h, e = c.num_heads, c.num_kv_heads, c.head_dim, c.index_head_dim
    cos, sin = (np.asarray(side, np.float64)[0] for side in rotary_tables(jnp.arange(tokens)[None], c.rope, h))
    half = cos.shape[-1]

    def heads(rows: np.ndarray, size: int, norm: Any) -> np.ndarray:
        x = rows.reshape(tokens, rows.shape[1] // size, size)
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + c.norm_eps)
        x = x * (1 + np.asarray(norm.weight[...], np.float64))
        first, last, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = (first * cos[:, None] - last * sin[:, None], last * cos[:, None] + first * sin[:, None])
        return np.concatenate([*turned, rest], axis=-1)

    cuts = np.cumsum([n * h, k * h, k * h, k * e])
    parts = np.split(projected.astype(np.float64), cuts, axis=-1)
    q, keys, values = heads(parts[0], h, layer.q_norm), heads(parts[1], h, layer.k_norm), parts[2].reshape(tokens, k, h)
    index_q, index_k = heads(parts[3], e, layer.index_q_norm), heads(parts[4], e, layer.index_k_norm)[:, 0]
    out = np.zeros((tokens, n, h))
    for t in range(tokens):
        own = t // c.index_block
        for head in range(n):
            group = head // (n // k)
            scores = index_k[: t + 1] @ index_q[t, group]
            best = [scores[b * c.index_block : (b + 1) * c.index_block].max() for b in range(own + 1)]
            best = [np.inf if b > own - c.index_local else score for b, score in enumerate(best)]
            taken = np.argsort(best)[-c.index_blocks :]
            seen = np.isin(np.arange(t + 1) // c.index_block, taken)
            weights = np.where(seen, np.exp(keys[: t + 1, group] @ q[t, head] * h**-0.5), 0)
            out[t, head] = weights @ values[: t + 1, group] / weights.sum()
    return out


@pytest.mark.few("8-1", "6-0")
@pytest.mark.parametrize(("page", "local"), [(2, 1), (8, 1), (6, 0), (4, 2), (3, 1)])
def test_chosen_blocks_over_pages_are_those_of_float64(page: int, local: int) -> None:
    """In a ragged batch, prompts in pieces, with NaN in every row that nobody wrote."""
    config = replace(read(), index_local=local)
    layer, rng, lens = random_layer(config), np.random.default_rng(1), np.array([45, 0, 7, 31])
    table = rng.permutation(4 * 48 // page).reshape(4, -1)
    pages = jax.tree.map(
        lambda pool: jnp.full_like(pool, jnp.nan), make_pages(config, table.size, page, jnp.dtype("float32"))
    )
    width = layer.qkv_proj.weight[...].shape[0]
    texts = [rng.normal(size=(length, width)).astype(np.float32) for length in lens]
    expected, got = [oracle(layer, text) for text in texts], [[] for _ in texts]

    @jax.jit
    def call(projected, positions, q_lens, pages):
        attend = PagedAttend(jnp.array(table, jnp.int32), positions, q_lens, page, related=True)
        return layer.mix(projected, rotary_tables(positions, config.rope, config.head_dim), attend, pages)

    for start in range(0, 48, 16):
        q_lens = np.clip(lens - start, 0, 16).astype(np.int32)
        projected = np.zeros((4, 16, width), np.float32)
        for row, (text, length) in enumerate(zip(texts, q_lens, strict=True)):
            projected[row, :length] = text[start : start + length]
        positions = jnp.broadcast_to(start + jnp.arange(16), (4, 16))
        out, pages = call(jnp.array(projected), positions, jnp.array(q_lens), pages)
        for row, length in enumerate(q_lens):
            got[row].append(np.asarray(out)[row, :length])
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.concatenate(ours), theirs, atol=2e-5)
    longest = jnp.array(texts[0])[None]
    rotary = rotary_tables(jnp.arange(45)[None], config.rope, config.head_dim)
    np.testing.assert_allclose(
        np.asarray(layer.mix(longest, rotary, dense_attend(), None)[0])[0], expected[0], atol=2e-5
    )


def test_what_files_say() -> None:
    """In MiniMax's words and in transformers'."""
    config = read()
    assert (config.indexers, config.dense_layers, config.rope.partial) == ((False, True, True, True), (0,), 0.5)
    assert (config.index_block, config.index_blocks, config.index_local, config.index_topk) == (4, 3, 1, 12)
    assert (config.intermediate_size, config.moe_intermediate_size, config.shared_intermediate_size) == (40, 24, 24)
    assert [spec.index for spec in layer_specs(config)] == [0, 16, 16, 16]
    assert type(config).from_dict(config.to_dict()) == config
    theirs = {
        "sparse_attention_config": ..., "moe_layer_freq": ..., "hidden_act": "silu", "index_n_heads": 2, "index_head_dim": 16,
        "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    }  # fmt: skip
    assert read(**theirs) == config
    assert family_of(TEXT).config(TEXT) == config
    assert read(sparse_attention_config=None).indexers == (False,) * 4


def test_published_sizes() -> None:
    """Of the release's configuration: 60 layers, three of them dense in both ways."""
    kinds = [0] * 3 + [1] * 57
    config = read(
        vocab_size=200_064, hidden_size=6144, intermediate_size=3072, dense_intermediate_size=12_288, num_hidden_layers=60,
        shared_intermediate_size=3072, num_attention_heads=64, num_key_value_heads=4, head_dim=128, rotary_dim=64,
        num_local_experts=128, num_experts_per_tok=4, max_position_embeddings=524_288, moe_layer_freq=kinds,
        sparse_attention_config=SPARSE | {
            "sparse_attention_freq": kinds, "sparse_disable_index_value": kinds, "sparse_index_dim": 128,
            "sparse_num_index_heads": 4, "sparse_block_size": 128, "sparse_topk_blocks": 16,
        },
    )  # fmt: skip
    assert config.index_topk == 2048
    assert 425e9 < count(family_for(config).parameters(config)) < 430e9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sparse_attention_config": SPARSE | {"sparse_init_block": 1}}, "sparse_init_block=1"),
        ({"sparse_attention_config": SPARSE | {"sparse_score_type": "sum"}}, "sparse_score_type"),
        ({"sparse_attention_config": SPARSE | {"sparse_disable_index_value": [0] * 4}}, "no weights of theirs"),
        ({"sparse_attention_config": SPARSE | {"sparse_num_index_heads": 1}}, "a head for each of"),
        ({"sparse_attention_config": SPARSE | {"sparse_local_block": 4}}, "cannot always see its last 4"),
        ({"sparse_attention_config": SPARSE | {"sparse_index_dim": 4}}, "at least the 8 entries"),
        ({"sparse_attention_config": SPARSE | {"sparse_attention_freq": [1] * 3}}, "must list 0 or 1"),
        ({"index_block_size": 8}, "keep one"), ({"mlp_layer_types": ["sparse"] * 4}, "say different things"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"), ({"use_gemma_norm": False}, "use_gemma_norm"),
        ({"rotary_dim": 6}, "rotary_dim=6"), ({"num_experts_per_tok": 5}, "is more than"), ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_output_gate": True}, "attention_output_gate"), ({"attention_bias": True}, "attention_bias must be"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(dj.ConfigError, match=said):
        read(**changes)


def test_what_its_layers_do_not_go_with() -> None:
    config = read()
    plan = choose(layer_traits(config), CallShape(1, 8, jnp.dtype("bfloat16")))
    assert plan.runner == "plain"
    assert any("blocks that an indexer chooses" in one.reason for one in plan.refusals)
    assert any("blocks of their own choice" in reason for reason in sharing_refusals(config, None, 2))
    with pytest.raises(ParameterError, match="an indexer of blocks"):
        check_cache_dtype(config, "fp8")
    layer, rotary = random_layer(config), rotary_tables(jnp.arange(4)[None], config.rope, config.head_dim)
    masked = dense_attend(jnp.ones((1, 4, 4), bool))
    with pytest.raises(NotImplementedError, match="no mask"):
        layer(jnp.zeros((1, 4, 32)), rotary, masked)


def test_what_its_drafter_says() -> None:
    """Model Optimizer's file: windows on both sides, a confidence head, and slots that predict the token behind them."""
    config = family_of(DRAFTER).config(DRAFTER, ("embed_tokens.weight",))
    assert (config.windows, config.causal, config.sample_from_anchor) == ((9, 9), (False, False), True)
    assert (config.head.confidence, config.own_embedding, config.num_drafts) == ("hidden_and_token", True, 4)
    inner = DRAFTER["dflash_config"]
    other = DRAFTER | {"dflash_config": inner | {"shift_label": False, "use_confidence_head": False}}
    config = family_of(other).config(other, ())
    assert (config.sample_from_anchor, config.head.confidence) == (False, "none")
    for key, value in (("sample_from_anchor", False), ("dspark_bonus_anchor", True)):
        wrong = DRAFTER | {"dflash_config": inner | {key: value}}
        with pytest.raises(dj.ConfigError, match="shift_label=True contradicts"):
            family_of(wrong).config(wrong, ())
