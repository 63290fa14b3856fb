"""Temperature, min_p, top_k, top_p and min_tokens against their definitions in float64, and the noise behind sampling."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import noise_of, noise_of_all
from dflash_kernels.core.device import Target
from dflash_kernels.sampling import search
from dflash_kernels.sampling.noise import CHUNK, arrivals

from dflash_jax.decoding import sampling
from dflash_jax.decoding.sampling import RequestArrays, is_stop, noise_at

from ..devices import on
from .chi_square import p_value

# As a loop has them. Called as they are, each of their operations would be compiled by itself.
filtered_logits = jax.jit(sampling.filtered_logits, static_argnums=(2, 3))
choose = jax.jit(sampling.choose, static_argnums=3)
without_stops = jax.jit(sampling.without_stops)
GOOD = 1e-3


def requests(b: int, **fields: Any) -> RequestArrays:
    """`b` slots that sample at temperature 1 without filters, with changes; a scalar holds for every slot."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0}
    dtypes = {"top_k": np.int32, "min_tokens": np.int32}
    arrays = {
        name: jnp.asarray(np.broadcast_to(np.asarray(fields.get(name, default), dtypes.get(name, np.float32)), (b,)))
        for name, default in defaults.items()
    }
    seed = jnp.asarray(np.stack([np.zeros(b, np.uint32), np.arange(b, dtype=np.uint32)], axis=1))
    stops = jnp.asarray(np.asarray(fields.get("stop_ids", np.full((b, 2), -1)), np.int32))
    return RequestArrays(seed=fields.get("seed", seed), stop_ids=stops, **arrays)


def kept(logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens of one row may be sampled, by the definitions; what ties with the last one kept is kept."""
    scaled = logits.astype(np.float64) / temperature
    law = np.exp(scaled - scaled.max())
    keep = law >= min_p * law.max()
    if 0 < top_k < keep.sum():
        keep &= law >= np.sort(law[keep])[-top_k]
    law = np.where(keep, law, 0) / law[keep].sum()
    total = 0.0
    for value in np.sort(law)[::-1]:
        total += value
        if total >= top_p or value == 0:
            return keep & (law >= value)
    return keep


def between_steps(rng: np.random.Generator, law: np.ndarray) -> tuple[float, float]:
    """A top_p and a min_p well away from the values where rounding would decide."""
    steps = np.unique(np.append(0, np.cumsum(np.sort(law)[::-1])))
    at = rng.integers(len(steps) - 1)
    ratios = np.unique(np.append(law / law.max(), 1e-4))
    low = rng.integers(len(ratios) - 1)
    return float(steps[at : at + 2].mean()), float(np.sqrt(ratios[low] * ratios[low + 1]))


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_filters_keep_what_their_definitions_keep(ties: bool) -> None:
    rng = np.random.default_rng(int(ties))
    b, t, vocab = 400, 2, 11
    logits = rng.normal(size=(b, t, vocab)) * 2
    logits = np.round(logits).astype(np.float32) if ties else logits.astype(np.float32)
    logits[:, 1] = logits[:, 0]
    temperature, top_k = rng.choice([0.5, 1.0, 2.0], b), rng.choice([0, 1, 2, 3, 5, 11, 40], b)
    top_p, min_p = np.ones(b), np.zeros(b)
    for row in range(b):
        law = np.exp(logits[row, 0].astype(np.float64) / temperature[row])
        inside = kept(logits[row, 0], temperature=temperature[row], top_k=int(top_k[row]), top_p=1.0, min_p=0.0)
        drawn_p, drawn_min = between_steps(rng, np.where(inside, law, 0) / law[inside].sum())
        use = row % 4
        top_p[row], min_p[row] = (drawn_p if use in (1, 3) else 1.0), (drawn_min if use == 2 else 0.0)
    request = requests(b, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    result = np.asarray(filtered_logits(jnp.asarray(logits), request, "full"))
    for row in range(b):
        expected = kept(
            logits[row, 0], temperature=temperature[row], top_k=int(top_k[row]), top_p=top_p[row], min_p=min_p[row]
        )
        np.testing.assert_array_equal(np.isfinite(result[row, 0]), expected, err_msg=f"row {row}")
        np.testing.assert_array_equal(result[row, 0], result[row, 1])
        survivors = result[row, 0][expected]
        np.testing.assert_allclose(
            survivors - survivors.max(),
            (logits[row, 0][expected] - logits[row, 0].max()) / temperature[row],
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_of_sixteen_bits(dtype: str) -> None:
    """A vocabulary of 5,000 with many ties; that logits are given in float32, not rounded yet, changes nothing."""
    rng = np.random.default_rng(8)
    exact = jnp.asarray(rng.normal(size=(8, 1, 5000)) * 3, jnp.float32)
    logits = np.asarray(exact.astype(dtype).astype(jnp.float32))
    rows = [(0.7, 20, 1.0, 0.0), (1.3, 0, 1.0, 0.02), (1.0, 333, 1.0, 0.0), (0.6, 4999, 1.0, 1e-5)] * 2
    tops = [None if row < 4 else row for row in range(8)]
    drawn = []
    for row, (temperature, top_k, _, min_p) in enumerate(rows):
        inside = kept(logits[row, 0], temperature=temperature, top_k=top_k, top_p=1.0, min_p=min_p)
        law = np.where(inside, np.exp(logits[row, 0].astype(np.float64) / temperature), 0)
        steps = np.cumsum(np.sort(np.unique(law, return_counts=True)[0])[::-1])
        at = rng.integers(min(len(steps), 40))
        mass = [law[law >= value].sum() / law.sum() for value in np.unique(law)[::-1][at : at + 2]]
        drawn.append(1.0 if tops[row] is None else float(np.mean(mass)))
    law = {
        "temperature": [row[0] for row in rows],
        "top_k": [row[1] for row in rows],
        "min_p": [row[3] for row in rows],
    }
    request = requests(8, **law, top_p=drawn)
    results = [
        np.asarray(filtered_logits(jnp.asarray(given), request, "full", jnp.dtype(dtype))) for given in (exact, logits)
    ]
    np.testing.assert_array_equal(*results)
    for row, (temperature, top_k, _, min_p) in enumerate(rows):
        expected = kept(logits[row, 0], temperature=temperature, top_k=top_k, top_p=drawn[row], min_p=min_p)
        np.testing.assert_array_equal(np.isfinite(results[0][row, 0]), expected, err_msg=f"row {row}")
    wide = np.asarray(filtered_logits(jnp.asarray(logits), request, "full"))
    np.testing.assert_array_equal(results[0], wide)


@pytest.mark.few
def test_gpus_find_more_bits_with_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(6, 2, 700)) * 4, jnp.float32).astype(jnp.bfloat16)
    request = requests(
        6, temperature=0.8, top_k=np.array([0, 1, 20, 20, 700, 0]), top_p=np.array([0.9, 1, 0.8, 1, 0.5, 1e-9])
    )
    found, bits = [], []
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
        here = filtered_logits(logits.astype(jnp.float32), request, "full", dtype)
        with on("NVIDIA H200"):
            program = jax.jit(lambda: sampling.filtered_logits(logits.astype(jnp.float32), request, "full", dtype))  # noqa: B023
            bits.append(str(program.trace().jaxpr).count(" = reduce["))
        with monkeypatch.context() as patch:
            patch.setattr(search, "target", lambda: Target("H200", "gpu", 90, 132))
            found.append(np.asarray(sampling.filtered_logits(logits.astype(jnp.float32), request, "full", dtype)))
        np.testing.assert_array_equal(np.asarray(here), found[-1])
    assert bits == [2 * passes for passes in (8, 5, 4)]


def test_what_stays_does_not_depend_on_the_batch() -> None:
    """Alone, among others, with other tokens of its sequence: the same tokens, also where a share of probability ends at one."""
    rng = np.random.default_rng(9)
    logits = jnp.asarray(rng.normal(size=(7, 16, 4097)), jnp.float32)
    request = requests(7, top_p=0.5 + 0.07 * np.arange(7), top_k=np.array([0, 0, 0, 0, 500, 3000, 4000]))
    call = filtered_logits
    whole = np.asarray(call(logits, request, "full"))
    for row in range(7):
        one = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], request)
        np.testing.assert_array_equal(np.asarray(call(logits[row : row + 1], one, "full")), whole[row : row + 1])
        np.testing.assert_array_equal(np.asarray(call(logits[row : row + 1, 5:6], one, "full"))[0, 0], whole[row, 5])


def test_refused_logits_stay_refused() -> None:
    """Rows of which most are -inf already, as stop ids are before `min_tokens`; nothing else is known of such a row."""
    logits = jnp.full((2, 1, 40), -jnp.inf).at[:, 0, 7].set(1.0).at[:, 0, 9].set(0.0)
    for fields in ({"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.1}, {"top_k": 1}):
        result = np.asarray(filtered_logits(logits, requests(2, **fields), "full"))
        finite = np.flatnonzero(np.isfinite(result[0, 0])).tolist()
        assert finite == ([7] if fields == {"top_k": 1} else [7, 9])


def test_filters_apply_in_their_order() -> None:
    # Probabilities .4 .3 .2 .1: top_k=3 leaves .444 .333 .222, of which top_p=.75 keeps two; the other order would keep three.
    logits = jnp.log(jnp.array([[[0.4, 0.3, 0.2, 0.1]]]))
    both = filtered_logits(logits, requests(1, top_k=3, top_p=0.75), "full")
    assert np.isfinite(np.asarray(both)).tolist() == [[[True, True, False, False]]]
    # min_p=.6 leaves .4 and .3, renormalised .571 and .429: top_p=.55 then keeps one.
    both = filtered_logits(logits, requests(1, min_p=0.6, top_p=0.55), "full")
    assert np.isfinite(np.asarray(both)).tolist() == [[[True, False, False, False]]]


@pytest.mark.parametrize("top_p", [1e-3, 1e-20, 1e-45, 1e-60])
def test_the_most_probable_token_always_stays(top_p: float) -> None:
    logits = jnp.array([[[0.0, 3.0, -1.0, 2.9]]])
    result = filtered_logits(logits, requests(1, top_p=top_p), "full")
    assert np.isfinite(np.asarray(result)).tolist() == [[[False, True, False, False]]]


def test_top_p_of_one_keeps_every_token() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(1, 1, 50_000)).astype(np.float32)
    logits[0, 0, 7] = 30.0
    result = filtered_logits(jnp.asarray(logits), requests(1), "full")
    assert np.isfinite(np.asarray(result)).all()


@pytest.mark.few("1e-40-full", "1e-30-sampled")
@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-37, 1e-40, 1e-60])
def test_ever_lower_temperatures_end_at_the_greedy_choice(temperature: float, mode: Any) -> None:
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(16, 3, 40)) * 8 + 60, jnp.float32)
    request = requests(16, temperature=temperature, top_p=0.9)
    positions = jnp.broadcast_to(jnp.arange(3), (16, 3))
    tokens = choose(filtered_logits(logits, request, mode), positions, request, mode)
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, axis=-1))


def test_temperature_zero_is_greedy_beside_rows_that_sample() -> None:
    rng = np.random.default_rng(2)
    logits = jnp.asarray(np.round(rng.normal(size=(64, 2, 9))), jnp.float32)
    request = requests(64, temperature=np.where(np.arange(64) % 2, 0.0, 5.0), top_k=4)
    positions = jnp.broadcast_to(jnp.arange(2), (64, 2))
    tokens = np.asarray(choose(filtered_logits(logits, request, "full"), positions, request, "full"))
    greedy = np.asarray(jnp.argmax(logits, axis=-1))
    np.testing.assert_array_equal(tokens[1::2], greedy[1::2])
    assert (tokens[::2] != greedy[::2]).mean() > 0.3
    np.testing.assert_array_equal(choose(logits, positions, request, "greedy"), greedy)


def test_stop_ids_are_refused_until_min_tokens() -> None:
    b, t, vocab = 4, 3, 6
    request = requests(b, min_tokens=[0, 2, 4, 9], stop_ids=np.array([[1, 5, -1], [1, 5, -1], [-1, -1, -1], [0, 2, 4]]))
    produced = jnp.array([0, 0, 2, 7], jnp.int32)
    result = np.asarray(without_stops(jnp.zeros((b, t, vocab)), request, produced))
    refused = np.isneginf(result)
    expected = np.zeros((b, t, vocab), bool)
    expected[1, :2, [1, 5]] = True  # tokens 0 and 1 of at least 2
    expected[3, :2][:, [0, 2, 4]] = True  # tokens 7 and 8 of at least 9
    np.testing.assert_array_equal(refused, expected)
    assert (result[~refused] == 0).all()


def test_padding_is_no_stop_id() -> None:
    stop_ids = jnp.array([[3, -1], [-1, -1]], jnp.int32)
    tokens = jnp.array([[3, 5, 0], [3, 0, 5]], jnp.int32)
    assert is_stop(tokens, stop_ids).tolist() == [[True, False, False], [False, False, False]]


def test_the_law_over_many_tokens() -> None:
    """2,548 tokens, alike but for three; noise that comes again within the vocabulary is noticed."""
    vocab, period, draws, likely = 2548, CHUNK, 1200, [3, 1500, 2500]
    logits = np.zeros(vocab, np.float32)
    logits[likely] = 7.0, 6.5, 7.5
    drawn = noise_at(jnp.arange(2 * draws, dtype=jnp.uint32).reshape(draws, 2), jnp.full((draws, 1), 9), vocab)[:, 0]
    law = np.exp(logits.astype(np.float64))
    cells = np.arange(vocab) // 256
    cells[likely] = 10, 11, 12
    expected = np.bincount(cells, weights=law / law.sum())
    for noise, right in ((drawn, True), (drawn.at[:, period : 2 * period].set(drawn[:, :period]), False)):
        tokens = np.asarray(jnp.argmax(jnp.asarray(logits) + noise, axis=-1))
        chance = p_value(np.bincount(cells[tokens], minlength=len(expected)), expected)
        assert (chance > 1e-3) if right else (chance < 1e-6)


def noise(
    seed: list[list[int]], positions: list[list[int]], vocab: int = 50, stream: int = 0, since: int | None = None
) -> np.ndarray:
    first = None if since is None else jnp.full(len(seed), since, jnp.int32)
    return np.asarray(noise_at(jnp.array(seed, jnp.uint32), jnp.array(positions, jnp.int32), vocab, stream, first))


def test_noise_belongs_to_seed_and_position() -> None:
    whole = noise([[1, 2], [3, 4], [1, 2]], [[10, 11, 12], [10, 11, 12], [12, 10, 99]])
    np.testing.assert_array_equal(whole[0, 2], whole[2, 0])
    np.testing.assert_array_equal(whole[0, 0], whole[2, 1])
    np.testing.assert_array_equal(whole[1, 1], noise([[3, 4]], [[11]])[0, 0])
    jitted = jax.jit(noise_at, static_argnums=2)(jnp.array([[1, 2]], jnp.uint32), jnp.array([[10]], jnp.int32), 50)
    # Logarithms of the same bits: XLA for the CPU rounds some of them otherwise where they are part of a larger loop.
    np.testing.assert_allclose(noise([[1, 2]], [[10]]), jitted, rtol=3e-7)


def test_other_seeds_positions_and_streams_are_unrelated() -> None:
    base = noise([[0, 7]], [[5]], 20_000)[0, 0]
    others = {
        "position": noise([[0, 7]], [[6]], 20_000),
        "low word": noise([[0, 8]], [[5]], 20_000),
        "high word": noise([[1, 7]], [[5]], 20_000),
        "stream 1": noise([[0, 7]], [[5]], 20_000, stream=1),
        "stream 2": noise([[0, 7]], [[5]], 20_000, stream=2),
        "stream 3": noise([[0, 7]], [[5]], 20_000, stream=3),
        "cycle": noise([[0, 7]], [[5]], 20_000, since=5),
        "another cycle": noise([[0, 7]], [[5]], 20_000, since=4),
    }
    table = np.stack([base, *(other[0, 0] for other in others.values())])
    correlation = np.corrcoef(table) - np.eye(len(table))
    assert np.abs(correlation).max() < 5 / np.sqrt(20_000), others.keys()


def test_noise_is_gumbel() -> None:
    uniform = np.exp(-np.exp(-noise([[0, i] for i in range(200)], [[3]] * 200, 200).astype(np.float64)))
    bins = np.bincount(np.minimum((uniform * 64).astype(int), 63).ravel(), minlength=64)
    assert p_value(bins, np.full(64, 1 / 64)) > 1e-3


def test_first_arrivals_of_chunks_are_exponential_and_anyones() -> None:
    """As the first of 1,024 independent times is; and of a chunk no other token is as loud."""
    keys = jnp.asarray(np.random.default_rng(3).integers(2**32, size=(4000, 2)), jnp.uint32)
    least, first = (np.asarray(each) for each in arrivals(keys, jnp.broadcast_to(jnp.array([0, 5]), (4000, 2))))
    uniform = -np.expm1(-CHUNK * least.astype(np.float64))
    for column in (0, 1):
        assert p_value(np.bincount((uniform[:, column] * 20).astype(int), minlength=20), np.full(20, 1 / 20)) > GOOD
        assert p_value(np.bincount(first[:, column] // 64, minlength=16), np.full(16, 1 / 16)) > GOOD
    assert np.abs(np.corrcoef(np.concatenate([uniform, first], axis=1).T) - np.eye(4)).max() < 5 / np.sqrt(4000)
    whole = np.asarray(noise_of_all(keys[:20], 6 * CHUNK))
    for chunk, place in ((0, 0), (5, 1)):
        of_chunk = whole[:, chunk * CHUNK : (chunk + 1) * CHUNK]
        np.testing.assert_array_equal(of_chunk.argmax(axis=1), first[:20, place])
        np.testing.assert_allclose(of_chunk.max(axis=1), -np.log(least[:20, place]), rtol=1e-6)


def test_noise_of_some_tokens_is_that_of_all() -> None:
    keys = jnp.asarray(np.random.default_rng(5).integers(2**32, size=(3, 2)), jnp.uint32)
    tokens = jnp.asarray([[0, 1023, 1024, 2999], [5, 5, 2047, 2048], [2999, 1, 1500, 700]], jnp.int32)
    expected = jnp.take_along_axis(noise_of_all(keys, 3000), tokens, axis=1)
    np.testing.assert_allclose(noise_of(keys, tokens), expected, rtol=3e-7)


@pytest.mark.few
def test_the_same_request_draws_the_same_token_in_any_row() -> None:
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.normal(size=(1, 8, 30)), jnp.float32)
    positions = jnp.arange(8)[None] + 100
    one = requests(1, temperature=0.9, top_k=12)
    expected = choose(filtered_logits(logits, one, "full"), positions, one, "full")
    many = requests(5, temperature=0.9, top_k=12)
    many = replace(many, seed=many.seed.at[3].set(one.seed[0]))
    wide = jnp.asarray(rng.normal(size=(5, 8, 30)), jnp.float32).at[3].set(logits[0])
    tokens = choose(filtered_logits(wide, many, "full"), jnp.broadcast_to(positions, (5, 8)), many, "full")
    np.testing.assert_array_equal(tokens[3], expected[0])
