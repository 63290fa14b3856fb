"""Tables of grammars in the loop: the texts that the host's masks give, token for token, whoever runs beside them."""

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding import cycle, grammar_tables
from dflash_jax.decoding.grammar_masks import NO_GRAMMAR, Follower, Grammar, masks_of
from dflash_jax.decoding.grammar_tables import Shelf, block_states, states_after, table_masks
from dflash_jax.decoding.token_automata import FREE
from dflash_jax.engine import batch

from ..hybrid_pair import hybrid_pair
from ..random_pair import VOCAB, of_one_shape
from .test_adjustments import EVERYTHING, PROMPTS, asked, texts_of
from .test_grammar_masks import END, FIRST, automaton_of, grammar_of, with_table

pytest.importorskip("llguidance")
PATTERNS = ("([!-@][A-`])*", "([!-@][A-`]){5}", "(A|BC*[!-,]{2,3})+~?", "[^A-Z]{4,30}")


def tabled(pattern: str) -> Grammar:
    return with_table(grammar_of(pattern, VOCAB, END), pattern, VOCAB, END, FIRST)


def on_host(request: Any) -> Any:
    grammar = None if request.grammar is None else replace(request.grammar, table=None)
    return replace(request, grammar=grammar)


def test_texts_are_those_of_the_host(make_pair: Any, monkeypatch: Any) -> None:
    """Greedy and sampled, with filters and penalties, plain and drafted, where slots are lost, and where a grammar that the host
    has to be asked for comes and goes."""
    pair = make_pair(max_batch=2, num_pages=5, max_model_len=64)
    of_one_shape(pair.engine)
    tables = [tabled(pattern) for pattern in PATTERNS]
    many = {"max_tokens": 40}
    asks = [
        asked(0, PROMPTS[0], **many), asked(1, PROMPTS[1], **many), asked(2, PROMPTS[2], **many, **EVERYTHING),
        asked(3, PROMPTS[3], **many, temperature=1.0, top_k=20), asked(4, PROMPTS[4], **many, temperature=1.3),
        asked(5, PROMPTS[5], max_tokens=12), asked(6, PROMPTS[1], **many), asked(7, PROMPTS[0], **many),
    ]  # fmt: skip
    for index, table in ((1, 0), (2, 0), (3, 2), (4, 3), (6, 1), (7, 2)):
        asks[index] = replace(asks[index], grammar=tables[table], eos_ids=(END,))
    assert [ask.mode for ask in asks] == ["greedy", *["regular"] * 4, "greedy", "regular", "regular"]
    asked_host = list[str]()
    cycles = batch.masked_cycles

    def told(*args: Any, **named: Any) -> Any:
        asked_host.append("cycles")
        return cycles(*args, **named)

    monkeypatch.setattr(batch, "masked_cycles", told)
    plain, _ = texts_of(pair, asks, draft=False)
    assert not asked_host
    assert pair.engine.scheduler.stats.preemptions, "nobody came back: no grammar was begun in the middle of a text"
    expected, _ = texts_of(pair, list(map(on_host, asks)), draft=False)
    assert asked_host
    assert plain == expected

    # Proposals that are right for up to four places, others that no grammar allows among them.
    known = np.zeros((len(asks), 64), np.int32)
    for row, (request, text) in enumerate(zip(asks, plain, strict=True)):
        known[row, : len(request.prompt) + len(text)] = (*request.prompt, *text)

    def forced(setup: Any, logits: Any, positions: jax.Array, state: Any, noise: Any) -> jax.Array:
        request = state.request.seed[:, 1:].astype(jnp.int32)
        right = jnp.asarray(known)[request, jnp.minimum(positions, 63)]
        return jnp.where((positions * 3 + request) % 7 == 0, (right + 40) % VOCAB, right)

    monkeypatch.setattr(cycle, "propose", forced)
    drafted, counts = texts_of(pair, asks, draft=True)
    assert drafted == plain
    assert {1, 5} < set(counts)
    assert len(set(counts)) > 3

    # One among them that the host has to be asked for: all beside it are followed by the host meanwhile, and by tables again.
    switched = list[tuple[str, str]]()
    follow = batch.Batch._follow_anew

    def turned(batch: Any, needs: Any) -> None:
        switched.append((batch.needs.mode, needs.mode))
        follow(batch, needs)

    monkeypatch.setattr(batch.Batch, "_follow_anew", turned)
    mixed = [on_host(ask) if index == 3 else ask for index, ask in enumerate(asks)]
    assert texts_of(pair, mixed, draft=True)[0] == plain
    assert {("regular", "structured"), ("structured", "regular")} <= set(switched)


@pytest.mark.few
def test_grammars_wait_for_room(make_pair: Any, monkeypatch: Any) -> None:
    """Where the tables of those that run leave none."""
    tables = [tabled(f"[!-@]{{{count}}}") for count in (12, 13, 14)]
    monkeypatch.setattr(grammar_tables, "SHELF_STATES", 20)
    pair = make_pair(max_batch=3, max_model_len=64)
    asks = [
        replace(asked(index, PROMPTS[index], max_tokens=30), grammar=tables[index], eos_ids=(END,))
        for index in range(3)
    ]
    most, place = [], batch.Batch.place

    def told(batch: Any, job: Any) -> bool:
        found = place(batch, job)
        most.append((len(batch.slots.taken), found))
        return found

    monkeypatch.setattr(batch.Batch, "place", told)
    texts, _ = texts_of(pair, asks, draft=True)
    assert [len(text) for text in texts] == [13, 14, 15]
    assert {taken for taken, found in most if found} == {0}
    assert (1, False) in most


def test_a_shelf_keeps_what_is_used() -> None:
    tables = {name: automaton_of(tabled(f"[!-@]{{{name}}}")) for name in (2, 3, 4, 5)}
    shelf = Shelf(VOCAB)
    before = shelf.tables
    assert all(shelf.place(table, ()) for table in tables.values())
    assert shelf.tables is not before
    assert not np.asarray(before.next).any(), "tables that a call was given changed under it"
    after = shelf.tables
    assert shelf.place(tables[3], ())
    assert shelf.tables is after
    taken = np.asarray(after.next)
    for table in tables.values():
        for state in range(1, table.states):
            where = shelf.state(table, state)
            assert shelf.own(table, where) == state
            own = taken[where, : table.next.shape[1]]
            np.testing.assert_array_equal(np.where(own > FREE, own - (where - state), own), table.next[state])
            assert (taken[where, table.next.shape[1] :] < 0).all()
    assert shelf.state(tables[2], FREE) == shelf.own(tables[2], FREE) == FREE


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_blocks_are_those_of_the_host(seed: int) -> None:
    """Masks of drawn blocks, refused proposals among them, beside slots without a grammar, and where counts of tokens lead."""
    draw, grammars = random.Random(seed), [tabled(pattern) for pattern in PATTERNS]
    shelf, slots, places = Shelf(VOCAB), 12, 6
    asked_of_host, at, ids, texts, followers = [], [], [], [], []
    for slot in range(slots):
        if slot % 4 == 3:  # no grammar
            block = [draw.randrange(VOCAB) for _ in range(places)]
            asked_of_host.append([NO_GRAMMAR, 1, *block])
            at.append(FREE)
            ids.append(block)
            texts.append((None, block[:1]))
            continue
        grammar = draw.choice(grammars)
        table, text = automaton_of(grammar), list[int]()
        shelf.place(table, ())
        for _ in range(draw.randint(1, 8)):
            allowed = np.flatnonzero(table.allowed(table.walk(text))).tolist()
            text += [one for one in draw.sample(allowed, len(allowed)) if one != END][:1]
        block = text[-1:]
        while len(block) < places:
            allowed = np.flatnonzero(table.allowed(table.walk([*text, *block[1:]]))).tolist()
            block.append(draw.choice(allowed) if draw.random() < 0.8 else draw.randrange(VOCAB))
        followers.append(Follower(grammar, text))
        asked_of_host.append([followers[-1].number, len(text), *block])
        at.append(shelf.state(table, table.walk(text)))
        ids.append(block)
        texts.append((table, text))
    tables = shelf.tables
    rows = block_states(tables, jnp.asarray(at), jnp.asarray(ids))
    masks = np.asarray(table_masks(tables, rows))
    expected = masks_of(np.asarray(asked_of_host), VOCAB)
    shown, wanted = (
        np.unpackbits(one.view(np.uint8), axis=-1, bitorder="little")[..., :VOCAB] for one in (masks, expected)
    )
    for slot, block in enumerate(ids):
        reached = (*block[1:], END).index(END) + 1  # behind an end nothing is emitted
        np.testing.assert_array_equal(shown[slot, :reached], wanted[slot, :reached])
    counts = np.array([draw.randint(0, places) for _ in range(slots)])
    tokens = np.concatenate([np.asarray(ids)[:, 1:], np.asarray(ids)[:, :1]], axis=1)
    after = np.asarray(states_after(tables, rows, jnp.asarray(tokens), jnp.asarray(counts)))
    for slot, (table, text) in enumerate(texts):
        own = FREE if table is None else table.walk([*text, *tokens[slot, : counts[slot]].tolist()])
        assert after[slot] == (FREE if table is None else shelf.state(table, own))


@pytest.mark.few
def test_states_of_delta_nets_beside_tables() -> None:
    pair = hybrid_pair(max_batch=2, max_model_len=64)
    asks = [asked(0, PROMPTS[0], max_tokens=24), asked(1, PROMPTS[1], max_tokens=24, temperature=1.0, top_k=20)]
    asks = [
        replace(ask, grammar=tabled(PATTERNS[place]), eos_ids=(END,)) for ask, place in zip(asks, (0, 2), strict=True)
    ]
    texts, counts = texts_of(pair, asks, draft=True)
    assert texts == texts_of(pair, list(map(on_host, asks)), draft=True)[0]
    assert set(counts) > {1}
