"""The pair that ships, on its held-out prompts: acceptance and tokens per second, with and without drafting.

    python benchmarks/pair.py
    python benchmarks/pair.py --draft tests/data/dflash

100 prompts one at a time, 128 tokens each, through `dflash_jax.generate`; compilation is in no figure. Acceptance is the mean over
cycles; a text that fell into a loop is one whose last 48 tokens repeat with a period of at most 16, and figures without those are
given beside.
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, arguments

import dflash_jax as dj

PROMPTS = Path(__file__).parent.parent / "tests" / "data" / "heldout_prompts.json"
TEMPERATURES = {"shared_noise": (0.0, 0.7, 1.0), "argmax": (1.0,), "rejection": (0.7, 1.0)}


def loops(tokens: list[int], *, tail: int = 48, period: int = 16) -> bool:
    """Whether the end of a text repeats."""
    end = tokens[-tail:]
    return len(end) == tail and any(end[p:] == end[:-p] for p in range(1, period + 1))


def histogram(lengths: list[int], block: int) -> list[int]:
    """How many cycles gained 1, 2, ... `block` tokens."""
    return [lengths.count(n) for n in range(1, block + 1)]


def rate(results: list[dj.Completion]) -> float:
    """Tokens after the first for each second of decoding."""
    return sum(len(r.token_ids) - 1 for r in results) / sum(r.stats.decode_s for r in results)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft", default=None, help="folder of another drafter than the one that ships")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--max-model-len", type=int, default=224)
    parser.add_argument("--weight-dtype", default=None, help="int8, fp8 or fp8_dynamic: large matrices in eight bits")
    parser.add_argument("--draft-weight-dtype", default=None, help="the same for the drafter alone")
    parser.add_argument("--draft-window", type=int, default=None, help="tokens of a text that the drafter sees")
    options = parser.parse_args()
    texts = [row["text"] for row in json.loads(PROMPTS.read_text())][: options.prompts]
    weights = "" if options.weight_dtype is None else f" {options.weight_dtype} weights"
    weights += "" if options.draft is None else f" {Path(options.draft).name} drafter"
    weights += "" if options.draft_weight_dtype is None else f" {options.draft_weight_dtype} drafter"
    weights += "" if options.draft_window is None else f" window{options.draft_window}"
    kinds = [
        options.draft and Path(options.draft).name,
        options.weight_dtype,
        options.draft_weight_dtype and f"draft_{options.draft_weight_dtype}",
    ]
    kinds += [options.draft_window and f"window{options.draft_window}"]
    record = Record("_".join(["pair", *filter(None, kinds)]), options)
    for proposals, temperatures in TEMPERATURES.items():
        model = dj.load(
            draft=options.draft,
            dtype=options.dtype,
            max_batch=1,
            max_model_len=options.max_model_len,
            proposals=proposals,
            weight_dtype=options.weight_dtype,
            draft_weight_dtype=options.draft_weight_dtype,
            draft_window=options.draft_window,
        )
        dj.generate(
            model, texts[0], dj.SamplingParams(max_tokens=4)
        )  # the first call of a process is not like the others
        block = model.draft.num_drafts + 1
        dtype = str(model.engine.dtype)
        for temperature in temperatures:
            each = [
                dj.SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=i, ignore_eos=True)
                for i in range(len(texts))
            ]
            drafted = [dj.generate(model, text, one) for text, one in zip(texts, each, strict=True)]
            case = f"pair T{temperature:g} B1 {dtype}{weights}" + (
                "" if proposals == "shared_noise" else f" {proposals}"
            )
            lengths = [n for r in drafted for n in r.acceptance_lengths]
            steady = [n for r in drafted if not loops(r.token_ids) for n in r.acceptance_lengths]
            looped = sum(loops(r.token_ids) for r in drafted)
            record.add(
                case,
                "acceptance, mean over cycles",
                round(statistics.mean(lengths), 3),
                "tokens",
                histogram=histogram(lengths, block),
            )
            record.add(
                case, "acceptance without looping texts", round(statistics.mean(steady), 3) if steady else None, "tokens",
                histogram=histogram(steady, block), looping_texts=looped,
            )  # fmt: skip
            record.add(
                case,
                "acceptance, mean of prompt means",
                round(statistics.mean(r.stats.tokens_per_cycle for r in drafted), 3),
                "tokens",
            )
            record.add(case, "decode with drafting", round(rate(drafted), 1), "tokens/s")
            if proposals != "shared_noise":
                continue
            plain = [dj.generate(model, text, one, draft=False) for text, one in zip(texts, each, strict=True)]
            record.add(case, "decode without drafting", round(rate(plain), 1), "tokens/s")
            record.add(case, "speed-up", round(rate(drafted) / rate(plain), 3), "x")
            same = sum(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True))
            record.add(case, "texts equal with and without", same, f"of {len(texts)}")
    print(record.write())


if __name__ == "__main__":
    main()
