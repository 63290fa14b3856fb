"""Numbers of two, three, four and eight bits, one after the other in bytes or in 32-bit words: the first in the lowest bits.

Numbers of three bits go across bytes and words, eight of them in three bytes.
"""

from math import gcd

import numpy as np

from dflash_jax.checkpoints.quantized.dequantized import Decoder

# What a number of four bits stands for in E2M1: a sign, two bits of exponent and one of mantissa.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_E2M1, -_E2M1])
_THREES = 3 * np.arange(8, dtype=np.uint32)


def unit(bits: int) -> tuple[int, int]:
    """How many numbers fill how many 32-bit words, the fewest."""
    common = gcd(bits, 32)
    return 32 // common, bits // common


def table_of(values: np.ndarray, *, high_first: bool = False) -> Decoder:
    """Numbers of two or four bits, each of which stands for one of `values`, of the lower or of the higher bits first."""
    bits = len(values).bit_length() - 1
    places = np.arange(0, 8, bits)[:: -1 if high_first else 1]
    parts = np.arange(256)[:, None] >> places & len(values) - 1
    # What a byte stands for is looked up as one item.
    table = np.ascontiguousarray(values.astype(np.float32)[parts]).view(f"V{4 * len(places)}").reshape(-1)

    def decode(codes: np.ndarray) -> np.ndarray:
        return np.take(table, np.ascontiguousarray(codes), mode="clip").view(np.float32)

    return decode


def whole_numbers(bits: int, least: int = 0) -> Decoder:
    """Whole numbers of so many bits; the bits of none stand for `least`."""
    if bits in (2, 4):
        return table_of(np.arange(1 << bits) + least)

    def decode(codes: np.ndarray) -> np.ndarray:
        numbers = unpacked(codes, bits).astype(np.float32)
        if least:
            numbers += np.float32(least)
        return numbers

    return decode


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Whole numbers along the last axis of words or bytes, uint8. Of three bits, bytes come in threes."""
    whole = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return whole
    lead, per_byte = whole.shape[:-1], 8 // bits
    if bits == 3:
        low, middle, high = np.moveaxis(whole.reshape(*lead, -1, 3).astype(np.uint32), -1, 0)
        return ((low | middle << 8 | high << 16)[..., None] >> _THREES & 7).astype(np.uint8).reshape(*lead, -1)
    numbers = np.empty((*lead, per_byte * whole.shape[-1]), np.uint8)
    for place in range(per_byte):
        numbers[..., place::per_byte] = whole >> bits * place & (1 << bits) - 1
    return numbers
