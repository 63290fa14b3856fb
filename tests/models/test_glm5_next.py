"""GLM-5.3-Flash: transformers' logits and taps, what its files say and what is refused, and the way to our own format and back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_convert.cli import main as dflash_convert
from safetensors.numpy import load_file

from dflash_jax.cache import check_cache_dtype
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.opening import open_checkpoint as open_any
from dflash_jax.engine.planning import plan_engine
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import ConfigError, ParameterError
from dflash_jax.execution.plan import exact_refusals
from dflash_jax.models import family_of, layer_traits
from dflash_jax.models.glm5_next import Glm5NextConfig
from dflash_jax.options import LoadOptions

from ..published_layouts import TARGETS
from .golden_files import GOLDEN, TOLERANCE, difference
from .test_parity_llama import logits_and_taps

FOLDER = GOLDEN / "glm5_next_folder"
FILE = TARGETS["GLM-5.3-Flash"]
INNER = FILE["text_config"]["linear_attn_config"]


def read(**changes: Any) -> Glm5NextConfig:
    text = {key: value for key, value in (FILE["text_config"] | changes).items() if value != "left out"}
    config = family_of(FILE).config(FILE | {"text_config": text})
    assert isinstance(config, Glm5NextConfig)
    return config


def test_transformers_logits_and_taps() -> None:
    checkpoint = open_checkpoint(FOLDER)
    with np.load(FOLDER / "expected.npz") as file:
        ids, logits, taps = file["ids"], file["logits"], file["taps"]
    ours = logits_and_taps(checkpoint.config, checkpoint.load("float32"), ids.tolist())
    assert difference(ours[0], logits) <= TOLERANCE
    assert difference(ours[1], taps) <= TOLERANCE


@pytest.mark.few
def test_it_is_converted_there_and_back(tmp_path: Path) -> None:
    """But for the tower."""
    assert dflash_convert([str(FOLDER), "--output", str(tmp_path / "out"), "--verify", "logits", "--quiet"]) == 0
    assert open_any(tmp_path / "out").config == open_checkpoint(FOLDER).config
    assert dflash_convert([str(tmp_path / "out"), "--reverse", "--output", str(tmp_path / "back"), "--quiet"]) == 0
    first, last = (load_file(one / "model.safetensors") for one in (FOLDER, tmp_path / "back"))
    text = {name: array for name, array in first.items() if ".visual." not in name}
    assert text.keys() == last.keys()
    assert all(text[name].tobytes() == last[name].tobytes() for name in text)


def test_what_a_file_says() -> None:
    """In the words of the release and in transformers', in which sizes of layers with states stand outside."""
    config = read()
    assert (config.full_layers, config.cached_layers, config.num_dense_layers) == ((2,), 1, 1)
    assert (config.kda.heads, config.kda.dim, config.kda.lower_bound, config.latent_norm_eps) == (4, 8, -5.0, 1e-5)
    outside = {"linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0}
    assert read(linear_attn_config="left out", **outside) == config
    assert read(first_k_dense_replace="left out", mhc="left out", num_nextn_predict_layers="left out") == config
    full = FILE["text_config"]["layer_types"]
    assert read(layer_types=[kind.replace("deepseek_sparse", "full") for kind in full]) == config
    assert read(linear_attn_config=INNER | {"gate_lower_bound": None}).kda.lower_bound == -5.0
    assert read(linear_attn_config=INNER | {"gate_lower_bound": None, "safe_gate": False}).kda.lower_bound is None
    assert read(linear_attn_config="left out", **outside | {"linear_lower_bound": None}).kda.lower_bound is None
    assert Glm5NextConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"qk_rope_head_dim": 4}, "qk_rope_head_dim must be 0"), ({"index_kpool_always_select_tail": False}, "select_tail=False"),
        ({"index_topk": 18}, "not a multiple"), ({"mhc": False}, "mhc=False"), ({"hidden_act": "gelu"}, "must be silu"),
        ({"indexer_types": ["full", "full", "shared", "full"]}, "indexer_types must say full"),
        ({"index_topk_freq": 2, "indexer_types": None}, "index_topk_freq must be 1"),
        ({"layer_types": ["linear_attention"] * 4}, "of both kinds"), ({"layer_types": ["conv"] * 4}, "must list linear_attention"),
        ({"linear_attn_config": INNER | {"kda_layers": [1, 2, 3]}}, "kda_layers"), ({"linear_num_heads": 3}, "say two things"),
        ({"linear_attn_config": INNER | {"short_conv_kernel_size": 3}}, "must be 4"), ({"q_lora_rank": None}, "q_lora_rank"),
        ({"linear_attn_config": INNER | {"gate_lower_bound": 1.0}}, "a negative number"), ({"swiglu_limit": 0}, "must be positive"),
        ({"linear_attn_config": INNER | {"use_full_rank_gate": True}}, "use_full_rank_gate"), ({"sliding_window": 9}, "sliding"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(**changes)


def test_what_its_layers_do_not_go_with() -> None:
    config = read()
    assert any("several residual streams" in reason for reason in sharing_refusals(config, None, 2))
    assert any("in another order" in reason for reason in exact_refusals(layer_traits(config), 5))
    with pytest.raises(ParameterError, match="an indexer of pools"):
        check_cache_dtype(config, "fp8")
    with pytest.raises(ParameterError, match="several residual streams"):
        plan_engine(open_checkpoint(FOLDER), None, LoadOptions(weight_dtype="int8"))
