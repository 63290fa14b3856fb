"""Grammars in verified blocks: what is emitted is what masking token after token gives, greedy and sampled, drafted and plain."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.decoding import cycle, grammar_masks
from dflash_jax.decoding.accept import accept_matching
from dflash_jax.decoding.adjustments import Adjustments, adjusted_logits, after
from dflash_jax.decoding.grammar_masks import Follower, Grammar, masked, masks_of
from dflash_jax.decoding.grammar_tables import GrammarTables, Shelf, block_states, states_after, table_masks
from dflash_jax.decoding.sampling import choose, filtered_logits
from dflash_jax.decoding.token_automata import TokenAutomaton
from dflash_jax.engine import batch
from dflash_jax.engine.requests import adjustments
from dflash_jax.errors import DFlashError
from dflash_jax.models.registry import bind
from dflash_jax.text.regular.expressions import automaton
from dflash_jax.text.regular.oracle import compare
from dflash_jax.text.regular.patterns import parse
from dflash_jax.text.regular.tokens import token_automaton, vocabulary_of

from ..random_pair import VOCAB
from .chi_square import count, p_value
from .test_adjustments import EVERYTHING, FILTERS, PENALTIES, PLACES, PROMPTS, asked, defined, texts_of
from .test_sampling_law import BAD, GOOD, START, TARGET, law_of, requests

llguidance = pytest.importorskip("llguidance")
FIRST = 33  # token 0 is "!", token 1 the letter behind it, and so on
END = 95
SEEDS = 4000


def grammar_of(pattern: str, vocab: int, end: int, first: int = FIRST, **thoughts: Any) -> Grammar:
    """Of a regular expression over tokens of one letter each."""

    class Letters:
        eos_token_id, bos_token_id, special_token_ids = end, None, (end,)
        tokens = tuple(bytes([first + token]) for token in range(vocab))

        def __call__(self, text: bytes) -> list[int]:
            return [byte - first for byte in text]

    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Letters()), n_vocab=vocab, eos_token=end)
    return Grammar(llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_regex(pattern)), **thoughts)


def with_table(grammar: Grammar, pattern: str, vocab: int, end: int, first: int) -> Grammar:
    """A grammar of `grammar_of` with its table."""

    class Letters:
        """As llguidance's tokenizer tells tokens."""

        is_special_token = staticmethod(lambda token: token == end)
        decode_bytes = staticmethod(lambda tokens: bytes(first + token for token in tokens))

    table = token_automaton(automaton(parse(pattern)), vocabulary_of(Letters, vocab, [end]), grammar.matcher)
    compare(table, grammar.matcher)
    return replace(grammar, table=table, reason="")


def automaton_of(grammar: Grammar) -> TokenAutomaton:
    assert grammar.automaton is not None
    return grammar.automaton


def by_turns(text: list[int]) -> set[int]:
    """What `([!-@][A-`])*` goes on with: a token below 32, then one from there to 63; it may end before the first of two."""
    if END in text:
        return {END}
    return set(range(32, 64)) if len(text) % 2 else {*range(32), END}


@pytest.mark.few
def test_texts_are_masked_step_by_step_and_drafting_changes_none(make_pair: Any, monkeypatch: Any) -> None:
    pair = make_pair(max_batch=2, num_pages=5, max_model_len=64)
    forever, ten = (grammar_of(f"([!-@][A-`]){times}", VOCAB, END) for times in ("*", "{5}"))
    asks = [
        asked(0, PROMPTS[0], max_tokens=40), asked(1, PROMPTS[1], max_tokens=40),
        asked(2, PROMPTS[2], max_tokens=40, **EVERYTHING), asked(3, PROMPTS[3], max_tokens=40, temperature=1.0, top_k=20),
        asked(4, PROMPTS[4], max_tokens=40), asked(5, PROMPTS[5], max_tokens=40),
    ]  # fmt: skip
    for index, grammar in ((1, forever), (2, forever), (3, forever), (5, ten)):
        asks[index] = replace(asks[index], grammar=grammar, eos_ids=(END,))
    assert [ask.mode for ask in asks[3:5]] == ["structured", "greedy"]
    plain, ones = texts_of(pair, asks, draft=False)
    assert set(ones) == {1}
    assert pair.engine.scheduler.stats.preemptions, "nobody came back: no grammar was begun in the middle of a text"
    alone, _ = texts_of(pair, [replace(asks[0]), replace(asks[4], index=1)], draft=False)
    assert [plain[0], plain[4]] == alone, "neighbours' texts change"
    assert len(plain[5]) == 11, "the end does not come where nothing else may"
    assert plain[5][-1] == END

    @jax.jit
    def raw_logits(weights: Any, ids: jax.Array) -> jax.Array:
        target = bind(pair.target, weights["target"])
        hidden, _, _ = target(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), dense_attend(), ())
        return target.logits(hidden)

    ids = np.zeros((len(asks), 64), np.int32)
    for row, (request, text) in enumerate(zip(asks, plain, strict=True)):
        ids[row, : len(request.prompt) + len(text)] = (*request.prompt, *text)
    logits = np.asarray(raw_logits(pair.engine.weights, ids))
    for row in (1, 2, 3, 5):
        request, text = asks[row], plain[row]
        for place, token in enumerate(text):
            allowed = by_turns(text[:place])
            if row == 5:  # ends after ten
                allowed = {END} if place == 10 else allowed - {END}
            assert token in allowed
            left = defined(logits[row, len(request.prompt) + place - 1], request, text[:place])
            left[[one for one in range(VOCAB) if one not in allowed]] = -np.inf
            if request.params.temperature == 0:
                assert left[token] >= left.max() - 1e-3, (row, place)
            else:
                assert (left > left[token]).sum() < request.params.top_k, "filters come before masks"

    # Proposals that are right for up to four places, others that no grammar allows among them.
    known = jnp.asarray(ids)

    def forced(setup: Any, logits: Any, positions: jax.Array, state: Any, noise: Any) -> jax.Array:
        request = state.request.seed[:, 1:].astype(jnp.int32)
        right = known[request, jnp.minimum(positions, 63)]
        return jnp.where((positions * 3 + request) % 7 == 0, (right + 40) % VOCAB, right)

    monkeypatch.setattr(cycle, "propose", forced)
    drafted, counts = texts_of(pair, asks, draft=True)
    assert drafted == plain
    assert {1, 2, 3, 5} <= set(counts)

    def broken(asked: Any, masks: Any) -> None:
        raise ValueError("a bound was passed")

    # What llguidance refuses ends those that ask for it and nobody else.
    monkeypatch.setattr(grammar_masks, "_fill", broken)
    with pytest.raises(DFlashError, match="any further: a bound was passed"):
        texts_of(pair, [replace(asks[1], index=0)], draft=True)
    pair.assert_free()
    assert texts_of(pair, [asks[0]], draft=True)[0] == [plain[0]]


@pytest.mark.few
def test_results_are_looked_at_before_the_next_cycles_begin(make_pair: Any, monkeypatch: Any) -> None:
    """Cycles that ask the host return with results: a call behind them would only keep those back."""
    pair = make_pair(max_batch=2, max_model_len=64)
    monkeypatch.setattr(pair.engine, "goes_ahead", True)  # of a device that works while the host goes on
    events, cycles = list[str](), batch.masked_cycles

    def told(*args: Any, **named: Any) -> Any:
        events.append("cycles")
        return cycles(*args, **named)

    monkeypatch.setattr(batch, "masked_cycles", told)
    grammar = grammar_of("([!-@][A-`])*", VOCAB, END)
    for update in pair.engine.run(
        [replace(asked(0, PROMPTS[0], max_tokens=40), grammar=grammar, eos_ids=())], cycles=4
    ):
        events.append("first" if update.first else "results")
    assert events[0] == "first"
    assert events[1:] == ["cycles", "results"] * (len(events) // 2)
    assert len(events) > 4


def follows(text: tuple[int, ...]) -> set[int]:
    """What `(ab|c[bde])*[ac]?` goes on with, of tokens a to e and the end."""
    if 5 in text:
        return {5}
    if len(text) % 2 == 0:
        return {0, 2, 5}
    return {1, 5} if text[-1] == 0 else {1, 3, 4, 5}


@functools.partial(jax.jit, static_argnums=2)
def emitted_texts(
    adjust: Adjustments, grammars: jax.Array, blind: bool, tables: GrammarTables | None = None
) -> tuple[jax.Array, jax.Array]:
    """The first tokens of every seed, and how many proposals stood at once. `blind` masks as if no proposal had come before.

    Args:
      grammars: numbers that the host knows, or states of `tables`.
    """
    rows, vocab = grammars.shape[0], len(TARGET)
    request, places, each = requests(rows, **FILTERS), jnp.arange(3), jnp.arange(rows)

    def cycle(carry: Any, _: Any) -> Any:
        pending, length, text, adjust, state = carry
        positions = length[:, None] + places
        first = jnp.argmax(
            jnp.asarray(TARGET)[pending] + jnp.array([0, 0, 9, 0, 0, 0]) * (length % 2 == 0)[:, None], axis=-1
        )
        proposals = jnp.stack([first, jnp.where(each % 2, 1, 3)], axis=1).astype(jnp.int32)
        ids = jnp.concatenate([pending[:, None], proposals], axis=1)
        logits = adjusted_logits(jnp.asarray(TARGET)[ids], ids, adjust)
        walked = ids if not blind else ids.at[:, 1:].set(jnp.array([0, 1]))
        asked = jnp.concatenate([grammars[:, None], length[:, None], walked], axis=1)
        shape = jax.ShapeDtypeStruct((*walked.shape, 1), jnp.uint32)
        if tables is None:
            masks = jax.pure_callback(lambda asked: masks_of(np.asarray(asked), vocab), shape, asked)
        else:
            states = block_states(tables, state, walked)
            masks = table_masks(tables, states)
        logits = masked(logits, masks)
        chosen = choose(filtered_logits(logits, request, "structured"), positions, request, "structured")
        accepted, tokens = accept_matching(proposals, chosen)
        at = jnp.where(places <= accepted[:, None], jnp.minimum(positions, PLACES), PLACES)
        text = text.at[each[:, None], at].set(tokens, mode="drop")
        last = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
        if tables is not None:
            state = states_after(tables, block_states(tables, state, ids), tokens, accepted + 1)
        return (last, length + accepted + 1, text, after(adjust, tokens, accepted + 1), state), accepted

    nothing, texts = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, PLACES), jnp.int32)
    start = jnp.full(rows, START, jnp.int32), nothing, texts, adjust, grammars
    carry, accepted = jax.lax.scan(cycle, start, None, length=PLACES)
    ended = jnp.cumsum(carry[2] == 5, axis=1) > 0  # behind an end everything is one
    return jnp.where(ended, 5, carry[2]), accepted[0]


@pytest.mark.few
def test_sampled_blocks_have_the_masked_law() -> None:
    """With filters, which see the tokens that are left, and penalties."""
    request, vocab = asked(0, (2,), **PENALTIES, **FILTERS), len(TARGET)
    grammar = grammar_of("(ab|c[bde])*[ac]?", vocab, 5, ord("a"))
    adjust = jax.tree.map(lambda leaf: jnp.repeat(leaf, SEEDS, axis=0), adjustments([(request, [START])], vocab))
    law = np.ones(())
    for _ in range(PLACES):
        next_law = np.zeros((*law.shape, vocab))
        for text in np.ndindex(law.shape):
            left = defined(TARGET[text[-1] if text else START], request, [START, *text])
            left[[token for token in range(vocab) if token not in follows(text)]] = -np.inf
            left[5] = 0.0 if 5 in text else left[5]
            next_law[text] = law_of(left, **FILTERS)
        law = law[..., None] * next_law
    followers = [Follower(grammar) for _ in range(SEEDS)]
    numbers = jnp.array([follower.number for follower in followers])
    text, accepted = emitted_texts(adjust, numbers, False)
    assert 0.2 < float(accepted.mean()) < 1.8
    assert p_value(count(text, vocab), law) > GOOD
    followers = [Follower(grammar) for _ in range(SEEDS)]
    blind = emitted_texts(adjust, jnp.array([follower.number for follower in followers]), True)[0]
    assert p_value(count(blind, vocab), law) < BAD, "masks of another path are not noticed"

    shelf, table = Shelf(vocab), automaton_of(with_table(grammar, "(ab|c[bde])*[ac]?", vocab, 5, ord("a")))
    assert shelf.place(table, ())
    states = jnp.full(SEEDS, shelf.state(table, table.start))
    by_table, accepted_so = emitted_texts(adjust, states, False, shelf.tables)
    np.testing.assert_array_equal(by_table, text)
    np.testing.assert_array_equal(accepted_so, accepted)
    assert p_value(count(emitted_texts(adjust, states, True, shelf.tables)[0], vocab), law) < BAD


def test_thoughts_come_before_a_grammar() -> None:
    """Tokens a to f: the grammar is `ab`, `d` opens thoughts, `e` closes them, and f ends the text."""
    grammar = grammar_of("ab", 6, 5, ord("a"), opens=3, closes=4)

    def masks(follower: Follower, produced: int, *ids: int) -> list[str]:
        found = masks_of(np.array([[follower.number, produced, *ids]]), 6)
        return ["".join("abcdef"[token] for token in range(6) if row >> token & 1) for row in found[0, :, 0].tolist()]

    anything = "abcdef"
    maybe = Follower(grammar)
    assert masks(maybe, 0, -1) == ["ad"]
    assert masks(maybe, 1, 3, 2, 4, 0, 1) == [anything, anything, "a", "b", "f"]
    assert masks(maybe, 4, 0, 1, 5) == ["b", "f", anything], "of d c e a, all but the last were proposed"
    assert masks(Follower(grammar, [0]), 1, 0, 1) == ["b", "f"]
    inside = Follower(replace(grammar, inside=True), [2])
    assert masks(inside, 1, 2, 2) == [anything, anything]
    assert masks(inside, 3, 4, 0) == ["a", "b"]
    assert masks(inside, 3, 4, 0) == ["a", "b"], "asked twice it says something else"
    number = inside.number
    del inside
    assert number not in grammar_masks._FOLLOWERS
