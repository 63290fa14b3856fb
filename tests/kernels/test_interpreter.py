"""Pallas' interpreter as tests drive it finds what it is there to find."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.mosaic_gpu.thread_op import kernel
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def _hand_over(x: Any, out: Any, *, shared: Any, written: Any, waits: bool) -> None:
    """The first warpgroup writes what the second reads, which waits for it or does not."""

    @pl.when(lax.axis_index("wg") == 0)
    def _() -> None:
        shared[...] = x[...] * 2
        plgpu.barrier_arrive(written)

    @pl.when(lax.axis_index("wg") == 1)
    def _() -> None:
        if waits:
            plgpu.barrier_wait(written)
        out[...] = shared[...]
        if not waits:
            plgpu.barrier_wait(written)


@pytest.mark.parametrize("waits", [True, False])
def test_races_are_found(waits: bool, capfd: pytest.CaptureFixture[str]) -> None:
    def body(*refs: Any, **buffers: Any) -> None:
        _hand_over(*refs, **buffers, waits=waits)

    run = kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), num_threads=2, thread_name="wg",
        scratch_types={"shared": plgpu.SMEM((128,), jnp.float32), "written": plgpu.Barrier()},
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )  # fmt: skip
    given = np.arange(128, dtype=np.float32)
    out = np.asarray(run(jnp.asarray(given)))
    assert ("race" in capfd.readouterr().out.lower()) != waits
    if waits:
        np.testing.assert_array_equal(out, given * 2)
