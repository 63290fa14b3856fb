"""Weights come to ranks as they would have been cut on the host, from a Hugging Face folder and from a converted one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_convert.cli import main

from dflash_jax.checkpoints.opening import open_checkpoint
from dflash_jax.checkpoints.weights import read_weights, spread, weight_shapes
from dflash_jax.cli.info import plan
from dflash_jax.models.dflash import HEAD_INDEX
from dflash_jax.parallel.ranks import local_ranks
from dflash_jax.quantization.weights import Quantized

FLOAT32 = jnp.dtype("float32")


@pytest.fixture(scope="module")
def converted(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "out"
    assert main([str(folder), "--output", str(out), "--draft", str(folder / "draft")]) == 0
    return out


@pytest.mark.parametrize("kind", ["hub", "converted"])
def test_shares(request, folder, kind):
    source = folder if kind == "hub" else request.getfixturevalue("converted")
    target, drafter, ranks = open_checkpoint(source), open_checkpoint(source / "draft"), local_ranks(4)
    assert ranks is not None
    whole, cut = (read_weights(target, drafter, FLOAT32, ranks=each) for each in (None, ranks))
    for checkpoint, role in ((target, "target"), (drafter, "draft")):
        for one in checkpoint.family.parameters(checkpoint.config):
            array, how = np.asarray(whole[role][one.name]), ranks.cut_of(one)
            for rank, shard in enumerate(cut[role][one.name].addressable_shards):
                expected = array if how is None else how.share(array, rank, 4)
                np.testing.assert_array_equal(np.asarray(shard.data), expected, err_msg=one.name)
    # The context's keys and values of a rank: of its only key head, 8 rows of the keys and 8 of the values.
    made, of_keys = cut["draft"]["context_kv_proj.weight"], np.asarray(whole["draft"]["context_kv_proj.weight"])
    for rank, shard in enumerate(made.addressable_shards):
        head = np.concatenate([of_keys[8 * rank : 8 * rank + 8], of_keys[32 + 8 * rank : 40 + 8 * rank]])
        np.testing.assert_array_equal(np.asarray(shard.data), head)


def test_rows_are_rounded_as_if_nobody_shared_them(folder):
    """A row's scale is that of all its columns, whoever has them; and the drafter's copy of the head is cut as the head is."""
    target, drafter, ranks = open_checkpoint(folder), open_checkpoint(folder / "draft"), local_ranks(2)
    assert ranks is not None
    whole, cut = (read_weights(target, drafter, FLOAT32, "int8", ranks=each) for each in (None, ranks))
    declared = {one.name: ranks.cut_of(one) for one in target.family.parameters(target.config)}
    rounded = [name for name, one in whole["target"].items() if isinstance(one, Quantized)]
    assert len(rounded) == 2 * 4 + 2
    for name in rounded:
        expected, how, made = np.asarray(whole["target"][name][:]), declared[name], cut["target"][name]
        shards = zip(made.values.addressable_shards, made.scales.addressable_shards, strict=True)
        for rank, (values, scales) in enumerate(shards):
            own = replace(
                made, values=jnp.asarray(np.asarray(values.data)), scales=jnp.asarray(np.asarray(scales.data))
            )
            share = expected if how is None else how.share(expected, rank, 2)
            np.testing.assert_array_equal(np.asarray(own[:]), share, err_msg=name)
    planned = spread_shapes(folder, "int8", ranks)
    for role, table in planned.items():
        assert table.keys() == cut[role].keys()
        for name, shape in table.items():
            kept = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding.spec), cut[role][name])
            assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding.spec), shape) == kept, name


def test_the_index_of_a_head_that_is_cut_is_planned_as_it_is_made(folder, monkeypatch):
    """Programs are compiled for what is planned, before there are weights."""
    monkeypatch.setattr("dflash_jax.checkpoints.weights.index_pays", lambda head: True)
    target, drafter, ranks = open_checkpoint(folder), open_checkpoint(folder / "draft"), local_ranks(2)
    assert ranks is not None
    made, planned = (
        found["draft"][HEAD_INDEX]
        for found in (read_weights(target, drafter, FLOAT32, ranks=ranks), spread_shapes(folder, None, ranks))
    )
    for one, wanted in zip(jax.tree.leaves(made), jax.tree.leaves(planned), strict=True):
        assert (one.shape, one.dtype, one.sharding.spec) == (wanted.shape, wanted.dtype, wanted.sharding.spec)
        assert one.shape[0] == 2 * one.addressable_shards[0].data.shape[0]


def spread_shapes(folder, kind, ranks):
    """What is planned before anything is read."""
    checkpoints = open_checkpoint(folder), open_checkpoint(folder / "draft")
    models = [(one.config, one.family) for one in checkpoints]
    return spread(models, weight_shapes(models, FLOAT32, kind, ranks=ranks), ranks)


def test_info_tells_what_each_device_holds(folder):
    options = {"dtype": "float32", "max_batch": 2, "max_model_len": 64, "page_size": 16}
    alone, shared = plan(folder, **options), plan(folder, tp=2, **options)
    assert "2 of them share the models; sizes are what each of these holds" in str(shared)
    assert 2 * shared["pages"]["pool_bytes"] == alone["pages"]["pool_bytes"]
    kept = sum(array.nbytes for array in jax.tree.leaves(_weights(folder, None)))
    own = sum(shard.data.nbytes for array in jax.tree.leaves(_weights(folder, 2)) for shard in array.addressable_shards)
    assert alone["memory"]["weight_bytes"] == kept
    assert 2 * shared["memory"]["weight_bytes"] == own


def _weights(folder, count):
    target, drafter = open_checkpoint(folder), open_checkpoint(folder / "draft")
    return read_weights(target, drafter, FLOAT32, ranks=None if count is None else local_ranks(count))
