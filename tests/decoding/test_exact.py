"""`exact`: in bfloat16 a request's text is the same, bit by bit, whatever is drafted and whoever is served beside it."""

from functools import partial

import jax.numpy as jnp
import pytest

import dflash_jax as dj
from dflash_jax.attention import prefill
from dflash_jax.engine.batch import Batch
from dflash_jax.engine.buckets import Buckets
from dflash_jax.engine.requests import Request, Update
from dflash_jax.errors import ParameterError
from dflash_jax.models import layers
from dflash_jax.options import LoadOptions
from dflash_jax.sampling_params import SamplingParams

LENGTHS = (3, 70, 17, 90, 1, 40)
GREEDY = SamplingParams(max_tokens=40)
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=5)
FILTERED = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, top_k=30, seed=5)
EXACT = {"exact": True, "dtype": jnp.dtype("bfloat16"), "page_size": 32, "max_batch": 3}


def sixteen_bits(weights):
    """In bfloat16; a drafter that is right now and then, for it shares the target's embedding and says little of its own."""
    for name in weights["draft"]:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights["draft"][name] = weights["draft"][name] * 0.0
    for role, table in weights.items():
        weights[role] = {name: array.astype(jnp.bfloat16) for name, array in table.items()}


def finish(engine):
    while engine.step():
        pass


@pytest.fixture(scope="module")
def exact(make_pair):
    return make_pair(edit=sixteen_bits, **EXACT)


@pytest.mark.few("sampled")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
def test_drafted_is_plain_alone_is_in_company(exact, make_prompts, params):
    prompts = make_prompts(LENGTHS)
    plain, ones, last = exact.run(prompts, params, draft=False)
    drafted, counts, _ = exact.run(prompts, params)
    assert drafted == plain == [exact.run([prompt], params)[0][0] for prompt in prompts]
    assert max(max(row) for row in counts) > 1, "nothing that was proposed stood"
    assert all(set(row) == {1} for row in ones)
    assert {drafts for update in last.values() for drafts in update.drafts} == {(0, 0)}, "nobody offered drafts"


def test_attention_is_told_that_rows_know_of_no_other(make_pair, make_prompts, monkeypatch):
    """The target's, in prompts and in cycles; a drafter's blocks, which see themselves whole, are proposals alone."""
    told, inner = [], prefill.paged_attention

    def attended(q, *args, causal, batch_invariant=False, **options):
        told.append((q.shape[:2], causal, batch_invariant))
        return inner(q, *args, causal=causal, batch_invariant=batch_invariant, **options)

    monkeypatch.setattr(prefill, "paged_attention", attended)
    make_pair(edit=sixteen_bits, **EXACT).run(make_prompts([40]), SamplingParams(max_tokens=2))
    assert len({shape for shape, causal, _ in told if causal}) == 2
    assert {causal for _, causal, _ in told} == {True, False}
    assert all(invariant == causal for _, causal, invariant in told)


def test_who_drafts_runs_beside_who_does_not(exact, make_prompts):
    """And greedy requests beside those that sample."""
    prompts = make_prompts(LENGTHS)
    each = [GREEDY, SAMPLED, FILTERED] * 2
    alone = [exact.run([prompt], params)[0][0] for prompt, params in zip(prompts, each, strict=True)]
    found: dict[int, list[int]] = {}
    for index, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
        found[index] = []
        take = found[index]
        request = Request(index, tuple(prompt), params)
        exact.engine.submit(request, lambda _, update, take=take: take.extend(update.tokens), draft=index % 2 == 0)
    finish(exact.engine)
    assert list(found.values()) == alone


@pytest.mark.few
def test_lost_pages_give_nothing_twice(make_pair, exact, make_prompts):
    """A request that lost its pages begins again, and what it had given out is not given out again."""
    prompts = make_prompts((40, 33, 20, 50))
    params = SamplingParams(max_tokens=60)
    short = make_pair(edit=sixteen_bits, num_pages=6, **EXACT)
    assert short.run(prompts, params)[0] == exact.run(prompts, params)[0]
    assert short.engine.scheduler.stats.preemptions > 0


def test_an_interrupt_gives_nothing_twice(exact, make_prompts, monkeypatch):
    """Whoever was at work begins again, with the same text."""
    (prompt,) = make_prompts((20,))
    whole = exact.run([prompt])[0][0]
    decode, calls = Batch.decode, []

    def interrupted(self, *args, **options):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(self, *args, **options)

    monkeypatch.setattr(Batch, "decode", interrupted)
    taken: list[int] = []
    exact.engine.submit(Request(0, tuple(prompt), GREEDY), lambda _, update: taken.extend(update.tokens), cycles=4)
    with pytest.raises(KeyboardInterrupt):
        finish(exact.engine)
    assert 0 < len(taken) < len(whole)
    finish(exact.engine)
    assert taken == whole


@pytest.mark.few
def test_penalties_are_in_batches_of_their_own(exact, make_prompts):
    """Each text is the one it has alone, and all come to an end."""
    prompts = make_prompts((20, 7, 40))
    each = [GREEDY, SamplingParams(max_tokens=20, temperature=0.9, seed=1, presence_penalty=0.7), SAMPLED]
    together = exact.run(prompts, each)[0]
    assert together == [exact.run([prompt], one)[0][0] for prompt, one in zip(prompts, each, strict=True)]
    assert together[1:2] == exact.run(prompts[1:2], each[1:2], draft=False)[0]


def test_who_shares_a_program(make_pair):
    """Whoever may stand beside a request runs in its program: of two programs a GPU gave a row other bits."""
    engine = make_pair(edit=sixteen_bits, **EXACT).engine
    for laws in (("greedy",), ("sampled", "full")):
        assert len({engine.setup(mode=mode, draft=draft) for mode in laws for draft in (True, False)}) == 1

    def company(**params):
        return engine.company(True, Request(0, (1,), SamplingParams(**params)).needs)

    assert company(temperature=1.0) == company(temperature=1.0, top_k=5) == company(min_tokens=2)
    others = [company(logprobs=0), company(stop_token_ids=list(range(20))), company(presence_penalty=0.5), company()]
    others.append(company(temperature=1.0))
    assert len({*others}) == len(others)
    assert company(presence_penalty=0.5) == company(presence_penalty=0.5, temperature=1.0)


def test_kinds_that_take_turns_run_side_by_side(exact, make_prompts, monkeypatch):
    """Seven requests of two kinds are two batches."""
    begun, texts = [], {}
    monkeypatch.setattr(
        "dflash_jax.engine.scheduler.Batch", lambda *a, **k: begun.append(k["company"]) or Batch(*a, **k)
    )
    prompts, each = make_prompts((20, 7, 40, 3, 9, 33, 5)), [GREEDY, SAMPLED] * 3 + [GREEDY]
    requests = [Request(index, tuple(prompt), each[index]) for index, prompt in enumerate(prompts)]

    for update in exact.engine.run(requests, draft=True):
        texts.setdefault(update.index, []).extend(update.tokens)
    assert len(begun) == 2
    for index in (0, 1, 5):
        assert texts[index] == exact.run([prompts[index]], each[index])[0][0]


@pytest.mark.few
def test_log_probabilities_are_in_batches_of_their_own(exact, make_prompts):
    prompts, each = make_prompts((20, 7, 40)), [GREEDY, SamplingParams(max_tokens=20, logprobs=2), SAMPLED]
    together = exact.run(prompts, each)[0]
    assert together == [exact.run([prompt], one)[0][0] for prompt, one in zip(prompts, each, strict=True)]


@pytest.mark.few
def test_warming_up_leaves_nothing_to_compile(make_pair, make_prompts):
    pair = make_pair(edit=sixteen_bits, **EXACT | {"max_batch": 2})
    setups = dict.fromkeys(pair.engine.setup(mode="greedy", draft=draft) for draft in (True, False))
    assert len(setups) == 1, "who drafts is told to the one program"
    for job in pair.engine.warmup_jobs(setups):
        job()
    shapes = pair.engine.programs.shapes()
    for draft in (True, False):
        pair.run(make_prompts((3, 50, 20)), draft=draft)
    assert pair.engine.programs.shapes() == shapes


def test_pages_of_prompts_alone_are_found(exact, make_prompts):
    """A text that goes on from an answer finds its prompt's pages, not the answer's, which cycles have written."""
    (prompt,) = make_prompts((33,), seed=7)
    answer = exact.run([prompt], SamplingParams(max_tokens=60))[0][0]
    longer = Request(0, (*prompt, *answer), SamplingParams(max_tokens=20))
    found = list(exact.engine.run([longer]))
    assert found[0].cached == 32
    exact.engine.allocator.forget()
    whole = list(exact.engine.run([longer]))
    assert whole[0].cached == 0
    texts = [[token for update in updates for token in update.tokens] for updates in (found, whole)]
    assert texts[0] == texts[1]


@pytest.mark.few
def test_shapes_that_vary_are_caught(make_pair, make_prompts, monkeypatch):
    """Of products whose sums depend on how many rows there are, as a GPU's do, one shape keeps the texts, and several do not."""
    product = layers.linear

    def by_rows(x, weight):
        rows = x.size // x.shape[-1]
        part = x.shape[-1] // (2 if rows < 8 else 4)
        return product(x[..., :part], weight[:, :part]) + product(x[..., part:], weight[:, part:])

    monkeypatch.setattr(layers, "linear", by_rows)
    prompts, equal, build = make_prompts((20, 9, 31)), {}, Buckets.build.__func__
    for one_shape in (True, False):
        monkeypatch.setattr(Buckets, "build", partial(_shaped, build, one_shape, Buckets))
        pair = make_pair(edit=sixteen_bits, **EXACT)
        equal[one_shape] = pair.run(prompts)[0] == [pair.run([prompt])[0][0] for prompt in prompts]
    assert equal == {True: True, False: False}


def _shaped(build, wanted, cls, **sizes):
    return build(cls, **sizes | {"one_shape": wanted})


def test_what_was_given_out_is_left_out():
    given = Update(0, [1, 2, 3, 4, 5], [True] * 5, [2, 3], False, 1.0, start=3, drafts=[(4, 1), (4, 2)])
    assert given.behind(3) is given
    assert given.behind(8) is None
    rest = given.behind(6)
    assert rest is not None
    assert (rest.tokens, rest.counts, rest.drafts, rest.start) == ([4, 5], [2], [(4, 2)], 6)
    first = Update(0, [7], [False], [], True, 1.0)
    assert first.behind(0) is first
    assert first.behind(1) is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"verify_length": "auto"}, "verify_length='auto', which chooses the shape"),
        ({"verify_length": "per_request"}, "verify_length='per_request', which chooses the shape"),
        ({"proposals": "rejection"}, "draws tokens from what the drafter proposed"),
        (
            {"weight_dtype": "fp8_dynamic", "attention_output": "fp8"},
            "attention_output='fp8', which rounds what attention gives",
        ),
        ({"cache_dtype": "fp8", "cache_scales": "traffic"}, "finds scales on the prompts that come first"),
        ({"tp": 2, "decode_context_parallel_size": 2}, "decode_context_parallel_size=2, which joins what several GPUs"),
        ({"exact": "yes"}, "exact must be True or False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_refused(options, why):
    with pytest.raises(ParameterError, match=why):
        LoadOptions(**{"exact": True} | options)


def test_a_plan_tells_the_shapes():
    told = str(dj.plan(exact=True, max_batch=3, max_model_len=128))
    assert "every cycle verifies 3 x 16 tokens, every part of prompts is 12 x 32" in told
    assert "every cycle" not in str(dj.plan(max_batch=3, max_model_len=128))


def test_pages_hold_whole_pieces():
    with pytest.raises(
        ParameterError, match="pieces of 32 tokens, of which a page must hold whole ones: raise page_size=16"
    ):
        dj.plan(exact=True, page_size=16)
