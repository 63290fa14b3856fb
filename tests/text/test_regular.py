"""Grammars as automata: byte for byte what llguidance follows, and over tokens its very masks."""

import json
import random
import re

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from dflash_jax.decoding.grammar_masks import Follower, Grammar, masks_of
from dflash_jax.decoding.token_automata import FREE, made
from dflash_jax.sampling_params import WHITE_SPACE, Structured
from dflash_jax.text.answers.call_grammars import call_grammar
from dflash_jax.text.regular import expressions, tokens
from dflash_jax.text.regular.expressions import NotRegular, automaton
from dflash_jax.text.regular.oracle import compare
from dflash_jax.text.regular.patterns import parse
from dflash_jax.text.regular.schemas import document
from dflash_jax.text.regular.tables import table_of
from dflash_jax.text.regular.tokens import Vocabulary, token_automaton, vocabulary_of

llguidance = pytest.importorskip("llguidance")
WORDS = (
    '{"', '": ', '", "', '"}', "name", "na", "am", "size", ', "', "  ", "    ", "\n", "\n  ", "true", "null", "12", "0", "ab",
    "abc", "é", "日本", '":"', "red", "gr", "een", "--", "\\n", "\\u00", '\\"', "[", "]", "[]", "{}", "}", "e+", ".5", "🙂", "cc",
)  # fmt: skip
END = 256 + len(WORDS) + 1


class Tokens:
    """All bytes, some longer ones, one that comes twice, one that is special, and the end."""

    eos_token_id, bos_token_id, special_token_ids = END, None, (END - 1, END)
    tokens = (*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS), b"<special>", b"<end>")

    def __call__(self, text):
        found, text = [], bytes(text)
        while text:  # the longest first
            size = next(size for size in range(12, 0, -1) if text[:size] in self.tokens[: END - 1])
            found.append(self.tokens.index(text[:size]))
            text = text[size:]
        return found


@pytest.fixture(scope="module")
def tokenizer():
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens()), n_vocab=END + 1, eos_token=END)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return vocabulary_of(tokenizer, END + 1, [END])


def matcher_of(tokenizer, wanted):
    make, (kind, text) = llguidance.LLMatcher, (wanted.form.kind, wanted.form.text)
    if kind == "json":
        grammar = make.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITE_SPACE})
    else:
        grammar = make.grammar_from_regex(text) if kind == "regex" else make.grammar_from_lark(text)
    found = make(tokenizer, grammar, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def drawn_texts(table, seed, count=8, most=120):
    """Texts that a table allows, drawn; those that come to an end."""
    draw = random.Random(seed)
    for _ in range(count):
        state, text = table.start, []
        while len(text) < most:
            # Ends and rare tokens as often as the many that texts hold.
            allowed = np.flatnonzero(table.allowed(state))
            classes = sorted(set(table.classes[allowed].tolist()))
            chosen = draw.choice(classes)
            token = draw.choice(allowed[table.classes[allowed] == chosen].tolist())
            if token == END:
                yield text
                break
            text.append(token)
            state = int(table.next[state, table.classes[token]])


def drawn_pattern(draw, depth=3):
    """A regular expression at random."""
    if depth == 0 or draw.random() < 0.3:
        return draw.choice(
            [
                "a",
                "b",
                "é",
                "[a-c]",
                "[^a]",
                ".",
                r"\d",
                r"\.",
                "[0-9]",
                r"[\x41-\x5a_-]",
                "name",
                "日",
                r"\s",
                "12",
                r"\u0062",
            ]
        )
    part = [drawn_pattern(draw, depth - 1) for _ in range(3)]
    times = draw.choice(["*", "+", "?", "{2}", "{1,3}", "{2,}"])
    return draw.choice(["".join(part), f"(?:{part[0]}|{part[1]})", f"({part[0]}){times}", part[0] + part[1]])


def drawn_schema(draw, depth=3):
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "range"]
    match draw.choice(kinds if depth == 0 else [*kinds, "object", "object", "array", "any"]):
        case "object":
            names = draw.sample(["name", "size", 'a"b', "é", "x", "na"], draw.randint(0, 3))
            found = {"type": "object", "properties": {name: drawn_schema(draw, depth - 1) for name in names}}
            return found | {"required": [one for one in names if draw.random() < 0.5], "additionalProperties": False}
        case "array":
            bounds = {
                name: value
                for name, value in (("minItems", draw.randint(0, 2)), ("maxItems", 3))
                if draw.random() < 0.5
            }
            return {"type": "array", "items": drawn_schema(draw, depth - 1)} | bounds
        case "any":
            return {"anyOf": [drawn_schema(draw, 0), {"type": draw.choice(["null", "boolean"])}]}
        case "enum":
            return {"enum": draw.sample(["red", "green", 'q"\n', 1, -2, True, None, 1.5], 3)}
        case "pattern":
            return {
                "type": "string",
                "pattern": draw.choice(["^[a-c]{2,4}$", "ab", "^a.b", r"^\d+-\w$", "^(red|green)$"]),
            }
        case "string":
            return {"type": "string"} | draw.choice([{}, {"maxLength": 3}, {"minLength": 1}])
        case "range":
            return {"type": "integer"} | draw.choice(
                [{"minimum": 0}, {"minimum": -3, "maximum": 12}, {"exclusiveMinimum": 0}]
            )
        case kind:
            return {"type": kind}


@pytest.mark.parametrize("seed", range(24))
def test_tables_of_drawn_expressions(tokenizer, vocabulary, seed):
    """`table_of` compares masks; what is drawn by them is what Python's expressions and a fresh matcher take."""
    pattern = drawn_pattern(random.Random(seed))
    wanted = Structured(regex=pattern)
    matcher = matcher_of(tokenizer, wanted)
    table = table_of(wanted, vocabulary, matcher)
    for text in drawn_texts(table, seed):
        assert matcher.validate_tokens([*text, END]) == len(text) + 1
        found = b"".join(Tokens.tokens[token] for token in text)
        if "\\d" not in pattern and "\\s" not in pattern:  # which are other characters in Python
            assert re.fullmatch(pattern, found.decode()), pattern


@pytest.mark.parametrize("seed", range(24))
def test_tables_of_drawn_schemas(tokenizer, vocabulary, seed):
    schema = drawn_schema(random.Random(seed))
    wanted = Structured(json=schema)
    matcher = matcher_of(tokenizer, wanted)
    table = table_of(wanted, vocabulary, matcher)
    for text in drawn_texts(table, seed):
        assert matcher.validate_tokens([*text, END]) == len(text) + 1
        found = json.loads(b"".join(Tokens.tokens[token] for token in text))
        Draft202012Validator(schema).validate(found)


def test_choices_are_tables(tokenizer, vocabulary):
    wanted = Structured(choice=["red", "green", 'q"\n', "re", "日本"])
    table = table_of(wanted, vocabulary, matcher_of(tokenizer, wanted))
    texts = {b"".join(Tokens.tokens[token] for token in text).decode() for text in drawn_texts(table, 0, count=60)}
    assert texts == {"red", "green", 'q"\n', "re", "日本"}


FUNCTIONS = [
    {"name": "paint", "parameters": {
        "type": "object", "required": ["size"], "additionalProperties": False,
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "red": {"enum": ["red", "gr"]}},
    }},
    {"name": "éclat", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]  # fmt: skip


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("form", ["hermes", "qwen3_xml"])
def test_calls_are_tables(tokenizer, vocabulary, form, several):
    wanted = Structured(grammar=call_grammar(form, FUNCTIONS, several=several))
    table = table_of(wanted, vocabulary, matcher_of(tokenizer, wanted))
    for text in drawn_texts(table, 0, count=20):
        written = b"".join(Tokens.tokens[token] for token in text).decode()
        calls = written.split("</tool_call>")
        assert calls[-1] == ""
        assert several or len(calls) == 2
        assert all(call.removeprefix("\n").startswith("<tool_call>\n") for call in calls[:-1])


def test_texts_end_where_their_suffix_first_stands(tokenizer, vocabulary):
    """The beginning of a suffix may be the beginning of its own end."""
    for suffix in ("ababc", "\n</a>\n", "aa", "é\n", "x"):
        wanted = Structured(grammar=f'start: "<" text ">"\ntext[suffix={json.dumps(suffix)}]: /(?s:.*)/')
        table = table_of(wanted, vocabulary, matcher_of(tokenizer, wanted))
        for text in drawn_texts(table, 1, count=20):
            written = b"".join(Tokens.tokens[token] for token in text).decode()
            assert written[0] + written[-1] == "<>"
            assert written.find(suffix, 1) == len(written) - len(suffix) - 1


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"json_object": True}, "additionalProperties is not false"), ({"grammar": 'root ::= "x" | "y"'}, "the rule"),
        ({"grammar": 'start: "a" b?\nb: "c" start'}, "comes back to itself"), ({"grammar": 'start: "a"i'}, "flags"),
        ({"grammar": 'start: "a" B\nB: /b/'}, "the rule 'B"), ({"grammar": "start: b"}, "no rule"),
        ({"grammar": 'start: %json {"type": "null"}'}, "white space"), ({"grammar": 'start: ("a" "b"'}, "the rule"),
        ({"grammar": 'start: "a" | '}, "the rule"), ({"regex": "(?i)a"}, "flags"), ({"regex": r"\bA"}, r"\\b"),
        ({"regex": "a*?"}, "lazy"), ({"regex": r"\p{L}"}, r"\\p"), ({"regex": "[a[b]]"}, "set within a set"),
        ({"regex": "a{2000}"}, "repetition of 2000"), ({"regex": "^a$"}, "'\\^' at 0"),
        ({"json": {"type": "array"}}, "schema None"), ({"json": {"type": "string", "format": "date"}}, "the word 'format'"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}}, "reference to itself"),
        ({"json": {"type": "integer", "minimum": 5}}, "far apart, or none"),
        ({"json": {"type": "array", "items": {"type": "string"}, "minItems": 1000}}, "more than 150000 steps"),
    ],
)  # fmt: skip
def test_what_is_not_regular_says_so(tokenizer, vocabulary, wanted, said):
    with pytest.raises(NotRegular, match=said):
        table_of(Structured(**wanted), vocabulary, None)


def test_bounds(monkeypatch, tokenizer, vocabulary):
    wanted = Structured(regex="[0-9]{30}")
    matcher = matcher_of(tokenizer, wanted)
    for module, name, value, said in (
        (expressions, "MOST_STATES", 20, "20 states over bytes"), (tokens, "MOST_STATES", 20, "states"),
        (tokens, "MOST_CLASSES", 3, "classes"), (tokens, "MOST_STEPS", 50, "steps along tokens"),
        (tokens, "MOST_FORCED", 0, "forced"),
    ):  # fmt: skip
        form = Structured(choice=["green", "name"]) if name == "MOST_FORCED" else wanted
        monkeypatch.setattr(module, name, value)
        with pytest.raises(NotRegular, match=said):
            table_of(form, vocabulary, matcher_of(tokenizer, form))
        monkeypatch.undo()
    table_of(wanted, vocabulary, matcher)


def test_a_wrong_step_is_noticed(tokenizer, vocabulary):
    """Every step of a small table made wrong in its turn: refused, allowed, and to another state."""
    wanted = Structured(regex="(?:ab|c[de]{2})+!")
    matcher = matcher_of(tokenizer, wanted)
    table = table_of(wanted, vocabulary, matcher)
    named = set(table.classes.tolist())
    wrong = 0
    for state, column in np.ndindex(table.next.shape):
        if state == FREE or column not in named:
            continue
        right = int(table.next[state, column])
        for other in {-1, 1 + right % (table.states - 1)} - {right}:
            changed = table.next.copy()
            changed[state, column] = other
            mutant = made(changed, table.classes, table.start)
            with pytest.raises(NotRegular):
                compare(mutant, matcher)
            wrong += 1
    assert wrong > 50
    assert compare(table, matcher) >= table.states - 1


def test_forced_texts_have_their_usual_tokens(tokenizer, vocabulary):
    """Where one text alone can follow llguidance allows the token that it begins with, and so does a table: where that depends on
    the token before, in states of their own."""
    wanted = Structured(regex="(?:a|x)(?:bc|bc)name")
    matcher = matcher_of(tokenizer, wanted)
    over_bytes = automaton(parse(wanted.form.text))
    table = token_automaton(over_bytes, vocabulary, matcher)
    name = 256 + WORDS.index("name")
    before = [text for text in ("abc", "ab") if text in WORDS]
    after = table.walk([256 + WORDS.index(before[0])])
    assert np.flatnonzero(table.allowed(after)).tolist() == [name]
    assert compare(table, matcher)


def test_thoughts_before_a_table(tokenizer, vocabulary):
    """Masks along drawn texts are those of the host's followers: thoughts that may come, that have begun, and none."""
    wanted = Structured(json={"type": "array", "items": {"enum": ["ab", "c"]}, "minItems": 1})
    matcher = matcher_of(tokenizer, wanted)
    opens, closes, draw = 257, 258, random.Random(0)
    table = table_of(wanted, vocabulary, matcher)
    for inside, may in ((False, opens), (True, None), (False, None)):
        grammar = Grammar(matcher, may, closes, inside, table=table, reason="")
        found = grammar.automaton
        assert found is not None
        assert found is grammar.automaton
        for _ in range(6):
            follower, text = Follower(grammar), []
            for _ in range(40):
                block = [text[-1] if text else -1]
                (row,) = masks_of(np.array([[follower.number, len(text), *block]]), END + 1)[0]
                state = found.walk(text)
                bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: END + 1]
                np.testing.assert_array_equal(bits.astype(bool), found.allowed(state))
                assert found.walk(found.prefix(state)) == state
                allowed = [token for token in np.flatnonzero(found.allowed(state)).tolist() if token != END]
                if not allowed:
                    break
                marks = [one for one in (opens, closes) if one in allowed]
                text.append(draw.choice(marks) if marks and draw.random() < 0.3 else draw.choice(allowed))


def test_a_vocabularys_tree():
    tree = Vocabulary.of([b"ab", b"a", b"", b"abc", b"ab", b"b", b"ab"], [2])
    assert [level.byte.tolist() for level in tree.levels] == [[97, 98], [98], [99]]
    assert tree.leaves.tolist() == [2, 0, -1, 3, 4, 1, 5]
    assert tree.twins.tolist() == [[2, 4], [2, 5]]
    assert [level.whole.tolist() for level in tree.levels] == [[True, True], [True], [True]]


def test_documents_are_those_of_llguidance_byte_for_byte(tokenizer):
    """Texts of a schema's automaton, drawn byte by byte, are what a matcher takes and nothing else."""
    schema = {
        "type": "object", "additionalProperties": False, "required": ["b"],
        "properties": {"a": {"type": "number"}, "b": {"type": "string"}, "c": {"type": ["integer", "null"]}},
    }  # fmt: skip
    matcher, draw = matcher_of(tokenizer, Structured(json=schema)), random.Random(0)
    found = automaton(document(json.dumps(schema)))
    for _ in range(8):
        follower, state = matcher.deep_copy(), 0
        for _ in range(150):
            follows = found.next[state] >= 0
            refused = [byte for byte in draw.sample(range(256), 24) if not follows[byte]]
            assert all(follower.validate_tokens([byte]) == 0 for byte in refused)
            allowed = np.flatnonzero(follows).tolist()
            assert follower.is_accepting() == bool(found.ends[state])
            if not allowed:
                break
            byte = draw.choice(allowed)
            assert follower.consume_tokens([byte])
            state = int(found.next[state, byte])
