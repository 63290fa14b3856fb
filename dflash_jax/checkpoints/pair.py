"""Pairs of checkpoints: the bundled pair, a target's published drafter, and the check that a drafter fits its target."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from dflash_jax.checkpoints.converted import Checkpoint
from dflash_jax.checkpoints.opening import open_checkpoint
from dflash_jax.config import FINAL_HIDDEN, DecoderConfig
from dflash_jax.errors import CheckpointError, PairError
from dflash_jax.models import DFlashConfig

# Folders of a target's in which its drafter may lie.
BESIDE = ("draft", "dflash")
# Published drafters, by the target they were trained for (hub ids).
KNOWN_DRAFTERS: Mapping[str, str] = {
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
    "Qwen/Qwen3-14B": "deepseek-ai/dspark_qwen3_14b_block7",
    "Qwen/Qwen3-30B-A3B": "RedHatAI/Qwen3-30B-A3B-speculator.dflash",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "z-lab/Qwen3-Coder-30B-A3B-DFlash",
    "meta-llama/Llama-3.1-8B-Instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    "openai/gpt-oss-20b": "z-lab/gpt-oss-20b-DFlash",
    "openai/gpt-oss-120b": "z-lab/gpt-oss-120b-DFlash",
    "Qwen/Qwen3.5-4B": "z-lab/Qwen3.5-4B-DFlash",
    "Qwen/Qwen3.5-9B": "z-lab/Qwen3.5-9B-DFlash",
    "Qwen/Qwen3.5-27B": "z-lab/Qwen3.5-27B-DFlash",
    "Qwen/Qwen3.5-35B-A3B": "z-lab/Qwen3.5-35B-A3B-DFlash",
    "Qwen/Qwen3.5-122B-A10B": "z-lab/Qwen3.5-122B-A10B-DFlash",
    "Qwen/Qwen3.5-397B-A17B": "z-lab/Qwen3.5-397B-A17B-DFlash",
    "Qwen/Qwen3.6-27B": "z-lab/Qwen3.6-27B-DFlash",
    "Qwen/Qwen3.6-35B-A3B": "z-lab/Qwen3.6-35B-A3B-DFlash",
    "Qwen/Qwen3.8-27B": "incoai/Qwen3.8-27B-DFlash2",
    "Qwen/Qwen3.8-Flash-Next": "incoai/Qwen3.8-Flash-Next-DFlash2",
    "ornith-ai/Ornith-1.5-35B-A3B": "jzinno/Ornith-1.5-35B-A3B-DFlash2",
    "Qwen/Qwen3-Coder-Next": "z-lab/Qwen3-Coder-Next-DFlash",
    "google/gemma-4-12B-it": "z-lab/gemma-4-12B-it-DFlash",
    "google/gemma-4-26B-A4B-it": "z-lab/gemma-4-26B-A4B-it-DFlash",
    "google/gemma-4-31B-it": "z-lab/gemma-4-31B-it-DFlash",
    "meta-models/Muse-Glimmer-30B": "z-lab/Muse-Glimmer-30B-DFlash2",
    "JetBrains/Mellum2-12B-A2.5B-Thinking": "RedHatAI/Mellum2-12B-A2.5B-Thinking-speculator.dflash",
    "MiniMaxAI/MiniMax-M2.5": "z-lab/MiniMax-M2.5-DFlash",
    "MiniMaxAI/MiniMax-M3": "nvidia/MiniMax-M3-DSpark",
    "mistralai/Mistral-Small-4-119B-2603": "RedHatAI/Mistral-Small-4-119B-2603-speculator.dspark",
    "XiaomiMiMo/MiMo-V2.5": "XiaomiMiMo/MiMo-V2.5-DFlash/dflash",
    "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash": "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash/dflash",
    "poolside/Laguna-XS.2": "poolside/Laguna-XS.2-speculator.dflash",
    "poolside/Laguna-S-2.1": "poolside/Laguna-S-2.1-DFlash",
    "moonshotai/Kimi-K2.5": "z-lab/Kimi-K2.5-DFlash",
    "deepseek-ai/DeepSeek-V4-Flash": "RedHatAI/DeepSeek-V4-Flash-speculator.dflash",
    "zai-org/GLM-5.1": "z-lab/GLM-5.1-FP8-DFlash",
    "zai-org/GLM-5.2": "RedHatAI/GLM-5.2-speculator.dspark",
    "zai-org/GLM-5.3": "incoai/GLM-5.3-DFlash2",
    "zai-org/GLM-5.3-Flash": "incoai/GLM-5.3-Flash-DFlash2",
    "LiquidAI/LFM2.5-1.2B-Instruct": "LiquidAI/LFM2.5-1.2B-Instruct-DSpark",
    "LiquidAI/LFM2.5-2.6B": "LiquidAI/LFM2.5-2.6B-DSpark",
    "thinkingmachines/Inkling": "RadixArk/Inkling-DSpark-Preview",
    "LiquidAI/LFM2.5-8B-A1B": "LiquidAI/LFM2.5-8B-A1B-DSpark",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": "RedHatAI/NVIDIA-Nemotron-3-Super-120B-A12B-speculator.dflash",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": "RedHatAI/NVIDIA-Nemotron-3-Ultra-550B-A55B-speculator.dflash",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16-DSpark",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DSpark",
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16": "RedHatAI/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B.dspark",
}


def open_pair(
    path: str | Path | None = None,
    draft: str | Path | bool | None = None,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
) -> tuple[Checkpoint, Checkpoint | None]:
    """The checkpoints that `load` would read, checked one by one and not yet loaded. Arguments and errors are those of `load`."""
    if path is None:
        if draft is None or draft is True:
            draft = shipped_pair() / "draft"
        path = shipped_pair() / "target"
    target = open_checkpoint(path, revision=revision)
    if target.family.role != "target":
        raise PairError(f"{path} is a drafter ({target.family.name}): load its target and name this one as draft=")
    return target, _open_drafter(path, target, draft, draft_revision)


def shipped_pair() -> Path:
    """Folder of the pair that comes with the package."""
    return Path(str(resources.files("dflash_jax"))) / "pair"


def _open_drafter(
    path: Any, target: Checkpoint, draft: str | Path | bool | None, revision: str | None
) -> Checkpoint | None:
    if draft is False:
        return _no_drafter("none is wanted", revision)
    published = None
    if draft is None or draft is True:
        beside = next((one for name in BESIDE if (one := target.folder / name).is_dir()), None)
        known = KNOWN_DRAFTERS.get(str(path))
        if beside is not None:
            draft = beside
        elif known is not None:
            draft = published = known
        elif draft is True:
            known_ids = ", ".join(f"{theirs} for {ours}" for ours, theirs in KNOWN_DRAFTERS.items())
            raise PairError(f"no drafter is known for {path}; known: {known_ids}. Name one as draft=")
        else:
            return _no_drafter(f"none is known for {path}", revision)
    try:
        drafter = open_checkpoint(draft, revision=revision)
    except CheckpointError as error:
        if published is None:
            raise
        way_out = (
            f"it was published for {path}; name another one with draft= or --draft, or say draft=False or --no-draft"
        )
        raise CheckpointError(published, [*error.problems, way_out]) from error
    if drafter.family.role != "draft":
        raise PairError(f"{draft} is a {drafter.family.name} target, not a DFlash drafter")
    return drafter


def drafter_notice(path: str | Path | None, draft: str | Path | bool | None, drafter: Checkpoint | None) -> list[str]:
    """One sentence where no drafter was found and none was refused: the target decodes alone. Arguments are those of `load`."""
    if drafter is not None or draft is False:
        return []
    name = Path(str(path)).name
    named = next((theirs for ours, theirs in KNOWN_DRAFTERS.items() if ours.endswith(f"/{name}")), None)
    known = f" ({named} was trained for a model of this name)" if named else ""
    why = (
        f"none lies in {path}/{BESIDE[0]} or {path}/{BESIDE[1]}"
        if Path(str(path)).expanduser().exists()
        else f"none is known for {path}"
    )
    return [f"no drafter: {why}; name one with draft= or --draft{known}, or say draft=False or --no-draft"]


def _no_drafter(why: str, revision: str | None) -> None:
    if revision is not None:
        raise PairError(f"draft_revision={revision!r} is for a drafter, and {why}: name one as draft=, or leave it out")


def check_pair(target: DecoderConfig, draft: DFlashConfig) -> None:
    """Raises PairError, with every reason, unless `draft` can draft for `target`."""
    wrong = []
    width = target.hidden_size if FINAL_HIDDEN in draft.target_layer_ids else target.feature_width
    if draft.target_hidden_size != width:
        wrong.append(f"it reads features of width {draft.target_hidden_size}, the target's are {width}")
    if draft.num_target_layers not in (0, target.num_layers):
        wrong.append(
            f"it was trained for a target of {draft.num_target_layers} layers, this one has {target.num_layers}"
        )
    if max(draft.target_layer_ids) >= target.num_layers:
        wrong.append(f"it taps layers {list(draft.target_layer_ids)}, the target has {target.num_layers}")
    if draft.hidden_size != target.hidden_size and not (draft.own_embedding and draft.own_head):
        wrong.append(
            f"it borrows the target's embedding or head but is {draft.hidden_size} wide, not {target.hidden_size}"
        )
    if draft.vocab_size != target.vocab_size:
        wrong.append(f"its vocabulary has {draft.vocab_size} tokens, the target's {target.vocab_size}")
    if draft.mask_token_id >= draft.vocab_size and not draft.mask_embedding:
        wrong.append(f"its mask_token_id {draft.mask_token_id} is outside the embedding table of {draft.vocab_size}")
    if wrong:
        raise PairError("target and drafter do not fit: " + "; ".join(wrong))
