"""jax-triton is an extra: what is said where it is missing or does not fit, and that importing it leaves nothing behind."""

import functools
import sys
from pathlib import Path

import dflash_kernels.core.triton_call as jax_triton_call
import jax
import jax.numpy as jnp
import pytest
from dflash_kernels import NoImplementationError, paged_attention

from ..devices import on
from .attention_oracle import make_case


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str) -> None:
    """Modules of these names that do to the environment what jax-triton does."""
    (folder / "triton.py").write_text("")
    text = f"import os\nos.environ['TRITON_CACHE_DIR'] = ''\n__version__ = {version!r}\n"
    (folder / "jax_triton.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("triton", "jax_triton"):
        monkeypatch.setitem(sys.modules, name, None)  # so that what was there comes back, and these do not stay
        del sys.modules[name]


@pytest.mark.parametrize("missing", ["triton", "jax_triton"])
def test_missing(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path, "0.3.1")
    monkeypatch.setitem(sys.modules, missing, None)
    arrays = make_case([4], t=1, dtype=jnp.bfloat16).arrays()[:5]
    with on("NVIDIA A100-SXM4-80GB"):
        with pytest.raises(
            NoImplementationError, match=r"needs jax-triton and a CUDA build of JAX \(pip install 'dflash-jax"
        ):
            jax.eval_shape(functools.partial(paged_attention, implementation="triton"), *arrays)
        assert jax.eval_shape(paged_attention, *arrays).shape == arrays[0].shape


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path, "0.4.1")
    with pytest.raises(NotImplementedError, match=r"needs jax-triton 0\.3\.\*, not 0\.4\.1"):
        jax_triton_call.jax_triton()


@pytest.mark.parametrize("cache", [None, "/somewhere"])
def test_the_cache_of_others_stays(cache: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path, "0.3.1")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if cache is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", cache)
    assert jax_triton_call.jax_triton().__version__ == "0.3.1"
    assert jax_triton_call.os.environ.get("TRITON_CACHE_DIR") == cache
