"""Tiling of a decoder layer's kernels: its products, and the attention in front of them. Arithmetic on shapes only."""

import dataclasses

from dflash_kernels.core.device import SHARED_MEMORY
from dflash_kernels.fused.plan import (
    BLOCK,
    COPIES,
    HEAD_DIM,
    KEYS,
    LEAST_STAGES,
    LEAST_WIDTH,
    MOST_ROWS,
    MOST_SPLITS,
    MOST_STAGES,
    MOST_TOKENS,
    ROWS,
    SPARE,
    WIDENED_STAGES,
    Attention,
    Plan,
    padded_rows,
    split_k,
    unsplit,
    with_stages,
)


def plan(
    *,
    live: int,
    hidden: int,
    heads_width: int,
    inner: int,
    next_width: int | None,
    ctas: int,
    eps: float,
    itemsize: int = 2,
    zero_centered: bool = False,
) -> Plan:
    """The products of a layer after its attention. Raises NotImplementedError with the reason for shapes that do not tile."""
    if not 0 < live <= MOST_ROWS:
        raise NotImplementedError(f"takes 1 to {MOST_ROWS} rows, not {live}")
    widths, even = {"hidden": hidden, "heads": heads_width, "inner": inner}, COPIES * BLOCK * 2 // itemsize
    for name, size in widths.items():
        if size % even:
            raise NotImplementedError(f"takes widths that {even} divides, not {name} {size}")
    if hidden // ROWS > ctas:
        raise NotImplementedError(f"hidden {hidden} needs {hidden // ROWS} multiprocessors to add up, there are {ctas}")
    if next_width is not None and next_width % LEAST_WIDTH:
        raise NotImplementedError(f"takes widths that {LEAST_WIDTH} divides, not next {next_width}")
    products = [
        split_k("o", hidden, heads_width, ctas, itemsize), unsplit("gate_up", inner, hidden, 2, ctas, itemsize),
        split_k("down", hidden, inner, ctas, itemsize),
    ]  # fmt: skip
    if next_width is not None:
        products.append(unsplit("next", next_width, hidden, 1, ctas, itemsize))
    return with_stages(Plan(live, padded_rows(live), hidden, tuple(products), ctas, 0, 0, 0, eps, zero_centered))


def attention_plan(
    plan: Plan, *, sequences: int, group: int, kv_heads: int, head_dim: int, page_size: int, table_width: int,
    scale: float, stages: int | None = None, splits: int | None = None, page_itemsize: int = 2,
) -> tuple[Attention, Plan]:  # fmt: skip
    """Attention in front of a layer's products, and the products with what shared memory it leaves them.

    Args:
      stages, splits: of the attention; None: chosen from the shapes.
      page_itemsize: bytes of a number in the pages.

    Raises:
      NotImplementedError: with the reason, for what does not fit in.
    """
    if head_dim != HEAD_DIM:
        raise NotImplementedError(f"takes head dim {HEAD_DIM}, not {head_dim}")
    tokens = plan.live // sequences
    if tokens > MOST_TOKENS or tokens * group > MOST_ROWS:
        raise NotImplementedError(f"takes {MOST_TOKENS} tokens of {MOST_ROWS} heads a KV head, not {tokens} of {group}")
    if page_size % KEYS and (KEYS % page_size or page_size < 8):
        raise NotImplementedError(f"takes page sizes 8, 16, 32 and multiples of 64, not {page_size}")
    if sequences * kv_heads > plan.ctas:
        raise NotImplementedError(f"takes {plan.ctas} KV heads of all sequences, not {sequences * kv_heads}")
    if splits is None:
        splits = min(plan.ctas // (sequences * kv_heads), MOST_SPLITS)
    if stages is not None:
        choices = [stages]
    else:
        # A short sequence's tiles are all on their way at once; more stages than memory has room for are not missed.
        choices = list(range(min(-(-table_width * page_size // (KEYS * splits)), MOST_STAGES), 0, -1))
    taken = SPARE + 2 * 2 * (-(-tokens // 8) * 8) * HEAD_DIM + plan.kept_bytes
    left = dataclasses.replace(plan, stages=min((SHARED_MEMORY - taken) // (plan.stage_rows * BLOCK * 2), plan.stages))
    for count in choices:
        wide, stages_8bit = (count, 0) if page_itemsize == 2 else (min(count, WIDENED_STAGES), count)
        attention = Attention(
            sequences, tokens, group, kv_heads, page_size, table_width, splits, wide, float(scale), stages_8bit, plan.is_8bit
        )  # fmt: skip
        if attention.kept(left) >= LEAST_STAGES:
            return attention, left
    raise NotImplementedError(f"{left.stages} stages of {left.stage_rows} weight rows leave attention no room")
