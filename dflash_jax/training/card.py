"""Model cards of a trained pair, written from the run's own records."""

from typing import Any

from dflash_jax.models import count
from dflash_jax.models.dflash import dflash_parameters
from dflash_jax.models.qwen3 import qwen3_parameters
from dflash_jax.training.evaluate import LOOP_PERIOD, LOOP_TAIL
from dflash_jax.training.kinds import title
from dflash_jax.training.settings import Settings

_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon, AdamW for tables and norms"}
_METHODS = {
    "v1": "DFlash, arXiv 2602.06036",
    "dflash2": "DFlash (arXiv 2602.06036) with block convolutions and a candidate selector",
    "dspark": "DFlash (arXiv 2602.06036) with DSpark's heads (arXiv 2607.05147)",
}


def cards(settings: Settings, record: dict[str, Any]) -> dict[str, str]:
    """README.md of the target and of the drafter.

    Args:
      record: `manifest`, `log` (per stage seconds and history), `evaluation`, `heldout_loss`, `device`, `versions`, `command`.
    """
    return {"target": target_card(settings, record), "draft": draft_card(settings, record)}


def target_card(s: Settings, record: dict[str, Any]) -> str:
    """Model card of the bundled target."""
    weights = count(qwen3_parameters(s.target_config)) / 1e6
    manifest = record["manifest"]
    tokens, size = manifest["tokens"], f"{manifest['characters_per_token']:.2f} characters each"
    epochs = s.target_steps * s.target_rows * s.target_length / tokens
    batch = f"{s.target_rows} x {s.target_length} tokens"
    return f"""---
license: apache-2.0
tags: [qwen3, code, python, speculative-decoding, dflash]
---
# A small Python model for DFlash speculative decoding

A Qwen3-architecture language model of {weights:.2f} M parameters that continues Python source. It exists so that
speculative decoding can be installed, run and measured without a download; the drafter beside it (`../draft`) was
trained for it.

| | |
| --- | --- |
| layers, hidden, feed-forward | {s.target_layers}, {s.hidden_size}, {s.intermediate_size} |
| heads (query / key-value x size) | {s.num_heads} / 1 x {s.head_dim} |
| vocabulary | {s.vocab_size} rows, tied; byte-level BPE uses all but row {s.mask_id}, the drafter's mask |
| end of text | id 0 |
| trained on windows of | {s.target_length} tokens (positions up to {s.max_position} are accepted) |

## Training

{s.target_steps:,} steps of {batch}: {epochs:.1f} passes over {tokens / 1e6:.1f} M tokens, {size}.
AdamW, peak rate {s.target_rate:g} along a cosine to zero, float32 master weights, bfloat16 compute.
{_seconds(record, "target")} on {record["device"]}; {record["versions"]}.

Held-out loss: **{record["heldout_loss"]:.4f}** nats a token. Training loss at the end: {_last(record, "target", "loss"):.4f}.

{_reproduce(record)}

## Data and licences

Python files of the packages below as installed, each file once, files of tables and generated lines left out. Files
whose content hash falls into {s.heldout_percent:g} % were held out from tokenizer, target and drafter alike; another
{s.prompt_percent:g} % were kept from the target, as prompts for the drafter's data.

{_packages(manifest)}

The weights are published under Apache-2.0. The model can reproduce passages of these sources; their licences apply to
such text.

## Limits

It has seen Python and little else, at a size that writes plausible but often wrong code, and repeats itself. It follows
no instructions. Held-out files come from the same packages as the training files, so figures on them are for text of
that kind.
"""


def draft_card(s: Settings, record: dict[str, Any]) -> str:
    """Model card of the bundled drafter."""
    weights = count(dflash_parameters(s.draft_config)) / 1e6
    plans = ";\n".join(
        f"{plan.greedy:,} greedy and {plan.sampled:,} sampled of {plan.prompt} + {plan.new} tokens"
        for plan in s.rollouts
    )
    rows = sum(plan.greedy_rows + plan.sampled_rows for plan in s.rollouts)
    evaluation = record["evaluation"]
    weighting = {"dpace": "D-PACE (arXiv 2605.18810)", "decay": "exp(-(k - 1) / 7) for slot k"}[s.loss]
    return f"""---
license: apache-2.0
tags: [dflash, speculative-decoding, draft-model]
---
# {title(s.draft_config)} drafter for the small Python model

{weights:.2f} M parameters, {s.draft_layers} layers, block size {s.block_size}, for the target in `../target`,
whose embeddings and head it uses. Method: {_METHODS[s.draft_kind]}. Taps: residual stream after layers
{list(s.taps)} of {s.target_layers} (0-based; raw, before the final norm). Mask id {s.mask_id}.
Attention inside a block is bidirectional.

## Acceptance

Tokens per cycle (accepted drafts + 1) on prompts of {evaluation["prompt_tokens"]} tokens cut at random places of held-out
files, {evaluation["new_tokens"]} new tokens each, bfloat16, measured offline by replaying cycles over the target's own
continuation. "shipped" is the first {s.shipped_prompts} prompts, kept with the package's tests. A prompt loops if its
last {LOOP_TAIL} new tokens repeat with a period of at most {LOOP_PERIOD}. At temperature 1,
"argmax" proposes the drafter's best token, "shared xS" adds the target's own sampling noise to its logits
times S; both emit exactly the target's samples.

{_acceptance(evaluation)}

Cycles that gained 1 to {s.block_size} tokens, on all prompts:

{_histograms(evaluation)}

## Training

Frozen target; data are its own continuations of passages from files it was not trained on:
{plans}.
{s.draft_steps:,} steps of {rows} sequences x {s.anchors} anchors, one anchor in each stretch of the
continuation, all blocks of a sequence in one pass. Greedy continuations are learnt
from their tokens, sampled ones from the target's distributions. Slot weights: {weighting}.
{_OPTIMIZERS[s.optimizer]}, peak rate {s.draft_rate:g} along a cosine to zero.
Continuations {_seconds(record, "rollouts")}, training {_seconds(record, "drafter")} on {record["device"]}; {record["versions"]}.

{_reproduce(record)}

Data and licences: the target's card.

## Limits

It fits this target only. Figures are for Python text of the kind it was trained on; acceptance falls on other text, and
at temperature 1, where most cycles end at an unpredictable token.
"""


def _seconds(record: dict[str, Any], stage: str) -> str:
    return f"{record['log'].get(stage, {}).get('seconds', 0.0):.0f} s"


def _last(record: dict[str, Any], stage: str, name: str) -> float:
    return record["log"][stage]["history"][-1][name]


def _reproduce(record: dict[str, Any]) -> str:
    return f"Reproduce: `{record['command']}`"


def _packages(manifest: dict[str, Any]) -> str:
    head = (
        "| package | version | licence | files | bytes | files held out |\n| --- | --- | --- | ---: | ---: | ---: |\n"
    )
    rows = [
        f"| {row['name']} | {row['version']} | {row['licence']} | {row['files']:,} | {row['bytes']:,} | {row['heldout_files']} |"
        for row in manifest["packages"]
    ]
    left = ";\n".join(f"{name} ({reason})" for name, reason in manifest["left_out"].items())
    return head + "\n".join(rows) + (f"\n\nLeft out: {left}." if left else "")


def _acceptance(evaluation: dict[str, Any]) -> str:
    head = "| T | proposals | set | loops | prompts | cycle mean | mean of prompt means |\n"
    head += "| --- | --- | --- | --- | ---: | ---: | ---: |\n"
    rows = [
        f"| {row['temperature']:g} | {row['proposals']} | {row['set']} | {row['loops']} | {row['prompts']} | "
        f"{row['cycle_mean']:.2f} | {row['prompt_mean']:.2f} |"
        for row in evaluation["rows"]
        if row["prompts"]
    ]
    return head + "\n".join(rows)


def _histograms(evaluation: dict[str, Any]) -> str:
    chosen = [row for row in evaluation["rows"] if row["set"] == "all" and row["loops"] == "all" and row["prompts"]]
    return "\n".join(
        f"* T={row['temperature']:g} {row['proposals']}: {', '.join(map(str, row['histogram']))}" for row in chosen
    )
