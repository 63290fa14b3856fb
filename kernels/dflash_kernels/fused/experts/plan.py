"""Tiling of a mixture of experts: groups of entries, work items, stages. Arithmetic on shapes only."""

import dataclasses

BLOCK = 64  # columns of one copy: 128 bytes of sixteen-bit numbers, one swizzled row of shared memory
ROWS = (
    64  # weight rows of one matrix instruction; a work item has as many gate as up rows, or two such tiles of down rows
)
FEWER_ROWS = 48, 40  # of a work item
UNIT = 2  # blocks of activations in one stage
SHARED = 222 * 1024  # bytes, less what barriers take
X_SHARED = 32 * 1024
WARPS = 4  # that sort
MOST_EXPERTS = 640  # five for each thread that sorts
MOST_ENTRIES = 4608  # those of 512 tokens that take eight experts and a shared one
MOST_CHOOSING = 16  # tokens for which every CTA chooses
MOST_TAKEN = 32  # a lane holds a choice
NOBODY = -1  # expert of an entry that the call does nothing for


@dataclasses.dataclass(frozen=True)
class Choice:
    """Routing weights of a token from its logits: the softmax of those it takes (normed) or of all, times a scale.

    shared: every token takes the last expert as well, weighted by the sigmoid of its logit, which is no part of the softmax.
    """

    normed: bool
    scale: float
    shared: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch.

    An entry is one of a token's choices, `token * top_k + choice`. Entries of one expert lie side by side in the order of
    experts; up to `columns` of them make a group. Work items are groups times tiles of weight rows.

    Attributes:
      tokens, top_k: T and k, a shared expert among a token's k.
      experts: E.
      hidden, inner: D and F.
      columns: of a group's products.
      gated_rows: gate rows of a work item, and as many up rows.
      stages, x_stages: of the rings of weights and of activations.
      ctas: CTAs, which share the work items.
      choice: how experts are chosen by the kernel itself; None where they are given.
      among: how many experts tokens choose from, a shared one not counted, where the call has a share of them: entries of the
        others' experts are `NOBODY`'s, and results of theirs zeros. None where it has all.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inner: int
    columns: int
    gated_rows: int
    stages: int
    x_stages: int
    ctas: int
    choice: Choice | None = None
    among: int | None = None

    @property
    def entries(self) -> int:
        return self.tokens * self.top_k

    @property
    def groups(self) -> int:
        """At most."""
        return min(self.experts, self.entries) + self.entries // self.columns

    @property
    def padded(self) -> int:
        """Entries in whole vectors."""
        return -(-self.entries // WARPS) * WARPS

    @property
    def routed(self) -> int:
        """Experts of the call without a shared one."""
        return self.experts - int(self.choice is not None and self.choice.shared)

    @property
    def ranked(self) -> int:
        """Experts among which logits choose: the first ones."""
        return self.routed if self.among is None else self.among

    @property
    def scores(self) -> int:
        """Logits of a token."""
        return self.ranked + self.experts - self.routed

    @property
    def threads(self) -> int:
        """Experts in whole warpgroups: each thread sorts for its own."""
        return _threads(self.experts)

    @property
    def spare(self) -> int:
        """Words that sorting takes: experts and weights of entries, what each warp counts, and sums of warps."""
        return 2 * self.padded + WARPS * self.threads + self.threads // 128 * WARPS

    @property
    def gated_tiles(self) -> int:
        return -(-self.inner // self.gated_rows)

    @property
    def one_turn(self) -> bool:
        """Whether no CTA has more than one work item of the first product."""
        return self.entries * self.gated_tiles <= self.ctas

    @property
    def down_tiles(self) -> int:
        return self.hidden // (2 * ROWS)


def most_groups(experts: int) -> int:
    """Words of an exchange: groups that so many experts may have, also as a share of others, and those of 256 at least."""
    return max(512, experts + MOST_EXPERTS * 2 // 5)


def _threads(experts: int) -> int:
    return -(-experts // 128) * 128


def tables_size(entries: int, experts: int, columns: int) -> int:
    """Bytes of shared memory that sorted entries and barriers take, at most."""
    groups = min(experts, entries) + entries // columns
    counts = WARPS * _threads(experts) + _threads(experts) // 128 * WARPS
    return 4 * (4 * (entries + WARPS) + 3 * groups + 1 + counts) + 8 * 128


def plan(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    ctas: int,
    choice: Choice | None = None,
    among: int | None = None,
) -> Plan:
    """Tiling of a mixture's two products. Raises NotImplementedError with the reason for shapes that do not tile."""
    entries = tokens * top_k
    if not 0 < experts <= MOST_EXPERTS:
        raise NotImplementedError(f"takes 1 to {MOST_EXPERTS} experts, not {experts}")
    if not 0 < entries <= MOST_ENTRIES:
        raise NotImplementedError(f"takes 1 to {MOST_ENTRIES} choices of tokens, not {entries}")
    if choice is not None and top_k > MOST_TAKEN:
        raise NotImplementedError(f"chooses {MOST_TAKEN} experts of a token at most, not {top_k}")
    if hidden % (UNIT * BLOCK) or inner % (UNIT * BLOCK):
        raise NotImplementedError(f"takes widths in {UNIT * BLOCK}s, not {hidden} and {inner}")
    # Few columns cost nothing beside the weights; an expert that more tokens take is read again, out of the cache.
    everyones = min(among or experts, MOST_EXPERTS)  # so that `most_groups` holds for a share of more
    columns = next((size for size in (8, 16, 32) if entries <= everyones * size * 2 // 5), 64)
    x_stage = UNIT * BLOCK * 2 * columns
    x_stages = max(X_SHARED // x_stage, 3) if columns > 8 else 8
    stages = min((SHARED - tables_size(entries, experts, columns) - x_stages * x_stage) // (2 * ROWS * BLOCK * 2), 12)
    return Plan(
        tokens,
        top_k,
        experts,
        hidden,
        inner,
        columns,
        _gated_rows(tokens, top_k, experts, everyones, inner, ctas),
        stages,
        x_stages,
        ctas,
        choice,
        among,
    )


def _gated_rows(tokens: int, top_k: int, experts: int, everyones: int, inner: int, ctas: int) -> int:
    """Fewer than a matrix instruction takes where far fewer CTAs are idle for it in their last turn, at random choices.

    They divide the inner width, or all tiles are one turn: then the last one of an expert may begin inside the one before.
    """
    distinct = max(round(experts * (1 - (1 - min(top_k / everyones, 1.0)) ** tokens)), 1)

    def tiles(rows: int) -> int:
        return distinct * -(-inner // rows)

    def longest(rows: int) -> int:
        return -(-tiles(rows) // ctas) * rows

    fitting = (rows for rows in FEWER_ROWS if inner % rows == 0 or tiles(rows) <= ctas)
    fewer = min(fitting, key=longest, default=ROWS)
    return fewer if longest(fewer) <= 0.8 * longest(ROWS) else ROWS
