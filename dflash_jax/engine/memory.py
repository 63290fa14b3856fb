"""Device memory budget: weights, KV pools and workspaces, decided before anything is loaded.

Weights come first, then the room that programs need while they run, then pages: as many as the largest load can fill, or as many
as there is room for. Weights that are rounded once they are read take more until then, which pages, made later, may use again.
What cannot fit is refused with the numbers.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels.attention.index.xla import WORKSPACE as SCORES_WORKSPACE
from dflash_kernels.attention.mla.selected_reference import WORKSPACE as SELECTED_WORKSPACE
from dflash_kernels.recurrent.kda import CHUNK, KdaShape
from dflash_kernels.recurrent.mamba2 import Mamba2Shape
from dflash_kernels.recurrent.short_conv import ConvShape
from jax.experimental import multihost_utils

from dflash_jax.attention.compressed import rows_at_once
from dflash_jax.attention.mla import LatentForm
from dflash_jax.attention.relative import WORKSPACE as RELATIVE_WORKSPACE
from dflash_jax.cache.recurrent import recurrent_layers
from dflash_jax.config import DecoderConfig
from dflash_jax.engine.buckets import PIECE
from dflash_jax.errors import CapacityError
from dflash_jax.models import DFlashConfig
from dflash_jax.models.registry import layer_traits

# Programs, libraries' handles, buffers between host and device, and what fragmentation wastes.
_OVERHEAD_BYTES = 256 << 20
# What NCCL keeps on each GPU for its channels to the others.
_LINKS_BYTES = 1 << 30
# Arrays of logits that are alive at a time in a sampling cycle: raw, scaled, noise, their sum, and the random bits behind them.
_LOGITS = 6


@dataclass(frozen=True)
class MemoryPlan:
    """Plan of a device's memory, in bytes.

    Attributes:
      free: what may be used in all.
      weights: of both models, as they stay.
      reading: the most that weights take while they are read, before there are pages.
      workspace: for activations, logits and scores of one cycle or one chunk, an estimate on the safe side.
      snapshots: of states that are kept for prompts to come.
      state_snapshots: how many.
      states: of gated delta nets, of all slots twice: a batch that changes its number of slots has both for a moment.
      page: one page of both models, of the layers that see farthest.
      num_pages: pages planned of these.
      full_pages: pages with which every slot could hold a request of full length.
      longest_pages: pages of one such request.
      windows: of each group of layers that see less, bytes of a page and pages of one sequence at most; see `cache.groups`.
      window_pages: pages planned of each of these.
    """

    free: int
    weights: int
    reading: int
    workspace: int
    page: int
    num_pages: int
    full_pages: int
    longest_pages: int
    states: int = 0
    snapshots: int = 0
    state_snapshots: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    window_pages: tuple[int, ...] = ()

    @property
    def pools(self) -> int:
        windows = sum(size * count for (size, _), count in zip(self.windows, self.window_pages, strict=True))
        return self.page * self.num_pages + windows

    @property
    def sequences(self) -> float:
        """Requests of full length whose pages there are at a time."""
        pools = (
            (self.num_pages, self.longest_pages),
            *zip(self.window_pages, (most for _, most in self.windows), strict=True),
        )
        return min(pages / most for pages, most in pools)

    @property
    def left(self) -> int:
        return self.free - self.weights - self.workspace - self.states - self.snapshots - self.pools


def free_memory() -> int:
    """Bytes that this process may still use on its first device; on a CPU the machine's memory."""
    return _free(jax.local_devices()[0])


def free_on_each(devices: Sequence[Any]) -> int:
    """Bytes that this process may still use on each of several devices, as many as on the fullest, less what links them; on a CPU
    the machine's memory in equal parts."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    if own[0].platform == "cpu":
        return _free(own[0]) // len(devices)
    free = min(map(_free, own)) - _LINKS_BYTES
    if len(own) == len(devices):
        return free
    # All processes plan alike.
    return int(multihost_utils.process_allgather(np.array(free / 2**20, np.float32)).min()) << 20


def _free(device: Any) -> int:
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def workspace_bytes(
    target: DecoderConfig, draft: DFlashConfig | None, dtype: jnp.dtype, *, tokens: int, batch: int, chunk: int
) -> int:
    """An estimate of what a cycle of `batch` sequences or a chunk of one prompt needs besides weights and pages.

    Args:
      tokens: of the longest sequence.
    """
    block = 1 if draft is None else draft.block_size + 1
    rows = max(batch * block, chunk)
    head_dim = max(dim for _, dim in target.key_shapes)
    widest = (
        4 * target.hidden_size * getattr(target, "streams", 1)
        + 3 * target.intermediate_size
        + 2 * target.num_heads * head_dim
    )
    features = 0 if draft is None else len(draft.target_layer_ids) * target.feature_width
    activations = rows * (widest + 2 * features) * dtype.itemsize + delta_bytes(target, rows, dtype)
    activations += ngram_bytes(target, rows, dtype) + conv_bytes(target, rows, dtype)
    logits = batch * block * target.vocab_size * 4 * _LOGITS
    # Where no kernel takes the call, scores are held whole, before and after the softmax.
    chosen = getattr(target, "index_topk", tokens)
    whole = 2 * 4 * rows * target.num_heads * min(tokens, chosen)
    scores = (2 * RELATIVE_WORKSPACE if layer_traits(target).relative else whole) + chosen_bytes(target, rows, tokens)
    scores += gathered_bytes(target, max(batch, chunk // PIECE), tokens, dtype)
    scores += pooled_bytes(target, max(batch, chunk // PIECE), tokens, dtype)
    scores += compressed_bytes(target, batch, rows, tokens, dtype)
    scores = scores if draft is None else max(scores, gathered_bytes(draft, batch, tokens, dtype))
    return (
        activations
        + experts_bytes(target, rows, dtype)
        + max(logits, scores, context_bytes(target, tokens, dtype))
        + _OVERHEAD_BYTES
    )


def gathered_bytes(config: DecoderConfig, sequences: int, tokens: int, dtype: jnp.dtype) -> int:
    """Keys and values of one layer that XLA gathers for a call of so many sequences, or pieces of prompts, where no kernel attends
    to its heads: as they lie in pages, and by head."""
    wide = layer_traits(config).wide_heads
    return 0 if wide is None else 2 * 2 * sequences * tokens * wide[0] * wide[1] * dtype.itemsize


def pooled_bytes(target: DecoderConfig, sequences: int, tokens: int, dtype: jnp.dtype) -> int:
    """Rows of an indexer of pools that XLA gathers for a call of so many sequences, and their weights in float32."""
    if tokens <= getattr(target, "index_topk", tokens):
        return 0
    return sequences * tokens * getattr(target, "index_row_width", 0) * (dtype.itemsize + 4)


def compressed_bytes(target: DecoderConfig, sequences: int, rows: int, tokens: int, dtype: jnp.dtype) -> int:
    """What queries that attend at once to compressed keys hold: scores of all stretches by each head of an indexer, index keys of
    their sequences, the rows chosen, as they lie in pages and cleaned, and attention's scores, before and after the softmax."""
    if not layer_traits(target).compressed:
        return 0
    sizes: Any = target
    stretches, heavy = tokens // sizes.sparse_rate, tokens // sizes.heavy_rate
    together = min(rows, max(PIECE, rows_at_once(sizes.index_heads, stretches)))
    seen = max(min(stretches, sizes.index_topk), heavy)
    keys = min(sequences, together) * stretches * (sizes.index_head_dim + sizes.head_dim) * dtype.itemsize
    indexed = 2 * 4 * together * sizes.index_heads * stretches
    chosen = 2 * together * seen * sizes.head_dim * dtype.itemsize
    return keys + indexed + chosen + 3 * 4 * together * sizes.num_heads * (seen + together + (sizes.windows[0] or 0))


def delta_bytes(target: DecoderConfig, rows: int, dtype: jnp.dtype) -> int:
    """Memory of the layers that keep states for `rows` tokens: the factors of all of them, and of one layer in work the
    projection, queries, keys, values and results in float32."""
    shape, layers = recurrent_layers(target)
    if shape is None:
        return 0
    if isinstance(shape, ConvShape):
        return rows * (
            layers * shape.channels * dtype.itemsize + 2 * shape.columns * dtype.itemsize + 2 * 4 * shape.columns
        )
    if isinstance(shape, Mamba2Shape):
        return rows * (layers * _mamba2_factors(shape, dtype) + _mamba2_work(shape, dtype))
    if isinstance(shape, KdaShape):
        # Beside columns, tokens and what a chunk has of them, decays between the tokens of a chunk, should these be written at all.
        factors = 3 * 4 * shape.width + dtype.itemsize * shape.channels
        return rows * (layers * factors + 2 * shape.columns * dtype.itemsize + (12 + CHUNK) * 4 * shape.width)
    factors = (
        4 * (shape.key_heads * shape.key_dim + shape.value_heads * (shape.value_dim + 1))
        + dtype.itemsize * shape.channels
    )
    return rows * (layers * factors + 2 * shape.columns * dtype.itemsize + 4 * 4 * shape.columns)


def ngram_bytes(target: DecoderConfig, rows: int, dtype: jnp.dtype) -> int:
    """Memory of hashed n-grams for `rows` tokens: rows of the convolutions of all layers, and of one layer in work keys, queries,
    gated values and sums in float32."""
    shapes = getattr(target, "ngram_shapes", ())
    if not shapes:
        return 0
    return rows * shapes[0].channels * (len(shapes) * dtype.itemsize + 6 * 4)


def conv_bytes(target: DecoderConfig, rows: int, dtype: jnp.dtype) -> int:
    """Memory of convolutions beside attention for `rows` tokens: rows of all of them, and of one in work the same and sums in
    float32."""
    widths = [shape.channels for shape in getattr(target, "conv_shapes", ())]
    return rows * (sum(widths) * dtype.itemsize + max(widths, default=0) * 3 * 4)


def _mamba2_factors(shape: Mamba2Shape, dtype: jnp.dtype) -> int:
    """Bytes that one layer keeps of a verified token until it is known whether it stands."""
    return 4 * (shape.inner + shape.groups * shape.state_dim + shape.heads) + dtype.itemsize * shape.channels


def _mamba2_work(shape: Mamba2Shape, dtype: jnp.dtype) -> int:
    """Bytes of one token in the layer in work: the projection, what is convolved, gated and summed in float32, the chunk's products
    of all pairs of tokens by head, and the state that enters the chunk, of which each is also there before it is summed."""
    chunk = 2 * 4 * (shape.heads * shape.chunk + shape.inner * shape.state_dim // shape.chunk)
    return 2 * shape.columns * dtype.itemsize + 5 * 4 * shape.columns + chunk


def experts_bytes(target: DecoderConfig, rows: int, dtype: jnp.dtype) -> int:
    """Memory of `rows` tokens on their way through every expert: both gates' rows, their product, and the output; without gates,
    the rows before and after the activation."""
    experts = layer_traits(target).experts
    if experts is None:
        return 0
    width = target.hidden_size if experts.width is None else experts.width
    return rows * experts.count * ((2 + experts.gated) * experts.inner + width) * dtype.itemsize


def context_bytes(target: DecoderConfig, tokens: int, dtype: jnp.dtype) -> int:
    """Keys and values of one chunk of context of a target with latent attention, and the rows they are written out from."""
    latent = getattr(target, "latent_width", 0)
    if not latent:
        return 0
    row = target.num_heads * (target.head_dim + getattr(target, "v_head_dim", 0)) * dtype.itemsize
    return min(tokens, LatentForm().chunk(row)) * (row + 2 * latent * dtype.itemsize)


def chosen_bytes(target: DecoderConfig, rows: int, tokens: int) -> int:
    """Memory of `rows` tokens whose keys an indexer chooses: scores of all keys with what counts them, and what is in
    work of some pages and some tokens."""
    if tokens <= getattr(target, "index_topk", tokens):
        return 0
    return 6 * 4 * rows * tokens + SCORES_WORKSPACE + SELECTED_WORKSPACE


def plan_memory(
    *,
    weights: int,
    reading: int,
    workspace: int,
    page: int,
    longest_pages: int,
    max_batch: int,
    num_pages: int | None,
    free: int,
    state: int = 0,
    snapshots: int | None = 0,
    windows: tuple[tuple[int, int], ...] = (),
) -> MemoryPlan:
    """Decides the number of pages of every group of layers, and of snapshots of states.

    Groups with windows get what `max_batch` sequences hold of them, whatever their length; twice that, for prompts to come, where
    every request could be of full length and memory is left; and for fewer sequences where there would else be no room for two
    thirds of full length of each in the layers that see farthest: as many pages of one kind as are of use with those of the other.

    Args:
      reading: see `MemoryPlan`.
      state: bytes of one slot's states.
      snapshots: as many exactly; None for two for each slot, fewer where pages leave no room.
      num_pages: as many exactly; None for as many as `max_batch` requests of full length need, fewer where there is no room.
      windows: see `MemoryPlan`.

    Raises:
      CapacityError: not even one request of full length fits, or not `num_pages` or `snapshots`, or not the weights while they
        are read.
    """
    full = max_batch * longest_pages
    states = 2 * max_batch * state
    kept = (snapshots or 0) if state else 0
    left = free - weights - workspace - states - kept * state
    needed = longest_pages if num_pages is None else num_pages
    of_one = sum(size * columns for size, columns in windows)

    def room(sequences: int) -> int:
        return max(0, (left - sequences * of_one) // page)

    def suits(sequences: int) -> bool:
        return room(sequences) >= (num_pages or max(longest_pages, 2 * sequences * longest_pages // 3))

    side_by_side = next((count for count in range(max_batch, 1, -1) if not windows or suits(count)), 1)
    pages = min(full, room(side_by_side)) if num_pages is None else num_pages
    window_pages = [side_by_side * columns for _, columns in windows]
    spare = left - side_by_side * of_one - pages * page
    if pages >= full:
        for place, (size_of_page, _) in enumerate(windows):
            more = min(window_pages[place], max(0, spare) // size_of_page)
            window_pages[place], spare = window_pages[place] + more, spare - more * size_of_page
    if snapshots is None and state:
        kept = min(2 * max_batch, max(0, spare) // state)
    plan = MemoryPlan(
        free, weights, reading, workspace, page, pages, full, longest_pages, states, kept * state, kept, windows,
        tuple(window_pages),
    )  # fmt: skip
    if room(side_by_side) < needed:
        kept_apart = sum(size_of_page * count for (size_of_page, _), count in zip(windows, window_pages, strict=True))
        raise CapacityError(
            f"the device has {size(free)} free; weights take {size(weights)}, the workspace of a cycle {size(workspace)}, "
            f"{f'states of {max_batch} slots {size(states)}, ' if states else ''}"
            f"{f'{kept} snapshots of states {size(kept * state)}, ' if kept else ''}"
            f"{f'pages of layers with windows {size(kept_apart)}, ' if windows else ''}and {needed} pages {size(needed * page)}: "
            f"{size(needed * page + kept_apart - plan.left - plan.pools)} too much. Lower max_model_len, "
            f"max_batch{', num_pages or state_snapshots' if kept else ' or num_pages'}, load without a drafter or in a smaller "
            "dtype, or let JAX use more of the device (XLA_PYTHON_CLIENT_MEM_FRACTION)"
        )
    if reading > weights and reading + _OVERHEAD_BYTES > free:
        raise CapacityError(
            f"the device has {size(free)} free; weights take {size(weights)} as they are kept, but {size(reading)} while they are "
            f"read, beside {size(_OVERHEAD_BYTES)} for programs: {size(reading + _OVERHEAD_BYTES - free)} too much. Load without a "
            "drafter or in a smaller dtype, or let JAX use more of the device (XLA_PYTHON_CLIENT_MEM_FRACTION)"
        )
    return plan


@contextmanager
def named_memory_errors(doing: str) -> Iterator[None]:
    """Turns the runtime's error for exhausted device memory into a CapacityError that says what can be done."""
    try:
        yield
    except GeneratorExit:  # also when Python ends, with no name left of what is below
        raise
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        stats = jax.local_devices()[0].memory_stats() or {}
        used = (
            f" ({size(stats['bytes_in_use'])} of {size(stats['bytes_limit'])} in use)" if "bytes_limit" in stats else ""
        )
        raise CapacityError(
            f"the device's memory ran out while {doing}{used}: close other programs on it, lower max_batch, max_model_len or "
            "num_pages, or let JAX use more of it (XLA_PYTHON_CLIENT_MEM_FRACTION). The runtime said: "
            + str(error).splitlines()[0][:200]
        ) from error


def size(nbytes: int) -> str:
    """Bytes in the largest unit that keeps a digit before the point."""
    amount = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
