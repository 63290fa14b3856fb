"""The way back to Hugging Face: names, shapes, dtypes and bits of every tensor."""

import json

import numpy as np
import pytest
from dflash_convert import reverse
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint


def tensors_of(folder) -> dict[str, np.ndarray]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_same(bits, a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape, bits(a[name])) == (b[name].dtype, b[name].shape, bits(b[name])), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_trip_of_a_pair(hf, bits, dtype):
    target, drafter = hf.qwen3(dtype=dtype, shards=3), hf.dflash(dtype=dtype)
    assert hf.convert(target, "--draft", drafter, "--output", hf.root / "out") == 0
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    for source, back in ((target, hf.root / "back"), (drafter, hf.root / "back" / "draft")):
        assert_same(bits, tensors_of(source), tensors_of(back))
        for name in ("config.json", "tokenizer.json", "generation_config.json"):
            assert (back / name).read_bytes() == (source / name).read_bytes()
        with safe_open(back / "model.safetensors", framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}
        assert open_checkpoint(back).notices == []
    assert not (hf.root / "back" / "conversion.json").exists()


def test_round_trip_keeps_odd_bits_prefixes_ties_and_wide_integers(hf, bits):
    """NaN payloads and signed zeros, `model.` names of a drafter, a repeated head, ids that are stored in fewer bits."""
    target = hf.qwen3(tie_word_embeddings=True)
    tensors = load_file(target / "model.safetensors")
    raw = np.random.default_rng(1).integers(0, 2**16, (96, 32)).astype(np.uint16)
    raw[0, :4] = 0x7FC1, 0xFFFF, 0x8000, 0x0001
    tensors["model.embed_tokens.weight"] = raw.view(tensors["model.embed_tokens.weight"].dtype)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, target / "model.safetensors")
    config = hf.dflash_config | {"draft_vocab_size": 40}
    own = {"lm_head.weight": np.ones((40, 32), np.float32), "d2t": np.arange(40)}
    drafter = hf.write("drafter", config, {f"model.{n}": v for n, v in hf.tensors(config, extra=own).items()})
    arguments = ("--output", hf.root / "out", "--verify", "none")
    assert hf.convert(target, "--draft", drafter, *arguments) == 0
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back", "--verify", "none") == 0
    assert_same(bits, tensors, tensors_of(hf.root / "back"))
    assert_same(bits, tensors_of(drafter), tensors_of(hf.root / "back" / "draft"))
    assert tensors_of(hf.root / "back" / "draft")["model.d2t"].dtype == np.int64


def test_narrowed_folders_go_back_narrowed(hf, bits):
    source = hf.qwen3(dtype="float32")
    assert hf.convert(source, "--output", hf.root / "out", "--dtype", "float16") == 0
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    narrowed = {name: value.astype(np.float16) for name, value in tensors_of(source).items()}
    assert_same(bits, narrowed, tensors_of(hf.root / "back"))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_the_configuration_names_a_dtype_that_was_changed(hf, key):
    """transformers loads in the dtype that config.json names: a wider one would take twice the memory, a narrower one round."""
    config = {name: value for name, value in hf.qwen3_config.items() if name != "torch_dtype"}
    config |= {key: "float32"} if key else {}
    source = hf.write("source", config, hf.tensors(config, dtype="float32"))
    assert hf.convert(source, "--output", hf.root / "out", "--dtype", "bfloat16") == 0
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    assert json.loads((hf.root / "back" / "config.json").read_text()) == config | ({key: "bfloat16"} if key else {})


def test_a_wrong_byte_on_the_way_back_fails_the_verification(hf, monkeypatch):
    assert hf.convert(hf.qwen3(), "--output", hf.root / "out") == 0
    original = reverse.write_huggingface

    def wrong(folder, converted, progress):
        original(folder, converted, progress)
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr("dflash_convert.conversion.write_huggingface", wrong)
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 4
    assert not list(hf.root.glob("back*"))


def test_only_converted_folders_go_back(hf):
    source = hf.qwen3()
    assert hf.convert(source, "--reverse", "--output", hf.root / "back") == 3
    assert hf.convert(source, "--output", hf.root / "out") == 0
    files = sorted((hf.root / "out" / "params").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    data = bytearray(files[-1].read_bytes())
    data[len(data) // 2] ^= 1
    files[-1].write_bytes(data)
    assert open_converted(hf.root / "out")
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") in (3, 4)
    assert not (hf.root / "back").exists()
