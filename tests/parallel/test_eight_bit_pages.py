"""Pages in eight bits that devices share: one device's texts, on scales that are one device's, cut as the key heads are."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.cli.info import plan
from dflash_jax.compile.programs import Programs
from dflash_jax.engine import Engine
from dflash_jax.engine.sharing import check_sharing
from dflash_jax.errors import ParameterError
from dflash_jax.models import family_for
from dflash_jax.models.deepseek import DeepseekConfig
from dflash_jax.models.presets import TARGETS
from dflash_jax.options import LoadOptions
from dflash_jax.parallel.ranks import local_ranks

from ..random_pair import Pair, random_params
from ..shared_weights import shared_weights
from .test_families import DRAFT, EXPERTS, SIZES
from .test_families import OPTIONS as ALONE
from .test_texts import GREEDY, SAMPLED, check_ranks_agree, served
from .test_texts import OPTIONS as SEVERAL

OPTIONS: Any = SEVERAL | {"max_batch": 1}
TEXTS = [list(range(3, 40)), [90, 11, 12, 60, 5, 4]]
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"cache_dtype": "fp8", "calibration": TEXTS, "draft_cache_dtype": "fp8"},
    "int8": {"cache_dtype": "int8", "calibration": TEXTS, "cache_dtype_skip_layers": [0]},
    "int8_keys": {"cache_dtype": "int8_keys", "draft_cache_dtype": "fp8_e5m2"},
    "fp8_e5m2": {"cache_dtype": "fp8_e5m2"},
}


def same(ours: Any, theirs: Any) -> None:
    """Scales of every layer."""
    for side in ("k", "v", "q"):
        for one, other in zip(getattr(ours, side), getattr(theirs, side), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.few
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("kind", FORMATS)
def test_texts(folder, kind, ranks):
    """Eight devices have four key heads: each is on two of them, with its scales."""
    single, model = (dj.load(folder, tp=count, **OPTIONS, **FORMATS[kind]) for count in (1, ranks))
    if FORMATS[kind].get("calibration"):
        found: Any = model.engine.cache_scales
        same(found, single.engine.cache_scales)
        assert len({float(scale) for scale in np.ravel(found.v)}) > 1
    texts = served(model, GREEDY)
    assert texts == served(single, GREEDY)
    if (kind, ranks) == ("fp8", 2):
        assert served(model, SAMPLED) == served(single, SAMPLED)
    if ranks == 2:
        assert [tokens for tokens, _ in served(model, GREEDY, draft=False)] == [tokens for tokens, _ in texts]
    (pages, draft), (whole, _), heads = model.engine.take_pools(), single.engine.take_pools(), max(1, 4 // ranks)
    own = [rank * 4 // ranks for rank in range(ranks)]
    for name, axis in (("k_scale", 0 if kind.startswith("fp8") else 1), ("v_scale", 0)):
        for scale, of_all in zip(getattr(pages, name), getattr(whole, name), strict=True):
            assert (scale is None) == (of_all is None)
            for rank, shard in enumerate(() if scale is None else scale.addressable_shards):
                share = np.take(np.asarray(of_all), range(own[rank], own[rank] + heads), axis=axis)
                assert shard.data.shape == share.shape
                if axis == 0:
                    np.testing.assert_allclose(shard.data, share, rtol=1e-6)
    held = sum(leaf.addressable_shards[0].data.nbytes for pools in (pages, draft) for leaf in (*pools.k, *pools.v))
    held += sum(leaf.addressable_shards[0].data.nbytes for leaf in pages.k_scale if leaf is not None and leaf.ndim == 3)
    assert model.engine.pool_bytes == held


@pytest.mark.few
def test_pools_stay_and_ranks_agree(folder):
    """What is donated stays where it is, keys' scales too. Pages found again bring these along."""
    model = dj.load(folder, tp=2, **SEVERAL, **FORMATS["int8"])

    def places() -> list[int]:
        pools = jax.tree.leaves(model.engine.take_pools())
        return [shard.data.unsafe_buffer_pointer() for pool in pools for shard in pool.addressable_shards]

    before = places()
    check_ranks_agree(model, 2)
    long = [int(token) for token in np.random.default_rng(1).integers(5, 90, 20)]
    first, again = (dj.generate(model, [long], GREEDY)[0] for _ in range(2))
    assert (first.token_ids, again.stats.cached_tokens) == (again.token_ids, 16)
    assert places() == before


@pytest.mark.few
def test_scales_are_saved_found_on_traffic_and_read_from_a_checkpoint(folder, tmp_path):
    made = dj.load(folder, tp=2, **OPTIONS, **FORMATS["fp8"])
    made.save_cache_scales(tmp_path / "scales.json")
    again = dj.load(folder, tp=8, cache_dtype="fp8", cache_scales=tmp_path / "scales.json", **OPTIONS)
    same(again.engine.cache_scales, made.engine.cache_scales)
    single, double = (dj.load(folder, tp=tp, cache_dtype="fp8", cache_scales="traffic", **OPTIONS) for tp in (1, 2))
    assert served(double, GREEDY) == served(single, GREEDY)
    same(double.engine.cache_scales, single.engine.cache_scales)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = np.array([1, 2, 4, 8], np.float32) / 64
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = np.array(layer + 1, np.float32)
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    (scaled / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, scaled / "model.safetensors", metadata={"format": "pt"})
    found: Any = dj.load(scaled, draft=False, tp=8, cache_dtype="auto", **OPTIONS).engine.take_pools()[0]
    assert [float(shard.data[0]) * 64 for shard in found.k_scale[1].addressable_shards] == [1, 1, 2, 2, 4, 4, 8, 8]


def test_info_counts_bytes_of_each_device(folder):
    alone, shared = (plan(folder, tp=tp, **OPTIONS, cache_dtype="int8_keys") for tp in (1, 2))
    assert 2 * shared["pages"]["pool_bytes"] == alone["pages"]["pool_bytes"]
    assert "int8 for keys and float32 for values" in str(shared)


LATENTS = DeepseekConfig(
    **SIZES | {"num_layers": 1, "windows": (None,)}, **EXPERTS, num_heads=4, num_kv_heads=4, head_dim=24, q_lora_rank=24,
    kv_lora_rank=128, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_shared_experts=1, routing="noaux_tc",
    num_groups=2, groups_per_token=1, routing_scale=1.0, num_dense_layers=1,
)  # fmt: skip


@pytest.mark.few("dealt_fp8_packed")
@pytest.mark.parametrize("kind", ["fp8", "fp8_packed", "dealt_fp8", "dealt_fp8_packed"])
def test_latents(kind):
    """Every device has all rows, or its part of them, in the same eight bits, and what scales them."""
    dealt, kind = 2 if kind.startswith("dealt") else 1, kind.removeprefix("dealt_")
    draft, ranks = replace(DRAFT, target_layer_ids=(-1, 0)), local_ranks(2, dealt=dealt)
    assert ranks is not None
    options = ALONE | {"cache_dtype": kind, "scales_from_traffic": kind == "fp8"}
    options |= {"query_dtype": "fp8"} if kind == "fp8" and dealt == 1 else {}
    pair = Pair(LATENTS, draft, **options)
    prompts = [np.random.default_rng(2).integers(0, 90, 20).tolist()]
    expected, found = pair.run(prompts)[:2], pair.engine.cache_scales
    weights = {"target": random_params(LATENTS, 0), "draft": random_params(draft, 1, 1.0)}
    shared = shared_weights([(LATENTS, family_for(LATENTS)), (draft, family_for(draft))], weights, ranks)
    options |= {"page_size": dealt * options["page_size"]}
    pair.engine = Engine(LATENTS, draft, shared, programs=Programs(ranks=ranks), **options)
    assert pair.run(prompts)[:2] == expected
    pool = pair.engine.take_pools()[0].k[0]
    assert pool.dtype == (jnp.uint8 if kind == "fp8_packed" else jnp.float8_e4m3fn)
    assert len({np.asarray(shard.data).tobytes() for shard in pool.addressable_shards}) == dealt
    if kind == "fp8":
        same(pair.engine.cache_scales, found)
        assert found is not None
        assert found.q


def test_what_is_not_dealt_out_in_eight_bits():
    check_sharing(LATENTS, None, LoadOptions(tp=2, decode_context_parallel_size=2, cache_dtype="fp8"))
    asked = {"tp": 2, "decode_context_parallel_size": 2, "cache_dtype": "fp8"}
    with pytest.raises(ParameterError, match="attends with queries in the model's dtype, got query_dtype='fp8'"):
        check_sharing(LATENTS, None, LoadOptions(**asked, query_dtype="fp8"))
    with pytest.raises(ParameterError, match="pages of heads in the model's dtype, got cache_dtype='fp8'"):
        check_sharing(replace(TARGETS["Qwen3-8B"], num_kv_heads=1), None, LoadOptions(**asked))
