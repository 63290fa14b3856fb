"""What `dflash-jax bench` measures, in the shapes of a published pair with random bf16 weights: the target alone, the whole block
verified, and lengths chosen as cycles cost, one after the other in one process.

    python benchmarks/bench.py --shapes qwen3-4b --concurrency 1 8 64 --imposed-acceptance 6
    python benchmarks/bench.py --concurrency 8 64 --kinds block auto per_request --imposed-acceptance 2 10 --short-length 0

The second has requests of two kinds side by side, and verification that follows each of them.

Where several users share the device, rows of short prompts follow, which are prefilled several at once.

Random weights agree on nothing, so each cycle is told how many tokens to gain on average; rows keep that number. The rows of
tokens per second hold all figures, which notebooks/05_benchmark.ipynb draws.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, arguments

from dflash_jax.bench import Figures, measure, programs, random_pair, synthetic
from dflash_jax.bench.workload import SHAPES
from dflash_jax.options import WEIGHT_DTYPES

THREADS = 12
# Name of a row, what the engine is told to verify, whether it drafts.
KINDS: tuple[tuple[str, Literal["auto", "per_request"] | None, bool], ...] = (
    ("alone", None, False),
    ("block", None, True),
    ("auto", "auto", True),
    ("per_request", "per_request", True),
)


def add(record: Record, case: str, figures: Figures) -> None:
    """Rows of one run."""
    record.add(case, "tokens of all users", figures.tokens_per_s, "tokens/s", figures=figures.to_dict())
    record.add(case, "first token, median", figures.time_to_first_token_ms["p50"], "ms")
    record.add(case, "next token, median", figures.inter_token_ms["p50"], "ms")
    record.add(case, "longest wait for the next tokens", figures.longest_wait_ms, "ms")


def main() -> None:
    parser = arguments(str(__doc__))
    parser.add_argument("--shapes", default="qwen3-4b", choices=sorted(SHAPES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--input-length", type=int, default=512)
    parser.add_argument("--short-length", type=int, default=128, help="of short prompts, 0 for none (default: 128)")
    parser.add_argument("--output-length", type=int, default=128)
    parser.add_argument("--requests", type=int, default=None, help="of each run (default: 8 for each user, 16 to 256)")
    parser.add_argument(
        "--imposed-acceptance", type=float, nargs="+", default=[6.0], help="several: of slots by turns (default: 6)"
    )
    names = [name for name, _, _ in KINDS]
    parser.add_argument("--kinds", nargs="+", default=names[:3], choices=names)
    for role in ("weight", "draft-weight"):
        parser.add_argument(
            f"--{role}-dtype", default=None, choices=list(WEIGHT_DTYPES), help="large matrices in eight bits"
        )
    options = parser.parse_args()
    means = tuple(options.imposed_acceptance)
    acceptance = means if len(means) > 1 else means[0]
    suffix = "" if options.weight_dtype is None else f" {options.weight_dtype}"
    suffix += "" if options.draft_weight_dtype is None else f" {options.draft_weight_dtype} drafter"
    record = Record("bench" + suffix.replace(" ", "_"), options)
    model = random_pair(
        options.shapes,
        max_model_len=options.input_length + options.output_length + 64,
        max_batch=max(options.concurrency), weight_dtype=options.weight_dtype, draft_weight_dtype=options.draft_weight_dtype,
    )  # fmt: skip
    cases = [(users, options.input_length) for users in options.concurrency]
    if 0 < options.short_length < options.input_length:
        cases += [(users, options.short_length) for users in options.concurrency if users > 1]
    plan = [
        (users, prompt, kind, synthetic(model.target.vocab_size, prompt, max(8, users), options.output_length))
        for users, prompt in cases
        for kind in KINDS
        if kind[0] in options.kinds
    ]
    began, jobs = time.perf_counter(), list[Callable[[], object]]()
    for users, _, (_, length, draft), workload in plan:
        model.engine.verify_length = length
        imposed = acceptance if draft else None
        jobs += programs(model, workload, concurrency=users, draft=draft, imposed_acceptance=imposed)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda job: job(), jobs))
    print(f"{len(jobs)} programs compiled in {time.perf_counter() - began:.1f} s", flush=True)
    for users, prompt, (name, length, draft), workload in plan:
        model.engine.verify_length = length
        figures = measure(
            model, workload, concurrency=users, requests=options.requests or min(max(16, 8 * users), 256),
            draft=draft,
            imposed_acceptance=acceptance if draft else None,
        )  # fmt: skip
        mix = "" if len(means) == 1 else f" mix {' and '.join(f'{mean:g}' for mean in means)}"
        add(record, f"bench {options.shapes} in{prompt} U{users} {name}{mix}{suffix}", figures)
        print(f"verified {figures.verify_lengths}, shared {figures.shared_lengths}", flush=True)
    print(record.write())


if __name__ == "__main__":
    main()
