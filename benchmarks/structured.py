"""What grammars and penalties cost a cycle: the same users with and without them, and with grammars followed by the host
(structured) and by tables on the device (regular), in one run.

    python benchmarks/structured.py                     # the shipped pair: real texts under a JSON schema
    python benchmarks/structured.py --shapes qwen3-4b

Greedy requests of one length, the whole block verified, time of the device's calls over their cycles, compilation excluded: of
calls of all their cycles alone, as what a call costs beside them would count more where a text ends after few. Random weights
follow no grammar: with `--shapes` cycles are told what they gain, and the host walks along a path that is valid to its end in every
cycle, so that all masks of a block are computed, which is the most that can be. What tables cost does not depend on where in them a
text is: theirs takes whatever path it takes.
"""

import statistics
import string
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from record import Record, arguments

import dflash_jax as dj
from dflash_jax.bench.workload import random_pair
from dflash_jax.compile.programs import start_compiling
from dflash_jax.decoding import grammar_masks
from dflash_jax.decoding.grammar_masks import Grammar
from dflash_jax.decoding.sampling import Mode
from dflash_jax.engine.requests import Request
from dflash_jax.sampling_params import WHITE_SPACE, SamplingParams
from dflash_jax.text.grammars import installed
from dflash_jax.text.regular.tables import table_of
from dflash_jax.text.regular.tokens import vocabulary_of

RECORD = {
    "type": "object", "required": ["name", "size", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string"}, "size": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}},
    },
}  # fmt: skip
# So many that few texts come to their end, and no more than a table has states for.
SCHEMA = {"type": "array", "minItems": 3, "items": RECORD}
PROMPT = "def records():\n    return "
TOKENS, PROMPT_TOKENS, ACCEPTANCE = 384, 32, 6.0
MODEL_LEN, CYCLES = 448, 8


class Letters:
    """A vocabulary of any size: single bytes, then words of letters that are longer and longer."""

    bos_token_id = None

    def __init__(self, vocab: int):
        rng = np.random.default_rng(0)
        letters = np.array(list(string.ascii_letters + " .,"))
        words = dict[bytes, None]()
        while len(words) < vocab - 257:
            words["".join(rng.choice(letters, rng.integers(2, 9))).encode()] = None
        self.tokens = [*(bytes([byte]) for byte in range(256)), *words, b"<end>"]
        self.eos_token_id = vocab - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def synthetic_grammar(vocab: int) -> Grammar:
    """`SCHEMA` over a vocabulary of this size, whose followers walk along one valid path for ever."""
    import llguidance

    letters = Letters(vocab)
    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(letters), n_vocab=vocab, eos_token=letters.eos_token_id)
    wanted = dj.Structured(json=SCHEMA)
    space = {"whitespace_pattern": WHITE_SPACE}
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides=space))
    path = list(b'[{"name": "some words')
    assert matcher.validate_tokens(path) == len(path)
    grammar_masks.Follower.walk = lambda self, produced, ids: (0, path[: len(ids) - 1], None)  # type: ignore[method-assign]
    table = table_of(wanted, vocabulary_of(tokens, vocab, [letters.eos_token_id]), matcher)
    return Grammar(matcher, table=table, reason="")


class Kind(NamedTuple):
    """Wishes of requests: the mode of their programs, their parameters, and how many of the users have them; None for all."""

    mode: Mode
    params: Mapping[str, Any] = MappingProxyType({})
    users: int | None = None


GRAMMARS = "structured", "regular"
PENALTY = {"repetition_penalty": 1.05}
KINDS = {
    "free": Kind("greedy"), "penalty": Kind("adjusted", PENALTY), "penalty of one": Kind("adjusted", PENALTY, 1),
    "structured": Kind("structured"), "regular": Kind("regular"), "regular of one": Kind("regular", users=1),
}  # fmt: skip


def requests(model: dj.Model, users: int, grammar: Grammar | None, kind: Kind) -> list[Request]:
    shapes = [SamplingParams(max_tokens=TOKENS, ignore_eos=grammar is None, **params) for params in (kind.params, {})]
    if model.tokenizer is not None:
        prompts = [tuple(model.tokenizer.encode(f"# {user}\n{PROMPT}")) for user in range(users)]
    else:
        drawn = np.random.default_rng(1).integers(0, model.target.vocab_size, (users, PROMPT_TOKENS))
        prompts = [tuple(row) for row in drawn.tolist()]
    having = users if kind.users is None else kind.users
    return [
        Request(place, prompt, shapes[place >= having], model.eos_ids, grammar=grammar if place < having else None)
        for place, prompt in enumerate(prompts)
    ]


def cycle_ms(model: dj.Model, asked: Sequence[Request]) -> tuple[float, float]:
    """Milliseconds of a cycle, and tokens that it gains, of the median user, by whole calls; everybody's first is left out."""
    seconds, cycles, gained = ([0.0] * len(asked) for _ in range(3))
    begun = set[int]()
    for update in model.engine.run(asked, cycles=CYCLES):
        place = update.index
        if place in begun and len(update.counts) == CYCLES:
            seconds[place] += update.seconds
            cycles[place] += len(update.counts)
            gained[place] += sum(update.counts)
        elif not update.first:
            begun.add(place)
    each = [(1e3 * s / c, g / c) for s, c, g in zip(seconds, cycles, gained, strict=True) if c]
    return statistics.median(ms for ms, _ in each), statistics.median(tokens for _, tokens in each)


def compile_ahead(model: dj.Model, kinds: Sequence[str], users: Sequence[int]) -> None:
    setups = [model.engine.setup(mode=KINDS[kind].mode, draft=True, sampling=False) for kind in kinds]
    for program in start_compiling(model.engine.warmup_jobs(setups, users)):
        program.result()


def main() -> None:
    parser = arguments(str(__doc__))
    parser.add_argument("--shapes", help="a published shape with random weights in place of the pair")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="free is always timed")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    kinds = ["free", *(kind for kind in KINDS if kind in args.kinds and kind != "free")]
    if not installed():
        kinds = [kind for kind in kinds if KINDS[kind].mode not in GRAMMARS]
    options: dict[str, Any] = {"max_batch": max(args.users), "max_model_len": MODEL_LEN, "verify_length": None}
    model = random_pair(args.shapes, **options) if args.shapes else dj.load(**options)
    model.engine.buckets = replace(
        model.engine.buckets, width=model.engine.buckets.width[-1:]
    )  # one width of page tables
    grammar, started = None, time.perf_counter()
    if args.shapes:
        model.engine.imposed_acceptance = ACCEPTANCE
    if installed():
        grammar = (
            synthetic_grammar(model.target.vocab_size)
            if args.shapes
            else model.grammars.compiled({"json": SCHEMA}, at_once=True)
        )
    record = Record("structured", args, ["llguidance"] if installed() else [])
    if grammar is not None:
        assert grammar.table is not None, grammar.reason
        seconds = time.perf_counter() - started
        states, classes = grammar.table.next.shape
        record.add(
            f"{args.shapes or 'pair'}, the grammar", "made", round(seconds, 2), "s", states=states, classes=classes
        )
    compile_ahead(model, kinds, args.users)
    by_mode = {"regular": grammar, "structured": None if grammar is None else replace(grammar, table=None)}
    for users in args.users:
        base = None
        for name in kinds:
            kind = KINDS[name]
            given = by_mode.get(kind.mode)
            runs = [cycle_ms(model, requests(model, users, given, kind)) for _ in range(args.repeats + 1)][1:]
            ms, tokens = min(ms for ms, _ in runs), runs[0][1]
            base = ms if base is None else base
            case = f"{args.shapes or 'pair'}, {users} users, {name}"
            record.add(
                case, "cycle", round(ms, 4), "ms", runs=[round(one, 4) for one, _ in runs], tokens_per_cycle=tokens,
                over_free=round(ms / base - 1, 4),
            )  # fmt: skip


if __name__ == "__main__":
    main()
