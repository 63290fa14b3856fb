"""A CTA's queries, new keys and new values below Pallas, in terms of single threads; written out while a kernel is lowered.

As in `attention_chain.mosaic_gpu_heads` a head's row belongs to eight threads. Here all rows of a thread are one token's, its new
key among them, so that the angles are asked for once.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir.dialects import arith

from dflash_kernels.fused import heads
from dflash_kernels.fused.plan import KEYS, Attention
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.convert import numbers

_LINES = heads.ROWS_AT_ONCE  # threads with the same columns
_LINE = 128  # bytes of a swizzled row in shared memory
_SHARED = 8  # of what is asked for: angles and both norms' weights


def count(attention: Attention) -> int:
    """What is asked for: two halves of each query row of a thread, of a key and of a value, and what they share."""
    return 2 * (_rows(attention) + 2) + _SHARED


def ask(attention: Attention, qkv, cos, sin, q_norm, k_norm, sequence, head) -> list:
    """What `put_queries` and `put_new` are made of, four words a thread each, on its way to registers from here on.

    Args:
      qkv: `[B * T, N + 2 K, H]`; cos, sin: `[B * T, H / 2]` float32; q_norm, k_norm: `[H]`.
      sequence, head: int32 scalars.
    """
    sequence, head = (value.registers.item() for value in (sequence, head))
    _, place = heads.line_and_place()
    token = th.add(th.mul(sequence, attention.tokens), _token(attention))
    first, key = th.mul(head, attention.group), th.add(head, attention.kv_heads * attention.group)
    rows = [*[th.add(first, among) for among in _among(attention)], key, th.add(key, attention.kv_heads)]
    found = [address for row in rows for address in heads.head_places(qkv, token, row, place)]
    found += heads.angle_places(cos, sin, token, place)
    found += [address for norm in (q_norm, k_norm) for address in heads.weight_places(norm, place)]
    # Volatile: as plain loads they would be moved to where they are used.
    return [heads.load4(address, "ld.volatile") for address in found]


def parted(asked: list) -> tuple[list, list]:
    """What `put_queries` takes of `ask`'s, and what `put_new` does."""
    (*queries, key, key_end, value, value_end), shared = asked[:-_SHARED], asked[-_SHARED:]
    return [*queries, *shared[:6]], [key, key_end, value, value_end, *shared[:4], *shared[6:]]


def put_queries(attention: Attention, eps: float, words: list, target) -> None:
    """Normed, turned queries of a KV head to `target [2, 64, 64]` in swizzled tiles; then matrix instructions may read them."""
    _, place = heads.line_and_place()
    base, weights, turn = th.address(target, space=3), [numbers(half) for half in words[-2:]], heads.Turn(words[-6:-2])
    first = th.mul(_token(attention), attention.group)
    for index, among in enumerate(_among(attention)):
        held = heads.Head(words[2 * index : 2 * index + 2]).normed(weights, eps)
        for block, half in enumerate(turn.turned(held)):
            heads.store_line(th.add(base, block * KEYS * _LINE), th.add(first, among), place, half)
    mgpu.commit_shared()


def put_new(attention: Attention, eps: float, words: list, pools, head, limits, pages) -> None:
    """New keys, normed and turned, and values of a head to their pages; `pages`: of the first new token's tile and of the next."""
    (line, _), lines = heads.line_and_place(), _lines(attention)
    leads = arith.cmpi(arith.CmpIPredicate.eq, th.rem(line, lines), utils.c(0, th.i32()))
    token = arith.select(leads, th.div(line, lines), utils.c(attention.tokens, th.i32()))
    new = heads.New(attention, [value.registers.item() for value in limits], token)
    page, following = (page.registers.item() for page in pages)
    same = arith.cmpi(arith.CmpIPredicate.eq, th.div(new.position, KEYS), th.div(new.first, KEYS))
    new.put(eps, words, pools, head.registers.item(), arith.select(same, page, following), None)


def _lines(attention: Attention) -> int:
    """Threads with the same columns that share one token's heads."""
    lines = 1
    while 2 * lines * attention.tokens <= _LINES and 2 * lines <= attention.group:
        lines *= 2
    return lines


def _rows(attention: Attention) -> int:
    """Query rows that a thread makes."""
    return -(-attention.group // _lines(attention))


def _token(attention: Attention):
    """Token of a sequence that a thread has; the last one where there are fewer."""
    line, _ = heads.line_and_place()
    return arith.minsi(th.div(line, _lines(attention)), utils.c(attention.tokens - 1, th.i32()))


def _among(attention: Attention) -> list:
    """Heads of a group that a thread makes of its token; the last one again where it would be past it."""
    line, _ = heads.line_and_place()
    lines, last = _lines(attention), utils.c(attention.group - 1, th.i32())
    return [arith.minsi(th.add(th.rem(line, lines), index * lines), last) for index in range(_rows(attention))]
