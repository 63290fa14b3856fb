"""Qwen3.8-Flash-Next: transformers' logits and taps, attention to chosen blocks and rows of n-grams against exact numbers, what its
files say and what is refused, and the way to our own format and back."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.attention import whole_blocks
from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.attention.recurrent import HybridAttend, HybridCache
from dflash_jax.cache import check_cache_dtype, make_pages
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.engine.planning import plan_engine
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import ParameterError
from dflash_jax.execution.plan import CallShape, choose
from dflash_jax.models import family_of, layer_traits
from dflash_jax.models.layers import rotary_tables
from dflash_jax.models.qwen4_exp import ChosenAttention, Qwen4ExpConfig
from dflash_jax.options import LoadOptions

from ..published_layouts import TARGETS
from .golden_files import GOLDEN, TOLERANCE
from .golden_models import check_conversion, check_logits_and_taps, check_texts

FOLDER = GOLDEN / "qwen4_exp_folder"
FILE = TARGETS["Qwen3.8-Flash-Next"]
TEXT = FILE["text_config"]


def test_transformers_logits_and_taps() -> None:
    """Within 1.5e-6 as programs are compiled by default. Gates of n-grams take the root of products near 0, which magnifies what
    quick compiling rounds otherwise."""
    check_logits_and_taps(FOLDER, 3 * TOLERANCE)


@pytest.mark.few
def test_it_is_converted_there_and_back(tmp_path: Path) -> None:
    """But for the tower and what is computed here."""
    check_conversion(FOLDER, tmp_path, left_out=(".visual.", ".layer_multipliers", ".ngram_heads_"))


@pytest.mark.few
def test_texts_in_pages_under_a_drafter() -> None:
    check_texts(FOLDER, (0, 2, 4))


def read(*names: str, **changes: Any) -> Qwen4ExpConfig:
    text = {key: value for key, value in (TEXT | changes).items() if value is not ...}
    config = family_of(FILE).config(FILE | {"text_config": text}, names)
    assert isinstance(config, Qwen4ExpConfig)
    return config


def random_layer(config: Qwen4ExpConfig) -> ChosenAttention:
    layer, rng = ChosenAttention(config, 3, layer_traits(config)), np.random.default_rng(0)
    for norm in (layer.query_norm, layer.key_norm, layer.index_q_norm, layer.index_k_norm):
        norm.weight[...] = jnp.array(rng.uniform(-0.5, 0.5, size=norm.weight[...].shape), jnp.float32)
    return layer


def oracle(layer: ChosenAttention, projected: np.ndarray) -> np.ndarray:
    """float64: what attention gives each token of a text `[T,W]`, one query at a time."""
    c, tokens = layer.config, len(projected)
    n, k, h, e, size = c.num_heads, c.num_kv_heads, c.head_dim, c.index_head_dim, c.index_block
    cos, sin = (np.asarray(side, np.float64)[0] for side in rotary_tables(jnp.arange(tokens)[None], c.rope, h))
    half = cos.shape[-1]

    def heads(rows: np.ndarray, width: int, norm: Any, places: np.ndarray) -> np.ndarray:
        x = rows.reshape(len(rows), rows.shape[1] // width, width)
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + c.norm_eps)
        x = x * (1 + np.asarray(norm.weight[...], np.float64))
        first, last, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turns = cos[places][:, None], sin[places][:, None]
        return np.concatenate([first * turns[0] - last * turns[1], last * turns[0] + first * turns[1], rest], axis=-1)

    every, begins = np.arange(tokens), np.arange(tokens // size) * size
    cuts = np.cumsum([n * h, k * h, k * h, n * h, c.index_heads * e])
    parts = np.split(projected.astype(np.float64), cuts, axis=-1)
    q, keys = heads(parts[0], h, layer.query_norm, every), heads(parts[1], h, layer.key_norm, every)
    values, gates = parts[2].reshape(tokens, k, h), 1 / (1 + np.exp(-parts[3].reshape(tokens, n, h)))
    index_q = heads(parts[4], e, layer.index_q_norm, every)
    means = parts[5][: len(begins) * size].reshape(len(begins), size, e).mean(axis=1)
    index_k = heads(means, e, layer.index_k_norm, begins)[:, 0]
    out = np.zeros((tokens, n, h))
    for t in range(tokens):
        whole = (t + 1) // size
        scores = np.maximum(index_q[t] @ index_k[:whole].T, 0).sum(axis=0)
        taken = np.argsort(-scores, kind="stable")[: c.index_topk // size]
        seen = np.isin(every[: t + 1] // size, taken) | (every[: t + 1] >= whole * size)
        for head in range(n):
            weights = np.where(seen, np.exp(keys[: t + 1, head // (n // k)] @ q[t, head] * h**-0.5), 0)
            out[t, head] = weights @ values[: t + 1, head // (n // k)] / weights.sum()
    return out * gates


@pytest.mark.few("3-5")
@pytest.mark.parametrize(("page", "size"), [(2, 4), (8, 4), (6, 4), (3, 5), (16, 1)])
def test_chosen_blocks_over_pages_are_those_of_float64(page: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ragged batch, prompts in pieces, with NaN in every row that nobody wrote, some queries at a time."""
    monkeypatch.setattr(whole_blocks, "WORKSPACE", 40_000)
    config = replace(read(), index_block=size, index_topk=4 * size)
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
        paged = PagedAttend(jnp.array(table, jnp.int32), positions, q_lens, page, related=True)
        attend, cache = HybridAttend(paged, lambda *given: given), HybridCache(pages, (), ())  # pyright: ignore
        rotary = rotary_tables(positions, config.rope, config.head_dim)
        out, cache = layer.mix(projected, rotary, attend, cache)
        return out, cache.pages

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
    longest, rotary = jnp.array(texts[0])[None], rotary_tables(jnp.arange(45)[None], config.rope, config.head_dim)
    np.testing.assert_allclose(
        np.asarray(layer.mix(longest, rotary, dense_attend(), None)[0])[0], expected[0], atol=2e-5
    )


def test_a_file_with_other_multipliers_is_refused(tmp_path: Path) -> None:
    """What tells the rows of n-grams is computed, and a checkpoint that has it must agree."""
    tensors = load_file(FOLDER / "model.safetensors")
    name = "model.language_model.layers.2.ple.ple_embedding.layer_multipliers"
    shutil.copy(FOLDER / "config.json", tmp_path)
    save_file(tensors | {name: tensors[name] + 2}, tmp_path / "model.safetensors")
    with pytest.raises(dj.CheckpointError, match="is not what follows from") as error:
        open_checkpoint(tmp_path)
    assert name in str(error.value)
    assert len(error.value.problems) == 1


def test_what_files_say() -> None:
    """In the words of the release and in transformers'; tensors tell how tables of n-grams are stored."""
    config = read()
    assert (config.full_layers, config.cached_layers, config.state_layers) == ((3,), 1, 3)
    assert (config.index_block, config.index_topk, config.index_heads, config.index_head_dim) == (4, 12, 4, 8)
    assert (config.streams, config.stream_rank, config.delta.gate, config.rope.partial) == (4, 6, "sigmoid", 0.5)
    assert (config.ngram_layers, config.ngram_end, config.ngram_size, config.ngram_parts) == ((1,), 2, 3, 2)
    assert (config.ngrams[0].primes, config.ngrams[0].rows) == ((29, 31, 37, 41), 140)
    assert type(config).from_dict(config.to_dict()) == config
    assert read(layer_types=[kind.replace("full_", "qwen_sparse_") for kind in TEXT["layer_types"]]) == config
    assert read(layer_types=..., full_attention_interval=4, eos_token_id=[2, 9]) == config
    assert read("model.layers.1.ple.ple_embedding.ngram_embedding.weight").ngram_parts == 0
    assert family_of(TEXT | {"architectures": ["Qwen4ExpForCausalLM"]}).config(TEXT) == config
    plain = read(ple_layer_ids=[], eos_token_id=None, output_gate_type=None)
    assert (plain.ngrams, plain.ngram_shapes, plain.delta.gate) == ((), (), "silu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ple_layer_ids": [4]}, "n-grams are for layers that do not attend"), ({"ple_layer_ids": [0]}, "must list layers from 1"),
        ({"eos_token_id": None}, "eos_token_id must be the token"), ({"eos_token_id": 97}, "a token of the vocabulary"),
        ({"ple_embed_dim": 10}, "a multiple of the 4 heads"), ({"split_ngram_parts": 3}, "a multiple of its 3 parts"),
        ({"ngram_vocab_size_base": 2**30}, "fewer than 2,147,483,648 rows"), ({"ngram_size": 65}, "must be 64 or less"),
        ({"ngram_size": 1}, "at least 2"), ({"heads_per_ngram": 2**20}, "at most"), ({"hc_count": 1}, "from 2 to 64"),
        ({"ple_embedding_dtype": "float8_e4m3fn"}, "ple_embedding_dtype"), ({"indexer_kv_heads": 2}, "indexer_kv_heads=2"),
        ({"indexer_budget": 13}, "not a multiple"), ({"indexer_head_dim": 6}, "must hold the 8 entries"),
        ({"indexer_n_heads": None}, "indexer_n_heads must be"), ({"output_gate_type": "tanh"}, "must be silu or sigmoid"),
        ({"attention_bias": True}, "attention_bias must be false"), ({"num_experts_per_tok": 5}, "is more than"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer of layer_types"), ({"hidden_act": "gelu"}, "must be silu"),
        ({"layer_types": ["conv"] * 4}, "must list linear_attention"), ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(dj.ConfigError, match=said):
        read(**changes)


def test_what_its_layers_do_not_go_with() -> None:
    config = read()
    plan = choose(layer_traits(config), CallShape(1, 8, jnp.dtype("bfloat16")))
    assert plan.runner == "plain"
    assert any("several residual streams" in reason for reason in sharing_refusals(config, None, 2))
    with pytest.raises(ParameterError, match="an indexer of blocks"):
        check_cache_dtype(config, "fp8")
    with pytest.raises(ParameterError, match="hashed n-grams"):
        plan_engine(open_checkpoint(FOLDER), None, LoadOptions(weight_dtype="int8"))
    with pytest.raises(ParameterError, match="exact is not there"):
        plan_engine(open_checkpoint(FOLDER), None, LoadOptions(exact=True))
    layer, rotary = random_layer(config), rotary_tables(jnp.arange(4)[None], config.rope, config.head_dim)
    with pytest.raises(NotImplementedError, match="no mask"):
        layer(jnp.zeros((1, 4, 32)), rotary, dense_attend(jnp.ones((1, 4, 4), bool)))
