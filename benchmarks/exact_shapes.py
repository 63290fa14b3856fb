"""`exact` texts of published shapes, on a GPU in bfloat16: how many are equal where most of what is proposed stands.

    python benchmarks/exact_shapes.py --models qwen3-4b --batch 8

The target has its first layers, the drafter one, and weights are random. No drafter knows such a target, so what it proposes is
replaced by what plain decoding wrote, wrong at every seventh place. 100 prompts of random tokens, 128 tokens each, greedy and
sampled with a seed. The pool has fewer pages than slots come to need, so some lose theirs and begin again.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from exact import LAWS, TOKENS, add, each, texts
from record import Record, arguments

import dflash_jax as dj
from dflash_jax.bench.workload import random_model
from dflash_jax.decoding import cycle
from dflash_jax.models.presets import DEEPSEEK_TARGETS, DRAFTERS, MOE_TARGETS, TARGETS

PROMPT, WRONG = 40, 7
FEWEST = 5  # tokens a cycle, below which the proposals were not the known ones
REPLACED = ["commit_context", "best_proposals", "propose", "shares_noise"]  # functions of `decoding.cycle`
PAGE, PAGES = 32, 4  # tokens of a page; pages for each slot, of the six that it needs in the end
# Family and target.
MODELS: Mapping[str, tuple[str, Any]] = {
    "qwen3-4b": ("qwen3", TARGETS["Qwen3-4B"]),
    "qwen3-8b": ("qwen3", TARGETS["Qwen3-8B"]),
    "qwen3-coder-30b-a3b": ("qwen3_moe", MOE_TARGETS["Qwen3-Coder-30B-A3B-Instruct"]),
    "deepseek-v2-lite": ("deepseek", DEEPSEEK_TARGETS["DeepSeek-V2-Lite"]),
}


def load(name: str, layers: int, batch: int) -> dj.Model:
    """A new model of the same weights, with programs of its own."""
    family, whole = MODELS[name]
    target = replace(whole, num_layers=layers, windows=whole.windows[:layers])
    draft = replace(
        DRAFTERS["Qwen3-4B-DFlash-b16"], num_layers=1, windows=(None,), causal=(False,), hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size, vocab_size=target.vocab_size, mask_token_id=target.vocab_size - 1,
        target_layer_ids=(0, layers - 1), num_target_layers=layers, max_position=target.max_position,
    )  # fmt: skip
    jax.clear_caches()
    options: Any = {"max_batch": batch, "max_model_len": 256, "page_size": PAGE, "num_pages": max(PAGES * batch, 8)}
    return random_model(name, family, target, draft, exact=True, dtype="bfloat16", **options)


def propose_known(known: jax.Array) -> None:
    """Programs traced from now on propose tokens of `known`, texts by seed and place, wrong at every `WRONG`-th place."""
    commit, seen = cycle.commit_context, list[Any]()

    def looked(drafter: Any, state: Any, *rest: Any) -> Any:
        seen[:] = [drafter, state]
        return commit(drafter, state, *rest)

    def at(positions: jax.Array) -> jax.Array:
        seed = seen[1].request.seed[:, 1:].astype(jnp.int32)
        right = known[seed, jnp.minimum(positions, known.shape[1] - 1)]
        return jnp.where((positions + seed) % WRONG == 0, (right + 1) % seen[0].config.vocab_size, right)

    def greedy(drafter: Any, rows: jax.Array, *_: Any) -> jax.Array:
        del drafter
        return at(seen[1].seq_lens[:, None] + jnp.arange(rows.shape[1]))

    def sampled(setup: Any, logits: jax.Array, positions: jax.Array, *_: Any) -> jax.Array:
        del setup, logits
        return at(positions)

    def never(*_: Any) -> bool:
        return False

    # Drafts are drawn by `propose` alone then: no kernel makes noise for them.
    replaced: dict[str, Callable[..., Any]] = {
        "commit_context": looked, "best_proposals": greedy, "propose": sampled, "shares_noise": never,
    }  # fmt: skip
    assert list(replaced) == REPLACED
    for function, instead in replaced.items():
        setattr(cycle, function, instead)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["qwen3-4b"])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="slots")
    parser.add_argument("--texts", type=int, default=100, help="prompts")
    options = parser.parse_args()
    if options.layers < 2:
        parser.error(f"--layers must be at least 2, as the drafter sees the first and the last, got {options.layers}")
    record, kept = Record("exact_shapes", options), {name: getattr(cycle, name) for name in REPLACED}
    for name in options.models:
        draw = np.random.default_rng(0)
        prompts: Any = draw.integers(0, MODELS[name][1].vocab_size - 1, (options.texts, PROMPT)).tolist()
        plain = {law: texts(load(name, options.layers, options.batch), prompts, law, draft=False) for law in LAWS}
        for law in LAWS:
            propose_known(jnp.asarray([[*prompt, *text] for prompt, text in zip(prompts, plain[law], strict=True)]))
            model = load(name, options.layers, options.batch)
            case = f"{name}, {options.layers} layers, {options.batch} slots,"
            add(record, model, prompts, law, case)
            drafted = dj.generate(model, prompts, each(len(prompts), law))
            equal = sum(row.token_ids == text for row, text in zip(drafted, plain[law], strict=True))
            record.add(f"{case} {law}: plain in programs of their own", "texts equal", equal, f"of {len(prompts)}")
            cycles = sum(len(row.acceptance_lengths) for row in drafted)
            if TOKENS * len(prompts) < FEWEST * cycles:
                raise SystemExit(f"{case} {law}: {cycles} cycles are too many: proposals were not the known ones")
            lost = model.engine.scheduler.stats.preemptions
            record.add(f"{case} {law}", "slots lost", lost, "times")
            record.add(f"{case} {law}", "tokens a cycle", round(TOKENS * len(prompts) / cycles, 2), "tokens")
            for function, own in kept.items():
                setattr(cycle, function, own)


if __name__ == "__main__":
    main()
