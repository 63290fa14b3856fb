"""A model's vision tower at work: pictures in, rows of the text model's width out, on the host."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels import NoImplementationError, ragged_attention
from jaxtyping import Array, Float, Int

from dflash_jax.attention.standalone.encoder import encoder_attention
from dflash_jax.compile.programs import Programs
from dflash_jax.models import Patches, VisionConfig, bind
from dflash_jax.text.pictures.films import FilmProcessor
from dflash_jax.text.pictures.float8 import Float8Mixing, VisionScales
from dflash_jax.text.pictures.packing import MOST_PICTURES, buckets, packed
from dflash_jax.text.pictures.placed import Picture
from dflash_jax.text.pictures.reading import Processor

# Patches of a call, unless one picture alone has more: 4 megapixels of patches of 16 x 16.
MOST_PATCHES = 16_384
# Patches whose scores are alive at a time where XLA attends: a power of 2, as `packing.bucket` has them.
QUERIES = 1024
# Rows of pictures that are kept, for conversations that show them again with every message.
KEPT_BYTES = 256 << 20


def rows_of(config: VisionConfig, weights: Mapping[str, Array], patches: Patches) -> Array:
    """The program of a tower."""
    with jax.named_scope("vision"):
        return bind(config, weights)(patches, attended)


def rows_in_float8(
    config: VisionConfig, found: bool, weights: Mapping[str, Array], patches: Patches, numbers: Float[Array, "blocks 3"]
) -> tuple[Array, Float[Array, "blocks 3"]]:
    """The same with float8 attention, and the largest numbers of every block; see `Float8Mixing`."""
    mixing = Float8Mixing(attended, numbers, found=found)
    with jax.named_scope("vision"):
        return bind(config, weights)(patches, mixing), jnp.stack(mixing.largest)


def attended(
    q: Float[Array, "P N H"], k: Float[Array, "P N H"], v: Float[Array, "P N H"], cu_lens: Int[Array, "C"]
) -> Float[Array, "P N H"]:
    """`encoder_attention` in memory that many patches have: where no kernel takes them, `QUERIES` at a time."""
    if len(q) <= QUERIES:
        return encoder_attention(q, k, v, cu_lens)
    try:
        return encoder_attention(q, k, v, cu_lens, implementation="mosaic_gpu")
    except NoImplementationError:
        pass

    def part(of: tuple[Array, Array]) -> Array:
        own = jnp.clip(cu_lens - of[0], 0, QUERIES)  # a part may begin and end within pictures
        return cast(Array, ragged_attention(of[1], k, v, own, cu_lens, causal=False, implementation="xla"))

    parts = q.reshape(-1, QUERIES, *q.shape[1:])
    starts = QUERIES * jnp.arange(len(parts), dtype=jnp.int32)
    return jax.lax.map(part, (starts, parts)).reshape(q.shape)


@dataclass(eq=False)
class VisionEncoder:
    """What a model sees pictures and films with. May be asked from several threads.

    Attributes:
      processor, films: what makes patches of pictures, and of films.
      weights: of the tower; their shapes until they are read.
      float8: what its attention's queries, keys and values are rounded on; None leaves them.
    """

    config: VisionConfig
    processor: Processor
    films: FilmProcessor
    weights: Mapping[str, Any] = field(repr=False)
    programs: Programs = field(default_factory=Programs, repr=False)
    float8: VisionScales | None = None
    _kept: OrderedDict[bytes, np.ndarray] = field(default_factory=OrderedDict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def rows(self, pictures: Sequence[Picture]) -> list[np.ndarray]:
        """Of each picture its rows `[height * width / merge_size ** 2, D]` in the model's dtype, on the host.

        Pictures that were seen lately are not computed again. Rows are 0 before the weights are there: who compiles ahead asks for
        their number alone.
        """
        if any(isinstance(one, jax.ShapeDtypeStruct) for one in self.weights.values()):
            width, dtype = self.config.out_hidden_size, self.weights["grid"].dtype
            return [np.zeros((len(one.pixels) // self.config.merged, width), dtype) for one in pictures]
        digests = [picture.digest for picture in pictures]
        with self._lock:
            found = {digest: self._kept[digest] for digest in digests if digest in self._kept}
        new = {digest: one for digest, one in zip(digests, pictures, strict=True) if digest not in found}
        for batch in _batches(new):
            found |= dict(zip(batch, self._computed([new[digest] for digest in batch]), strict=True))
        with self._lock:
            for digest in digests:
                self._kept[digest] = found[digest]
                self._kept.move_to_end(digest)
            while sum(rows.nbytes for rows in self._kept.values()) > KEPT_BYTES and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return [found[digest] for digest in digests]

    def jobs(self, tokens: int) -> Iterator[Callable[[], Any]]:
        """What compiles every program that pictures of prompts of at most so many tokens can need."""
        for size in buckets(min(tokens * self.config.merged, MOST_PATCHES)):
            patches = jax.eval_shape(lambda size=size: packed(self.config, [], [], size))
            function, static, *more = self._program()
            yield partial(self.programs.prepare, function, static, (), self.weights, patches, *more)

    def _program(self) -> tuple[Any, ...]:
        """The program, what it is compiled for, and what it takes beside weights and patches."""
        if self.float8 is None:
            return rows_of, (self.config,)
        return rows_in_float8, (self.config, self.float8.found), self.float8.numbers

    def _computed(self, pictures: Sequence[Picture]) -> list[np.ndarray]:
        patches = packed(self.config, [one.pixels for one in pictures], [one.grid for one in pictures])
        function, static, *more = self._program()
        rows = self.programs.call(function, static, (), self.weights, patches, *more)
        if self.float8 is not None:
            rows, largest = rows
            self.float8.record(np.asarray(largest))
        rows = np.asarray(rows)
        ends = np.cumsum([len(one.pixels) // self.config.merged for one in pictures])
        return [
            rows[end - len(one.pixels) // self.config.merged : end].copy()
            for one, end in zip(pictures, ends, strict=True)
        ]


def _batches(pictures: Mapping[bytes, Picture]) -> Iterator[list[bytes]]:
    """Names of pictures that one call takes together."""
    batch, held = list[bytes](), 0
    for digest, picture in pictures.items():
        size = len(picture.pixels)
        if batch and (len(batch) == MOST_PICTURES or held + size > MOST_PATCHES):
            yield batch
            batch, held = [], 0
        batch.append(digest)
        held += size
    if batch:
        yield batch


def workspace_bytes(config: VisionConfig, dtype: jnp.dtype) -> int:
    """An estimate of what a call of `MOST_PATCHES` needs besides weights."""
    widest = 4 * config.hidden_size + max(4 * config.hidden_size, config.intermediate_size)
    rows = widest * dtype.itemsize + 4 * (config.patch_width + 4 * config.hidden_size)
    kernel = getattr(jax.local_devices()[0], "compute_capability", "") == "9.0" and dtype.itemsize == 2
    scores = 0 if kernel else 2 * 4 * QUERIES * config.num_heads
    return MOST_PATCHES * (rows + scores)
