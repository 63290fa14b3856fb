"""Which implementation runs, and what is said when none does."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError
from dflash_kernels.core.dispatch import first_fitting


def refuses(reason: str) -> Any:
    def implementation(*args: Any, **options: Any) -> None:
        raise NotImplementedError(reason)

    return implementation


def takes(name: str) -> Any:
    def implementation(*args: Any, **options: Any) -> tuple[Any, ...]:
        return name, args, options

    return implementation


TABLE = {"fast": refuses("head_dim 72 is not a multiple of 64"), "old": refuses("needs a GPU"), "plain": takes("plain")}


def test_the_first_that_fits_gets_the_arguments() -> None:
    assert first_fitting("op", TABLE, None, 1, 2, scale=3) == ("plain", (1, 2), {"scale": 3})
    assert first_fitting("op", TABLE | {"more": takes("more")}, None)[0] == "plain"
    assert first_fitting("op", TABLE | {"more": takes("more")}, ("old", "more", "plain"))[0] == "more"


def test_arrays_of_numpy_can_be_indexed_by_traced_ones() -> None:
    """Pages that somebody has made with NumPy, looked up inside a loop."""

    def lookup(pages: Any, table: Any, *, scale: Any) -> Any:
        return jax.lax.map(lambda row: pages[row] * scale, table)

    pages, table = np.arange(6.0, dtype=np.float32), np.array([4, 1])
    found = first_fitting("op", {"plain": lookup}, None, pages, table, scale=np.float32(2) * np.ones(()))
    assert found.tolist() == [8, 2]


def test_arrays_on_another_device_are_served_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose default device is a GPU, with arrays that somebody has put on the CPU."""
    (here, *_) = jax.devices()
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr("dflash_kernels.core.dispatch.default_device", lambda: jax.config.jax_default_device or gpu)
    where = {"plain": lambda *args: jax.config.jax_default_device}
    put, left = jax.device_put(1.0, here), jnp.ones(())
    assert first_fitting("op", where, None, [left, put]) == here
    assert first_fitting("op", where, None, left) is None
    assert jax.jit(lambda x: x if first_fitting("op", where, None, x, left) is None else 0)(put) == 1


def test_what_is_named_is_never_replaced() -> None:
    with pytest.raises(NoImplementationError, match="needs a GPU"):
        first_fitting("op", TABLE, "old")


def test_every_refusal_is_listed() -> None:
    with pytest.raises(NoImplementationError) as caught:
        first_fitting("op", TABLE, ("fast", "old"))
    text = str(caught.value)
    assert "op: no implementation takes this call" in text
    assert "fast: head_dim 72 is not a multiple of 64" in text
    assert "old: needs a GPU" in text


@pytest.mark.parametrize("wanted", ["cuda", ("plain", "cuda")])
def test_unknown_names_are_refused_before_anything_runs(wanted: Any) -> None:
    with pytest.raises(NoImplementationError, match=r"no implementation named \['cuda'\]; there are fast, old, plain"):
        first_fitting("op", TABLE, wanted)


def test_naming_none_at_all_is_an_error() -> None:
    with pytest.raises(NoImplementationError, match="there are fast, old, plain"):
        first_fitting("op", TABLE, ())


def test_errors_that_are_no_refusal_pass_through() -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        first_fitting("op", {"broken": broken, "plain": takes("plain")}, None)
