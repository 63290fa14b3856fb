"""What compiled programs depend on: this package's sources, and not what JAX sets for itself."""

import jax

from dflash_jax.compile import executable_cache as fingerprint


def test_sources_are_hashed_with_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint.resources, "files", lambda package: tmp_path / package)
    for package in fingerprint.SOURCES:
        (tmp_path / package / "part").mkdir(parents=True)
        (tmp_path / package / "a.py").write_text("x = 1")
    found = [fingerprint.sources.__wrapped__()]
    (tmp_path / "dflash_jax" / "a.py").write_text("x = 2")
    found.append(fingerprint.sources.__wrapped__())
    (tmp_path / "dflash_jax" / "a.py").rename(tmp_path / "dflash_jax" / "part" / "a.py")
    found.append(fingerprint.sources.__wrapped__())
    (tmp_path / "dflash_kernels" / "part" / "tuning.json").write_text("{}")
    found.append(fingerprint.sources.__wrapped__())
    assert len(set(found)) == 4
    (tmp_path / "dflash_kernels" / "part" / "notes.txt").write_text("no source")
    assert fingerprint.sources.__wrapped__() == found[-1]


def test_what_jax_sets_itself_when_it_traces_a_kernel_does_not_matter(monkeypatch):
    device = jax.devices()[0]
    before = fingerprint.environment.__wrapped__(device)
    monkeypatch.setenv("MOSAIC_GPU_RUNTIME_LIB_PATH", "/elsewhere")
    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", "/elsewhere")
    assert fingerprint.environment.__wrapped__(device) == before
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    assert fingerprint.environment.__wrapped__(device) != before
