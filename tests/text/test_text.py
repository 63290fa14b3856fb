"""Text that grows token by token: whole characters, nothing taken back, stop strings wherever tokens are cut."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_jax.engine.acceptance import DraftRecord
from dflash_jax.engine.requests import Request, Update
from dflash_jax.generation import Writer
from dflash_jax.model import Model
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.text.completion import Completion
from dflash_jax.text.detokenizer import TextStream
from dflash_jax.text.tokenizer import Tokenizer

from .tokenizers_for_tests import PIECES, byte_fallback, byte_level, ids_of, metaspace

TOKENIZER = byte_level()
SPECIAL_ID = 256 + len(PIECES)
TOKENIZERS: dict[str, Tokenizer] = {}
UNKNOWN_IDS = (SPECIAL_ID + 1, 100_000)

ANY_IDS = st.lists(st.one_of(st.integers(0, SPECIAL_ID), st.integers(256, SPECIAL_ID), st.sampled_from(UNKNOWN_IDS)))
LETTERS = st.text("abé你 😀", max_size=12)
# Text cut into tokens in a random way, so that words and characters straddle them.
CUT_TEXT = st.tuples(st.text("abcstop é你😀\ufffd\n", max_size=20), st.sets(st.sampled_from(PIECES))).map(
    lambda drawn: ids_of(drawn[0], sorted(drawn[1]))
)
STOPS = st.lists(st.text("abcstop é你\ufffd", min_size=1, max_size=4), max_size=3)


def feed(ids: list[int], stops=(), **options) -> tuple[TextStream, list[str]]:
    """The stream and its pieces: one after each token up to a stop string, then the rest."""
    stream, pieces = TextStream(TOKENIZER, stops, **options), []
    for token in ids:
        found = stream.add(token)
        pieces.append(stream.take())
        if found:
            break
    else:
        stream.finish()
    pieces.append(stream.take(everything=True))
    return stream, pieces


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.one_of(ANY_IDS, CUT_TEXT))
def test_pieces_make_the_whole_text(ids: list[int]) -> None:
    whole = TOKENIZER.decode(ids)
    stream, pieces = feed(ids)
    assert "".join(pieces) == stream.text == whole


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.one_of(ANY_IDS, CUT_TEXT), st.integers(0, 5), st.booleans(), st.sampled_from([byte_level, byte_fallback]))
def test_tokens_at_once_are_tokens_one_by_one(ids: list[int], first: int, special: bool, make: Callable) -> None:
    tokenizer = TOKENIZERS.setdefault(make.__name__, make())
    one, all_of_them = (TextStream(tokenizer, special=special) for _ in range(2))
    ends = []
    for token in ids:
        assert not one.add(token)
        ends.append(len(one.text))
    assert all_of_them.add_all(ids[:first]) + all_of_them.add_all(ids[first:]) == ends
    for stream in (one, all_of_them):
        stream.finish()
    assert one.text == all_of_them.text


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
def test_tokens_that_are_silent_add_nothing_anywhere(make: Callable[[], Tokenizer]) -> None:
    """By definition: unknown ones, and those that are text with special tokens alone."""
    tokenizer = make()
    for token in [*range(tokenizer.backend.get_vocab_size()), *UNKNOWN_IDS]:
        shown, hidden = (tokenizer.backend.decode([token], skip_special_tokens=skip) for skip in (False, True))
        unknown = tokenizer.backend.id_to_token(token) is None
        assert tokenizer.is_silent(token) == (unknown or (bool(shown) and not hidden))
        assert tokenizer.is_silent(token, special=True) == unknown


def test_byte_level_texts_are_joined_without_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    tokenizer.backend.add_special_tokens(["<\uff5cend\u2581of\uff5c>"])  # no letters of bytes: as it is written
    last = tokenizer.backend.get_vocab_size() - 1
    ids = [*ids_of("aé stop", [b"stop"]), 0xF0, 0x9F, last, SPECIAL_ID, 0x98]
    whole = tokenizer.decode(ids, special=True)
    assert tokenizer.joins_bytes
    assert not any(make().joins_bytes for make in (byte_fallback, metaspace))
    monkeypatch.setattr("dflash_jax.text.tokenizer.Tokenizer.joins_bytes", True)
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: pytest.fail("it was asked"))
    stream = TextStream(tokenizer, special=True)
    for token in ids:
        stream.add(token)
    stream.finish()
    assert stream.text == whole


def test_special_tokens_are_text_where_asked() -> None:
    ids = [*b"ab", SPECIAL_ID, *b"c", UNKNOWN_IDS[1], SPECIAL_ID]
    whole = TOKENIZER.decode(ids, special=True)
    stream, pieces = feed(ids, special=True)
    assert "".join(pieces) == stream.text == whole
    assert len(whole) > len(TOKENIZER.decode(ids)) == 3


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.one_of(ANY_IDS, CUT_TEXT), STOPS)
def test_nothing_given_is_taken_back_and_no_character_is_cut(ids: list[int], stops: list[str]) -> None:
    whole = TOKENIZER.decode(ids)
    stream, pieces = feed(ids, stops)
    shown = ""
    for piece in pieces:
        shown += piece
        assert whole.startswith(shown)
        assert stream.text.startswith(shown)
    assert shown == stream.text


@settings(max_examples=300, deadline=None, derandomize=True)
@given(LETTERS, st.sets(st.sampled_from(PIECES)))
def test_text_is_not_held_back_without_reason(text: str, pieces: set[bytes]) -> None:
    ids = ids_of(text, sorted(pieces))
    stream, given_so_far = TextStream(TOKENIZER), ""
    for place, token in enumerate(ids):
        stream.add(token)
        given_so_far += stream.take()
        so_far = TOKENIZER.decode(ids[: place + 1])
        if not so_far.endswith("\ufffd"):
            assert given_so_far == so_far


def cut(whole: str, stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The definition, one character at a time: the first stop string to be complete, the longest of several at once."""
    for end in range(1, len(whole) + 1):
        hits = [stop for stop in stops if whole[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return whole[: end if include_stop else end - len(longest)], longest
    return whole, None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.one_of(ANY_IDS, CUT_TEXT), STOPS, st.booleans())
def test_stop_strings_end_the_text_wherever_tokens_are_cut(ids: list[int], stops: list[str], include: bool) -> None:
    stream, pieces = feed(ids, stops, include_stop=include)
    text, found = cut(TOKENIZER.decode(ids), stops, include_stop=include)
    assert (stream.text, stream.found) == (text, found)
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "found"),
    [
        ([b"STOP here"], ["P h"], "STO", "P h"),
        (["a", "b", "c", "d"], ["bcx", "cd"], "ab", "cd"),
        (["x", "a", "b", "a", "b", "c"], ["abc"], "xab", "abc"),
        (["a", "a", "a", "b"], ["aab"], "a", "aab"),
        (["x", b"abc"], ["abc", "b"], "xa", "b"),
        (["x", b"ab", "c"], ["abc", "b"], "xa", "b"),
        (["x", "a", "b"], ["b", "ab"], "x", "ab"),
        (["é", "s", "t", "o", "p"], ["éstop"], "", "éstop"),
        (["a", b" \xe4", b"\xbd\xa0", "!"], ["你"], "a ", "你"),
    ],
)
def test_examples_of_stop_strings(tokens: list, stops: list[str], text: str, found: str) -> None:
    ids = [token for part in tokens for token in ids_of(part, PIECES)]
    stream, _ = feed(ids, stops)
    assert (stream.text, stream.found) == (text, found)


def test_a_stop_string_in_the_bytes_that_were_waiting() -> None:
    # The last token ends inside a character, so the whole token waits until no other follows.
    stream = TextStream(TOKENIZER, ["stop"])
    for token in ids_of(b"go stop\xc3", [b"stop\xc3"]):
        assert not stream.add(token)
    assert stream.take() == "go "
    assert stream.finish()
    assert (stream.take(everything=True), stream.text, stream.found) == ("", "go ", "stop")
    assert not stream.finish()


def test_a_possible_beginning_of_a_stop_string_waits() -> None:
    stream, shown = TextStream(TOKENIZER, ["stop", "ab\n\n"]), []
    for character in "xstoab\n!sto":
        stream.add(ord(character))
        shown.append(stream.take())
    assert shown == ["x", "", "", "", "sto", "", "", "ab\n!", "", "", ""]
    assert not stream.finish()
    assert stream.take(everything=True) == "sto"


def test_the_stop_string_is_kept_where_asked() -> None:
    for include, text in ((True, "xab"), (False, "x")):
        stream, pieces = feed(ids_of("xabc"), ["ab"], include_stop=include)
        assert "".join(pieces) == stream.text == text


def test_nothing_is_looked_for_before_min_tokens() -> None:
    stream = TextStream(TOKENIZER, ["ab"])
    for character in "abab":
        assert not stream.add(ord(character), watch=False)
    assert not stream.add(ord("a"))
    assert stream.add(ord("b"))
    assert stream.text == "abab"


@pytest.mark.parametrize(
    ("least", "pieces", "text", "reason"),
    [
        (1, [b"a", b"b", b"a", b"b"], "", "stop"), (2, [b"a", b"b", b"a", b"b"], "ab", "stop"),
        (3, [b"a", b"b", b"a", b"b"], "ab", "stop"), (4, [b"a", b"b", b"a", b"b"], "abab", "length"),
        (0, [b"stop\xc3"], "", "stop"), (1, [b"stop\xc3"], "stop\ufffd", "length"),
    ],
)  # fmt: skip
def test_a_request_looks_for_stop_strings_after_its_min_tokens(
    least: int, pieces: list, text: str, reason: str
) -> None:
    """As for stop ids: the first token that may complete one is the next. The last case's text waits until no token follows."""
    tokens = [token for piece in pieces for token in ids_of(piece, [b"stop\xc3"])]
    params = SamplingParams(max_tokens=len(tokens), min_tokens=least, stop=("ab", "stop"))
    model = object.__new__(Model)  # without weights
    vars(model).update(tokenizer=TOKENIZER, engine=SimpleNamespace(programs=SimpleNamespace(compile_s=0.0)))
    update = Update(0, tokens, [False] * len(tokens), [], first=True, seconds=1.0, finish_reason="length")
    done = Writer(model, Request(0, (1,), params)).write(update).completion
    assert done is not None
    assert (done.text, done.finish_reason) == (text, reason)


@pytest.mark.parametrize(("stop", "counts"), [("a", [3]), ("d", [3, 1]), ("de", [3, 1, 4]), ("x", [3, 1, 4])])
def test_cycles_behind_the_end_of_a_text_are_not_counted(stop: str, counts: list[int]) -> None:
    """The device has run them before anybody looks for a stop string."""
    model = object.__new__(Model)  # without weights
    vars(model).update(tokenizer=TOKENIZER, engine=SimpleNamespace(programs=SimpleNamespace(compile_s=0.0)))
    writer = Writer(model, Request(0, (1,), SamplingParams(stop=stop)))
    writer.write(Update(0, [ord("-")], [False], [], first=True, seconds=1.0))
    tokens = [ord(letter) for letter in "abcdefgh"]
    drafts, model.drafting = [(4, 2), (4, 0), (4, 3)], DraftRecord()
    update = Update(0, tokens, [False] * 8, [3, 1, 4], first=False, seconds=1.0, finish_reason="length", drafts=drafts)
    piece = writer.write(update)
    assert piece.completion is not None
    assert piece.accepted == piece.completion.acceptance_lengths == counts
    assert piece.completion.stats.target_steps == len(counts)
    # A text that ends at a draft says nothing of those behind it.
    ends = {"a": [(1, 1)], "d": [(4, 2), (4, 0)], "de": [(4, 2), (4, 0), (1, 1)], "x": [(4, 2), (4, 0), (4, 3)]}
    assert writer.drafts == ends[stop]


def written(update: Update, params: SamplingParams, eos: tuple[int, ...] = ()) -> Completion:
    """What a request comes to that got all its tokens in one update."""
    model = object.__new__(Model)  # without weights
    vars(model).update(tokenizer=TOKENIZER, engine=SimpleNamespace(programs=SimpleNamespace(compile_s=0.0)))
    done = Writer(model, Request(0, (1,), params, eos)).write(update).completion
    assert done is not None
    return done


ENDS: dict[str, dict[str, Any]] = {
    "end token": {"eos": (ord("b"),)},
    "stop id": {"stop_token_ids": [ord("b")]},
    "end token and stop id": {"eos": (ord("b"),), "stop_token_ids": [ord("b")]},
    "stop id where end tokens are ignored": {"eos": (ord("b"),), "stop_token_ids": [ord("b")], "ignore_eos": True},
    "stop string": {"stop": ["b"]},
    "stop string that the end token completes": {"stop": ["b"], "eos": (ord("b"),)},
}


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
@pytest.mark.parametrize("end", ENDS)
def test_what_ended_a_text_is_in_it_where_that_is_asked_for(end: str, include: bool, text: str) -> None:
    """Whichever way it ended, and with an end token that the tokenizer does not call special. The id is among the tokens."""
    options = dict(ENDS[end])
    params = SamplingParams(max_tokens=9, include_stop=include, **{k: v for k, v in options.items() if k != "eos"})
    request = Request(0, (1,), params, options.get("eos", ()))
    update = Update(0, [ord("a"), ord("b")], [False] * 2, [], first=True, seconds=1.0)
    update.finish(request)
    done = written(update, params, options.get("eos", ()))
    assert (done.text, done.token_ids) == (text, [ord("a"), ord("b")])


@pytest.mark.parametrize("ended", ["eos", "stop"])
@pytest.mark.parametrize("include", [False, True])
def test_a_special_token_that_ended_a_text_is_never_in_it(ended: str, include: bool) -> None:
    params = SamplingParams(include_stop=include)
    ids = [ord("a"), SPECIAL_ID]
    update = Update(0, ids, [False] * 2, [], first=True, seconds=1.0, finish_reason=ended, stop_reason=SPECIAL_ID)
    done = written(update, params)
    assert (done.text, done.token_ids, done.finish_reason) == ("a", ids, ended)


def test_an_end_token_before_min_tokens_or_at_the_limit_is_text() -> None:
    """It did not end the text."""
    update = Update(0, [ord("a"), ord("b")], [False] * 2, [], first=True, seconds=1.0, finish_reason="length")
    assert written(update, SamplingParams(ignore_eos=True), (ord("b"),)).text == "ab"


def test_special_and_unknown_tokens_are_no_text() -> None:
    ids = [SPECIAL_ID, ord("a"), UNKNOWN_IDS[0], 0xC3, SPECIAL_ID, UNKNOWN_IDS[1], 0xA9, SPECIAL_ID]
    stream, pieces = feed(ids)
    assert stream.text == "".join(pieces) == "aé"


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None)
    assert not stream.add(5)
    assert not stream.finish()
    assert stream.take(everything=True) == ""


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.integers(250, 260), st.sampled_from([0xE4, 0xBD, 0xA0, 0xC3]))))
def test_decoders_that_change_their_mind_do_no_harm(ids: list[int]) -> None:
    # Byte fallback turns all bytes of a run into replacement characters once one of them fits nothing.
    tokenizer = byte_fallback()
    stream, shown = TextStream(tokenizer), ""
    for token in ids:
        stream.add(token)
        shown += stream.take()
        assert stream.text.startswith(shown)
    stream.finish()
    shown += stream.take(everything=True)
    whole = tokenizer.decode(ids)
    assert [c for c in shown if c.isascii()] == [c for c in whole if c.isascii()]
    if "\ufffd" not in whole:
        assert shown == whole


def all_at_once(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text by definition, in which whatever is no character yet is decoded again with every token that follows."""
    text, window, read, known = "", list[int](), 0, 0
    for place, token in enumerate([*ids, None]):
        window += [] if token is None else [token]
        decoded = tokenizer.decode(window)
        if len(decoded) > known and (place == len(ids) or not decoded.endswith("\ufffd")):
            text += decoded[known:]
            window = window[read:]
            read, known = len(window), len(tokenizer.decode(window))
    return text


BROKEN = (0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xC3)
RUNS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(BROKEN), st.integers(1, 90)).map(lambda drawn: [drawn[0]] * drawn[1]),
        st.lists(st.sampled_from(BROKEN), min_size=30, max_size=60),
        st.lists(st.integers(0, 300), max_size=12),
        st.integers(1, 50).map(lambda times: [SPECIAL_ID] * times),
        st.lists(st.sampled_from([0xE4, 0xBD, 0xA0, 259, 260]), max_size=40),
    ),
    max_size=6,
).map(lambda runs: [token for run in runs for token in run])


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
@settings(max_examples=80, deadline=None, derandomize=True)
@given(ids=RUNS)
@example(
    ids=[0xFF, *[0xC3, 0xA9] * 15, 0xE4, 0xBD, 0xA0]
)  # good but for the first, dropped in the middle of a character
@example(ids=[*[0xFF] * 30, 0xF0, 0x9F, 0x98, 0x80])  # shortened just before the last byte of a character
@example(
    ids=[*[0xFF] * 20, 256, *[0xFF] * 33, 256, 257]
)  # behind many tokens that the next piece needs to tell its space
def test_long_runs_that_are_no_text_lose_nothing(make: Callable[[], Tokenizer], ids: list[int]) -> None:
    tokenizer = TOKENIZERS.setdefault(make.__name__, make())
    stream, shown = TextStream(tokenizer), ""
    for token in ids:
        stream.add(token)
        shown += stream.take()
    stream.finish()
    shown += stream.take(everything=True)
    assert shown == stream.text == all_at_once(tokenizer, ids)
    if make is byte_level:
        assert shown == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("make", "first", "then"),
    [
        (byte_level, [], [0xE4]),
        (byte_level, [], [SPECIAL_ID]),
        (byte_level, [], [100_000]),
        (byte_fallback, [], [0xFF]),
        (byte_fallback, [0xFF], [0xC3, 0xA9]),  # bytes of good characters that an earlier one of their run spoils
        (metaspace, [], [0xE4]),
    ],
)
def test_no_output_is_decoded_again_and_again(make: Callable[[], Tokenizer], first: list[int], then: list[int]) -> None:
    """Tokens that never become text, for example what follows an ignored end: the work for one of them has a bound."""
    tokenizer, ids, most = make(), first + then * 500, 0

    class Counting(Tokenizer):
        def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
            nonlocal most
            most = max(most, len(ids))
            return super().decode(ids, special=special)

    stream = TextStream(Counting(tokenizer.backend), ["stop"])
    for token in ids:
        stream.add(token)
    assert most < 100
    assert not stream.finish()
    assert stream.text == tokenizer.decode(ids)


def test_a_decoder_that_looks_at_all_tokens_is_given_all() -> None:
    """What it makes of fewer ends otherwise: then nothing is dropped."""

    class Numbering(Tokenizer):
        def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
            return "".join(str(place % 10) for place in range(len(ids))) + "\ufffd" * bool(ids)

    tokenizer = Numbering(TOKENIZER.backend)
    stream, ids = TextStream(tokenizer), [0xE4] * 50
    for token in ids:
        stream.add(token)
    stream.finish()
    assert stream.text == tokenizer.decode(ids)
