"""Proposals through a copy of the head in float8: they are the head's own, and no text depends on them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import noise_of_all

import dflash_jax as dj
from dflash_jax.bench.workload import SHAPES, published_shape
from dflash_jax.checkpoints import weights
from dflash_jax.checkpoints.weights import stored_shapes, weight_bytes, weight_shapes
from dflash_jax.cli.info import collect
from dflash_jax.engine.cycle_costs import bare_cost
from dflash_jax.execution import draft_head as head_index
from dflash_jax.execution.draft_head import best_by_index, index_pays
from dflash_jax.models import family_named
from dflash_jax.models.dflash import HEAD_INDEX, SHARED_HEAD
from dflash_jax.models.heads import Block, MarkovConfig, Selector, SelectorConfig, Sizes
from dflash_jax.models.presets import DRAFTERS, TARGETS
from dflash_jax.quantization.weights import quantize

from ..devices import on

V1 = Path(__file__).parents[1] / "data" / "dflash"
PAIR = [(TARGETS["Qwen3-4B"], family_named("qwen3")), (DRAFTERS["Qwen3-4B-DFlash-b16"], family_named("dflash"))]


index_of = jax.jit(head_index.head_index)


@jax.jit
def best_of(x: jax.Array, head: jax.Array, index: Any) -> jax.Array:
    """As programs have it; operation by operation, each would be compiled by itself."""
    return best_by_index(x, head, index)


def head_and_rows(rows: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(rows), 2)
    return jax.random.normal(keys[0], (3000, 512)).astype(dtype), jax.random.normal(keys[1], (rows, 512)).astype(dtype)


@pytest.mark.few("shape1")
@pytest.mark.parametrize("shape", [(1,), (2, 3), (5, 16)])
def test_the_best_rows_are_the_heads(shape: tuple[int, ...]) -> None:
    """Of random rows, many of which are nearly as good, one in a hundred may share its group with one that the copy prefers."""
    head, rows = head_and_rows(int(np.prod(shape)))
    products = np.asarray(rows, np.float64) @ np.asarray(head, np.float64).T
    best = best_of(rows.reshape(*shape, -1), head, index_of(head))
    assert best.shape == shape
    places, largest = np.asarray(best).ravel(), products.max(axis=1)
    assert (places == products.argmax(axis=1)).mean() >= 0.98
    assert (products[np.arange(len(products)), places] > 0.95 * largest).all()


def test_drawn_rows_are_the_heads() -> None:
    """The largest product with its noise, in a row that does not sample without; on Hopper alone, and of plain products."""
    head, rows = head_and_rows(40)
    keys = jnp.asarray(np.random.default_rng(2).integers(2**32, size=(4, 10, 2)), jnp.uint32)
    temperature = jnp.array([0.0, 0.7, 20.0, 60.0])
    index = jax.jit(head_index.head_index)(head)
    found = jax.jit(head_index.drawn_by_index)(rows.reshape(4, 10, -1), head, index, keys, temperature)
    products = (np.asarray(rows, np.float64) @ np.asarray(head, np.float64).T).reshape(4, 10, -1)
    noisy = products + np.asarray(temperature)[:, None, None] * np.asarray(noise_of_all(keys, len(head)), np.float64)
    assert (np.asarray(found) == noisy.argmax(axis=-1)).mean() >= 0.95
    assert (noisy.argmax(axis=-1) != products.argmax(axis=-1)).mean() > 0.3
    config = DRAFTERS["Qwen3-4B-DFlash-b16"]
    assert not head_index.draws_by_index(config, rows, head, index, 3000)
    with on("NVIDIA H200"):
        assert head_index.draws_by_index(config, rows, head, index, 3000)
        assert not head_index.draws_by_index(config, rows, head, index, 6000)  # one of two ranks' shares
        assert not head_index.draws_by_index(config, rows, head, None, 3000)
        assert not head_index.draws_by_index(replace(config, logit_softcap=30.0), rows, head, index, 3000)


def test_the_head_decides() -> None:
    """Two rows that are one in the copy: the head's own numbers tell which is larger, and of equal ones it is the first."""
    head, rows = head_and_rows(1, jnp.float32)
    best = head[int(jnp.argmax(rows @ head.T))] * 1.5
    for more, expected in ((0.0, 7), (1e-4, 1000)):
        alike = head.at[7].set(best).at[1000].set(best + more * jnp.sign(rows[0]) * (jnp.abs(best) < 1))
        index = quantize(alike, "fp8_dynamic")
        values = np.asarray(index.values, np.float32)
        assert (values[7] == values[1000]).mean() > 0.99
        assert int(best_of(rows, alike, index)[0]) == expected


def test_rows_that_are_no_numbers() -> None:
    """A token of the vocabulary, and the other rows' own."""
    head, rows = head_and_rows(4)
    index = index_of(head)
    best = np.asarray(best_of(rows.at[2].set(jnp.nan), head, index))
    assert 0 <= best[2] < 3000
    kept = [0, 1, 3]
    np.testing.assert_array_equal(best[kept], np.asarray(best_of(rows, head, index))[kept])


def test_more_rows_than_a_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    head, rows = head_and_rows(9)
    index = index_of(head)
    expected = np.asarray(best_of(rows, head, index))
    monkeypatch.setattr(head_index, "MOST_ROWS", 8)
    monkeypatch.setattr(head_index, "float8_candidates", None)
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda: best_by_index(rows, head, index))()), expected)


def test_the_best_few_are_on_the_list() -> None:
    """Products are the head's own, and a selector that reads them proposes what it does of all logits."""
    head, rows = head_and_rows(30, jnp.float32)
    products = np.asarray(rows, np.float64) @ np.asarray(head, np.float64).T
    config = SelectorConfig(rank=4, top_k=16)
    index, blocks = index_of(head), rows.reshape(2, 15, -1)
    found = jax.jit(partial(head_index.shortlist, config, count=3000))(blocks, head, index)
    assert found is not None
    listed, places = (np.asarray(one).reshape(30, -1) for one in found)
    np.testing.assert_allclose(listed, np.take_along_axis(products, places, 1), rtol=1e-4, atol=1e-3)
    held = [set(np.argsort(-row)[:16]) <= set(its) for row, its in zip(products, places, strict=True)]
    assert np.mean(held) >= 0.9
    sizes = Sizes(hidden=512, vocab=3000, rows=3000)
    selector, keys = Selector(config, sizes), jax.random.split(jax.random.key(1), 2)
    selector.hidden_projection.weight[...] = jax.random.normal(keys[0], (4, 512)) / 8
    selector.successor_codebook[...] = selector.predecessor_codebook[...] = jax.random.normal(keys[1], (3000, 4))
    block = Block(
        jnp.array([3, 4]), blocks, jnp.asarray(products, jnp.float32).reshape(2, 15, -1), None, blocks, *[id] * 2
    )
    some = block._replace(logits=found[0], listed=found[1])

    def pick(first, scores, tokens):
        return jnp.argmax(scores, axis=-1).astype(jnp.int32), scores

    ours, theirs = (selector.propose(one, pick) for one in (some, block))
    assert (np.asarray(ours[0]) == np.asarray(theirs[0])).mean() >= 0.9
    assert head_index.shortlist(config, blocks, head, None, 3000) is None
    assert head_index.shortlist(config, blocks, head, index, 6000) is None  # one of two ranks' shares
    assert head_index.shortlist(MarkovConfig(rank=4), blocks, head, index, 3000) is None


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "pays"),
    [
        ("NVIDIA H200", (151_936, 2560), "bfloat16", True), ("NVIDIA A100-SXM4-80GB", (151_936, 2560), "bfloat16", False),
        ("NVIDIA H200", (151_936, 2560), "float32", False), ("NVIDIA H200", (4096, 2560), "bfloat16", False),
        ("NVIDIA H200", (151_936, 2688), "bfloat16", False), ("NVIDIA H200", (151_930, 2560), "bfloat16", False),
    ],
)  # fmt: skip
def test_where_an_index_pays(kind: str, shape: tuple[int, int], dtype: str, pays: bool) -> None:
    with on(kind):
        assert index_pays(jax.ShapeDtypeStruct(shape, dtype)) == pays
        assert not index_pays(jax.eval_shape(lambda head: quantize(head, "fp8"), jax.ShapeDtypeStruct(shape, dtype)))


def test_which_pairs_have_one() -> None:
    """Those whose drafter is not rounded and has no head of its own. It is no weight of a checkpoint."""
    dtype = jnp.dtype(jnp.bfloat16)
    with on("NVIDIA H200"):
        tables = [
            weight_shapes(PAIR, dtype, ours, theirs) for ours, theirs in ((None, None), (None, "fp8"), ("int8", None))
        ]
        assert HEAD_INDEX not in stored_shapes(PAIR, dtype)["draft"]
    assert [(HEAD_INDEX in table["draft"], SHARED_HEAD in table["draft"]) for table in tables] == [
        (True, False), (False, True), (False, False),
    ]  # fmt: skip
    index = tables[0]["draft"][HEAD_INDEX]
    assert (index.values.shape, index.values.dtype) == ((151_936, 2560), jnp.float8_e4m3fn)
    assert HEAD_INDEX not in weight_shapes(PAIR, dtype)["draft"]  # on a CPU


def test_costs_count_its_bytes_alone() -> None:
    with on("NVIDIA H200"):
        table = weight_shapes(PAIR, jnp.dtype(jnp.bfloat16))
    bare = {**table, "draft": {name: one for name, one in table["draft"].items() if name != HEAD_INDEX}}
    ours, theirs = (bare_cost(PAIR[0][0], PAIR[1][0], one) for one in (table, bare))  # type: ignore[arg-type]
    assert ours.draft == theirs.draft
    assert ours.head == theirs.head
    assert (
        ours.proposing.dense
        == weight_bytes({"": {HEAD_INDEX: table["draft"][HEAD_INDEX]}})
        < 0.51 * theirs.proposing.dense
    )


@pytest.mark.few
def test_no_text_depends_on_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped target with v1's drafter: the same texts and, as the head decides, the same acceptance; `info` says what the copy
    takes."""
    prompts, params = (
        ["def test_", "class Matrix:", "The quick brown fox"],
        dj.SamplingParams(max_tokens=60, ignore_eos=True),
    )
    sampled = dj.SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=3)
    options: Any = {"draft": V1, "max_batch": 1, "max_model_len": 128}
    exact = dj.load(**options)
    assert HEAD_INDEX not in exact.engine.weights["draft"]
    monkeypatch.setattr(weights, "index_pays", lambda head: True)
    model, facts = dj.load(**options), collect(**options)
    index = model.engine.weights["draft"][HEAD_INDEX]
    assert facts["memory"]["head_index_bytes"] == index.values.nbytes + index.scales.nbytes
    assert model.memory.weights - exact.memory.weights == facts["memory"]["head_index_bytes"]
    assert facts["memory"]["weight_bytes"] == model.memory.weights
    for each in (params, sampled):
        before, ours = (dj.generate(one, prompts, each) for one in (exact, model))
        assert [one.token_ids for one in ours] == [one.token_ids for one in before]
        lengths = [[one.acceptance_lengths for one in completions] for completions in (before, ours)]
        if each is sampled:  # proposals are drawn from the head's own logits
            assert lengths[0] == lengths[1]
        else:
            means = [np.mean([n for one in of for n in one]) for of in lengths]
            assert means[1] == pytest.approx(means[0], rel=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 120, 512, 2048])
def test_full_size_proposals_are_the_heads(rows: int) -> None:
    """Random rows lie nearer to each other than a text's: of those, too, the index leaves out next to none."""
    keys = jax.random.split(jax.random.key(rows), 2)
    head = jax.random.normal(keys[0], (151_936, 2560), jnp.bfloat16)
    assert index_pays(head)
    index, x = index_of(head), jax.random.normal(keys[1], (rows, 2560), jnp.bfloat16)
    best = np.asarray(jax.jit(best_by_index)(x, head, index))
    products = np.asarray(jnp.matmul(x, head.T, preferred_element_type=jnp.float32))
    chosen, largest = products[np.arange(rows), best], products.max(axis=1)
    assert (chosen >= largest * (1 - 1e-5)).mean() > 0.98
    assert (chosen >= 0.93 * largest).all()


@pytest.mark.few("qwen3-4b", "qwen3.5-27b", "gpt-oss-20b", "gemma*")
@pytest.mark.parametrize("name", SHAPES)
def test_published_pairs_that_are_measured_have_one(name: str) -> None:
    family, target, draft = published_shape(name)
    with on("NVIDIA H200"):
        tables = weight_shapes(
            [(target, family_named(family)), (draft, family_named("dflash"))], jnp.dtype(jnp.bfloat16)
        )
    # Proposals of v1 and of a selector are among the best rows of the target's head; gpt-oss is 2880 wide and Gemma 4 3840 or
    # 5376, no multiples of 512.
    best_rows = head_index.lists(draft.head) and not draft.own_head
    assert (HEAD_INDEX in tables["draft"]) == (best_rows and target.hidden_size % 512 == 0)
    assert target.hidden_size % 512 == 0 or name in ("gpt-oss-20b", "gemma-4-31b", "gemma-4-12b-dspark")
