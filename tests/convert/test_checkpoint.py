"""Opening checkpoints: which reader answers, what a converted folder must be, and what the hub is asked for."""

import json
import sys
import types
from fnmatch import fnmatch

import jax.numpy as jnp
import pytest

from dflash_jax.checkpoints import converted as checkpoint
from dflash_jax.checkpoints.converted import Converted, group_names, open_converted
from dflash_jax.checkpoints.hub import resolve_source
from dflash_jax.checkpoints.huggingface import HuggingFaceCheckpoint
from dflash_jax.checkpoints.opening import open_checkpoint
from dflash_jax.errors import CheckpointError, ConfigError, ParameterError


@pytest.fixture
def converted(hf):
    """A converted folder."""
    assert hf.convert(hf.qwen3(), "--output", hf.root / "out", "--verify", "none") == 0
    return hf.root / "out"


def edit_marker(folder, change):
    marker = json.loads((folder / "conversion.json").read_text())
    change(marker)
    (folder / "conversion.json").write_text(json.dumps(marker))


def test_the_reader_follows_the_folder(hf, converted, bits):
    plain = open_checkpoint(str(hf.root / "target"))
    ours = open_checkpoint(converted)
    assert isinstance(plain, HuggingFaceCheckpoint)
    assert isinstance(ours, Converted)
    a, b = plain.load("float32"), ours.load("float32")
    assert list(a) == list(b) == [parameter.name for parameter in ours.parameters]
    assert all(bits(a[name]) == bits(b[name]) for name in a)
    assert {str(array.dtype) for array in a.values()} == {"float32"}
    for opened in (plain, ours):
        with pytest.raises(ParameterError, match="bfloat16, float16, float32"):
            opened.load("int8")


def test_a_folder_without_a_marker_is_no_checkpoint(converted):
    (converted / "conversion.json").unlink()
    with pytest.raises(CheckpointError, match="its conversion did not finish"):
        open_converted(converted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda marker: marker.update(format=99), "has format 99, expected 1"),
        (lambda marker: marker.clear(), "has format None"),
        (lambda marker: marker.pop("outputs"), "malformed"),
        (lambda marker: marker.update(parameters=3), "malformed"),
        (lambda marker: marker.update(outputs=[1]), "malformed"),
        (lambda marker: marker["parameters"].pop("norm.weight"), "parameter norm.weight is missing"),
        (
            lambda marker: marker["parameters"].update(x=marker["parameters"]["norm.weight"]),
            "parameter x is not one of",
        ),
        (
            lambda marker: marker["parameters"]["norm.weight"].update(shape=[31]),
            "norm.weight has shape [31], expected [32]",
        ),
        (lambda marker: marker["parameters"]["norm.weight"].update(dtype="object"), "norm.weight has dtype object"),
        (lambda marker: marker["outputs"].update({"../target/config.json": {"bytes": 1}}), "lies outside the folder"),
        (lambda marker: marker["outputs"].update({"/etc/hosts": {"bytes": 1}}), "lies outside the folder"),
        (lambda marker: marker["outputs"].update({"gone": {"bytes": 1}}), "file gone is missing"),
        (
            lambda marker: marker["outputs"].update({f"gone{i}": {"bytes": 1} for i in range(9)}),
            "9 files are missing, gone0",
        ),
    ],
)
def test_markers_that_do_not_fit(converted, change, message):
    edit_marker(converted, change)
    with pytest.raises(CheckpointError) as caught:
        open_converted(converted)
    assert message in str(caught.value)
    assert "onvert again" in str(caught.value)


def test_markers_of_another_family_or_version(converted):
    edit_marker(converted, lambda marker: marker["config"].update(surprise=1))
    with pytest.raises(ConfigError, match="Convert the checkpoint again"):
        open_converted(converted)
    (converted / "conversion.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        open_converted(converted)
    (converted / "conversion.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"is not usable: .*convert again"):
        open_converted(converted)


def test_files_are_checked_by_size_and_on_request_by_hash(converted):
    weights = max((path for path in converted.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[100] ^= 1
    weights.write_bytes(data)
    open_converted(converted)
    with pytest.raises(CheckpointError, match="has changed: its sha256"):
        open_converted(converted, hashes=True)
    weights.write_bytes(data[:-1])
    (converted / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_converted(converted)
    assert len(caught.value.problems) == 2


def test_groups_are_bounded_by_the_largest_array(monkeypatch):
    monkeypatch.setattr(checkpoint, "MIN_GROUP_BYTES", 10)
    sizes = {"a": 4, "b": 7, "c": 20, "d": 5, "e": 5, "f": 10, "g": 1}
    groups = list(group_names(sizes))
    assert [name for group in groups for name in group] == list(sizes)
    assert max(sum(sizes[name] for name in group) for group in groups) == 20
    assert list(group_names({})) == []


class Hub(types.ModuleType):
    """Stands for huggingface_hub: remembers what it was asked for and hands out a folder, or fails."""

    def __init__(self, answer):
        super().__init__("huggingface_hub")
        self.answer, self.calls = answer, []

    def snapshot_download(self, *arguments, **options):
        self.calls.append((arguments, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_hub_models(hf, monkeypatch):
    snapshot = hf.qwen3("models--owner--name/snapshots/" + "ab" * 20)
    hub = Hub(snapshot)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    opened = open_checkpoint("owner/name", revision="main")
    assert opened.load()["norm.weight"].dtype == jnp.bfloat16
    (arguments, options) = hub.calls[0]
    assert arguments == ("owner/name",)
    assert options["revision"] == "main"
    wanted = {
        "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json", "tokenizer.model", "chat_template.jinja", "mask_embedding.pt",
    }  # fmt: skip
    others = {
        "dflash.py", "pytorch_model.bin", "model.pt", "tokenizer_code.py", "tokenizer.bin", "tokenizer.pt", "tokenizer.pkl",
        "README.md", "onnx/config.json", "original/model.safetensors",
    }  # fmt: skip
    allowed, ignored = options["allow_patterns"], options["ignore_patterns"]
    fetched = {
        name for name in wanted | others
        if any(fnmatch(name, pattern) for pattern in allowed) and not any(fnmatch(name, pattern) for pattern in ignored)
    }  # fmt: skip
    assert fetched == wanted
    assert resolve_source("owner/name")[1] == "ab" * 20
    # A drafter in a folder of the repository.
    assert resolve_source("owner/name/dflash") == (snapshot / "dflash", "ab" * 20)
    arguments, options = hub.calls[-1]
    assert arguments == ("owner/name",)
    assert "dflash/*.safetensors" in options["allow_patterns"]
    assert "dflash/*/*" in options["ignore_patterns"]
    with pytest.raises(CheckpointError, match="nor a model id of the form owner/name"):
        resolve_source("owner/name/other")
    assert resolve_source(snapshot)[1] == "ab" * 20
    assert hf.convert("owner/name", "--revision", "main", "--output", hf.root / "out") == 0
    source = json.loads((hf.root / "out" / "conversion.json").read_text())["source"]
    assert (source["given"], source["revision"]) == ("owner/name", "ab" * 20)


def test_an_output_that_exists_is_told_before_anything_is_fetched(hf, monkeypatch, capsys):
    hub = Hub(AssertionError("was asked"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    target = hf.qwen3()
    assert hf.convert(target, "--output", hf.root / "out") == 0
    capsys.readouterr()
    for source in (["owner/name"], [target, "--draft", "owner/drafter"]):
        assert hf.convert(*source, "--output", hf.root / "out") == 5
        assert "already holds a converted checkpoint" in capsys.readouterr().err
    assert hub.calls == []
    assert hf.convert("owner/name", "--output", hf.root / "out", "--overwrite") == 3
    assert len(hub.calls) == 1


def test_hub_failures_say_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(ConnectionError("no route to host")))
    with pytest.raises(CheckpointError, match=r"could not be fetched \(no route to host\); check the name"):
        resolve_source("owner/name")
    gated = RuntimeError(
        "403 Client Error.\n\nCannot access gated repo: ask for access."
    )  # not every library's is an OSError
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(gated))
    with pytest.raises(
        CheckpointError, match=r"\(403 Client Error. Cannot access gated repo: ask for access\.\).*hf auth login"
    ):
        resolve_source("owner/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install"):
        resolve_source("owner/name")
    for wrong in ("nowhere", "/no/such/folder", "../x/y", "owner/name/more"):
        with pytest.raises(CheckpointError, match=r"neither an existing folder( \(seen from /.*\))? nor a model id"):
            resolve_source(wrong)
    with pytest.raises(CheckpointError, match="home of a user whom this machine does not know"):
        resolve_source("~nobody-of-this-name/model")
    with pytest.raises(CheckpointError, match="revision 'main' has no meaning"):
        resolve_source(tmp_path, "main")
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("ab" * 20)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"folder in the hub's cache: give its name on the hub, or {snapshot}"):
        resolve_source(snapshot.parent.parent)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_source(tmp_path / "file")
