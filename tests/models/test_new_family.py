"""A model family is one file and one row of the registry: one that nobody published, added here with nothing else touched.

Its feed-forwards are gated by GELU, unlike those of every family there is, and its heads are not normed. What the engine decodes is
held against a float64 model of its own in NumPy.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.attention.dense import dense_attend
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.weights import weight_shapes
from dflash_jax.config import NEUTRAL_KEYS, DecoderConfig, KeyReader, decoder_fields
from dflash_jax.errors import ConfigError
from dflash_jax.execution.plan import CallShape, PageShape, choose, weight_format
from dflash_jax.models import Family, LayerTraits, Parameter, bind, family_of, layer_traits, registry
from dflash_jax.models.decoder import Decoder, target_parameters
from dflash_jax.models.layers import DecoderLayer, decoder_parameters
from dflash_jax.models.qwen3 import qwen3_canonical
from dflash_jax.models.traits import decoder_traits
from dflash_jax.sampling_params import SamplingParams

from ..devices import h200
from ..random_pair import Pair, draft_config, random_prompts

# --- what models/gelu.py would hold


@dataclass(frozen=True, kw_only=True)
class GeluConfig(DecoderConfig):
    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "GeluConfig":
        keys = KeyReader("config.json (Gelu)", values, notices)
        if (gate := keys.get("gate")) != "gelu_tanh":
            raise ConfigError(f"{keys.subject}: gate must be gelu_tanh, got {gate!r}")
        config = cls(**decoder_fields(keys, head_dim=None))
        keys.refuse_rest(NEUTRAL_KEYS)
        return config


def gelu_traits(config: GeluConfig) -> LayerTraits:
    return decoder_traits(config, qk_norm=False, activation="gelu_tanh")


class Gelu(Decoder):
    def __init__(self, config: GeluConfig):
        layers = [DecoderLayer(config, i, gelu_traits(config)) for i in range(config.num_layers)]
        super().__init__(config, layers, tied=False)


def gelu_parameters(config: GeluConfig) -> tuple[Parameter, ...]:
    return target_parameters(config, decoder_parameters(config, "model.", gelu_traits(config)), tied=False)


GELU = Family(
    "gelu", "target", ("GeluForCausalLM",), GeluConfig, Gelu, gelu_parameters, qwen3_canonical, traits=gelu_traits
)

# --- and the tests of it

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, INNER, VOCAB = 3, 4, 2, 8, 32, 48, 97
FILE = {
    "architectures": ["GeluForCausalLM"], "model_type": "gelu", "vocab_size": VOCAB, "hidden_size": WIDTH,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256, "gate": "gelu_tanh",
}  # fmt: skip


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, GELU))


def tensors() -> dict[str, np.ndarray]:
    """A checkpoint's tensors under their published names, with logits far enough apart for a greedy choice to be stable."""
    rng, found = np.random.default_rng(0), {}

    def draw(name: str, *shape: int, scale: float = 1.0) -> None:
        found[name] = (rng.standard_normal(shape) * scale / np.sqrt(shape[-1])).astype(np.float32)

    draw("model.embed_tokens.weight", VOCAB, WIDTH, scale=4.0)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            draw(f"{layer}self_attn.{name}_proj.weight", rows, WIDTH, scale=2.0)
        draw(f"{layer}self_attn.o_proj.weight", WIDTH, HEADS * DIM, scale=2.0)
        for name, shape in (("gate", (INNER, WIDTH)), ("up", (INNER, WIDTH)), ("down", (WIDTH, INNER))):
            draw(f"{layer}mlp.{name}_proj.weight", *shape, scale=2.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{name}.weight"] = rng.uniform(0.5, 1.5, WIDTH).astype(np.float32)
    found["model.norm.weight"] = rng.uniform(0.5, 1.5, WIDTH).astype(np.float32)
    draw("lm_head.weight", VOCAB, WIDTH, scale=4.0)
    return found


def oracle(ids: list[int]) -> np.ndarray:
    """Logits `[T, V]` in float64."""
    w = {name: array.astype(np.float64) for name, array in tensors().items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name]

    angles = np.arange(len(ids))[:, None] * 10000.0 ** (-np.arange(0, DIM, 2) / DIM)

    def turn(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        y = norm(x, f"{layer}input_layernorm.weight")
        q, k, v = ((y @ w[f"{layer}self_attn.{one}_proj.weight"].T).reshape(len(ids), -1, DIM) for one in "qkv")
        q, k = turn(q), turn(k)
        k, v = (np.repeat(one, HEADS // KV_HEADS, axis=1) for one in (k, v))
        scores = np.where(np.tri(len(ids), dtype=bool), np.einsum("tnh,snh->nts", q, k) / np.sqrt(DIM), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v).reshape(len(ids), -1)
        x = x + heads @ w[f"{layer}self_attn.o_proj.weight"].T
        y = norm(x, f"{layer}post_attention_layernorm.weight")
        gate, up = (y @ w[f"{layer}mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        x = x + (gate * up) @ w[f"{layer}mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


def loaded(folder: Path) -> tuple[GeluConfig, dict[str, jax.Array]]:
    """The family's configuration and parameters from a folder as the hub has it."""
    (folder / "config.json").write_text(json.dumps(FILE))
    save_file(tensors(), folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.family is GELU
    config: Any = checkpoint.config
    return config, checkpoint.load("float32")


def test_its_files_become_a_module_that_computes_what_was_published(tmp_path: Path) -> None:
    config, params = loaded(tmp_path)
    assert family_of(FILE) is GELU
    assert (layer_traits(config).qk_norm, config.head_dim) == (False, DIM)
    assert not any("q_norm" in name or "k_norm" in name for name in params)
    ids = random_prompts([19], seed=3)[0]
    model = bind(config, params)
    hidden, features, _ = model(jnp.array([ids]), jnp.arange(19)[None], dense_attend(), (-1, LAYERS - 1))
    assert features.shape == (1, 19, 2 * WIDTH)
    true = oracle(ids)
    np.testing.assert_allclose(np.asarray(model.logits(hidden))[0], true, atol=2e-5 * np.abs(true).max())


@pytest.mark.few
def test_the_engine_decodes_it_with_a_drafter_and_without(tmp_path: Path) -> None:
    """Prompts in chunks and pages, then cycles: every token is the float64 model's greedy choice."""
    config, params = loaded(tmp_path)
    draft = replace(draft_config(), vocab_size=VOCAB, hidden_size=WIDTH, target_hidden_size=WIDTH)
    pair = Pair(config, draft, edit=lambda weights: weights.update(target=params))
    prompts, new = random_prompts([5, 33]), 12
    drafted, counts, _ = pair.run(prompts, SamplingParams(max_tokens=new))
    plain, _, _ = pair.run(prompts, SamplingParams(max_tokens=new), draft=False)
    assert drafted == plain
    assert all(sum(each) == new - 1 for each in counts)
    for prompt, tokens in zip(prompts, plain, strict=True):
        logits = oracle([*prompt, *tokens])[len(prompt) - 1 : -1]
        assert tokens == np.argmax(logits, axis=-1).tolist()


def test_its_plan_says_which_kernels_do_not_have_its_gate() -> None:
    """In published sizes on an H200: each fused runner is asked, none has the gate."""
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336}
    config = GeluConfig(vocab_size=1024, num_layers=1, windows=(None,), **sizes)
    with h200():
        weights = weight_shapes([(config, GELU)], jnp.dtype(jnp.bfloat16), rows=16)["target"]
        call = CallShape(1, 16, jnp.dtype(jnp.bfloat16), PageShape(64, 32, jnp.dtype(jnp.bfloat16)))
        found = choose(layer_traits(config), call, weight_format(weights))
    assert (found.runner, found.attention, found.weight_layout) == ("plain", "apart", "rows")
    assert {"gelu_tanh" in (found.refused(one) or "") for one in ("persistent", "fused_dense", "fused_moe")} == {True}
