"""Texts of the pair that ships with `exact`, on a GPU in bfloat16: how many are equal, drafted and plain, alone and in company.

    python benchmarks/exact.py --batch 8
    python benchmarks/exact.py --batch 8 --default

100 prompts from files that the pair was not trained on, 128 tokens each, greedy and sampled with a seed. What a cycle costs in
this mode is `decode.py --exact`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, arguments

import dflash_jax as dj

PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "heldout_prompts.json"
TOKENS = 128
LAWS = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95}}


def texts(model: dj.Model, prompts: Sequence[str], law: str, *, draft: bool = True) -> list[list[int]]:
    """Token ids of all prompts, as many side by side as the model has slots."""
    return [row.token_ids for row in dj.generate(model, list(prompts), each(len(prompts), law), draft=draft)]


def alone(model: dj.Model, prompts: Sequence[str], law: str) -> list[list[int]]:
    """The same, one after the other."""
    return [dj.generate(model, *one).token_ids for one in zip(prompts, each(len(prompts), law), strict=True)]


def each(count: int, law: str) -> list[dj.SamplingParams]:
    return [dj.SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=seed, **LAWS[law]) for seed in range(count)]


def add(record: Record, model: dj.Model, prompts: Sequence[str], law: str, case: str) -> None:
    """How many texts equal the drafted ones in company."""
    drafted = texts(model, prompts, law)
    others = {
        "plain": texts(model, prompts, law, draft=False),
        "alone": alone(model, prompts, law),
        "run again, prompts' pages found": texts(model, prompts, law),
    }
    for name, found in others.items():
        equal = sum(ours == theirs for ours, theirs in zip(drafted, found, strict=True))
        record.add(f"{case} {law}: {name}", "texts equal to drafted ones in company", equal, f"of {len(prompts)}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32], help="slots")
    parser.add_argument("--texts", type=int, default=100, help="prompts")
    parser.add_argument("--default", action="store_true", help="without the mode, to compare")
    options: argparse.Namespace = parser.parse_args()
    record = Record("exact_default" if options.default else "exact", options)
    prompts = [row["text"] for row in json.loads(PROMPTS.read_text())][: options.texts]
    for batch in options.batch:
        model = dj.load(exact=not options.default, dtype="bfloat16", max_batch=batch, max_model_len=512)
        for law in LAWS:
            add(record, model, prompts, law, f"shipped pair, {batch} slots{', default' if options.default else ''},")
    print(record.write(), flush=True)


if __name__ == "__main__":
    main()
