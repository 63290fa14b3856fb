"""The Qwen3 target against transformers' Qwen3ForCausalLM, module by module in float32 (see make_golden.py)."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.models import bind, family_of

from .golden_files import TOLERANCE, cases, difference, golden

CASES = cases("qwen3")


@functools.cache
def observed(case: str) -> dict[str, Any]:
    """Our value for every name a golden file holds."""
    config, params, inputs, _ = golden(case)
    model = bind(config, params)
    ids, positions = jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"])
    dense, seen = dense_attend(), {}

    def attend(layer: Any, qkv: Any, rotary: Any, cache: Any) -> Any:
        seen.setdefault(layer.index, layer.heads(qkv, rotary))
        return dense(layer, qkv, rotary, cache)

    taps = tuple(range(-1, config.num_layers))
    hidden, features, _ = model(ids, positions, attend, taps)
    embed, *blocks = jnp.split(features, len(taps), axis=-1)
    first = model.layers[0]
    ours = {"embed": embed, "norm0": first.input_norm(embed), "final_norm": hidden, "logits": model.logits(hidden)}
    ours |= dict(zip(("q0", "k0", "v0"), seen[0], strict=True))
    ours["attn0"] = first.attn(ours["norm0"], model.rotary(positions), dense)[0]
    ours["mlp0"] = first.mlp(first.post_norm(embed + ours["attn0"]))
    return ours | {f"block{index}": block for index, block in enumerate(blocks)}


def test_cases_are_there() -> None:
    assert len(CASES) >= 8


@pytest.mark.parametrize("case", CASES)
def test_every_module_agrees(case: str) -> None:
    _, _, _, expected = golden(case)
    ours = observed(case)
    assert set(ours) == set(expected)
    errors = {name: difference(ours[name], value) for name, value in expected.items()}
    assert all(error <= TOLERANCE for error in errors.values()), errors


def test_angles_are_computed_once_for_all_layers() -> None:
    config, params, inputs, _ = golden("qwen3_untied")
    model = bind(config, params)
    arrays = jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"])
    text = str(jax.make_jaxpr(lambda ids, positions: model(ids, positions, dense_attend())[0])(*arrays))
    assert config.num_layers > 1
    assert [text.count(f"= {name} ") for name in ("cos", "sin")] == [1, 1]


@pytest.mark.parametrize("case", ["qwen3_untied", "qwen3_window"])
def test_taps_follow_the_order_asked_for(case: str) -> None:
    config, params, inputs, expected = golden(case)
    model = bind(config, params)
    last = config.num_layers - 1
    _, features, _ = model(jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"]), dense_attend(), (last, -1, 0))
    theirs = np.concatenate([expected[f"block{last}"], expected["embed"], expected["block0"]], axis=-1)
    assert difference(features, theirs) <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_last_tap_is_taken_before_the_final_norm(case: str) -> None:
    config, _, _, expected = golden(case)
    last = observed(case)[f"block{config.num_layers - 1}"]
    assert difference(last, expected[f"block{config.num_layers - 1}"]) <= TOLERANCE
    assert difference(last, expected["final_norm"]) > 0.1


@pytest.mark.parametrize("case", CASES)
def test_a_tap_one_layer_off_is_noticed(case: str) -> None:
    config, _, _, expected = golden(case)
    ours = observed(case)
    streams = ["embed", *(f"block{index}" for index in range(config.num_layers))]
    for right, wrong in itertools.pairwise(streams):
        assert difference(ours[wrong], expected[right]) > 0.1
        assert difference(ours[right], expected[wrong]) > 0.1


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, {}),
        ({"sliding_window": 7, "use_sliding_window": True}, {28: 7, 29: 7}),
        ({"use_sliding_window": True, "max_window_layers": 29}, {29: 4096}),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, {}),
    ],
)
def test_absent_window_keys_mean_what_transformers_takes_for_them(
    keys: dict[str, Any], windows: dict[int, int]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 61}
    hf_config = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 30} | sizes | keys
    assert family_of(hf_config).config(hf_config).windows == tuple(windows.get(index) for index in range(30))
