"""The command `dflash-jax demo`: streamed text, saved target passes, a comparison of texts, and speed."""

import itertools
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jax

from dflash_jax.cli.report import acceptance_histogram, mean_acceptance, tokens_per_second
from dflash_jax.cli.terminal import note, printable
from dflash_jax.config import DecoderConfig
from dflash_jax.generation import generate, stream
from dflash_jax.model import Model, load
from dflash_jax.models import count, family_for
from dflash_jax.sampling_params import SamplingParams

ON_A_CPU = (
    "On a CPU this shows what drafting does: the tokens of a cycle, the passes of the target that it saves, the same text. It "
    "cannot show speed: verifying {longest} tokens takes a CPU many times as long as one, and a GPU about as long as one."
)


def default_prompts() -> list[str]:
    """Beginnings of code that the pair that ships has not learnt from, with their sources in the file."""
    rows = json.loads(resources.files("dflash_jax").joinpath("cli/demo_prompts.json").read_text(encoding="utf-8"))
    return [row["text"] for row in rows]


def demo(
    prompts: Sequence[str], max_tokens: int, path: str | None, options: Mapping[str, Any], *, bars: bool = True
) -> int:
    """Prints the demonstration; `options` are `load`'s. Exact float32 unless they say otherwise. Returns the exit code."""
    asked: dict[str, Any] = {**options, "dtype": options.get("dtype") or "float32", "max_batch": 1}
    model = load(path, **asked)
    for notice in model.notices:
        note(notice)
    params = SamplingParams(max_tokens=max_tokens)
    prompts = list(prompts) or default_prompts()
    stream(model, prompts, params).close()  # prompts that cannot run are refused before anything is compiled
    introduce(model)
    if model.draft is not None and jax.default_backend() == "cpu":
        print(textwrap.fill(ON_A_CPU.format(longest=model.draft.num_drafts + 1), 80), flush=True)
    flags = (False,) if model.draft is None else (True, False)
    # Once through everything, so that no figure below holds a compilation or a first run.
    print("compiling ...", end=" ", flush=True)
    compile_s = sum(generate(model, prompt, params, draft=flag).stats.compile_s for prompt in prompts for flag in flags)
    print(f"{compile_s:.1f} s\n")

    for prompt in prompts:
        print(f"{'-' * 80}\n{prompt}", end="", flush=True)
        for piece in stream(model, prompt, params, cycles=1):
            print(printable(piece.text, sys.stdout), end="", flush=True)
        print()
    print("-" * 80)
    *drafting, plain = ([generate(model, prompt, params, draft=flag) for prompt in prompts] for flag in flags)
    if model.draft is None:
        print(f"without drafting  {tokens_per_second(plain):8.0f} tokens/s")
        return 0
    drafted, longest = drafting[0], model.draft.num_drafts + 1
    passes, alone = (sum(one.stats.target_steps for one in completions) for completions in (drafted, plain))
    saved = f"   ({1 - passes / alone:.0%} saved)" if alone else ""  # one token each: its prompt gave it
    lengths = list(itertools.chain.from_iterable(completion.acceptance_lengths for completion in drafted))
    print(f"tokens per cycle  {mean_acceptance(drafted):8.2f}   (of {longest} at most)")
    print(f"cycles by length  {acceptance_histogram(lengths, longest, bars=bars)}")
    print(f"target passes     {passes:8} where decoding without a drafter takes {alone}{saved}")
    equal = sum(ours.token_ids == theirs.token_ids for ours, theirs in zip(drafted, plain, strict=True))
    verdict = "yes" if equal == len(prompts) else "NO"
    print(f"same text         {verdict:>8}: {equal} of {len(prompts)} equal token for token")
    speeds = [tokens_per_second(completions) for completions in (drafted, plain)]
    ratio = f"   ({speeds[0] / speeds[1]:.2f} times as fast)" if all(speeds) else ""
    print(f"with drafting     {speeds[0]:8.0f} tokens/s{ratio}")
    print(f"without           {speeds[1]:8.0f} tokens/s")
    exact = model.engine.dtype == "float32"
    return 0 if equal == len(prompts) or not exact else 1


def introduce(model: Model) -> None:
    """One line: what runs, and where."""
    device = jax.local_devices()[0]
    about = f"{model.name} on {device.device_kind} in {model.engine.dtype}: a target of {_size(model.target)}"
    if model.draft is not None:
        about += f", a drafter of {_size(model.draft)}, blocks of {model.draft.block_size}"
    print(about, flush=True)


def _size(config: DecoderConfig) -> str:
    return f"{count(family_for(config).parameters(config)) / 1e6:.1f} million parameters"
