"""What a conversion writes, and how its verification fails."""

import errno
import json
import subprocess
from collections import namedtuple
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_convert import verify, write
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import assemble, open_checkpoint
from dflash_jax.models import registry
from dflash_jax.models.parameters import single, to_huggingface


def same(bits, a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)
        assert bits(a[name]) == bits(b[name]), name


@pytest.mark.few("3")
@pytest.mark.parametrize("shards", [1, 3])
def test_pair_is_converted_bit_for_bit(hf, bits, shards):
    target, drafter, output = hf.qwen3(shards=shards), hf.dflash(), hf.root / "out"
    assert hf.convert(target, "--draft", drafter, "--output", output, "--verify", "logits") == 0
    for source, folder in ((target, output), (drafter, output / "draft")):
        converted, original = open_converted(folder, hashes=True), open_checkpoint(source)
        assert converted.config == original.config
        assert converted.family == original.family
        params = converted.load()
        same(bits, params, original.load())
        tensors = {name: value for path in source.glob("*.safetensors") for name, value in load_file(path).items()}
        same(bits, to_huggingface(converted.parameters, params), tensors)
        for name in ("config.json", "tokenizer.json", "generation_config.json"):
            assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert open_converted(output).draft == output / "draft"
    assert not list(hf.root.glob("out.*"))


def test_marker_records_where_everything_came_from(hf):
    source, output = hf.qwen3(shards=2), hf.root / "out"
    assert hf.convert(source, "--output", output) == 0
    marker = json.loads((output / "conversion.json").read_text())
    assert marker["family"] == "qwen3"
    assert marker["source"]["given"] == "target"
    assert str(hf.root) not in json.dumps(marker)
    inputs, outputs = set(marker["source"]["files"]), set(marker["outputs"])
    assert inputs == {path.name for path in source.iterdir()}
    assert outputs == {
        str(path.relative_to(output)) for path in output.rglob("*") if path.is_file() and path.name != "conversion.json"
    }
    for folder, entries in ((source, marker["source"]["files"]), (output, marker["outputs"])):
        for name, entry in entries.items():
            digest = subprocess.run(["sha256sum", folder / name], capture_output=True, text=True, check=True).stdout
            assert digest.split()[0] == entry["sha256"]
            assert (folder / name).stat().st_size == entry["bytes"]


def test_params_are_an_ordinary_orbax_checkpoint_without_local_paths(hf, bits):
    source, output = hf.qwen3(), hf.root / "out"
    assert hf.convert(source, "--output", output) == 0
    same(bits, ocp.load(str(output / "params")), open_converted(output).load())
    for path in output.rglob("*"):
        assert path.is_dir() or not any(name in path.read_bytes() for name in (bytes(hf.root), b"/proc/self")), path


@pytest.mark.few("float16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype(hf, bits, dtype):
    source, output = hf.qwen3(dtype="float32"), hf.root / "out"
    assert hf.convert(source, "--output", output, "--dtype", dtype, "--verify", "logits") == 0
    params = open_converted(output).load()
    original = open_checkpoint(source).load()
    assert all(array.dtype == jnp.dtype(dtype) for array in params.values())
    same(bits, params, {name: np.asarray(array).astype(jnp.dtype(dtype)) for name, array in original.items()})
    same(bits, open_checkpoint(source).load(dtype), params)
    assert {str(array.dtype) for array in open_converted(output).load("float32").values()} == {"float32"}


@pytest.mark.few
def test_drafter_with_everything_of_its_own(hf, bits):
    """Prefixed names, own embedding and head, a reduced vocabulary whose ids are 64-bit, a mask embedding."""
    config = hf.dflash_config | {"draft_vocab_size": 40}
    own = {name: np.ones(1, np.float32) for name in ("embed_tokens.weight", "lm_head.weight", "mask_embedding", "d2t")}
    tensors = hf.tensors(config | {"tie_word_embeddings": False}, extra=own)
    random = np.random.default_rng(3)
    tensors |= {
        "embed_tokens.weight": random.normal(size=(96, 32)).astype(np.float16),
        "lm_head.weight": random.normal(size=(40, 32)).astype(np.float16),
        "mask_embedding": random.normal(size=32).astype(np.float32),
        "d2t": np.sort(random.integers(0, 50, 40)),
        "t2d": np.ones(96, bool),
    }
    source = hf.write("drafter", config, {f"model.{name}": value for name, value in tensors.items()})
    output = hf.root / "out"
    assert hf.convert(source, "--output", output, "--verify", "logits") == 0
    params = open_converted(output).load()
    assert params["d2t"].dtype == jnp.int32
    assert params["d2t"].tolist() == tensors["d2t"].tolist()
    assert bits(params["lm_head.weight"]) == bits(tensors["lm_head.weight"])
    assert open_converted(output).notices == [
        "model.t2d is not needed and left out",
        "3 of 22 arrays are not stored in bfloat16; a model has all in one type",
    ]


@pytest.mark.few
def test_a_drafter_as_the_speculators_library_writes_it(hf, bits):
    """The same weights with z-lab's file beside them and with that library's; the way back keeps its file."""
    config = hf.dflash_config | {"draft_vocab_size": 40, "num_target_layers": None}
    own = {"embed_tokens.weight": np.ones((96, 32), np.float32), "lm_head.weight": np.ones((40, 32), np.float32)}
    tensors = hf.tensors(config, extra=own | {"d2t": np.arange(40) + 3})
    layers = {key: value for key, value in hf.qwen3_config.items() if key not in ("architectures", "torch_dtype")}
    theirs = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": 4, "mask_token_id": 95,
        "aux_hidden_state_layer_ids": [1, 3], "draft_vocab_size": 40, "transformer_layer_config": layers | {"num_hidden_layers": 2},
        "dtype": "bfloat16",
    }  # fmt: skip
    plain = open_checkpoint(hf.write("plain", config, tensors))
    source = hf.write("theirs", theirs, tensors | {"t2d": np.ones(96, bool)})
    other = open_checkpoint(source)
    assert other.config == plain.config
    same(bits, other.load(), plain.load())
    assert hf.convert(hf.qwen3(), "--draft", source, "--output", hf.root / "out", "--verify", "logits") == 0
    assert open_converted(hf.root / "out" / "draft").config == plain.config
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    assert open_checkpoint(hf.root / "back" / "draft").config == plain.config


def test_other_names_of_a_drafters_tensors(hf, bits):
    """`midlayer.` for a single layer, and other names for sinks, the mask's embedding and the map of a draft vocabulary."""
    config = hf.dflash_config | {"num_hidden_layers": 1, "draft_vocab_size": 40}
    config |= {"dflash_config": config["dflash_config"] | {"attention_sink_bias": True}}
    own = {name: np.ones(1, np.float32) for name in ("lm_head.weight", "mask_embedding", "d2t")}
    tensors = hf.tensors(config, extra=own) | {
        "lm_head.weight": np.ones((40, 32), np.float16), "mask_embedding": np.arange(32, dtype=np.float32),
        "d2t": np.arange(40) + 3, "layers.0.self_attn.attention_sink_bias": np.arange(4, dtype=np.float16),
    }  # fmt: skip
    others = {
        "mask_embedding": "mask_embedding.weight", "d2t": "draft_id_to_target_id",
        "layers.0.self_attn.attention_sink_bias": "layers.0.self_attn.sinks",
    }  # fmt: skip
    renamed = {others.get(name, name).replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    assert renamed.keys() & tensors.keys() == {"fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight"}
    plain, other = (open_checkpoint(hf.write(name, config, t)) for name, t in (("a", tensors), ("b", renamed)))
    assert other.config == plain.config
    same(bits, other.load(), plain.load())
    assert bits(other.load()["d2t"]) == bits((np.arange(40) + 3).astype(np.int32))


def test_empty_and_scalar_parameters(hf, monkeypatch, bits):
    """No family has them today; the writer and the loaders must not care."""
    original = registry.FAMILIES

    def with_odd_ones(config):
        table = original[0].parameters(config)
        return (*table, single("empty", "empty", (0, 4)), single("scalar", "scalar", ()))

    config = hf.qwen3_config
    odd = {"empty": np.zeros((0, 4), np.float16), "scalar": np.asarray(1.5, np.float32)}
    source = hf.write("source", config, hf.tensors(config) | odd)
    monkeypatch.setattr(registry, "FAMILIES", (replace(original[0], parameters=with_odd_ones), *original[1:]))
    assert hf.convert(source, "--output", hf.root / "out") == 0
    params = open_converted(hf.root / "out").load()
    assert params["empty"].shape == (0, 4)
    assert float(params["scalar"]) == 1.5
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    back = load_file(hf.root / "back" / "model.safetensors")
    same(bits, {name: back[name] for name in odd}, odd)


def test_existing_outputs(hf, bits):
    source, output = hf.qwen3(), hf.root / "out"
    output.mkdir()
    (output / "precious.txt").write_text("mine")
    assert hf.convert(source, "--output", output) == 5
    assert hf.convert(source, "--output", output, "--overwrite") == 5
    assert (output / "precious.txt").read_text() == "mine"
    other = hf.root / "converted"
    assert hf.convert(source, "--output", other, "--dtype", "float32") == 0
    assert hf.convert(source, "--output", other) == 5
    assert open_converted(other).load()["norm.weight"].dtype == jnp.float32
    assert hf.convert(source, "--output", other, "--overwrite") == 0
    same(bits, open_converted(other).load(), open_checkpoint(source).load())
    (hf.root / "file").write_text("")
    assert hf.convert(source, "--output", hf.root / "file", "--overwrite") == 5


def test_outputs_that_cannot_be_written(hf, monkeypatch, capsys):
    """One line that names the place and what to do; nothing is left behind."""
    source = hf.qwen3()
    (hf.root / "file").write_text("")
    before = sorted(hf.root.iterdir())
    assert hf.convert(source, "--output", hf.root / "file" / "out") == 5
    full = namedtuple("usage", "total used free")(10**9, 10**9, 1000)
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: full)
    assert hf.convert(source, "--output", hf.root / "out") == 5
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"dflash-convert: output not usable: {hf.root}/file/out cannot be written (")
    assert first.endswith("; name another output")
    nbytes = open_checkpoint(source).plan.nbytes
    assert f"{hf.root}/out takes {nbytes:,} bytes, its disk has 1,000 free; make room" in second
    assert sorted(hf.root.iterdir()) == before


def test_a_disk_that_fills_up_is_one_line(hf, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "weights")

    monkeypatch.setattr("dflash_convert.conversion.write_converted", fails)
    assert hf.convert(hf.qwen3(), "--output", hf.root / "out") == 5
    told = "cannot be written (No space left on device): nothing is left of it; make room or name another output"
    assert capsys.readouterr().err == f"dflash-convert: output not usable: {hf.root}/out {told}\n"
    assert not list(hf.root.glob("out*"))


@pytest.mark.parametrize("verify_kind", ["hash", "logits"])
def test_a_wrong_value_fails_the_verification(hf, monkeypatch, verify_kind, capsys):
    def wrong(step, dtype, advance=None):
        array = assemble(step, dtype, advance)
        if step.parameter.name == "layers.1.mlp.down_proj.weight":
            array[3, 5] += 1
        return array

    source = hf.qwen3()
    monkeypatch.setattr(write, "assemble", wrong)
    assert hf.convert(source, "--output", hf.root / "out", "--verify", verify_kind) == 4
    assert "layers.1.mlp.down_proj.weight differs from its source in 1 of 1,536 values" in capsys.readouterr().err
    assert not list(hf.root.glob("out*"))
    assert hf.convert(source, "--output", hf.root / "out", "--verify", "none") == 0


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "keep"), (np.inf, "keep"), (1e30, "float16")])
def test_values_that_are_not_finite_fail_the_verification(hf, value, dtype, capsys):
    source = hf.qwen3()
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][:2] = value
    save_file(tensors, source / "model.safetensors")
    assert hf.convert(source, "--output", hf.root / "out", "--dtype", dtype) == 4
    assert "norm.weight holds 2 values that are not finite" in capsys.readouterr().err
    assert not (hf.root / "out").exists()


def test_logits_of_another_model_fail_the_verification(hf):
    source, output = hf.qwen3(), hf.root / "out"
    assert hf.convert(source, "--output", output) == 0
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = (tensors["model.norm.weight"].astype(np.float32) * 1.1).astype(jnp.bfloat16)
    other = hf.write("other", hf.qwen3_config, tensors)
    plan = open_checkpoint(source).plan
    assert verify.verify_logits(output, source, plan, "keep") == 0.0
    with pytest.raises(verify.VerificationError, match="outputs differ by"):
        verify.verify_logits(output, other, plan, "keep")


def test_integers_that_do_not_fit(hf):
    config = hf.dflash_config | {"draft_vocab_size": 40}
    head = {"lm_head.weight": np.ones((40, 32), np.float32), "d2t": np.arange(40) + 2**40}
    source = hf.write("drafter", config, hf.tensors(config, extra=head))
    assert hf.convert(source, "--output", hf.root / "out") == 3
