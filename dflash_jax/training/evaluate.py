"""Acceptance length, measured offline: the target decodes alone, the drafter is asked at every position, cycles are replayed.

A cycle at the pending token's position s proposes the tokens of s + 1 .. s + G - 1; the longest prefix that equals what the target
decoded is accepted; the next cycle starts at s + accepted + 1. That is what an engine does, because what is emitted is always
the target's own token, so the text does not depend on the drafter.

At temperature 1 the target's token at position t is the argmax of its logits plus Gumbel noise that (seed, t) fixes. A drafter
may propose its plain argmax, or its argmax plus the same noise (`shared`), optionally with its logits scaled first. Either way
the emitted tokens are the target's samples.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.models import bind
from dflash_jax.models.heads import Pick
from dflash_jax.models.heads.markov import Markov
from dflash_jax.training.drafter import block_hidden, gather_slots, target_pass
from dflash_jax.training.head_losses import corrected
from dflash_jax.training.optimizer import Params
from dflash_jax.training.rollouts import continue_prompts, position_noise
from dflash_jax.training.settings import EOS_ID, Settings

LOOP_TAIL, LOOP_PERIOD = 48, 16
SHARED_SCALES = (1.0, 1.3, 1.6, 2.0)
_ANCHORS_AT_ONCE = 8


@dataclass(frozen=True)
class Acceptance:
    """Tokens per cycle (accepted drafts + 1). The last cycle of a prompt counts whole, even past the last new token."""

    cycles: list[list[int]]

    def summary(self, block: int) -> dict:
        every = [length for row in self.cycles for length in row]
        rows = [float(np.mean(row)) for row in self.cycles if row]
        if not every:
            return {"prompts": 0, "cycles": 0}
        histogram = np.bincount(every, minlength=block + 1)[1:].tolist()
        return {
            "prompts": len(rows),
            "cycles": len(every),
            "cycle_mean": float(np.mean(every)),
            "prompt_mean": float(np.mean(rows)),
            "histogram": histogram,
        }

    def only(self, keep: np.ndarray) -> "Acceptance":
        return Acceptance([row for row, chosen in zip(self.cycles, keep, strict=True) if chosen])


def loops(new: np.ndarray) -> np.ndarray:
    """Mask of the rows that end in a loop: their last 48 tokens repeat with a period of at most 16."""
    tail = new[:, -LOOP_TAIL:]
    periods = range(1, min(LOOP_PERIOD, tail.shape[1] - 1) + 1)
    return np.any([np.all(tail[:, p:] == tail[:, :-p], axis=1) for p in periods], axis=0)


def replay(ids: np.ndarray, proposals: np.ndarray, prompt: int, new: int) -> Acceptance:
    """Cycles over `ids [n, prompt + new + G]` with `proposals [n, new, G - 1]` for a pending token at prompt + i."""
    slots, rows = proposals.shape[2], []
    for tokens, drafts in zip(ids, proposals, strict=True):
        ends = np.flatnonzero(tokens[prompt : prompt + new] == EOS_ID)
        stop = prompt + (int(ends[0]) + 1 if len(ends) else new)
        at, cycles = prompt, []
        while at < stop:
            hit = drafts[at - prompt] == tokens[at + 1 : at + 1 + slots]
            accepted = int(np.argmin(np.append(hit, False)))
            cycles.append(accepted + 1)
            at += accepted + 1
        rows.append(cycles)
    return Acceptance(rows)


def noisy_pick(noise: Float[Array, "B S V"] | None, scale: float = 1.0) -> Pick:
    """A head's `Pick` of the best score, with `noise` of each place's tokens added to scaled scores."""

    def pick(first: int, scores: Array, tokens: Array | None) -> tuple[Array, Array]:
        if noise is not None:
            drawn = noise[:, first : first + scores.shape[1]]
            drawn = drawn if tokens is None else jnp.take_along_axis(drawn, tokens, axis=-1)
            scores = scores * scale + drawn[:, :, None]
        return jnp.argmax(scores, axis=-1), scores

    return pick


@functools.partial(jax.jit, static_argnames=("settings", "scales"))
def _proposals(
    settings: Settings, target: Params, draft: Params, ids: Array, features: Array, at: Array, key: Array, scales: tuple
) -> Int[Array, "mode n A S"]:
    """Argmax proposals, then one set with shared noise for each scale, for anchors at positions `at [A]` of every row."""
    config, table = settings.draft_config, target["embed.weight"]
    rows, slots, vocab = len(ids), settings.block_size - 1, config.vocab_size
    anchors = jnp.broadcast_to(at, (rows, len(at)))
    hidden = block_hidden(config, draft, table, ids, features, anchors).reshape(
        -1, config.block_size, config.hidden_size
    )
    module = bind(config, draft)
    before = jnp.maximum(anchors - 1, 0)
    last = jnp.take_along_axis(features, before[..., None], axis=1).reshape(-1, features.shape[-1])
    pending = jnp.take_along_axis(ids, anchors, axis=1).reshape(-1)
    block = module.judged(hidden, slots, pending, table, table, last)

    def propose(noise: Array | None, scale: float = 1.0) -> Array:
        pick = noisy_pick(noise, scale)
        if module.head is None:
            return pick(0, block.logits[:, :, None], None)[0][..., 0]
        drawn = None if noise is None else block.named(noise) / scale
        return module.head.propose(block._replace(noise=drawn), pick)[0]

    modes = [propose(None)]
    if scales:
        places = at[:, None] + 1 + jnp.arange(slots)
        noise = functools.partial(position_noise, key, rows=rows, vocab=vocab)
        drawn = jnp.moveaxis(jax.vmap(jax.vmap(noise))(places), 2, 0).reshape(-1, slots, vocab)
        modes += [propose(drawn, scale) for scale in scales]
    return jnp.stack(modes).reshape(-1, rows, len(at), slots)


def _continued(
    settings: Settings, target: Params, prompts: np.ndarray, seed: int, batch: int, *, sampled: bool, temperature: float
) -> Iterator[tuple[Array, int, Int[Array, "n T"]]]:  # fmt: skip
    """Of each batch of prompts the key of its noise, the prompts' width, and what the target makes of them, a block more than is
    judged."""
    new = settings.evaluation_new + settings.block_size
    for index, rows in enumerate(np.split(prompts, range(batch, len(prompts), batch))):
        key, law = jax.random.fold_in(jax.random.key(seed), index), {"sampled": sampled, "temperature": temperature}
        yield (
            key,
            rows.shape[1],
            continue_prompts(settings.target_config, target, jnp.asarray(rows), key, new=new, **law),
        )


def _places(width: int, new: int) -> Iterator[Int[Array, "n"]]:
    """Positions of `new` tokens behind a prompt, a few at a time; the last ones may lie behind them."""
    for start in range(width, width + new, _ANCHORS_AT_ONCE):
        yield jnp.arange(start, start + _ANCHORS_AT_ONCE)


def measure(
    settings: Settings,
    target: Params,
    draft: Params,
    prompts: np.ndarray,
    *,
    temperature: float,
    seed: int = 0,
    batch: int = 256,
    scales: tuple[float, ...] = SHARED_SCALES,
) -> tuple[dict[str, Acceptance], np.ndarray]:
    """Acceptance at a temperature of bfloat16 weights, per kind of proposal, and the new tokens `[n, new]`."""
    sampled, new = temperature > 0, settings.evaluation_new
    scales = scales if sampled else ()
    names = ["argmax", *(f"shared x{scale:g}" for scale in scales)]
    scales = tuple(scale / temperature for scale in scales)
    found: dict[str, list[list[int]]] = {name: [] for name in names}
    texts = []
    for key, width, ids in _continued(settings, target, prompts, seed, batch, sampled=sampled, temperature=temperature):
        _, features = target_pass_jit(settings, target, ids)
        proposals = np.concatenate(
            [
                np.asarray(_proposals(settings, target, draft, ids, features, at, key, scales).astype(jnp.uint16))
                for at in _places(width, new)
            ],
            axis=2,
        )
        tokens = np.asarray(ids)
        for name, drafts in zip(names, proposals, strict=True):
            found[name] += replay(tokens, drafts[:, :new], width, new).cycles
        texts.append(tokens[:, width : width + new])
    return {name: Acceptance(cycles) for name, cycles in found.items()}, np.concatenate(texts)


@functools.partial(jax.jit, static_argnames="settings")
def _stands(
    settings: Settings, target: Params, draft: Params, ids: Array, final: Array, features: Array, at: Array, temperature: Array
) -> Float[Array, "n A S"]:  # fmt: skip
    """The chance that block verification accepts each place and those before it, for anchors at positions `at [A]` of every row."""
    config, table, slots = settings.draft_config, target["embed.weight"], settings.block_size - 1
    anchors = jnp.broadcast_to(at, (len(ids), len(at)))
    hidden = block_hidden(config, draft, table, ids, features, anchors)[:, :, 1:].reshape(-1, slots, config.hidden_size)
    module, model = bind(config, draft), bind(settings.target_config, target)
    tokens, before = gather_slots(ids, anchors, slots, 1), gather_slots(ids, anchors, slots, 0)
    drafted = module.logits(hidden, table)
    if module.head is not None:
        drafted = corrected(cast(Markov, module.head), drafted, hidden, before)
    taught = model.logits(gather_slots(final, anchors, slots, 0))
    log_p, log_q = (jax.nn.log_softmax(logits / temperature) for logits in (taught, drafted))
    ratios = jnp.take_along_axis(log_q - log_p, tokens[..., None], axis=-1)[..., 0]
    least = jax.lax.cummin(jnp.minimum(jnp.cumsum(ratios, axis=-1), 0.0), axis=1)
    return jnp.exp(least).reshape(len(ids), len(at), slots)


def cycles_of(stands: Float[np.ndarray, "n new S"]) -> tuple[float, float]:
    """Expected cycles over `new` tokens of each text, summed up, and the tokens that they gain, the last cycle's all.

    That i proposals or more stand for a pending token, given the text that comes, has the chance `stands[..., i - 1]`: the next
    cycle's start is so known in law, whatever was drafted.
    """
    n, new, slots = stands.shape
    ends = -np.diff(np.pad(stands, ((0, 0), (0, 0), (1, 1)), constant_values=((0, 0), (0, 0), (1, 0))), axis=-1)
    begun, gained = np.zeros((n, new + slots + 1)), 0.0
    begun[:, 0] = 1.0
    for place in range(new):
        begun[:, place + 1 : place + 2 + slots] += begun[:, place, None] * ends[:, place]
        gained += float((begun[:, place] * (1 + stands[:, place].sum(-1))).sum())
    return float(begun[:, :new].sum()), gained


def block_verified(
    settings: Settings, target: Params, draft: Params, prompts: np.ndarray, *, temperature: float, seed: int = 0, batch: int = 256
) -> float:  # fmt: skip
    """Tokens per cycle where a drafter's samples are judged by block verification, of v1 or DSpark: expected over what is drafted,
    on texts that the target sampled."""
    new, cycles, tokens = settings.evaluation_new, 0.0, 0.0
    for _, width, ids in _continued(settings, target, prompts, seed, batch, sampled=True, temperature=temperature):
        final, features = target_pass_jit(settings, target, ids)
        stands = np.concatenate(
            [
                np.asarray(_stands(settings, target, draft, ids, final, features, at, jnp.float32(temperature)))
                for at in _places(width, new)
            ],
            axis=1,
        )
        more = cycles_of(stands[:, :new].astype(np.float64))
        cycles, tokens = cycles + more[0], tokens + more[1]
    return tokens / cycles


target_pass_jit = jax.jit(target_pass, static_argnames="settings")


def report_card(settings: Settings, target: Params, draft: Params, prompts: np.ndarray) -> dict:
    """Both temperatures on `prompts`; the first `settings.shipped_prompts` of them also on their own.

    Rows are `{"temperature", "proposals", "set", "loops", ...summary}`; `loops` is all, without or only.
    """
    rows = []
    for temperature in (0.0, 1.0):
        kinds, texts = measure(settings, target, draft, prompts, temperature=temperature)
        looping = loops(texts)
        shipped = np.arange(len(prompts)) < settings.shipped_prompts
        for kind, acceptance in kinds.items():
            for name, chosen in (("shipped", shipped), ("all", np.ones_like(shipped))):
                for part, keep in (("all", chosen), ("without", chosen & ~looping), ("only", chosen & looping)):
                    about = {"temperature": temperature, "proposals": kind, "set": name, "loops": part}
                    rows.append(about | acceptance.only(keep).summary(settings.block_size))
    return {"rows": rows, "new_tokens": settings.evaluation_new, "prompt_tokens": int(prompts.shape[1])}


def lines(report: dict) -> list[str]:
    """The report as text, one line a row."""
    out = []
    for row in report["rows"]:
        about = f"T={row['temperature']:g} {row['proposals']:<12} {row['set']:<8} loops {row['loops']:<8}"
        about += f" {row['prompts']:>5} prompts"
        if row["prompts"]:
            about += f"  cycle mean {row['cycle_mean']:.3f}  mean of prompt means {row['prompt_mean']:.3f}"
        out.append(about)
    return out
