"""Thread-level code of the recurrent kernels, run for all threads of a warpgroup by NumPy, against float64."""

from typing import Any

import numpy as np
import pytest
from dflash_kernels.mosaic_gpu import columns, precise, rows

from .delta_oracle import close
from .numpy_cluster import Cluster
from .numpy_threads import Threads

RNG = np.random.default_rng(0)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    stand_in = Threads()
    for module in (columns, precise):
        monkeypatch.setattr(module, "th", stand_in)
    monkeypatch.setattr(columns, "_number", lambda number: number)
    monkeypatch.setattr(columns, "_array", lambda number: number)
    return stand_in


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def of_threads(op: Any) -> Any:
    """The function that an operation was made of."""
    return op.__wrapped__


def swizzled(matrix: np.ndarray) -> np.ndarray:
    """As TMA writes tiles of 8 rows and 128 bytes, swizzled over 128."""
    rows, width = matrix.shape
    tiles = matrix.reshape(rows // 8, 8, width // 32, 8, 4).transpose(0, 2, 1, 3, 4)
    return np.stack([tiles[:, :, row, np.arange(8) ^ row] for row in range(8)], axis=2)


def test_products(threads: Threads) -> None:
    left, right = normal(128, precise.LEFT_PITCH), normal(128, 128)
    places = [threads.place(left.shape, left), threads.place(right.shape, swizzled(right))]
    out, gram, squares = (threads.place(shape) for shape in ((32, 128), (64, 16), (128,)))
    of_threads(precise.products)(*places, out, gram, squares)
    wide = left[:, :32].astype(np.float64)
    close(threads.read(out), wide.T @ right, 3e-7)
    close(threads.read(gram)[:32], wide.T @ wide[:, :16], 3e-7)
    close(threads.read(squares)[:32], (wide**2).sum(0), 3e-7)


def test_columns_of_rows(threads: Threads) -> None:
    target, given = threads.place((128, precise.LEFT_PITCH)), normal(16, 128)
    of_threads(columns.store_columns)(target, list(given), first=16)
    np.testing.assert_array_equal(threads.read(target)[:, 16:32], given.T)


@pytest.mark.parametrize(("part", "parts"), [(0, 1), (1, 2), (3, 4)])
@pytest.mark.parametrize("live", [1, 0])
def test_a_matrix_of_columns(live: int, part: int, parts: int, threads: Threads) -> None:
    """One of six, or some of its rows: what two vectors find there, and what a third writes."""
    matrices, vectors, new = normal(2, 3, 128, 128), normal(2, 128), normal(128)
    rows = slice(part * 128 // parts, (part + 1) * 128 // parts)
    place, places = (
        threads.place(matrices.shape, matrices),
        [threads.place(one[rows].shape, one[rows]) for one in vectors],
    )
    held = of_threads(columns.held_columns)(place, 1, 2, part, parts=parts)
    found = vectors[:, rows].astype(np.float64) @ matrices[1, 2, rows]
    close(np.stack(of_threads(columns.summed_columns)(held, places)), found, 1e-6)
    of_threads(columns.write_columns)(place, 1, 2, part, held, places[0], np.float32(0.5), new, live, parts=parts)
    expected = matrices.astype(np.float64)
    if live:
        expected[1, 2, rows] = expected[1, 2, rows] / 2 + np.outer(vectors[0, rows], new)
    close(threads.read(place), expected, 1e-6)


def test_sums_are_the_same_in_parts(threads: Threads) -> None:
    """The bits of a matrix's sums do not depend on how many share it."""
    matrix, vectors = normal(1, 1, 128, 128), normal(2, 128)
    place, sums = threads.place(matrix.shape, matrix), {}
    for parts in (1, 2, 4):
        each = []
        for part in range(parts):
            own = slice(part * 128 // parts, (part + 1) * 128 // parts)
            places = [threads.place(one[own].shape, one[own]) for one in vectors]
            held = of_threads(columns.held_columns)(place, 0, 0, part, parts=parts)
            each.append(np.stack(of_threads(columns.summed_columns)(held, places)))
        sums[parts] = columns._in_pairs(each)
    np.testing.assert_array_equal(sums[2], sums[1])
    np.testing.assert_array_equal(sums[4], sums[1])


def test_sums_of_rows(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "th", threads)
    monkeypatch.setattr(rows, "_own_sum", lambda row: row)
    given, place = normal(3, 128), threads.place((3, 4))
    found = of_threads(rows.row_sums)(list(given), place, vector=1)
    close(np.stack(found), np.repeat(given.astype(np.float64).sum(1)[:, None], 128, axis=1), 1e-6)


@pytest.mark.parametrize("ctas", [2, 4])
def test_sums_of_a_cluster(ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every CTA has what all have, added up in pairs."""
    cluster = Cluster(ctas, 128)
    monkeypatch.setattr(columns, "th", cluster)
    monkeypatch.setattr(columns, "_number", lambda number: number)
    monkeypatch.setattr(columns, "_array", lambda number: number)
    given, memory, arrived = normal(2, ctas * 128), cluster.shared(ctas * 256), cluster.number(0)
    of_threads(columns.give_sums)(list(given), memory, arrived, parts=ctas)
    found = of_threads(columns.taken_sums)(memory, arrived, None, None, None, parts=ctas)
    each = given.reshape(2, ctas, 128)
    pairs = each[:, ::2] + each[:, 1::2]
    expected = pairs[:, 0] if ctas == 2 else pairs[:, 0] + pairs[:, 1]
    np.testing.assert_array_equal(np.stack(found).reshape(2, ctas, 128), np.stack([expected] * ctas, axis=1))


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_a_triangular_system(tokens: int, threads: Threads) -> None:
    rows, weights, entries, betas, values = (
        normal(32, 128),
        normal(64, 16) / 4,
        normal(128),
        normal(128),
        normal(tokens, 128),
    )
    places = [threads.place(array.shape, array) for array in (rows, weights, entries, betas)]
    of_threads(columns.solve)(*places, list(values))
    wide, u = weights.astype(np.float64), np.zeros((tokens, 128))
    for token in range(tokens):
        u[token] = betas[token] * values[token] - entries[token] * rows[token] - wide[token, :token] @ u[:token]
    out = [
        entries[16 + token] * rows[16 + token] + wide[16 + token, : token + 1] @ u[: token + 1]
        for token in range(tokens)
    ]
    found = threads.read(places[0])
    close(found[:tokens], u, 1e-6)
    close(found[16 : 16 + tokens], np.stack(out), 1e-6)


def test_convolution(threads: Threads) -> None:
    rows, taps = normal(8, 128), normal(4, 128)
    sums = np.stack([(rows[start : start + 4] * taps).sum(0) for start in range(5)])
    found = of_threads(columns.convolved)(list(rows), list(taps))
    close(np.stack(found), sums / (1 + np.exp(-sums)), 1e-6)
