"""Hugging Face transformers on the shapes of `decode.py`: time of one plain decode step and, for one sequence, of one cycle of its
own DFlash, random bf16 weights, on the same GPU.

    python benchmarks/peers.py --models qwen3-4b --context 1024 --batch 1 8

Needs torch and transformers beside this package. Two calls of `generate` that differ in their number of new tokens give the time of
a step; prefill and start-up cancel out. `--static` adds the static cache, which transformers compiles (a minute and more).

Since 5.15 transformers drafts with DFlash (`speculation_type="dflash"`); its drafter is the one of Muse Glimmer, the same network
under other names, here in the shape of ours. The target's calls are counted: with random weights nearly every one gains one token.
"""

import os
import statistics
import sys
import time
from pathlib import Path

# torch and JAX share the device here; JAX only names it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from record import Record, arguments

from dflash_jax.bench.workload import SHAPES
from dflash_jax.config import Qwen3Config
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.presets import DRAFTERS, TARGETS

DENSE = [name for name, (family, _, _) in SHAPES.items() if family == "qwen3"]


def build(config: Qwen3Config) -> torch.nn.Module:
    """transformers' model of a preset's shape, on the GPU."""
    theirs = transformers.Qwen3Config(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim, max_position_embeddings=config.max_position, rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings, rope_theta=config.rope.theta, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.bfloat16).eval()


@torch.no_grad()
def step_ms(model: torch.nn.Module, context: int, batch: int, cache: str | None, *, repeats: int = 5) -> list[float]:
    """Milliseconds of one step, from runs of 8 and of 40 new tokens."""
    ids = torch.randint(0, 1000, (batch, context), device="cuda")

    def run(new: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            cache_implementation=cache,
        )  # fmt: skip
        torch.cuda.synchronize()
        if out.shape[1] != context + new:
            raise SystemExit(f"generate gave {out.shape[1] - context} tokens, {new} were asked for")
        return time.perf_counter() - started

    run(40)
    return [(run(40) - run(8)) / 32 * 1e3 for _ in range(repeats)]


def drafter(config: DFlashConfig) -> torch.nn.Module:
    """transformers' DFlash drafter of a preset's shape, on the GPU."""
    theirs = transformers.MuseGlimmerAssistantConfig(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        max_position_embeddings=config.max_position, layer_types=["full_attention"] * config.num_layers,
        block_size=config.block_size, mask_token_id=config.mask_token_id, target_layer_ids=list(config.target_layer_ids),
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"):
        return transformers.MuseGlimmerAssistantModel(theirs).to(torch.bfloat16).eval()


@torch.no_grad()
def cycle_ms(model: torch.nn.Module, draft: torch.nn.Module, context: int, *, repeats: int = 5) -> list[float]:
    """Milliseconds of one cycle of one sequence: a block drafted, then verified."""
    ids, calls = torch.randint(0, 1000, (1, context), device="cuda"), [0]
    handle = model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    def run(new: int) -> tuple[float, int]:
        torch.cuda.synchronize()
        started, before = time.perf_counter(), calls[0]
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            assistant_model=draft, speculation_type="dflash",
        )  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - started, calls[0] - before

    run(40)
    times = []
    for _ in range(repeats):
        (long, many), (short, few) = run(40), run(8)
        times.append((long - short) / (many - few) * 1e3)
    handle.remove()
    return times


def add_cycle(record: Record, name: str, model: torch.nn.Module, context: int) -> None:
    """A row of transformers' DFlash; what does not run there is said, and the rows so far are kept."""
    try:
        times = cycle_ms(model, drafter(DRAFTERS[SHAPES[name][2]]), context)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        print(f"transformers {transformers.__version__} does not run DFlash for {name}: {error!r}", flush=True)
        return
    record.add(
        f"cycle {name}-b16 ctx{context // 1024}k B1 transformers", "time per cycle", round(statistics.median(times), 2), "ms",
        spread=[round(min(times), 2), round(max(times), 2)],
    )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-4b"], choices=DENSE)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--static", action="store_true", help="also with the static, compiled cache")
    options = parser.parse_args()
    record = Record("peers", options, packages=("torch", "transformers"))
    for name in options.models:
        model = build(TARGETS[SHAPES[name][1]])
        for batch in options.batch:
            for cache in (None, "static") if options.static else (None,):
                times = step_ms(model, options.context, batch, cache)
                record.add(
                    f"step {name} ctx{options.context // 1024}k B{batch} transformers" + (f" {cache}" if cache else ""),
                    "time per step", round(statistics.median(times), 2), "ms",
                    spread=[round(min(times), 2), round(max(times), 2)],
                )  # fmt: skip
        if 1 in options.batch and hasattr(transformers, "MuseGlimmerAssistantModel"):
            add_cycle(record, name, model, options.context)
        del model
    print(record.write())


if __name__ == "__main__":
    main()
