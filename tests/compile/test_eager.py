"""Operations that tests have NumPy do outside of programs: bits, types and places of what JAX compiles for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ..eager import MOVES, TYPES, on_host

EACH = {
    "asarray": lambda x: jnp.asarray(np.asarray(x)),
    "the same type": lambda x: lax.convert_element_type(x, x.dtype),
    "full": lambda x: lax.broadcast_in_dim(x[0, 0, 0], (4, 2), ()),
    "spread": lambda x: lax.broadcast_in_dim(x, (2, 3, 5, 1, 4), (0, 1, 4)),
    "reshape": lambda x: lax.reshape(x, (6, 4)),
    "turned and reshaped": lambda x: lax.reshape(x, (6, 4), (2, 0, 1)),
    "squeeze": lambda x: lax.squeeze(x[:, :1], (1,)),
    "part": lambda x: lax.dynamic_slice(x, (1, 1, 2), (1, 2, 2)),
    "part beyond the ends": lambda x: lax.dynamic_slice(x, (-7, 9, 3), (1, 2, 3)),
    "concatenate": lambda x: lax.concatenate([x, x[:, :1], x], 1),
    "transpose": lambda x: lax.transpose(x, (2, 0, 1)),
    "iota": lambda x: lax.broadcasted_iota(x.dtype, (3, 5), 1) if x.dtype != bool else x,
}


@pytest.fixture
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is put onto the device by `on_host`, told by its functions' names."""
    told, put = list[str](), jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda array: told.append(str(array.dtype)) or put(array))
    return told


@pytest.mark.parametrize(
    "dtype", [bool, np.int32, np.uint8, np.float32, jnp.bfloat16], ids=lambda dtype: np.dtype(dtype).name
)
def test_they_are_those_of_a_program(dtype: Any) -> None:
    numbers = np.random.default_rng(0).integers(0, 2 if dtype is bool else 200, (2, 3, 4)).astype(dtype)
    x = jax.device_put(numbers)
    for name, function in EACH.items():
        found, expected = function(x), jax.jit(function)(x) if name != "asarray" else x
        assert (found.dtype, found.shape, found.weak_type) == (expected.dtype, expected.shape, expected.weak_type), name
        assert (found.committed, found.sharding) == (expected.committed, expected.sharding), name
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected), err_msg=name)


def test_numpy_does_them(by_numpy: list[str]) -> None:
    x = jnp.asarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4))
    assert by_numpy == ["int16"]
    lax.transpose(x, (2, 0, 1))
    lax.reshape(x, (24,))
    assert by_numpy == ["int16"] * 3


@pytest.mark.parametrize("size", [1, 64, 4096, 65_536])
def test_a_program_may_take_them(size: int) -> None:
    """Memory that NumPy holds would stay where it is."""
    for number in range(4):
        x = jnp.asarray(np.arange(size, dtype=np.float32) + number)
        place = x.unsafe_buffer_pointer()
        assert jax.jit(lambda x: x + 1, donate_argnums=0)(x).unsafe_buffer_pointer() == place


def test_what_is_given_may_change_later() -> None:
    room = np.arange(4096 + 16, dtype=np.float32)
    given = room[(-room.ctypes.data // room.itemsize) % 16 :][:4096]  # where a device could read it as it lies
    given[7] = 7.0
    made = jnp.asarray(given)
    given[:] = -1
    assert float(made[7]) == 7.0


@pytest.mark.parametrize(
    "given",
    [
        lambda: jnp.asarray(2.5), lambda: jnp.ones(3) * 1.5, lambda: jnp.asarray([1.5, 2.5], jnp.float8_e4m3fn),
        lambda: jax.device_put(np.ones((4, 2), np.float32), jax.devices()[3]),
    ],
    ids=["weak", "float32", "float8", "another device"],
)  # fmt: skip
def test_other_types_and_places_stay(given: Callable[[], jax.Array]) -> None:
    x = given()
    wide = lax.broadcast_in_dim(x, (2, *x.shape), range(1, x.ndim + 1))
    assert (wide.dtype, wide.weak_type, wide.devices()) == (x.dtype, x.weak_type, x.devices())
    np.testing.assert_array_equal(np.asarray(wide)[1], np.asarray(x))


def test_what_numpy_cannot_say_is_jaxs() -> None:
    assert on_host(lambda array: None, lambda array: "compiled", np.ones(2, np.float32)) == "compiled"
    assert on_host(lambda array: array, lambda array: "compiled", np.ones(2)) == "compiled", "float64"
    assert np.dtype(np.float64) not in TYPES
    assert len(MOVES) == 9
