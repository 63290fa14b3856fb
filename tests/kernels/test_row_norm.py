"""Norms at a model's ends: the definitions, and the Hopper kernels in Pallas's interpreter, lowered for an H200, and for real
(`-m gpu`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, embed_norm, stream_norm
from dflash_kernels.norm.mosaic_gpu import launch_embed_norm, launch_stream_norm
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

EPS = 1e-6
INTERPRET = plgpu.InterpretGPUParams()


def normed(rows: np.ndarray, weight: jax.Array) -> np.ndarray:
    rows = rows.astype(np.float64)
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS) * np.asarray(weight, np.float64)


def check(found: jax.Array, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    error = np.abs(np.asarray(found, np.float64) - expected).max()
    assert error <= 2 * float(jnp.finfo(found.dtype).eps) * np.abs(expected).max()


def embed_call(vocab: int, width: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Ids of the first row and the last, twice the same, and outside the table."""
    keys = jax.random.split(jax.random.key(vocab), 2)
    ids = jnp.array([3, 0, vocab - 1, 5, 5, vocab + 7, -1], jnp.int32)
    weight = 1 + 0.1 * jax.random.normal(keys[1], (width,))
    return jax.random.normal(keys[0], (vocab, width)).astype(dtype), ids, weight.astype(dtype)


def check_embed(call: tuple[jax.Array, ...], out: tuple[jax.Array, jax.Array]) -> None:
    table, ids, weight = call
    inside = (np.asarray(ids) >= 0) & (np.asarray(ids) < len(table))
    rows = np.asarray(table)[np.asarray(ids)[inside]]
    np.testing.assert_array_equal(np.asarray(out[0])[inside], rows)
    check(out[1][inside], normed(rows, weight))
    assert bool(jnp.isfinite(out[1]).all())


def stream_call(width: int, columns: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(width + columns), 2)
    # Large beside the rest: the row is rounded to dtype before it is normed.
    stream = jax.random.normal(keys[0], (width, columns)).at[7].mul(300)
    return stream, (1 + 0.1 * jax.random.normal(keys[1], (width,))).astype(dtype)


def check_stream(stream: jax.Array, rows: int, weight: jax.Array, out: jax.Array) -> None:
    assert out.dtype == weight.dtype
    check(out, normed(np.asarray(stream[:, :rows].T.astype(weight.dtype), np.float32), weight))


def test_embed_norm() -> None:
    call = embed_call(40, 512)
    check_embed(call, launch_embed_norm(*call, eps=EPS, interpret=INTERPRET))
    check_embed(call, embed_norm(*call, eps=EPS, implementation="xla"))
    wide = embed_call(40, 64, jnp.float32)
    check_embed(wide, embed_norm(*wide, eps=EPS, implementation="xla"))


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (16, 16), (9, 16)])
def test_stream_norm(rows: int, columns: int) -> None:
    stream, weight = stream_call(512, columns)
    check_stream(stream, rows, weight, launch_stream_norm(stream, rows, weight, eps=EPS, interpret=INTERPRET))
    check_stream(stream, rows, weight, stream_norm(stream, rows, weight, eps=EPS, implementation="xla"))


def test_zero_centered_weights_are_added_to_one_in_float32() -> None:
    """Offsets that bfloat16 would lose beside 1, and that count in the result."""
    table, ids, _ = embed_call(40, 512)
    offset = (jnp.arange(512) % 5 / 2**10).astype(jnp.bfloat16).at[3].set(-3)
    how: Any = {"eps": EPS, "zero_centered": True}
    weight, call = 1 + offset.astype(jnp.float32), (table, ids, offset)
    out = [launch_embed_norm(*call, **how, interpret=INTERPRET), embed_norm(*call, **how, implementation="xla")]
    for rows, normed_rows in out:
        check_embed((table, ids, weight), (rows, normed_rows))
    np.testing.assert_array_equal(np.asarray(out[0][1], np.float32), np.asarray(out[1][1], np.float32))
    stream = stream_call(512, 8)[0]
    for found in (
        launch_stream_norm(stream, 3, offset, **how, interpret=INTERPRET),
        stream_norm(stream, 3, offset, **how, implementation="xla"),
    ):
        check(found, normed(np.asarray(stream[:, :3].T.astype(jnp.bfloat16), np.float32), weight))


def test_lowers_for_an_h200() -> None:
    def run(table: jax.Array, ids: jax.Array, weight: jax.Array, stream: jax.Array) -> Any:
        return embed_norm(table, ids, weight, eps=EPS), stream_norm(stream, 16, weight, eps=EPS)

    calls = jax.eval_shape(lambda: (*embed_call(151936, 2560), stream_call(2560, 16)[0]))
    with h200():
        text = jax.jit(run).trace(*calls).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 2


def test_refusals_name_their_reason() -> None:
    table, ids, weight = embed_call(40, 256)
    with pytest.raises(NotImplementedError, match="a multiple of 512, not bfloat16 of 256"):
        launch_embed_norm(table, ids, weight, eps=EPS)
    with pytest.raises(ValueError, match="9 rows of a stream"):
        stream_norm(stream_call(512, 8)[0], 9, stream_call(512, 8)[1], eps=EPS)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
        embed_norm(*embed_call(40, 512), eps=EPS, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2560, 4096])
def test_full_size(width: int) -> None:
    call = embed_call(5000, width)
    check_embed(call, embed_norm(*call, eps=EPS, implementation="mosaic_gpu"))
    for rows, columns in ((1, 8), (16, 16), (64, 64)):
        stream, weight = stream_call(width, columns)
        check_stream(stream, rows, weight, stream_norm(stream, rows, weight, eps=EPS, implementation="mosaic_gpu"))
