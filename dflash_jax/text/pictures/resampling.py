"""Bicubic resampling of frames in whole numbers, bit for bit as transformers' video processor resizes them.

Along each axis a pixel is a sum of neighbours by the cubic of Keys (a = -0.5), stretched where a picture becomes smaller. Weights
are fixed-point numbers of sixteen bits, and columns are rounded to bytes before rows are summed. Pillow's weights have more bits,
so that less than one byte in a hundred differs by one. Source: PyTorch's `interpolate` of uint8 with `antialias`, on CPUs.
"""

import functools

import numpy as np

_MOST_BITS, _WIDTH = 22, 15


def resampled(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 `[H, W, C]` as uint8 `[height, width, C]`."""
    if frame.shape[1] != width:
        frame = _first_axis(frame.transpose(1, 0, 2), width).transpose(1, 0, 2)
    return frame if frame.shape[0] == height else _first_axis(frame, height)


def _first_axis(x: np.ndarray, size: int) -> np.ndarray:
    """uint8 `[S, ...]` as uint8 `[size, ...]`."""
    starts, weights, bits = _weights(len(x), size)
    # Sums of whole numbers below 2 ** 53, which float64 holds exactly.
    rows = x.reshape(len(x), -1).astype(np.float64)
    whole = np.empty((size, rows.shape[1]))
    for place, (start, row) in enumerate(zip(starts, weights, strict=True)):
        np.matmul(row, rows[start : start + len(row)], out=whole[place])
    whole += 1 << (bits - 1)
    whole *= 2.0**-bits
    return np.clip(np.floor(whole, out=whole), 0, 255, out=whole).astype(np.uint8).reshape(size, *x.shape[1:])


@functools.lru_cache(maxsize=64)
def _weights(before: int, after: int) -> tuple[list[int], list[np.ndarray], int]:
    """Of each place the first neighbour and the whole weights of all, and how many of their bits are behind the point."""
    scale = before / after
    stretch = max(scale, 1.0)
    starts, shares = list[int](), list[np.ndarray]()
    for place in range(after):
        centre = scale * (place + 0.5)
        start = max(int(centre - 2 * stretch + 0.5), 0)
        stop = min(int(centre + 2 * stretch + 0.5), before)
        near = _cubic((np.arange(start, stop) - centre + 0.5) * (1 / stretch))
        starts.append(start)
        shares.append(near / near.sum())
    top, bits = max(float(one.max()) for one in shares), 0
    while bits < _MOST_BITS and int(0.5 + top * (1 << (bits + 1))) < 1 << _WIDTH:
        bits += 1
    return starts, [np.trunc(one * (1 << bits) + np.copysign(0.5, one)) for one in shares], bits


def _cubic(x: np.ndarray) -> np.ndarray:
    x, a = np.abs(x), -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
