"""Counters between CTAs: who has written counts, who needs it waits for a number, and the last who waits leaves a zero.

All CTAs of such a launch must be resident at once. In Pallas' interpreter whoever counts is in a launch before (`stages`).
"""

from typing import Any

from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, SCALAR, thread_op


@thread_op(args=(GLOBAL, SCALAR), interpret=lambda *_, **__: None)
def announce(ready: Any, group: Any) -> None:
    """Counts one more of what makes up `group`, after all that this warpgroup has written: one thread's release is for all that it
    has met at the barrier."""
    th.warpgroup_barrier()
    with th.one_thread():
        th.inline("red.release.gpu.global.add.u32 [$0], 1;", th.word_address(ready, group))


@thread_op(args=(GLOBAL, SCALAR), interpret=lambda *_, **__: None)
def await_announced(ready: Any, group: Any, *, given: int, taken: int) -> None:
    """Waits until so many of a group are there. The last of `taken` who wait leaves the count at 0 for the next launch."""
    with th.branch(th.compare(th.thread(), "eq", 0)):
        th.inline(
            "{ .reg .pred p; .reg .b32 w; .reg .b64 a; mov.b64 a, $0; again: ld.acquire.gpu.global.u32 w, [a]; "
            f"setp.lt.u32 p, w, {given}; @p bra again; atom.relaxed.gpu.global.add.u32 w, [a], 1; "
            f"setp.eq.u32 p, w, {given + taken - 1}; @p st.relaxed.gpu.global.u32 [a], 0; }}",
            th.word_address(ready, group),
        )
    th.warpgroup_barrier()


@thread_op(args=(GLOBAL, SCALAR, SCALAR), interpret=lambda *_, **__: None)
def await_announced_by(ready: Any, group: Any, items: Any, *, given: int, taken: int) -> None:
    """`await_announced` for `items` of the `taken` at once."""
    with th.branch(th.compare(th.thread(), "eq", 0)):
        th.inline(
            "{ .reg .pred p; .reg .b32 w; .reg .b64 a; mov.b64 a, $0; again: ld.acquire.gpu.global.u32 w, [a]; "
            f"setp.lt.u32 p, w, {given}; @p bra again; atom.relaxed.gpu.global.add.u32 w, [a], $1; add.u32 w, w, $1; "
            f"setp.eq.u32 p, w, {given + taken}; @p st.relaxed.gpu.global.u32 [a], 0; }}",
            th.word_address(ready, group), items,
        )  # fmt: skip
    th.warpgroup_barrier()
