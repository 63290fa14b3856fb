"""The Hopper kernel of an indexer's scores: a warpgroup multiplies 64 keys of a page with all heads of a few query tokens.

Keys are the left operand of the matrix instruction, 64 rows; the heads of `group` tokens lie side by side in the right one. So a
key's sum over the heads of a token is a sum of one row of the result, in registers, and nothing of `[tokens, heads, keys]` is ever
written. Warpgroups share the queries and nothing else: each takes every so-many-th tile of keys, has stages of its own and refills
them itself, so that one adds up while the tensor cores work for another. (Two or three that multiply one tile while they add up
another, in twice the registers, take 49 and 41 us for sixteen tokens of 131,072 keys, four without that 36.) A token's sum is
added up in the same order whatever it is computed with.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.index.launch import KEYS, WIDTH, Launch
from dflash_kernels.mosaic_gpu.layouts import rows_of, store, swizzled
from dflash_kernels.mosaic_gpu.pipeline import div, rem
from dflash_kernels.mosaic_gpu.thread_op import COLUMN, ROW, kernel


def scores(
    launch: Launch, q: jax.Array, weights: jax.Array, index_pages: jax.Array, index_scale: jax.Array, table: jax.Array,
    seq_lens: jax.Array, q_lens: jax.Array, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """Runs the kernel; float32 `[B, tokens, S]`.

    Args:
      launch: shapes and tiling.
      q: `[B, groups, group * heads, E]` float8_e4m3fn.
      weights: `[B, groups * group, heads]` float32.
      index_pages: `[P, 1, p, E]` float8_e4m3fn; index_scale: `[P, 1, p]` float32.
      table: `[B, W]`; seq_lens, q_lens: `[B]`; int32.
    """
    stages = launch.warpgroups * launch.stages

    def body(*refs: Any, **buffers: Any) -> None:
        _Warpgroup(launch, *refs, **buffers).run()

    body.__name__ = "index_scores"  # what profilers show
    run = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((q.shape[0], launch.tokens, launch.table_width * launch.page_size), jnp.float32),
        scratch_types={
            "q_sm": plgpu.SMEM((launch.columns, WIDTH), q.dtype, transforms=swizzled(q.dtype, WIDTH)),
            "keys_sm": plgpu.SMEM((stages, KEYS, WIDTH), q.dtype, transforms=swizzled(q.dtype, WIDTH)),
            "scales_sm": plgpu.SMEM((stages, KEYS), jnp.float32),
            "q_in": plgpu.Barrier(),
            "keys_in": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        grid=(q.shape[0], launch.groups, launch.ctas), grid_names=("b", "group", "cta"),
        num_threads=launch.warpgroups, thread_name="wg",
        # Sums of rows stay within a warp: no scratch. Shared memory is written by copies alone, which barriers announce.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )  # fmt: skip
    return run(q, weights, index_pages, index_scale, table, seq_lens, q_lens)


class _Warpgroup:
    """The program of one warpgroup: tiles `unit`, `unit + units` and on of a sequence, for one group of tokens."""

    def __init__(
        self, launch, q_ref, weights_ref, pages_ref, scale_ref, table_ref, seq_ref, live_ref, out_ref, **buffers
    ):
        self.launch, self.out_ref, self.weights_ref, self.q_ref = launch, out_ref, weights_ref, q_ref
        self.pages_ref, self.scale_ref, self.table_ref = pages_ref, scale_ref, table_ref
        self.q_sm, self.keys_sm, self.scales_sm = (buffers[name] for name in ("q_sm", "keys_sm", "scales_sm"))
        self.q_in, self.keys_in = buffers["q_in"], buffers["keys_in"]
        self.b, self.group, cta, self.wg = (lax.axis_index(name) for name in ("b", "group", "cta", "wg"))
        self.unit, self.units = cta * launch.warpgroups + self.wg, launch.ctas * launch.warpgroups
        self.per_page = launch.page_size // KEYS
        self.seq_len, self.q_len = seq_ref[self.b], live_ref[self.b]
        self.first_token = self.group * launch.group
        # Tiles that the last live token of the group sees something of.
        last = jnp.minimum(self.first_token + launch.group, self.q_len) - 1
        seen = jnp.where(last >= self.first_token, jnp.maximum(self._limit(last), 0), 0)
        self.tiles = div(seen + (KEYS - 1), KEYS)

    def run(self) -> None:
        launch = self.launch

        @pl.when(self.wg == 0)
        def _():
            plgpu.copy_gmem_to_smem(self.q_ref.at[self.b, self.group], self.q_sm, self.q_in)

        pages = [self._page(step) for step in range(launch.stages)]
        for step, page in enumerate(pages):
            self._fill(jnp.int32(step), page)
        # Halves, under x + |x| in place of max(x, 0): additions go through a pipe that takes twice as many.
        weights = [
            0.5 * rows_of(self.weights_ref.at[self.b, self.first_token + token], COLUMN)
            for token in range(launch.group)
        ]
        plgpu.barrier_wait(self.q_in)
        steps, all_steps = self._steps(self.tiles), self._steps(jnp.int32(launch.tiles))
        lax.fori_loop(0, steps, lambda step, page: self._score(step, page, weights), self._page(launch.stages))
        nothing = plgpu.layout_cast(jnp.full((KEYS,), -jnp.inf, jnp.float32), ROW)

        def clear(step, _):
            for token in range(launch.group):
                self._write(self._tile(step), token, nothing)

        lax.fori_loop(steps, all_steps, clear, None)

    def _limit(self, token):
        """The key after the last one that a token sees, which the table has room for."""
        seen = jnp.minimum(self.seq_len - self.q_len + token + 1, self.seq_len)
        return jnp.minimum(seen, self.launch.tiles * KEYS)

    def _tile(self, step):
        return self.unit + step * self.units

    def _steps(self, tiles):
        """The warpgroup's own among the first `tiles`."""
        return div(jnp.maximum(tiles - self.unit, 0) + (self.units - 1), self.units)

    def _page(self, step):
        """Page of a step's tile, or any number where there is none."""
        return self.table_ref[self.b, jnp.minimum(div(self._tile(step), self.per_page), self.launch.table_width - 1)]

    def _slot(self, step):
        return self.wg * self.launch.stages + rem(step, self.launch.stages)

    def _fill(self, step, page) -> None:
        """Starts the copies of a step's keys and their scales, if there is such a step."""
        tile, slot = self._tile(step), self._slot(step)

        @pl.when(tile < self.tiles)
        def _():
            rows = pl.ds(rem(tile, self.per_page) * KEYS, KEYS)
            plgpu.copy_gmem_to_smem(self.pages_ref.at[page, 0, rows], self.keys_sm.at[slot], self.keys_in.at[slot])
            plgpu.copy_gmem_to_smem(self.scale_ref.at[page, 0, rows], self.scales_sm.at[slot], self.keys_in.at[slot])

    def _score(self, step, page, weights):
        launch, tile, slot = self.launch, self._tile(step), self._slot(step)
        later = self._page(step + launch.stages + 1)
        plgpu.barrier_wait(self.keys_in.at[slot])

        def multiply(acc):
            plgpu.wgmma(acc, self.keys_sm.at[slot], self.q_sm.transpose((1, 0)))
            return acc[...]

        products = pl.run_scoped(multiply, plgpu.ACC((KEYS, launch.columns), jnp.float32))
        factor = rows_of(self.scales_sm.at[slot], ROW)
        plgpu.commit_smem()  # all threads have read
        self._fill(step + launch.stages, page)
        place = plgpu.layout_cast(lax.iota(jnp.int32, KEYS), ROW)
        for token, of_heads in enumerate(weights):
            part = products[:, token * launch.heads : (token + 1) * launch.heads]
            score = ((part + jnp.abs(part)) * lax.broadcast_in_dim(of_heads, part.shape, [1])).sum(axis=1) * factor
            number = self.first_token + token
            limit = jnp.where(number < self.q_len, self._limit(number), 0) - tile * KEYS
            # A zero has no sign; rows that nobody may see hold anything.
            score = jnp.where(score == 0, 0.0, score)
            self._write(tile, token, jnp.where(place < limit, score, -jnp.inf))
        return later

    def _write(self, tile, token: int, score) -> None:
        number, launch = self.first_token + token, self.launch

        def put():
            store(self.out_ref.at[self.b, number, pl.ds(tile * KEYS, KEYS)], score)

        if launch.tokens % launch.group == 0:
            put()
        else:
            pl.when(number < launch.tokens)(put)
