"""Layers with windows keep the pages that queries to come may see; what is given back holds NaN here, and texts stay the same."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache.groups import PageTables, columns_held, first_column, page_groups
from dflash_jax.decoding.prefill import Caches
from dflash_jax.engine.memory import plan_memory
from dflash_jax.engine.requests import Request
from dflash_jax.engine.resources import Resources
from dflash_jax.errors import CapacityError
from dflash_jax.sampling_params import SamplingParams

from ..random_pair import Pair, draft_config, of_one_shape, random_prompts, target_config
from .schedules import make_texts, play

OPTIONS = {"max_model_len": 640, "page_size": 32, "max_chunk": 128, "max_batch": 2}
PARAMS = SamplingParams(max_tokens=20)
PROMPTS = random_prompts((520, 60, 330))


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A window in one layer of each model."""
    draft = draft_config(num_layers=2, windows=(60, None), causal=(True, False))
    made = Pair(target_config(windows=(20, None)), draft, **OPTIONS)
    of_one_shape(made.engine)
    return made


@pytest.fixture(scope="module")
def texts(pair) -> list[list[int]]:
    """Of an engine that keeps all pages, without its drafter."""
    whole = replace(pair.engine, slides=False, share_prefixes=False, num_pages=0)
    assert len(whole.groups) == 1
    of_one_shape(whole)
    other = object.__new__(Pair)
    other.engine = whole
    return other.run(PROMPTS, PARAMS, draft=False)[0]


@pytest.fixture(autouse=True)
def owned(pair, monkeypatch) -> list[tuple[int, ...]]:
    """See `poisoned`."""
    return poisoned(pair.engine, monkeypatch)


def poisoned(engine: Resources, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Fills pages without owner and name with NaN before every call; what is named must stay free of it. Owned pages of each group
    are told before each call."""
    call, seen = engine.programs.call, []

    def called(function, static, donate, weights, table, pools, *rest):
        if isinstance(table, PageTables):
            sizes = (engine.num_pages, *engine.window_pages)
            accounts = {size: pool.allocator for size, pool in zip(sizes, engine.groups, strict=True)}
            assert len(accounts) == len(engine.groups)  # told apart by their sizes
            held = {
                count: np.isin(np.arange(count), np.flatnonzero(account._owners)) for count, account in accounts.items()
            }
            named = {count: np.isin(np.arange(count), [*account._keys]) for count, account in accounts.items()}
            unused = {count: ~(held[count] | named[count]) for count in accounts}
            seen.append(tuple(int(sum(mine)) for mine in held.values()))
            names = ("target", "draft") if isinstance(pools, Caches) else ("target_pages", "draft_pages")
            pages, bad = _with_nan({name: getattr(pools, name) for name in names}, unused, named)
            assert not bad
            pools = pools._replace(**pages) if isinstance(pools, Caches) else replace(pools, **pages)
        return call(function, static, donate, weights, table, pools, *rest)

    monkeypatch.setattr(engine.programs, "call", called)
    return seen


@jax.jit
def _with_nan(pools, unused, named):
    """`pools` with NaN in pages that nobody has, by the number of pages; and whether pages that can be found hold NaN."""

    def of(pages, pool):
        return pages[pool.shape[0]][:, None, None, None]

    bad = [jnp.any(of(named, pool) & jnp.isnan(pool)) for pool in jax.tree.leaves(pools)]
    return jax.tree.map(lambda pool: jnp.where(of(unused, pool), jnp.nan, pool), pools), jnp.any(jnp.array(bad))


@pytest.mark.few
def test_texts_are_those_of_an_engine_that_keeps_all_pages(pair, texts, owned) -> None:
    full, *windows = pair.engine.groups
    assert [(pool.group.reach, pool.group.target, pool.group.draft) for pool in (full, *windows)] == [
        (None, (1,), (1,)), (60, (), (0,)), (20, (0,), ())
    ]  # fmt: skip
    assert pair.run(PROMPTS, PARAMS)[0] == texts
    most = np.max(owned, axis=0)
    assert most[0] >= 17 + 3
    assert (most[1:] >= 5).all()
    assert (most[1:] < 14).all()  # of two, which keep 17 and 11 in the end where nothing falls out


def test_what_is_found_ends_with_the_pages_of_a_window(pair, texts) -> None:
    """The end of a text, and the middle of one; without pages of the window nothing, whatever other layers keep."""
    narrow = pair.engine.groups[2].allocator

    def found(prompts):
        before = pair.engine.scheduler.stats.cached_tokens
        return pair.run(prompts, PARAMS)[0], pair.engine.scheduler.stats.cached_tokens - before

    found(PROMPTS)
    assert found(PROMPTS) == (texts, 512 + 32 + 320)
    branch = [*PROMPTS[0][:300], *PROMPTS[1]]
    first, cached = found([branch])
    assert cached == 288
    assert found([branch]) == (first, 352)
    # The window's last pages are gone: what is found ends before them.
    for key in [key for key, page in narrow._pages.items() if page in narrow._idle][-2:]:
        page = narrow._pages.pop(key)
        del narrow._keys[page], narrow._idle[page]
        narrow._free.append(page)
    again, cached = found([branch])
    assert again == first
    assert 0 < cached < 352
    for pool in pair.engine.groups[1:]:
        pool.allocator.forget()
    assert found([branch]) == (first, 0)


@pytest.mark.few
def test_requests_that_lose_their_pages_or_are_cancelled(pair, texts) -> None:
    engine, longer = pair.engine, SamplingParams(max_tokens=70)
    prompts, found, taken = [PROMPTS[1], PROMPTS[0][:500]], {0: [], 1: []}, []
    before = engine.scheduler.stats.preemptions
    for update in engine.run([Request(i, tuple(prompt), longer) for i, prompt in enumerate(prompts)], cycles=1):
        found[update.index] += update.tokens
        if not taken and found[1]:
            taken = engine.allocator.allocate(engine.allocator.num_free - 1)
    engine.allocator.free(taken)
    pair.assert_free()
    assert engine.scheduler.stats.preemptions > before
    assert list(found.values()) == [pair.run([prompt], longer)[0][0] for prompt in prompts]
    run = engine.run([Request(i, tuple(prompt), PARAMS) for i, prompt in enumerate(PROMPTS)], cycles=1)
    for _, _ in zip(range(3), run, strict=False):
        pass
    run.close()
    pair.assert_free()
    assert pair.run(PROMPTS, PARAMS)[0] == texts


def test_layers_without_windows_read_shared_pages_once(pair, monkeypatch) -> None:
    engine, called, shared = pair.engine, pair.engine.programs.call, []
    prompts = [PROMPTS[0][:330] + end for end in ([1, 2, 3], [4])]
    alone = [pair.run([prompt], PARAMS)[0][0] for prompt in prompts]

    def watched(function, *rest):
        if function.__name__ == "loop":
            shared.append(rest[-1])
        return called(function, *rest)

    monkeypatch.setattr(engine.programs, "call", watched)
    monkeypatch.setattr(engine, "cascade", True)
    assert pair.run(prompts, PARAMS)[0] == alone
    assert any(pages is not None and pages.tolist() == [10, 10] for pages in shared)


@pytest.mark.few("True")
@pytest.mark.parametrize("ahead", [False, True])
def test_random_schedules(pair, monkeypatch, ahead, all_cases) -> None:
    """Of prompts that begin alike, with pools that run out, cancellations and interrupts."""
    monkeypatch.setattr(pair.engine, "groups", pair.engine.groups)
    for pool in pair.engine.groups:
        pool.allocator.forget()  # other accounts had these pages before
    stem = PROMPTS[0][:450]
    prompts = [stem[: 90 * i] + PROMPTS[1][: 7 * i + 1] for i in range(6)]
    texts = make_texts(pair.engine, prompts, tokens=12)
    for seed in range(40 if all_cases else 5):
        play(pair.engine, texts, seed, interrupt=seed % 4 == 3, ahead=ahead)


def test_layers_are_grouped_by_what_they_see() -> None:
    """A window that holds as many pages as the longest sequence is none."""
    target, draft = [1024] * 5 + [None], [4096, 2048]
    full, wide, narrow = page_groups(target, draft, ahead=1040, width=64, page_size=64)
    assert (full.reach, full.target, full.draft, full.columns) == (None, (5,), (0,), 64)
    assert (wide.reach, wide.target, wide.draft, wide.columns) == (2048, (), (1,), columns_held(2048, 1040, 64))
    assert (narrow.reach, narrow.target, narrow.draft) == (1024, (0, 1, 2, 3, 4), ())
    (only,) = page_groups([4096] * 3, [], ahead=512, width=512, page_size=64)
    assert (only.reach, only.columns) == (4096, columns_held(4096, 512, 64))


@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
def test_no_page_is_given_back_that_a_query_or_a_write_needs(page_size) -> None:
    """Wherever a sequence stands: neither what the next query sees, in tiles of 128, nor what the drafter's pages lack."""
    for tokens in range(0, 1500, 7):
        for reach, fresh in ((1, 0), (20, 9), (3, 17), (300, 5)):
            first = first_column(reach, tokens, fresh, page_size) * page_size
            needed = max(0, min(tokens - (reach - 1), tokens - fresh))
            assert first <= needed // 128 * 128
            for ahead in (40, 600):
                columns = -(-(tokens + ahead) // page_size) - first // page_size
                assert columns <= columns_held(max(reach, fresh + 1), ahead, page_size)


def test_five_layers_of_six_with_a_window_hold_four_times_the_tokens() -> None:
    """In the same memory, requests of 32k tokens."""
    layers = 36
    target = target_config(num_layers=layers, windows=((1024,) * 5 + (None,)) * (layers // 6), max_position=1 << 15)

    def plan(slides: bool):
        core = Resources(
            target=target, draft=None, weights={}, dtype=jnp.dtype(jnp.bfloat16), max_model_len=1 << 15, max_batch=256,
            slides=slides,
        )  # fmt: skip
        (first, *others), (size, *sizes) = core.groups, core.group_bytes
        windows = tuple((each, pool.group.columns) for each, pool in zip(sizes, others, strict=True))
        return plan_memory(
            weights=0, reading=0, workspace=0, page=size, longest_pages=first.group.columns, max_batch=256,
            num_pages=None, free=1 << 30, windows=windows,
        )  # fmt: skip

    kept, slid = plan(False), plan(True)
    assert slid.sequences >= 4 * kept.sequences
    assert max(slid.pools, kept.pools) <= 1 << 30


def test_a_plan_keeps_both_kinds_of_pages_in_step() -> None:
    usual = {
        "weights": 0, "reading": 0, "workspace": 0, "page": 1 << 20, "longest_pages": 100, "max_batch": 4, "num_pages": None,
        "windows": ((2 << 20, 10),),
    }  # fmt: skip
    roomy = plan_memory(**usual, free=1000 << 20)
    assert (roomy.num_pages, roomy.window_pages) == (400, (80,))  # twice, for prompts to come
    exact = plan_memory(**usual, free=480 << 20)
    assert (exact.num_pages, exact.window_pages, exact.left) == (400, (40,), 0)
    tight = plan_memory(**usual, free=125 << 20)
    assert (tight.num_pages, tight.window_pages, tight.sequences) == (105, (10,), 1.0)
    two = plan_memory(**usual, free=180 << 20)
    assert (two.num_pages, two.window_pages, two.sequences) == (140, (20,), 1.4)
    with pytest.raises(
        CapacityError, match="pages of layers with windows 20 MiB, and 100 pages 100 MiB: 1 MiB too much"
    ):
        plan_memory(**usual, free=119 << 20)
    assert plan_memory(**usual | {"num_pages": 200}, free=240 << 20).window_pages == (20,)
