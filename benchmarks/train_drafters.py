"""v1, DFlash 2 and DSpark, trained for the shipped target on the same data with the same steps, and what each is worth.

    python benchmarks/train_drafters.py --kinds v1
    python benchmarks/train_drafters.py --kinds dflash2
    python benchmarks/train_drafters.py --kinds dspark
    python benchmarks/train_drafters.py --start shipped --rate 1e-3 --seed 1
    python benchmarks/train_drafters.py --kinds dspark --start pair --rank 128 --optimizer muon --steps 5100 --rate 1e-3 --seed 2
    python benchmarks/train_drafters.py --kinds dspark --start pair --rank 128 --optimizer muon --form gated --sampled-loss block \
        --sampled-share 0.5 --train-until 430 --offline

The third goes on from the weights of `tests/data/dflash`, the DFlash drafter that shipped when its rows were measured: what a kind
adds begins silent, so that all begin with its drafts. The fifth goes on from the drafter that ships now. The last does so with
another head and loss, until so many seconds have passed, and is judged by replay: a third of a minute, where engines compile for
longer. Several processes that share `--continuations` make a part of them each (`--part 0/3`).

Needs no network: prompts are passages of the Python files that are installed, of those which the target was not trained on, and
the target continues them. Everything is kept in `--work`: a second call goes on where the first was stopped, one for another kind
takes the same continuations, and each prints the table of all kinds that are there. Acceptance is that of the engine, on held-out
prompts, one at a time.

A step is about 4.0e12 floating point operations (v1; `--flops` counts them). On an H100 that did other work as well, 10,000 steps
took 410 s (v1), 455 s (DSpark) and 840 s (DFlash 2), continuations 110 s.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
import numpy as np
from record import Record, arguments
from tokenizers import Tokenizer

import dflash_jax as dj
from dflash_jax.checkpoints.opening import open_checkpoint
from dflash_jax.checkpoints.pair import shipped_pair
from dflash_jax.engine.acceptance import DraftRecord
from dflash_jax.errors import DFlashError
from dflash_jax.models import count
from dflash_jax.models.dflash import dflash_parameters
from dflash_jax.models.heads.markov import FORMS
from dflash_jax.models.qwen3 import qwen3_parameters
from dflash_jax.training.corpus import read_sources
from dflash_jax.training.drafter import train_drafter
from dflash_jax.training.evaluate import block_verified, measure
from dflash_jax.training.export import draft_json, write_json, write_weights
from dflash_jax.training.kinds import KINDS, HeadSizes, carried, title
from dflash_jax.training.optimizer import half
from dflash_jax.training.rollouts import roll_out
from dflash_jax.training.settings import FULL, Rollouts, Settings, with_changes
from dflash_jax.training.stages import Clock, Interrupted
from dflash_jax.training.tokenizer import encode_files

DATA = Path(__file__).parent.parent / "tests" / "data"
PROMPTS = DATA / "heldout_prompts.json"
STARTS = {"random": None, "shipped": DATA / "dflash", "pair": shipped_pair() / "draft"}
TEMPERATURES = (0.0, 0.7, 1.0)
SHOWN = (1, 2, 4, 8, 15)


def settings_of(options: argparse.Namespace, kind: str) -> Settings:
    """One kind's run. All kinds draw the same rows and anchors in the same order."""
    plans = tuple(
        replace(
            plan,
            greedy=max(plan.greedy // options.fewer, plan.greedy_rows),
            sampled=max(plan.sampled // options.fewer, plan.sampled_rows),
            batch=max(8, plan.batch // (1 if options.fewer < 100 else 512)),
        )
        for plan in FULL.rollouts
    )
    if options.sampled_share is not None:
        plans = tuple(shared(plan, options.sampled_share) for plan in plans)
    if options.small:
        plans = tuple(replace(plan, prompt=plan.prompt // 8, new=48, greedy_rows=2, sampled_rows=1) for plan in plans)
    return with_changes(
        FULL, draft_kind=kind, draft_steps=options.steps, draft_rate=options.rate, loss=options.loss,
        blocks=options.blocks, sampled_loss=options.sampled_loss, optimizer=options.optimizer, seed=options.seed, rollouts=plans,
        head=HeadSizes(rank=options.rank, form=options.form), chunk=min(FULL.chunk, options.steps),
        anchors=4 if options.small else None, evaluation_new=options.tokens,
    )  # fmt: skip


def shared(plan: Rollouts, share: float) -> Rollouts:
    """As many continuations and rows, of which `share` is sampled."""
    count, rows = plan.greedy + plan.sampled, plan.greedy_rows + plan.sampled_rows
    sampled, sampled_rows = round(count * share), round(rows * share)
    return replace(
        plan, greedy=count - sampled, sampled=sampled, greedy_rows=rows - sampled_rows, sampled_rows=sampled_rows
    )


def flops(settings: Settings) -> float:
    """Floating point operations of one step: two for each weight and row forwards, four backwards, and attention to the context."""
    draft, target = settings.draft_config, settings.target_config
    embedding = settings.vocab_size * settings.hidden_size
    layers = count(dflash_parameters(draft))
    layers -= 0 if draft.head is None else 2 * settings.vocab_size * settings.head.rank  # tables that are looked up
    rows = [(plan.greedy_rows + plan.sampled_rows, plan.length) for plan in settings.rollouts]
    tokens = sum(number * length for number, length in rows)
    blocks = sum(number for number, _ in rows) * settings.anchors
    slots = blocks * settings.block_size
    total = 2 * tokens * (count(qwen3_parameters(target)) - embedding) + 6 * slots * layers
    width = settings.num_heads * settings.head_dim
    total += 6 * slots * embedding
    total += sum(
        12 * number * settings.anchors * settings.block_size * length * width * settings.draft_layers
        for number, length in rows
    )
    if settings.draft_kind == "dspark":
        total += 6 * slots * settings.vocab_size * settings.head.rank
    return float(total)


def trained(options: argparse.Namespace, settings: Settings, clock: Clock) -> Path:
    """The drafter's folder, trained from whatever the work folder holds."""
    work = options.work
    checkpoint = open_checkpoint(shipped_pair() / "target")
    if checkpoint.config != settings.target_config:
        raise SystemExit(
            f"the shipped target is {checkpoint.config}, training has settings for {settings.target_config}"
        )
    begun = STARTS.get(options.start, Path(options.start))
    start = {} if begun is None else open_checkpoint(begun).load("float32")
    if start and settings.draft_kind == "dspark":
        start = carried(settings.draft_config, start, settings.seed + 1)
    target = checkpoint.load("bfloat16")
    tokenizer = Tokenizer.from_file(str(shipped_pair() / "target" / "tokenizer.json"))
    files, _ = read_sources(settings)
    chosen = [file.text for file in files if file.part(settings) == "prompts"]
    clock.report(
        f"{jax.devices()[0].device_kind}; {len(chosen)} of {len(files)} files are prompts'; {flops(settings):.2e} FLOP a step"
    )
    continuations = options.continuations or work / "rollouts"
    data = roll_out(settings, target, encode_files(tokenizer, chosen), continuations, clock, part=options.part)
    drafter = work / f"drafter-{settings.draft_kind}"
    draft = half(train_drafter(settings, target, data, drafter, clock, start=start, until=options.train_until))
    folder = work / settings.draft_kind
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", draft_json(settings))
    write_weights(folder / "model.safetensors", dflash_parameters(settings.draft_config), draft)
    return folder


def judged(options: argparse.Namespace, folder: Path) -> dict:
    """Tokens per cycle and per second, and acceptance by position, at each temperature, and without a drafter."""
    model = dj.load(draft=folder, max_batch=1, max_model_len=224)
    texts = [row["text"] for row in json.loads(PROMPTS.read_text())][: options.prompts]
    rows = {}
    for temperature in TEMPERATURES:
        each = [
            dj.SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=i, ignore_eos=True)
            for i in range(len(texts))
        ]
        row = {}
        for draft in (True, False):
            dj.generate(model, texts[0], dj.SamplingParams(max_tokens=4, temperature=temperature), draft=draft)
            model.drafting = DraftRecord()
            done = [dj.generate(model, text, one, draft=draft) for text, one in zip(texts, each, strict=True)]
            speed = sum(len(one.token_ids) - 1 for one in done) / sum(one.stats.decode_s for one in done)
            row["tokens_per_s" if draft else "plain_tokens_per_s"] = speed
            if draft:
                lengths = [length for one in done for length in one.acceptance_lengths]
                row |= {
                    "tokens_per_cycle": sum(lengths) / len(lengths),
                    "by_position": list(model.acceptance_by_position),
                }
        rows[f"{temperature:g}"] = row
    return rows


def replayed(options: argparse.Namespace, settings: Settings, folder: Path) -> dict[str, dict[str, float]]:
    """Tokens per cycle of the drafter in `folder` at each temperature, by replay over the target's own texts."""
    target = open_checkpoint(shipped_pair() / "target").load(options.replay_dtype)
    draft = open_checkpoint(folder).load(options.replay_dtype)
    tokenizer = Tokenizer.from_file(str(shipped_pair() / "target" / "tokenizer.json"))
    texts = [row["text"] for row in json.loads(PROMPTS.read_text())][: options.prompts]
    prompts = np.asarray([tokenizer.encode(text).ids for text in texts], np.int32)
    rows = {}
    for temperature in TEMPERATURES:
        proposals = "shared x1" if temperature else "argmax"
        kinds, _ = measure(settings, target, draft, prompts, temperature=temperature, scales=(1.0,))
        row = {"tokens_per_cycle": kinds[proposals].summary(settings.block_size)["cycle_mean"]}
        if temperature and settings.draft_kind != "dflash2":
            each = np.tile(prompts, (options.texts, 1))
            row["block_verified"] = block_verified(
                settings, target, draft, each, temperature=temperature, batch=len(prompts)
            )
        rows[f"{temperature:g}"] = row
    return rows


def table(results: list[dict]) -> str:
    """All kinds' figures in Markdown."""
    places = " | ".join(f"{place}" for place in SHOWN)
    lines = [
        f"| drafter | M weights | steps | ms a step | T | tokens per cycle | tokens/s | x plain | stands at place {places} |"
    ]
    lines.append("| --- " + "| ---: " * (7 + len(SHOWN)) + "|")
    for result in results:
        for temperature, row in result["rows"].items():
            stands = " | ".join(
                f"{row['by_position'][place - 1]:.2f}" if place <= len(row["by_position"]) else "" for place in SHOWN
            )
            lines.append(
                f"| {result['title']} | {result['weights'] / 1e6:.2f} | {result['steps']:,} | {result['ms']:.1f} | {temperature} | "
                f"{row['tokens_per_cycle']:.2f} | {row['tokens_per_s']:.0f} | "
                f"{row['tokens_per_s'] / row['plain_tokens_per_s']:.2f} | {stands} |"
            )
    return "\n".join(lines)


def part_of(text: str) -> tuple[int, int]:
    """`I/N` as numbers."""
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"a part I/N must have 0 <= I < N, got {text}")
    return index, count


def main() -> int:
    parser = arguments(str(__doc__))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--work", type=Path, default=Path("/tmp/train_drafters"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--loss", choices=("decay", "dpace"), default="dpace")
    parser.add_argument("--blocks", choices=("even", "cycles"), default="even", help="weights of a step's blocks")
    parser.add_argument(
        "--sampled-loss", choices=("places", "block"), default="places", help="DSpark's, on sampled texts"
    )
    parser.add_argument("--sampled-share", type=float, help="of continuations and rows, a third otherwise")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--rank", type=int, default=64, help="of a head's vectors")
    parser.add_argument("--form", choices=FORMS, default="vanilla", help="of DSpark's head")
    parser.add_argument("--start", default="random", help=f"{', '.join(STARTS)} or a folder: weights to begin with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fewer", type=int, default=2, help="divides the number of continuations")
    parser.add_argument("--continuations", type=Path, help="their folder, where it is not the work folder's")
    parser.add_argument(
        "--part", type=part_of, default=(0, 1), metavar="I/N", help="of the continuations, in a shared folder"
    )
    parser.add_argument(
        "--train-until", type=float, metavar="SECONDS", help="as many steps as fit, in place of --steps"
    )
    parser.add_argument("--offline", action="store_true", help="judge by replay, not through the engine; no rows")
    parser.add_argument("--texts", type=int, default=4, help="of a prompt, for block verification by replay")
    parser.add_argument("--replay-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--small", action="store_true", help="few rows, short ones: for a look on a CPU")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="of training; the same call goes on")
    parser.add_argument("--flops", action="store_true", help="print a step's operations, and end")
    options = parser.parse_args()
    if options.flops:
        for kind in options.kinds:
            print(f"{kind}: {flops(settings_of(options, kind)):.2e} floating point operations a step")
        return 0
    record = None if options.offline else Record("train_drafters", options)
    for kind in options.kinds:
        settings, began = settings_of(options, kind), time.monotonic()
        clock = Clock(options.work / f"drafter-{kind}", lambda line: print(line, flush=True), options.stop_after)
        try:
            folder = trained(options, settings, clock)
        except DFlashError as error:
            raise SystemExit(f"{kind}: {error}") from None
        except Interrupted as stop:
            print(f"{stop}; the same command goes on", flush=True)
            return 75
        steps = clock.log["drafter"]["steps"]
        took = clock.log["drafter"]["seconds"] / steps * 1e3
        if record is None:
            rows = replayed(options, settings, folder)
            write_json(folder / "replayed.json", {"steps": steps, "ms": took, "seed": settings.seed, "rows": rows})
            figures = "; ".join(
                f"T {temperature}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items())
                for temperature, row in rows.items()
            )
            clock.report(f"{folder}: {steps} steps of {took:.1f} ms; {figures}")
            continue
        result = {
            "title": title(settings.draft_config), "weights": count(dflash_parameters(settings.draft_config)),
            "steps": steps, "ms": took, "loss": settings.loss, "optimizer": settings.optimizer,
            "start": options.start, "device": jax.devices()[0].device_kind, "rows": judged(options, folder),
        }  # fmt: skip
        write_json(options.work / f"{kind}.json", result)
        for temperature, row in result["rows"].items():
            case = f"{result['title']} T{temperature}"
            record.add(
                case, "acceptance, mean over cycles", row["tokens_per_cycle"], "tokens", by_position=row["by_position"]
            )
            record.add(case, "decode with drafting", row["tokens_per_s"], "tokens/s")
        clock.report(f"{kind}: {time.monotonic() - began:.0f} s in all")
    if record is None:
        return 0
    done = [options.work / f"{kind}.json" for kind in KINDS]
    print(table([json.loads(path.read_text()) for path in done if path.exists()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
