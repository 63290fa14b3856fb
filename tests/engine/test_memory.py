"""What is planned before anything is loaded, and what is said when memory runs out all the same."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.cache import page_bytes
from dflash_jax.checkpoints.pair import open_pair
from dflash_jax.checkpoints.weights import (
    read_weights,
    reading_bytes,
    round_weights,
    rounded_on_arrival,
    stored_shapes,
    weight_bytes,
    weight_shapes,
)
from dflash_jax.cli.commands import main
from dflash_jax.cli.info import _measured, collect
from dflash_jax.engine import planning
from dflash_jax.engine.memory import (
    MemoryPlan,
    context_bytes,
    experts_bytes,
    named_memory_errors,
    plan_memory,
    size,
    workspace_bytes,
)
from dflash_jax.models import family_named
from dflash_jax.models.dflash import SHARED_HEAD
from dflash_jax.models.presets import DEEPSEEK_TARGETS, DRAFTERS, GEMMA4_TARGETS, SPARSE_TARGETS, TARGETS
from dflash_jax.options import LoadOptions
from dflash_jax.quantization.weights import quantize_weights, rounding

GIB = 1 << 30
PAIR = [(one.config, one.family) for one in open_pair() if one is not None]


def plan(**changes) -> MemoryPlan:
    usual = {
        "weights": 9 * GIB,
        "reading": 9 * GIB,
        "workspace": GIB,
        "page": GIB // 64,
        "longest_pages": 66,
        "max_batch": 8,
        "num_pages": None,
    }
    return plan_memory(**usual | {"free": 100 * GIB} | changes)


def test_as_many_pages_as_all_slots_can_fill():
    assert plan().num_pages == plan().full_pages == 8 * 66
    assert plan().left == 100 * GIB - 10 * GIB - 8 * 66 * (GIB // 64)


def test_fewer_pages_where_there_is_no_room():
    small = plan(free=14 * GIB)
    assert small.num_pages == 4 * 64
    assert small.left == 0
    assert small.pools == 4 * GIB


def test_as_many_as_asked_for():
    assert plan(num_pages=7).num_pages == 7
    assert plan(num_pages=5000).num_pages == 5000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"free": 11 * GIB},
            "11.0 GiB free; weights take 9.0 GiB, the workspace of a cycle 1.0 GiB, and 66 pages 1.0 GiB: 32 MiB too",
        ),
        ({"free": 5 * GIB}, "5.0 GiB free; weights take 9.0 GiB.*6.0 GiB too much. Lower max_model_len"),
        ({"num_pages": 64 * 91}, "5824 pages 91.0 GiB: 1.0 GiB too much"),
        (
            {"free": 12 * GIB, "weights": 6 * GIB, "reading": 12 * GIB},
            "12.0 GiB free; weights take 6.0 GiB as they are kept, but 12.0 GiB while they are read, .* 256 MiB too much",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_numbers(changes, said):
    with pytest.raises(dj.CapacityError, match=said):
        plan(**changes)


@pytest.mark.few("float32-int8-None", "bfloat16-None-None", "bfloat16-fp8-None", "bfloat16-int8-fp8_dynamic")
@pytest.mark.parametrize(
    ("kind", "draft_kind"),
    [(None, None), ("int8", None), ("fp8", None), (None, "fp8_dynamic"), ("int8", "fp8_dynamic")],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_counted_as_they_are_loaded(kind, draft_kind, dtype):
    """The plan's bytes are those of the arrays, and `info`, which makes none, says the same."""
    kinds = {"weight_dtype": kind, "draft_weight_dtype": draft_kind}
    model = dj.load(dtype=dtype, max_model_len=64, **kinds)
    loaded = {role: sum(leaf.nbytes for leaf in jax.tree.leaves(each)) for role, each in model.engine.weights.items()}
    assert model.memory.weights == sum(loaded.values())
    assert (
        model.memory.pools
        == model.engine.pool_bytes
        == sum(leaf.nbytes for leaf in jax.tree.leaves(model.engine.take_pools()))
    )
    assert model.memory.num_pages == model.engine.num_pages == model.memory.full_pages
    facts = collect(dtype=dtype, max_model_len=64, **kinds)
    assert {row["role"]: row["weight_bytes"] for row in facts["models"]} == loaded
    assert facts["memory"]["weight_bytes"] == model.memory.weights
    assert facts["memory"]["reading_bytes"] == model.memory.reading
    read, promised = model.engine.weights, weight_shapes(PAIR, jnp.dtype(dtype), kind, draft_kind)
    head: Any = read["draft"].get(SHARED_HEAD)
    assert (head is not None) == (kind is None and draft_kind is not None)
    assert facts["memory"]["shared_head_bytes"] == (0 if head is None else head.values.nbytes + head.scales.nbytes)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), read, promised)))


@pytest.mark.parametrize("tied", [True, False])
def test_whose_head_a_drafter_in_eight_bits_copies(make_config, tied):
    """The target's, which may be its embedding; none where the drafter brings its own."""
    target, draft = make_config
    largest = {"embed.weight": 1.0} | ({} if tied else {"lm_head.weight": 2.0})
    copies = [
        round_weights(
            {"target": {name: jnp.full((8, 16), top) for name, top in largest.items()}, "draft": {}},
            target(),
            draft(own_head=own),
            jnp.dtype("float32"),
            draft_weight_dtype="int8",
        )["draft"]
        for own in (False, True)
    ]
    assert copies[1] == {}
    np.testing.assert_allclose(copies[0][SHARED_HEAD][jnp.arange(8)], 1.0 if tied else 2.0)


def test_weights_in_eight_bits_leave_room_for_pages(monkeypatch):
    """Memory that is full with weights in 16 bits: eight bits give the rest of it to pages, every byte."""
    options: dict = {"dtype": "bfloat16", "max_model_len": 128, "page_size": 16, "max_batch": 64}
    wide = dj.load(**options).memory
    room = wide.weights + wide.workspace + 11 * wide.page
    monkeypatch.setattr(planning, "free_memory", lambda: room)
    plans = [dj.load(**options, weight_dtype=kind).memory for kind in (None, "int8", "fp8")]
    assert plans[0].num_pages == 11
    for narrow in plans[1:]:
        assert narrow.weights < 0.55 * wide.weights
        assert narrow.num_pages == (wide.weights - narrow.weights + 11 * wide.page) // wide.page > 11
        assert 0 <= narrow.left < narrow.page


@pytest.mark.parametrize("looked_at", [False, True])
def test_what_weights_take_while_they_are_read(monkeypatch, looked_at):
    """All arrays that are alive whenever another is rounded: never more than was planned. A target that nobody looks at is never
    whole in its own dtype; one that somebody does is, and is gone before the drafter is read."""
    before, seen = jax.live_arrays(), {"arriving": list[int](), "target": list[int](), "draft": list[int]()}
    known = {id(array) for array in before}

    def alive() -> int:
        return sum(array.nbytes for array in jax.live_arrays() if id(array) not in known)

    class Watched(dict):
        def pop(self, *args):
            seen["draft" if "fc.weight" in self or seen["draft"] else "target"].append(alive())
            return super().pop(*args)

    def watched(params, kind):
        params, _ = Watched(params), params.clear()
        return quantize_weights(params, kind)

    def watched_one(*args):
        keep = rounding(*args)

        def kept_one(name, array):
            kept = jax.block_until_ready(keep(name, array))
            seen["arriving"].append(alive())
            return kept

        return kept_one

    stored, kept = (weight_shapes(PAIR, jnp.dtype("float32"), kind) for kind in (None, "int8"))
    monkeypatch.setattr("dflash_jax.checkpoints.weights.quantize_weights", watched)
    monkeypatch.setattr("dflash_jax.checkpoints.weights.rounding", watched_one)
    looks: dict = {"observe": lambda params: None} if looked_at else {}
    weights = read_weights(*open_pair(), jnp.dtype("float32"), "int8", **looks)
    arriving = rounded_on_arrival(PAIR, "int8", observed=looked_at)
    assert arriving == (set() if looked_at else {"target"})
    planned, sizes = reading_bytes(stored, kept, arriving), {role: weight_bytes({"": stored[role]}) for role in stored}
    beside = sizes["draft"] + weight_bytes({"": kept["target"]})
    if looked_at:
        assert not seen["arriving"]
        assert seen["target"][0] == sizes["target"]
    else:
        assert not seen["target"]
        assert len(seen["arriving"]) == len(kept["target"])
        alone = [{"target": one["target"]} for one in (stored, kept)]
        assert max(seen["arriving"]) <= reading_bytes(alone[0], alone[1], arriving)
        assert max(seen["arriving"]) < sizes["target"]
    assert seen["draft"][0] == beside
    assert max(map(max, filter(None, seen.values()))) <= planned < sum(sizes.values())
    assert alive() == weight_bytes(weights) == weight_bytes(kept)
    assert reading_bytes(stored, stored) == sum(sizes.values())


def test_a_large_model_in_eight_bits_never_takes_its_sixteen():
    """Qwen3-32B: 33 GB of weights, where the largest matrix takes 1.6 GB while it is read."""
    models: Any = [(TARGETS["Qwen3-32B"], family_named("qwen3"))]
    kept = weight_shapes(models, jnp.dtype("bfloat16"), "fp8")
    stored = stored_shapes(models, jnp.dtype("bfloat16"))
    assert 32e9 < weight_bytes(kept) < 34e9
    assert reading_bytes(stored, kept) > 64e9
    assert reading_bytes(stored, kept, rounded_on_arrival(models, "fp8")) < weight_bytes(kept) + 3e9


def test_a_model_that_is_not_rounded_is_not_copied_while_it_is_read():
    """Bytes of a large target and a small drafter, which alone is rounded."""
    large, small, rounded = (jax.ShapeDtypeStruct((size,), jnp.int8) for size in (100, 8, 4))
    stored, kept = ({"target": {"a": large}, "draft": {"b": one}} for one in (small, rounded))
    assert reading_bytes(stored, kept) == 100 + 8 + 4
    assert reading_bytes(stored, {"target": {"a": small}, "draft": {"b": small}}) == 100 + 8


def test_weights_that_fit_only_once_they_are_rounded(monkeypatch):
    """Refused before anything is read, with the numbers."""
    plan = dj.load(max_model_len=64, max_batch=1, weight_dtype="int8").memory
    assert plan.reading > plan.weights + plan.page * plan.longest_pages
    monkeypatch.setattr(planning, "workspace_bytes", lambda *_, **__: 0)
    monkeypatch.setattr(planning, "free_memory", lambda: plan.reading)
    with pytest.raises(
        dj.CapacityError, match=f"{size(plan.reading)} while they are read, beside 256 MiB.*: 256 MiB too"
    ):
        dj.load(max_model_len=64, max_batch=1, weight_dtype="int8")


@pytest.mark.parametrize(("batch", "longest", "tokens"), [(2, 600, 512), (1, 400, 400), (1, 200, 224)])
def test_room_for_the_largest_call_of_prompts(monkeypatch, batch, longest, tokens):
    """One row of a long prompt, or all pieces of several."""
    seen, found = [], planning.workspace_bytes
    monkeypatch.setattr(planning, "workspace_bytes", lambda *args, **of: seen.append(of["chunk"]) or found(*args, **of))
    planning.plan_engine(*open_pair(), LoadOptions(max_model_len=longest, max_batch=batch))
    assert seen == [tokens]


@pytest.mark.few
def test_load_uses_what_room_there_is(monkeypatch):
    """A pool for less than all requests at full length: a notice says so, and they are all served."""
    whole = dj.load(dtype="float32", max_model_len=128, page_size=16, max_batch=4)
    room = whole.memory.weights + whole.memory.workspace + 13 * whole.memory.page
    monkeypatch.setattr(planning, "free_memory", lambda: room)
    model = dj.load(dtype="float32", max_model_len=128, page_size=16, max_batch=4)
    assert model.engine.num_pages == 13 < whole.engine.num_pages
    assert any("room for 13 pages" in notice for notice in model.notices)
    params = dj.SamplingParams(max_tokens=28, ignore_eos=True)
    prompts = [list(range(n, n + 60)) for n in (10, 110, 210, 310)]
    served = [[row.token_ids for row in dj.generate(one, prompts, params)] for one in (model, whole)]
    assert served[0] == served[1]
    monkeypatch.setattr(planning, "free_memory", lambda: room - 5 * whole.memory.page)
    with pytest.raises(dj.CapacityError, match=r"10 pages .* too much"):
        dj.load(dtype="float32", max_model_len=128, page_size=16, max_batch=4)


def test_info_says_what_was_decided(monkeypatch, capsys):
    monkeypatch.setattr(planning, "free_memory", lambda: 500 << 20)
    assert main(["info", "--max-batch", "64"]) == 0
    out = capsys.readouterr().out
    assert "memory    500 MiB free: 49.34 MiB weights" in out
    assert "no room for the 2112 pages" in out
    monkeypatch.setattr(planning, "free_memory", lambda: 30 << 20)
    assert main(["info"]) == 4
    assert capsys.readouterr().err.startswith("error: the device has 30 MiB free; weights take 49.34 MiB")


def test_memory_that_runs_out_is_a_message(monkeypatch):
    """The runtime's own error, from an array that no machine can hold."""
    said = r"ran out while the test ran.*The runtime said: RESOURCE_EXHAUSTED"
    with pytest.raises(dj.CapacityError, match=said), named_memory_errors("the test ran"):
        jnp.zeros((1 << 20, 1 << 20, 1 << 6)).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), named_memory_errors("the test ran"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
    model = dj.load(dtype="float32", max_batch=1, max_model_len=64)

    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")

    call = model.engine.programs.call
    monkeypatch.setattr(model.engine.programs, "call", exhausted)
    with pytest.raises(dj.CapacityError, match="ran out while requests were served"):
        dj.generate(model, "x", dj.SamplingParams(max_tokens=2))
    assert model.engine.allocator.num_free == model.engine.num_pages
    monkeypatch.setattr(model.engine.programs, "call", call)
    assert len(dj.generate(model, "x", dj.SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2


def test_workspace_grows_with_what_it_is_for():
    target, draft = TARGETS["Qwen3-4B"], DRAFTERS["Qwen3-4B-DFlash-b16"]
    usual = {"tokens": 4096, "batch": 8, "chunk": 512}
    base = workspace_bytes(target, draft, jnp.dtype("bfloat16"), **usual)
    assert 8 * 17 * target.vocab_size * 4 < base < 2 * GIB
    for name in ("tokens", "batch", "chunk"):
        assert workspace_bytes(target, draft, jnp.dtype("bfloat16"), **usual | {name: 16 * usual[name]}) > base
    assert workspace_bytes(target, None, jnp.dtype("bfloat16"), **usual) < base


@pytest.mark.parametrize(("tokens", "largest"), [(4096, 2 * 4 * 512 * 32 * 4096), (1024, 6 * 4 * 8 * 17 * 151_936)])
def test_workspace_of_a_pair(tokens, largest):
    """Qwen3-4B by hand: a chunk of 512 rows, and the larger of its scores, before and after the softmax, and a cycle's logits."""
    target, draft = TARGETS["Qwen3-4B"], DRAFTERS["Qwen3-4B-DFlash-b16"]
    row = 4 * 2560 + 3 * 9728 + 2 * 4096 + 2 * len(draft.target_layer_ids) * 2560
    found = workspace_bytes(target, draft, jnp.dtype("bfloat16"), tokens=tokens, batch=8, chunk=512)
    assert found == 512 * row * 2 + largest + (256 << 20)


def test_workspace_of_experts_and_of_expanded_context():
    """DeepSeek-V2-Lite, 512 tokens through 64 experts, and 32,768 tokens of context written out for 16 heads, by hand."""
    target, kind = DEEPSEEK_TARGETS["DeepSeek-V2-Lite"], jnp.dtype("bfloat16")
    assert experts_bytes(target, 512, kind) == 512 * 64 * (3 * 1408 + 2048) * 2
    assert context_bytes(target, 100_000, kind) == 32_768 * (16 * (192 + 128) + 2 * 576) * 2
    assert context_bytes(target, 100, kind) == 100 * (16 * (192 + 128) + 2 * 576) * 2
    sizes = {"tokens": 1024, "batch": 1, "chunk": 512}
    without = replace(target, num_experts=0)
    assert workspace_bytes(target, None, kind, **sizes) - workspace_bytes(
        without, None, kind, **sizes
    ) == experts_bytes(target, 512, kind)
    assert experts_bytes(TARGETS["Qwen3-4B"], 512, kind) == context_bytes(TARGETS["Qwen3-4B"], 512, kind) == 0


def test_workspace_of_heads_that_no_kernel_attends_to():
    """Gemma 4 31B: 16 pieces of a prompt gather the pages of 4 heads of 512."""
    target, kind = GEMMA4_TARGETS["gemma-4-31B"], jnp.dtype("bfloat16")
    short, long = (workspace_bytes(target, None, kind, tokens=tokens, batch=8, chunk=512) for tokens in (8192, 16_384))
    assert long - short == 8192 * (2 * 4 * 512 * 32 + 2 * 2 * 16 * 4 * 512 * 2)


def test_workspace_of_what_an_indexer_chooses():
    """DeepSeek-V3.2: attention's scores are of the 2,048 that are chosen however long the context is, the indexer's of all."""
    target, kind = SPARSE_TARGETS["DeepSeek-V3.2"], jnp.dtype("bfloat16")
    sizes = {"batch": 1, "chunk": 512}
    short, long = (workspace_bytes(target, None, kind, tokens=tokens, **sizes) for tokens in (2048, 131_072))
    assert long - short == 512 * 131_072 * 24 + (128 + 256) * 2**20
    page = page_bytes(target, 64, kind, cache_dtype="fp8_packed")
    assert page == 64 * 61 * (656 + 132)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1 << 20, "1 MiB"), (5 << 30, "5.0 GiB")]
)
def test_sizes_for_people(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.few
def test_what_the_worst_case_takes(capsys) -> None:
    """As planned to the byte for weights and pages; what programs hold besides is within the estimate."""
    assert (
        main(["info", "--measure-memory", "--json", "--max-batch", "2", "--max-model-len", "64", "--dtype", "float32"])
        == 0
    )
    read = json.loads(capsys.readouterr().out)["measured"]
    assert (read["requests"], read["tokens"]) == (2, 64)
    bytes_of = read["bytes"]
    assert bytes_of["weights"][0] == bytes_of["weights"][1] > 2**20
    assert bytes_of["pages"][0] == bytes_of["pages"][1] > 2**17
    assert 2**20 < bytes_of["workspace"][1] < bytes_of["workspace"][0]
    assert bytes_of["all"][0] == sum(bytes_of[name][0] for name in ("weights", "pages", "workspace"))
    assert bytes_of["all"][1] is None  # a CPU does not count
    printed = dict(row for row in _measured({**read, "bytes": {"all": (2**20, None), "pages": (2**20, 2**21)}}))
    assert printed == {"measured": "while 2 requests of 64 tokens were served", "": "pages 1 MiB planned, 2 MiB"}
