"""Cycles whose masks the host makes while the device verifies: what `loop` is where nobody asks the host."""

from typing import Any

import jax
import numpy as np

from dflash_jax.decoding.grammar_masks import masks_of
from dflash_jax.decoding.masked_cycle import draft_block, judge_block, verify_block
from dflash_jax.decoding.state import DecodeState, Emitted, Setup
from dflash_jax.engine.requests import on_host
from dflash_jax.engine.resources import Resources

# Arguments that each program is given for good.
DRAFT_DONATES, VERIFY_DONATES, JUDGE_DONATES = (2,), (2,), (1,)


def masked_cycles(
    core: Resources,
    setup: Setup,
    table: Any,
    state: DecodeState,
    cycles: int,
    *,
    until_any: bool,
    retired: np.ndarray,
    shared: np.ndarray | None = None,
    drafts: np.ndarray | None = None,
) -> tuple[DecodeState, Emitted]:
    """Up to `cycles` cycles; what they gave out is on the host. Arguments and results: see `decoding.loop.loop`.

    Whether slots are done is known when the next cycle has been drafted, so one more runs than in a loop.
    """
    call, static, weights = core.programs.call, (setup,), core.weights
    estimate = core.estimate if setup.per_request else None
    emitted, done_before = [], len(retired)
    for cycle in range(cycles):
        state, asked, block = call(draft_block, static, DRAFT_DONATES, weights, table, state, retired, estimate, shared)
        asked.copy_to_host_async()
        state, rows = call(verify_block, static, VERIFY_DONATES, weights, table, state, block, shared)
        told, retired = np.asarray(asked), np.zeros_like(retired)
        masks = masks_of(told[:, 1:], core.target.vocab_size)
        state, gained = call(judge_block, static, JUDGE_DONATES, weights, state, block, rows, masks, drafts)
        emitted.append(gained)
        done = int(told[:, 0].sum())
        done_before = done_before if cycle else done
        if done == len(told) or (until_any and done > done_before):
            break
    each = [on_host(one, logprobs=setup.logprobs) for one in emitted]
    return state, jax.tree.map(lambda *of_cycles: np.stack(of_cycles), *each)
