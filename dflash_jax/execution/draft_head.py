"""Shortlist of the LM head for drafts: best rows of a copy in eight bits, among which the head itself chooses.

Proposals need no logits, only the token of the largest one, or the largest few: the copy says which rows are in question, and of
these the head's own are multiplied. A cycle so reads half the bytes of a head for its proposals. They are the head's own choices,
but for the seldom one whose best row shares its group of candidates with a row that the copy takes for better. No text depends on
them.

Loops with and without an index that took turns on one H200, medians of a cycle at 1k of context, when the last choice still took
two reductions more: 4B 2.86 for 2.94 ms with one sequence, 4.13 for 4.23 with eight, 10.51 for 10.77 with 32; 8B 6.46 for 6.61 with
eight, 16.1 for 16.5 with 32.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import drawn_candidates, drawn_refusal, float8_candidates, float8_dense, float8_refusal, noise_of
from jaxtyping import Array, Float, Int, UInt32

from dflash_jax.models.dflash import DFlash
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.heads import HeadConfig
from dflash_jax.models.largest import largest
from dflash_jax.models.layers import best_of_head
from dflash_jax.parallel.collectives import best_of_ranks
from dflash_jax.quantization.weights import Quantized, quantize, rounded

CANDIDATES = 16
LISTED = 32  # best rows of the copy among which the best few of the head are
MOST_REGARDED = 16  # of them
LEAST_BYTES = 2**27  # of a head: a smaller one is read in the time that the choice among candidates takes
MOST_ROWS = 2048  # that one launch multiplies
WHOLE_WIDTH = 512  # rows of a multiple of it are rounded by a launch
FEWEST_ROWS, WHOLE_ROWS = 8, 64  # rows of a product are a multiple of the first, from the second on of the second


def index_pays(head: Any) -> bool:
    """Whether proposals through an index of a head, which may be a shape, are faster on the device that is traced for."""
    features, depth = head.shape
    if isinstance(head, Quantized) or features * depth * head.dtype.itemsize < LEAST_BYTES:
        return False
    return features % 16 == depth % WHOLE_WIDTH == 0 and float8_refusal(MOST_ROWS, head.dtype, depth) is None


def lists(head: HeadConfig | None) -> bool:
    """Whether proposals of a drafter with this head, or with none, need the best rows alone."""
    return head is None or 0 < head.regards <= MOST_REGARDED


def head_index(head: Float[Array, "V D"]) -> Quantized:
    """The copy: float8, with one scale a row, of products that round what they multiply."""
    return quantize(head, "fp8_dynamic")


def best_proposals(drafter: DFlash, hidden: Float[Array, "... D"], head: Any, index: Any) -> Int[Array, "..."]:
    """`drafter.best(hidden, head)`, through the index of a head that is not in eight bits itself, where there is one."""
    if index is None or isinstance(head, Quantized):
        return drafter.best(hidden, head)
    return best_by_index(hidden, head, index, drafter.head_rows)


def best_by_index(
    x: Float[Array, "... D"],
    head: Float[Array, "V D"],
    index: Quantized,
    count: int | None = None,
    regard: Callable[[Float[Array, "... C"], Int[Array, "... C"]], Float[Array, "... C"]] | None = None,
) -> Int[Array, "..."]:
    """The row of the head with the largest product in float32 among the candidates of its index, the first of equal ones.

    Of more rows than `MOST_ROWS` the head's own, without the index. Each rank may have a share of the head's `count` rows.

    Args:
      regard: what to compare in place of the candidates' products, from them and their rows, of a whole head.
    """
    rows, count = x.reshape(-1, x.shape[-1]), len(head) if count is None else count
    if len(rows) > MOST_ROWS:
        return best_of_head(x, head, count)
    found = float8_candidates(rounded(rows, index), index.values, index.scales, CANDIDATES).T

    def regarded(products: Array, found: Array) -> Array:
        if regard is None:
            return products
        shape = (*x.shape[:-1], CANDIDATES)
        return regard(products.T.reshape(shape), found.T.reshape(shape)).reshape(-1, CANDIDATES).T

    best, place = _best_of(rows, head, found, regarded)
    if len(head) < count:
        place = best_of_ranks(best, place, len(head))
    return place.reshape(x.shape[:-1])


def draws_by_index(config: DFlashConfig, x: Float[Array, "... D"], head: Any, index: Any, count: int) -> bool:
    """Whether `drawn_by_index` gives proposals of these hidden states: not of a head whose logits are no plain products, nor of a
    share of its `count` rows."""
    rows = math.prod(x.shape[:-1])
    plain = config.logit_scale == config.head_scale == 1.0 and not config.logit_softcap
    if index is None or isinstance(head, Quantized) or len(head) < count or rows > MOST_ROWS:
        return False
    return plain and drawn_refusal(jax.ShapeDtypeStruct((rows, count), x.dtype)) is None


def drawn_by_index(
    x: Float[Array, "B g D"], head: Any, index: Any, keys: UInt32[Array, "B g 2"],
    temperature: Float[Array, "B"],
) -> Int[Array, "B g"]:  # fmt: skip
    """The row of a whole head with the largest product in float32 and noise times the temperature, among candidates of its index.

    It is the largest of all rows unless the copy takes another row of its group of candidates for better.
    """
    rows, keys = x.reshape(-1, x.shape[-1]), keys.reshape(-1, 2)
    temperature = jnp.repeat(temperature, x.shape[1])
    padded = _whole(rows)
    rough = float8_dense(rounded(padded, index), index.values, index.scales)
    found = drawn_candidates(rough, keys, temperature)
    noise = noise_of(keys, found) * temperature[:, None]
    _, place = _best_of(rows, head, found.T, lambda products, _: products + noise.T)
    return place.reshape(x.shape[:-1])


def _whole(rows: Float[Array, "R D"]) -> Float[Array, "M D"]:
    """Rows, and rows of zeros, as many as the product computes: of fewer, its logits would be copied to leave the padding out."""
    unit = FEWEST_ROWS if len(rows) < WHOLE_ROWS else WHOLE_ROWS
    return jnp.pad(rows, ((0, -len(rows) % unit), (0, 0)))


def _best_of(
    rows: Float[Array, "R D"],
    head: Float[Array, "V D"],
    found: Int[Array, "C R"],
    regard: Callable[[Array, Array], Array],
) -> tuple[Float[Array, "R"], Int[Array, "R"]]:
    """Of the candidates' products in float32, as `regard` has them compared, the largest, and its row of the head."""
    # XLA multiplies and adds up the rows that it gathers as they come, in one launch.
    wide = head.at[found].get(mode="promise_in_bounds").astype(jnp.float32)
    products = regard(jnp.sum(wide * rows.astype(jnp.float32), axis=-1), found)
    # One after the other, which goes into the launch that needs them: a reduction would be one of its own.
    best, place = products[0], found[0]
    for other, its in zip(products[1:], found[1:], strict=True):
        better = (other > best) | ((other == best) & (its < place))
        best, place = jnp.where(better, other, best), jnp.where(better, its, place)
    return best, place


def shortlist(
    reader: HeadConfig | None, x: Float[Array, "*R D"], head: Any, index: Any, count: int
) -> tuple[Float[Array, "*R S"], Int[Array, "*R S"]] | None:
    """Products in float32 with the `LISTED` rows of the LM head that its index takes for the best, and the rows.

    None where proposals need others too, as those of some draft heads (`reader`) do, where there is no index, or no whole one of
    `count` rows, and for more rows than `MOST_ROWS`.
    """
    rows = x.reshape(-1, x.shape[-1])
    if index is None or isinstance(head, Quantized) or not lists(reader):
        return None
    if len(head) < count or len(rows) > MOST_ROWS:
        return None
    padded = _whole(rows)
    rough = float8_dense(rounded(padded, index), index.values, index.scales)[: len(rows)]
    _, found = largest(rough, LISTED)
    wide = head.at[found].get(mode="promise_in_bounds").astype(jnp.float32)
    products = jnp.sum(wide * rows[:, None].astype(jnp.float32), axis=-1)
    shape = (*x.shape[:-1], LISTED)
    return products.reshape(shape), found.reshape(shape)
