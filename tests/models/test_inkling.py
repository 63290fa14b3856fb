"""Inkling: transformers' logits and taps, attention with a bias by distance against float64, texts whose pages fall out of windows,
the released files' names and rows, what its files say and what is refused, and the way to our own format and back."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.attention import relative
from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.attention.recurrent import HybridAttend, HybridCache
from dflash_jax.cache import check_cache_dtype, make_pages
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.engine.planning import plan_engine
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import ParameterError
from dflash_jax.execution.plan import CallShape, choose
from dflash_jax.models import bind, family_of, layer_traits
from dflash_jax.models.inkling import InklingConfig, RelativeAttention
from dflash_jax.models.layers import Rotary
from dflash_jax.options import LoadOptions
from dflash_jax.sampling_params import SamplingParams

from ..engine.test_windows import poisoned
from ..hybrid_pair import hybrid_pair, relative_config
from ..published_layouts import LAYOUTS, TARGETS
from ..random_pair import Pair, of_one_shape, random_params, random_prompts
from .golden_files import GOLDEN, TOLERANCE
from .golden_models import check_conversion, check_logits_and_taps, check_texts

FOLDER = GOLDEN / "inkling_folder"
FILE = TARGETS["Inkling"]
TEXT = FILE["text_config"]


def test_transformers_logits_and_taps() -> None:
    check_logits_and_taps(FOLDER, TOLERANCE)


@pytest.mark.few
def test_texts_in_pages_under_a_drafter() -> None:
    check_texts(FOLDER, (0, 2, 3))


# Names of the released files, as transformers' mapping has them.
NAMES = (
    ("lm_head.", "model.llm.unembed."), ("model.embed_tokens.", "model.llm.embed."), ("model.embed_norm.", "model.llm.embed_norm."),
    ("model.norm.", "model.llm.norm."), ("model.layers.", "model.llm.layers."), ("self_attn.q_proj", "attn.wq_du"),
    ("self_attn.k_proj", "attn.wk_dv"), ("self_attn.v_proj", "attn.wv_dv"), ("self_attn.r_proj", "attn.wr_du"),
    ("self_attn.o_proj", "attn.wo_ud"), ("self_attn.", "attn."), ("sconv.conv1d.", "sconv."), ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "mlp_norm"), ("gate.e_score_correction_bias", "gate.bias"),
    ("shared_experts.down_proj", "shared_experts.shared_w2_weight"), ("experts.down_proj", "experts.w2_weight"),
    ("mlp.down_proj", "mlp.w2_md"),
)  # fmt: skip


def released(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of transformers' class as the released files have them: other names, gates and what they multiply in turns."""
    made: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if name.endswith(("up_proj.weight", "shared_experts.up_proj")):
            continue
        for ours, theirs in NAMES:
            name = name.replace(ours, theirs)
        if re.search(r"(gate|gate_up)_proj", name):
            other = name.replace("gate_proj", "up_proj").replace("attn.", "self_attn.")
            own = next(key for key in tensors if key.endswith(other.removeprefix("model.llm.")))
            pair = np.split(tensor, 2, axis=1) if "gate_up" in name else (tensor, tensors[own])
            axis = tensor.ndim - 2
            tensor = np.stack(pair, axis=axis + 1)
            tensor = tensor.reshape(*tensor.shape[:axis], -1, tensor.shape[-1])
            name = re.sub(r"mlp\.gate_proj\.weight", "mlp.w13_dn.weight", name)
            name = name.replace("shared_experts.gate_proj", "shared_experts.shared_w13_weight")
            name = name.replace("experts.gate_up_proj", "experts.w13_weight")
        made[name] = np.ascontiguousarray(tensor)
    return made


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden model as it would have been released, with parts that are left out."""
    folder = tmp_path_factory.mktemp("release")
    file = json.loads((FOLDER / "config.json").read_text())
    whole = {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "text_config": file,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    beside = {
        f"model.{name}.weight": np.zeros((2, 2), np.float32)
        for name in ("audio.encoder", "visual.norm", "mtp.layers.0.proj")
    }
    save_file(released(load_file(FOLDER / "model.safetensors")) | beside, folder / "model.safetensors")
    return folder


def test_the_released_files_are_the_same_model(release: Path) -> None:
    """Number for number."""
    ours, theirs = open_checkpoint(release), open_checkpoint(FOLDER)
    assert ours.config == replace(theirs.config, in_turns=True)
    first, second = (one.family.derived(one.config, one.load("float32")) for one in (ours, theirs))
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


@pytest.mark.few
def test_they_are_converted_there_and_back(release: Path, tmp_path: Path) -> None:
    check_conversion(FOLDER, tmp_path / "transformers")
    check_conversion(release, tmp_path / "released", left_out=("model.audio.", "model.visual.", "model.mtp."))


def oracle(layer: RelativeAttention, q: np.ndarray, k: np.ndarray, v: np.ndarray, mixes: np.ndarray) -> np.ndarray:
    """float64: what attention gives each token of a text `[T,N,H]`, one query at a time."""
    config, profiles = layer.config, np.asarray(layer.profiles[...], np.float64)
    out, reach = np.zeros(q.shape), len(q) if layer.window is None else layer.window[0] + 1
    for t, n in np.ndindex(*q.shape[:2]):
        head = n // (q.shape[1] // k.shape[1])
        seen = np.arange(max(t - reach + 1, 0), t + 1)
        biases = mixes[t, n].astype(np.float64) @ profiles
        near = t - seen < profiles.shape[1]
        scores = k[seen, head].astype(np.float64) @ q[t, n] / q.shape[2] + np.where(
            near, biases[np.minimum(t - seen, profiles.shape[1] - 1)], 0
        )
        if layer.window is None:
            scores = scores * (1 + config.growth_alpha * np.log(max((t + 1) / config.growth_floor, 1)))
        weights = np.exp(scores - scores.max())
        out[t, n] = weights @ v[seen, head] / weights.sum()
    return out


@pytest.mark.few("0-3-20000")
@pytest.mark.parametrize("workspace", [20_000, 2**28])
@pytest.mark.parametrize("page", [1, 3, 8, 16])
@pytest.mark.parametrize("index", [0, 1])
def test_a_bias_by_distance_over_pages_is_that_of_float64(
    index: int, page: int, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ragged batch, prompts in pieces, with NaN in every row that nobody wrote, all keys at a time and some."""
    monkeypatch.setattr(relative, "WORKSPACE", workspace)
    config = relative_config()
    layer, rng, lens = RelativeAttention(config, index), np.random.default_rng(1), np.array([45, 0, 7, 31])
    layer.profiles[...] = jnp.array(rng.normal(size=layer.profiles[...].shape), jnp.float32)
    n, k, h = config.heads(index)
    table = rng.permutation(4 * -(-48 // page)).reshape(4, -1)
    pages = jax.tree.map(
        lambda pool: jnp.full_like(pool, jnp.nan), make_pages(config, table.size, page, jnp.dtype("float32"))
    )
    widths = (n, h), (k, h), (k, h), (n, config.bias_width)
    texts = [[2 * rng.normal(size=(length, *width)).astype(np.float32) for width in widths] for length in lens]
    expected, got = [oracle(layer, *text) for text in texts], [[] for _ in texts]

    @jax.jit
    def call(given, positions, q_lens, pages):
        paged = PagedAttend(jnp.array(table, jnp.int32), positions, q_lens, page, related=True)
        attend, cache = HybridAttend(paged, lambda *given: given), HybridCache(pages, (), ())  # pyright: ignore
        q, k, v, mixes = given
        out, cache = attend.relative(layer, q, k, v, mixes, cache)
        return out, cache.pages

    for start in range(0, 48, 16):
        q_lens = np.clip(lens - start, 0, 16).astype(np.int32)
        given = [np.full((4, 16, *width), np.nan, np.float32) for width in widths]
        for row, (text, length) in enumerate(zip(texts, q_lens, strict=True)):
            for whole, part in zip(given, text, strict=True):
                whole[row, :length] = part[start : start + length]
        positions = jnp.broadcast_to(start + jnp.arange(16), (4, 16))
        out, pages = call([jnp.array(one) for one in given], positions, jnp.array(q_lens), pages)
        for row, length in enumerate(q_lens):
            got[row].append(np.asarray(out)[row, :length])
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.concatenate(ours), theirs, atol=2e-5)
    longest = [jnp.array(one)[None] for one in texts[0]]
    np.testing.assert_allclose(np.asarray(dense_attend().relative(layer, *longest)[0])[0], expected[0], atol=2e-5)


@pytest.mark.few
def test_texts_whose_pages_fall_out_of_windows_are_those_that_keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With states beside the pages, in slots and in snapshots that prompts go on from, and NaN in pages that were given back."""
    target = relative_config(num_layers=2, windows=(20, None), dense_layers=(0,))
    options: dict[str, Any] = {"max_model_len": 640, "page_size": 32, "max_chunk": 128, "max_batch": 2}
    pair = hybrid_pair(target, **options, state_snapshots=4, snapshot_tokens=64)
    of_one_shape(pair.engine)
    prompts, params = random_prompts((520, 60, 330)), SamplingParams(max_tokens=20)
    whole = object.__new__(Pair)
    whole.engine = replace(pair.engine, slides=False, share_prefixes=False, num_pages=0)
    of_one_shape(whole.engine)
    texts = whole.run(prompts, params, draft=False)[0]
    owned = poisoned(pair.engine, monkeypatch)
    assert [pool.group.reach for pool in pair.engine.groups] == [None, 20]
    before = pair.engine.scheduler.stats.cached_tokens
    assert pair.run(prompts, params)[0] == texts
    assert (np.max(owned, axis=0)[1:] < 14).all()
    assert pair.run(prompts, params)[0] == texts
    assert pair.engine.scheduler.stats.cached_tokens > before


def test_rows_that_fill_up_are_never_chosen() -> None:
    """Logits are those of a text model whose head has the true rows, over the divisor."""
    config = relative_config(num_layers=1, windows=(None,), dense_layers=(0,), true_vocab=40)
    params = random_params(config, 0)
    params["lm_head.weight"] = params["lm_head.weight"].at[40:].mul(100.0)
    model, hidden = bind(config, params), jax.random.normal(jax.random.key(1), (5, 40))
    logits = np.asarray(model.logits(hidden))
    np.testing.assert_allclose(logits[:, :40], hidden @ params["lm_head.weight"][:40].T / 1.5, atol=1e-5)
    assert np.isneginf(logits[:, 40:]).all()
    assert np.asarray(model.best(hidden)).tolist() == logits.argmax(axis=-1).tolist()
    whole = bind(replace(config, true_vocab=config.vocab_size), params)
    assert np.asarray(whole.best(hidden)).tolist() == np.asarray(whole.logits(hidden)).argmax(axis=-1).tolist()


def read(*names: str, **changes: Any) -> InklingConfig:
    text = {key: value for key, value in (TEXT | changes).items() if value is not ...}
    config = family_of(FILE).config(FILE | {"text_config": text}, names)
    assert isinstance(config, InklingConfig)
    return config


def test_what_files_say() -> None:
    """In the words of the release and in transformers'; tensors tell how rows of gates are stored."""
    config = read()
    assert (config.windows, config.dense_layers) == ((9, None, 9, None), (0, 1))
    assert (config.intermediate_size, config.moe_intermediate_size, config.num_shared_experts) == (48, 24, 2)
    assert (config.vocab_size, config.true_vocab, config.max_position, config.logit_divisor) == (97, 92, 512, 1.5)
    assert (config.bias_width, config.bias_extent, config.growth_floor, config.conv_taps) == (3, 14, 12, 4)
    assert config.key_shapes == ((2, 16), (1, 16)) * 2
    assert [shape.channels for shape in config.conv_shapes] == [64, 32, 32, 32, 32, 32] * 2
    assert type(config).from_dict(config.to_dict()) == config
    kinds = {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "local_layer_ids": ..., "dense_mlp_idx": ...}
    widths = {"intermediate_size": 48, "moe_intermediate_size": 24, "dense_intermediate_size": ...}
    others = {"conv_kernel_size": 4, "sconv_kernel_size": ..., "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}
    assert read(**kinds, **widths, **others) == config
    assert read("model.layers.2.mlp.experts.w13_weight").in_turns
    assert read(log_scaling_n_floor=None, unpadded_vocab_size=None).growth_floor == 0
    assert family_of({"model_type": "inkling_text"}).config(TEXT) == config
    drafter = family_of(LAYOUTS["SpecForge DSpark"]).config(LAYOUTS["SpecForge DSpark"])
    assert drafter.fitted(config).head_scale == 1 / 1.5
    assert drafter.fitted(config).logit_scale == replace(drafter, own_head=True).fitted(config).head_scale == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"swa_num_key_value_heads": 4}, "a multiple of key heads"), ({"num_experts_per_tok": 5}, "must be at most"),
        ({"conv_kernel_size": 3}, "keep the one"), ({"conv_kernel_size": 65, "sconv_kernel_size": 65}, "from 2 to 64"),
        ({"max_position_embeddings": 9}, "keep the one"), ({"embedding_multiplier": 3.0}, "keep the one"),
        ({"sliding_window": 7}, "keep the one"), ({"num_local_experts": 7}, "keep the one"),
        ({"layer_types": ["hybrid"] * 4}, "say different things"), ({"layer_types": ["conv"] * 4}, "must list hybrid"),
        ({"mlp_layer_types": ["sparse"] * 4}, "say different things"), ({"local_layer_ids": [4]}, "layers from 0 to 3"),
        ({"n_shared_experts": 0}, "n_shared_experts must be"), ({"log_scaling_n_floor": 0}, "at least 1"),
        ({"use_sconv": False}, "use_sconv=False"), ({"use_embed_norm": False}, "use_embed_norm=False"),
        ({"gate_activation": "softmax"}, "gate_activation"), ({"norm_after_topk": False}, "norm_after_topk=False"),
        ({"q_bias": True}, "q_bias=True"), ({"shared_expert_sink": False}, "shared_expert_sink=False"),
        ({"hidden_act": "gelu"}, "must be silu"), ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"), ({"rope_theta": 1e4}, "rope_theta"),
        ({"logits_mup_width_multiplier": 0.0}, "must be positive"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(dj.ConfigError, match=said):
        read(**changes)


def test_what_its_layers_do_not_go_with() -> None:
    config = read()
    assert choose(layer_traits(config), CallShape(1, 8, jnp.dtype("bfloat16"))).runner == "plain"
    assert any("a bias by distance" in reason for reason in sharing_refusals(config, None, 2))
    with pytest.raises(ParameterError, match="a bias by distance"):
        check_cache_dtype(config, "fp8")
    with pytest.raises(ParameterError, match="a bias by distance"):
        plan_engine(open_checkpoint(FOLDER), None, LoadOptions(weight_dtype="int8"))
    with pytest.raises(ParameterError, match="exact is not there"):
        plan_engine(open_checkpoint(FOLDER), None, LoadOptions(exact=True))
    layer, rotary = RelativeAttention(config, 1), Rotary(jnp.zeros((1, 4, 0)), jnp.zeros((1, 4, 0)))
    with pytest.raises(NotImplementedError, match="no mask"):
        layer(jnp.zeros((1, 4, 32)), rotary, dense_attend(jnp.ones((1, 4, 4), bool)))
    with pytest.raises(NotImplementedError, match="take DenseAttend"):
        layer(jnp.zeros((1, 4, 32)), rotary, PagedAttend)
