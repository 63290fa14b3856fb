"""Malformed safetensors files: every kind is refused with what was expected, and well-formed oddities are read."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dflash_jax.checkpoints.safetensors import MAX_HEADER_BYTES, chunks, read_header
from dflash_jax.errors import CheckpointError

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def raw(header, data=bytes(32), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(**changes):
    """GOOD with changes to tensor `a`."""
    return GOOD | {"a": GOOD["a"] | changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"\1\2\3", "truncated"),
        (raw(GOOD)[:50], "truncated"),
        (raw(GOOD, data=bytes(31)), "truncated at"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a pointer of Git LFS"),
        (
            raw(GOOD, length=2**63),
            "9,223,372,036,854,775,808 bytes, at most 100,000,000 are permitted; not a safetensors file",
        ),
        (raw(GOOD, length=10_000), "truncated: expected a header of 10,000 bytes"),
        (raw(GOOD, data=bytes(40)), "8 bytes follow the last tensor"),
        (raw(b"[1, 2]"), "must be a JSON object and start with '{'"),
        (raw(b" " + json.dumps(GOOD).encode()), "must be a JSON object and start with '{'"),
        (raw(b"{not json"), "header is not usable"),
        (raw(b'{"a": "\xff"}'), "header is not usable"),
        (raw(b'{"a":' * 100_000), "header is not usable"),
        (raw(b'{"a": ' + b"1" * 5000 + b"}"), "header is not usable"),
        (raw(json.dumps(GOOD).replace('"b"', '"a"').encode()), "keys appear twice: 'a'"),
        (raw(json.dumps(GOOD).replace('"shape"', '"dtype"').encode()), "keys appear twice: 'dtype'"),
        (raw(GOOD | {"b": GOOD["b"] | {"data_offsets": [20, 28]}}, bytes(28)), "'b' overlaps tensor 'a' by 4 bytes"),
        (raw(GOOD | {"b": GOOD["b"] | {"data_offsets": [0, 8]}}, bytes(24)), "overlaps tensor 'b' by 8 bytes"),
        (raw(GOOD | {"b": GOOD["b"] | {"data_offsets": [28, 36]}}, bytes(36)), "a hole of 4 bytes"),
        (raw({"b": GOOD["b"]}), "a hole of 24 bytes lies between the header and tensor 'b'"),
        (raw(GOOD | {"b": GOOD["b"] | {"data_offsets": [2**40, 2**40 + 8]}}), "truncated at"),
        (raw(entry(shape=[2, 4])), "has 24 bytes of data, but F32 [2, 4] takes 32"),
        (raw(entry(data_offsets=[24, 0])), "begin <= end"),
        (raw(entry(data_offsets=[0])), "expected [begin, end]"),
        (raw(entry(shape=[2**32, 2**32])), "overflows 64 bits"),
        (raw(entry(shape=[0, 2**63])), "expected a list of at most"),
        (raw(entry(shape=[-2, -3])), "expected a list of at most"),
        (raw(entry(shape=[2.0, 3])), "expected a list of at most"),
        (raw(entry(shape=[True, 6])), "expected a list of at most"),
        (raw(entry(shape=[1] * 64)), "expected a list of at most"),
        (raw(entry(data_offsets=[0, "24"])), "expected a list of at most"),
        (raw(entry(dtype="F12")), "has dtype 'F12', known are BOOL"),
        (raw(entry(dtype=["F32"])), "expected a name"),
        (raw(entry(extra=1)), "must have exactly dtype, shape and data_offsets"),
        (raw(GOOD | {"a": 7}), "must have exactly dtype, shape and data_offsets"),
    ],
)
def test_malformed_files_are_refused(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert message in str(caught.value)


def test_a_header_over_the_limit_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{")
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(CheckpointError, match="header of 100,000,001 bytes, at most 100,000,000"):
        read_header(path)


def test_all_problems_of_a_file_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw({"a": {"dtype": "F12"}, "b": GOOD["b"] | {"shape": [-4]}, "c": 3}))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert len(caught.value.problems) == 3


def test_empty_and_scalar_tensors_and_metadata(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"scalar": np.float32(2.5), "empty": np.zeros((0, 7), np.float16), "last": np.arange(3)}
    save_file({name: np.asarray(value) for name, value in tensors.items()}, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {name: tensor.shape for name, tensor in header.items()} == {"scalar": (), "empty": (0, 7), "last": (3,)}
    assert list(chunks(header["empty"])) == []
    assert [piece.tolist() for piece in chunks(header["scalar"])] == [[2.5]]
    assert [piece.tolist() for piece in chunks(header["last"])] == [[0, 1, 2]]


def test_a_file_without_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw({}, b""))
    assert read_header(path) == {}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_])
def test_chunks_hold_every_value_in_order(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    values = np.random.default_rng(0).integers(0, 2, (7, 11)).astype(dtype)
    save_file({"other": np.ones(3, np.float32), "values": values}, path)
    tensor = read_header(path)["values"]
    pieces = [piece.copy() for piece in chunks(tensor, chunk_bytes=64)]
    assert len(pieces) > 1
    np.testing.assert_array_equal(np.concatenate(pieces), values.reshape(-1))


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw(GOOD))
    tensor = read_header(path)["b"]
    path.write_bytes(raw(GOOD)[:-4])
    with pytest.raises(CheckpointError, match="changed while it was read"):
        list(chunks(tensor))


@given(st.binary(max_size=400), st.integers(0, 500), st.integers(0, 255))
def test_arbitrary_damage_never_raises_anything_else(tmp_path_factory, noise, place, value):
    """Any file is either read or refused with a CheckpointError: pure noise, and one changed byte of a good file."""
    path = tmp_path_factory.mktemp("noise") / "model.safetensors"
    good = bytearray(raw(GOOD))
    good[place % len(good)] = value
    for content in (noise, raw(noise), bytes(good)):
        path.write_bytes(content)
        try:
            for tensor in read_header(path).values():
                assert sum(piece.nbytes for piece in chunks(tensor)) == tensor.nbytes
        except CheckpointError:
            pass
