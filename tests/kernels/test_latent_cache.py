"""How latent rows are kept in eight bits, byte by byte against a description in Python's own numbers.

The description searches the e4m3 values for the nearest one with exact fractions and packs bytes with `struct`; it shares nothing
with the op. Known failures met here: a row of zeros whose scale would be 0, scales that are powers of two and others, padding rows,
pools past 2^31 bytes.
"""

import bisect
import math
import struct
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dflash_kernels import (
    latent_decode,
    latent_encode,
    latent_pack,
    latent_unpack,
    latent_write,
    packed_latent_width,
)


@pytest.fixture(autouse=True, params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Bytes are the same on every device; the second round asks for a GPU as the default one."""
    return request.param


TINY = float(np.finfo(np.float32).tiny)


def e4m3_value(code: int) -> float:
    """Sign, four exponent bits with bias 7, three mantissa bits; 0x7f and 0xff are NaN, there is no infinity."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


MAGNITUDES = [e4m3_value(code) for code in range(127)]


def e4m3_code(value: Fraction | float, negative: bool) -> int:
    """The nearest value's code, a tie to the even one, saturated."""
    if isinstance(value, float) and math.isnan(value):
        return 255 if negative else 127
    size = min(abs(value), 448)
    above = min(bisect.bisect_left(MAGNITUDES, size), 126)
    best = min(
        (max(above - 1, 0), above), key=lambda code: (abs(Fraction(MAGNITUDES[code]) - Fraction(size)), code & 1)
    )
    return best | (128 if negative else 0)


def described(row: np.ndarray, rank: int) -> bytes:
    """One packed row: codes, scales, rotated part."""
    codes, scales = bytearray(), b""
    for start in range(0, rank, 128):
        tile = [float(x) for x in row[start : start + 128]]
        scale = max(np.float32(max(map(abs, tile))) / np.float32(448), np.float32(TINY))
        # The quotient is rounded to float32 before it is rounded to e4m3.
        for x in tile:
            codes.append(e4m3_code(Fraction(float(np.float32(x) / scale)), math.copysign(1, x) < 0))
        scales += struct.pack("<f", float(scale))
    rotated = b"".join(struct.pack("<H", int(x.view(np.uint16))) for x in row[rank:].astype(ml_dtypes.bfloat16))
    return bytes(codes) + scales + rotated


def rows(count: int, rank: int, rotated: int, dtype=ml_dtypes.bfloat16) -> np.ndarray:
    rng = np.random.default_rng(rank + count)
    sizes = np.exp2(rng.integers(-12, 8, (count, 1)))
    return (rng.standard_normal((count, rank + rotated)) * sizes).astype(dtype)


def pack(latents: np.ndarray, rank: int) -> np.ndarray:
    return np.asarray(jax.jit(lambda x: latent_pack(x, kv_lora_rank=rank))(jnp.asarray(latents)))


@pytest.mark.parametrize(("rank", "rotated"), [(512, 64), (128, 6)])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=lambda kind: np.dtype(kind).name)
def test_packed_bytes(rank: int, rotated: int, dtype) -> None:
    latents = rows(12, rank, rotated, dtype)
    latents[3] = 0  # a token of zeros
    latents[4, :rank] = 0
    latents[5, 128 - 1] = 0.25 if rank == 128 else latents[5, 127]
    latents[6, :128] = np.linspace(-1, 1, 128).astype(dtype)  # many ties
    packed = pack(latents, rank)
    assert packed.dtype == np.uint8
    assert packed.shape == (12, packed_latent_width(rank, rotated))
    for found, row in zip(packed, latents, strict=True):
        assert found.tobytes() == described(row, rank)


def test_the_published_width() -> None:
    assert packed_latent_width(512, 64) == 656
    assert pack(rows(1, 512, 64), 512).shape == (1, 656)


def test_a_row_of_zeros_reads_as_zeros_and_its_scale_is_the_smallest_normal_number() -> None:
    packed = pack(np.zeros((1, 576), np.float32), 512)
    assert packed[0, 512:528].tobytes() == struct.pack("<f", TINY) * 4
    assert not packed[0, :512].any()
    read = np.asarray(latent_unpack(jnp.asarray(packed), kv_lora_rank=512))
    assert (read == 0).all()


def test_reading_packed_rows() -> None:
    """Every code under any scale, powers of two and others, and the rotated part bit for bit."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (8, 656)).astype(np.uint8)
    scales = np.array([1.0, 0.5, 3.25, TINY] * 8, np.float32).reshape(8, 4)
    packed[:, 512:528] = scales.view(np.uint8)
    packed[:, 529::2] &= 0xBF  # no rotated number is infinity or NaN
    read = np.asarray(latent_unpack(jnp.asarray(packed), kv_lora_rank=512))
    values = np.array([e4m3_value(code) for code in range(256)], np.float64)
    true = values[packed[:, :512]].reshape(8, 4, 128) * scales.astype(np.float64)[..., None]
    normal = ~(np.abs(true) < TINY)  # the rest may be flushed to zero
    np.testing.assert_array_equal(read[:, :512].reshape(8, 4, 128)[normal], true.astype(np.float32)[normal])
    np.testing.assert_array_equal(
        read[:, 512:].astype(ml_dtypes.bfloat16).view(np.uint16), packed[:, 528:].view(np.uint16)
    )


def test_reading_undoes_writing_up_to_rounding() -> None:
    latents = rows(40, 256, 8, np.float32)
    read = np.asarray(latent_unpack(jnp.asarray(pack(latents, 256)), kv_lora_rank=256))
    tops = np.abs(latents[:, :256]).reshape(40, 2, 128).max(-1).repeat(128, axis=-1).reshape(40, 256)
    allowed = np.maximum(np.abs(latents[:, :256]) / 16, tops / 448 * 2.0**-10) * 1.001
    assert (np.abs(read[:, :256] - latents[:, :256]) <= allowed).all()
    np.testing.assert_allclose(read[:, 256:], latents[:, 256:], rtol=2**-8)


@pytest.mark.parametrize("scale", [1.0, 0.037, 2.0**-5])
def test_one_scale_for_the_pool(scale: float) -> None:
    values = np.concatenate(
        [rows(6, 30, 2, np.float32).ravel(), [0, -0.0, 1e9, -np.inf, np.inf, 448 * scale, 464.1 * scale]]
    )
    values = values.astype(np.float32)
    encoded = jax.jit(lambda x, s: latent_encode(x, jnp.float8_e4m3fn, kv_lora_rank=2, scale=s))(
        values, jnp.float32(scale)
    )
    quotients = np.clip(values / np.float32(scale), -448, 448)
    true = [e4m3_code(Fraction(float(q)), math.copysign(1, v) < 0) for q, v in zip(quotients, values, strict=True)]
    assert np.asarray(encoded).view(np.uint8).tolist() == true
    read = latent_decode(encoded, jnp.float32, kv_lora_rank=2, scale=jnp.float32(scale))
    expected = np.array([e4m3_value(code) for code in true], np.float32) * np.float32(scale)
    np.testing.assert_array_equal(np.asarray(read), expected)
    nan = latent_encode(jnp.array([jnp.nan, 1.0]), jnp.float8_e4m3fn, kv_lora_rank=1)
    assert np.isnan(np.asarray(nan, np.float32)).tolist() == [True, False]


def test_unquantized_pools_are_cast() -> None:
    latents = jnp.asarray(rows(3, 8, 4, np.float32))
    encoded = latent_encode(latents, jnp.bfloat16, kv_lora_rank=8)
    assert encoded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(latent_decode(encoded, jnp.float32, kv_lora_rank=8), encoded.astype(jnp.float32))


@pytest.mark.parametrize("kind", [jnp.uint8, jnp.float8_e4m3fn, jnp.float32], ids=["packed", "e4m3", "float32"])
def test_rows_in_their_slots_and_nothing_else_changed(kind) -> None:
    """A negative slot and rows past the last slot write nothing, whatever they hold."""
    width = packed_latent_width(128, 6) if kind == jnp.uint8 else 134
    rng = np.random.default_rng(1)
    before = jnp.asarray(rng.integers(0, 255, (5, 1, 4, width)).astype(np.uint8))
    before = before if kind == jnp.uint8 else jnp.asarray(rng.standard_normal((5, 1, 4, width)), kind)
    latents = rows(6, 128, 6, np.float32)
    latents[2] = latents[4:] = np.nan
    slots = np.array([7, 19, -1, 0], np.int32)
    encoded = latent_encode(jnp.asarray(latents), kind, kv_lora_rank=128, scale=jnp.float32(0.5))
    after = np.asarray(latent_write(before, encoded, jnp.asarray(slots)))
    expected = np.asarray(before).copy()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 4, 0, slot % 4] = np.asarray(encoded)[row]
    assert after.tobytes() == expected.tobytes()


def store(pool, latents, slots):
    """The pool with rows in its own format at their slots."""
    return latent_write(pool, latent_encode(latents, pool.dtype, kv_lora_rank=512), slots)


def test_the_write_is_in_place() -> None:
    pool = jax.ShapeDtypeStruct((64, 1, 16, 656), jnp.uint8)
    latents, slots = jax.ShapeDtypeStruct((4, 576), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    text = jax.jit(store, donate_argnums=0).lower(pool, latents, slots).compile().as_text()
    assert "input_output_alias" in text
    assert "copy(u8[64,1,16,656]" not in text


@pytest.mark.few
def test_rows_past_two_billion_bytes() -> None:
    """The last row of a pool of more than 2^31 bytes, whose neighbours and first rows stay zero."""
    pages = 2**31 // (64 * 656) + 2
    latents = jnp.asarray(rows(2, 512, 64))
    pool = jax.jit(store, donate_argnums=0)(
        jnp.zeros((pages, 1, 64, 656), jnp.uint8), latents, jnp.array([pages * 64 - 1, pages * 64 - 100], jnp.int32)
    )
    assert pool.size > 2**31
    expected = np.asarray(latent_pack(latents, kv_lora_rank=512))
    tail, head = np.asarray(pool[-2:]).reshape(128, 656), np.asarray(pool[:2])
    np.testing.assert_array_equal(tail[[127, 28]], expected)
    assert not head.any()
    assert not np.delete(tail, [127, 28], axis=0).any()


@pytest.mark.parametrize(("rank", "width"), [(24, 32), (0, 32), (256, 200)])
def test_ranks_that_cannot_be_packed(rank: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 128 and at most the rows' width {width}, got {rank}"):
        latent_pack(jnp.zeros((1, width)), kv_lora_rank=rank)
    with pytest.raises(ValueError, match="multiple of 128"):
        latent_encode(jnp.zeros((1, width)), jnp.uint8, kv_lora_rank=rank)


def test_bytes_that_are_no_packed_row() -> None:
    with pytest.raises(ValueError, match="rows of 131 bytes are no packed rows of kv_lora_rank 128"):
        latent_unpack(jnp.zeros((1, 131), jnp.uint8), kv_lora_rank=128)
