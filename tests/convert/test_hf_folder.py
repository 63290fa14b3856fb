"""Hugging Face folders that must be refused, with every problem at once, and folders that only look unusual."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.errors import CheckpointError, ConfigError, TokenizerError, UnsupportedModelError
from dflash_jax.text.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"


def problems_of(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    return "\n".join(caught.value.problems)


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def edit_tensors(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "a\\b.safetensors", "..", ""]
)
def test_index_entries_that_are_no_plain_names(hf, name):
    folder = hf.qwen3(shards=2)
    outside = folder.parent / "model.safetensors"
    save_file({"model.norm.weight": np.ones(32, np.float32)}, outside)
    edit_index(folder, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    assert "expected the plain name of a .safetensors file" in problems_of(folder)


def test_index_entry_that_is_no_string(hf):
    folder = hf.qwen3(shards=2)
    edit_index(folder, lambda index: index["weight_map"].update({"model.norm.weight": ["x"]}))
    assert "expected the plain name of a .safetensors file" in problems_of(folder)


def test_links_out_of_the_folder(hf):
    folder = hf.qwen3(shards=2)
    shard = folder / "model-00001-of-00002.safetensors"
    shard.rename(folder.parent / "elsewhere.safetensors")
    shard.symlink_to("../elsewhere.safetensors")
    secret = folder.parent / "secret"
    secret.write_text("{}")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(secret)
    found = problems_of(folder)
    assert "model-00001-of-00002.safetensors leads out of the folder" in found
    assert "tokenizer.json leads out of the folder" in found


def test_links_that_lead_nowhere(hf):
    """As where a snapshot of the hub's cache was copied, or mounted, without its blobs: no file is taken for one that never was."""
    folder = hf.qwen3()
    names = ("model.safetensors", "tokenizer.json", "generation_config.json")
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(f"../../blobs/{name}")
    found = problems_of(folder)
    assert all(f"{name} is a link to ../../blobs/{name}, which is not there" in found for name in names)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("nowhere")
    assert "config.json is a link to nowhere" in problems_of(folder)


def test_files_that_may_not_be_read(hf, monkeypatch):
    """Tests may run as root, who may read everything."""
    folder, opened = hf.qwen3(), Path.open
    (folder / "tokenizer.json").write_text("{}")

    def refuse(path, *args, **named):
        if path.name in ("model.safetensors", "tokenizer.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **named)

    monkeypatch.setattr(Path, "open", refuse)
    assert "model.safetensors: cannot be read (Permission denied)" in problems_of(folder)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read \(Permission denied\)"):
        Tokenizer.from_folder(folder)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(CheckpointError, match=r"cannot be opened \(Permission denied\)"):
        dj.load(folder)
    with pytest.raises(CheckpointError, match="cannot be looked for"):
        dj.load("x" * 5000)


def test_links_of_a_hub_cache_are_followed(hf, bits):
    plain = hf.qwen3(shards=2)
    repository = hf.root / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, path in enumerate(sorted(plain.iterdir())):
        (blobs / f"blob{index}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/blob{index}")
    ours, theirs = open_checkpoint(plain).load(), open_checkpoint(snapshot).load()
    assert all(bits(ours[name]) == bits(theirs[name]) for name in ours)
    other = hf.root / "models--other--name" / "blobs"
    other.mkdir(parents=True)
    (other / "blob").write_bytes((plain / "config.json").read_bytes())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(other / "blob")
    assert "config.json leads out of the folder" in problems_of(snapshot)


def test_shards_and_index_disagree(hf):
    folder = hf.qwen3(shards=3)
    first, second, third = (folder / f"model-{i}-of-00003.safetensors" for i in ("00001", "00002", "00003"))
    norm = load_file(first)["model.embed_tokens.weight"]
    edit_tensors(second, lambda tensors: tensors.update({"model.embed_tokens.weight": norm}))
    edit_tensors(second, lambda tensors: tensors.update({"unlisted": np.ones(2, np.float32)}))
    lost = next(iter(load_file(first).keys() - {"model.embed_tokens.weight"}))
    edit_tensors(first, lambda tensors: tensors.pop(lost))
    third.unlink()
    found = problems_of(folder)
    assert f"{third.name} is missing, though {INDEX} names it" in found
    assert f"{first.name} lacks tensors that {INDEX} places in it: {lost}" in found
    assert "tensor model.embed_tokens.weight is in several shards" in found
    assert f"{second.name} holds tensors that {INDEX} does not name: unlisted" in found
    assert "is missing;" not in found.replace(third.name, "")


def test_one_bad_shard_does_not_hide_the_other_problems(hf):
    folder = hf.qwen3(shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-3])
    name = next(name for name in load_file(second) if name.endswith("q_norm.weight"))
    edit_tensors(second, lambda tensors: tensors.update({name: np.ones(5, np.float32)}))
    (folder / "mask_embedding.pt").write_bytes(b"")
    found = problems_of(folder)
    assert "truncated" in found
    assert f"tensor {name} has shape [5], expected [8]" in found
    assert "mask_embedding.pt" in found


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "b", "a": "c"}}'])
def test_malformed_index(hf, content):
    folder = hf.qwen3(shards=2)
    (folder / INDEX).write_text(content)
    assert INDEX in problems_of(folder)


def test_pickles_are_never_opened(hf):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (hf.root / "opened",))

    folder = hf.qwen3()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    found = problems_of(folder)
    assert "only as pickles (pytorch_model.bin)" in found
    assert "convert them to safetensors" in found
    folder = hf.dflash()
    (folder / "mask_embedding.pt").write_bytes(pickle.dumps(Trap()))
    assert "mask_embedding.pt cannot be read" in problems_of(folder)
    assert not (hf.root / "opened").exists()


def test_code_is_left_alone_with_a_notice(hf):
    folder = hf.dflash(auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    (folder / "dflash.py").write_text(f"open({str(hf.root / 'opened')!r}, 'w')")
    notices = " ".join(open_checkpoint(folder).notices)
    assert "dflash.py" in notices
    assert "auto_map" in notices
    assert not (hf.root / "opened").exists()


@pytest.mark.parametrize(
    ("content", "message"), [("", "not usable"), ("[1]", "got list"), ("{}", "empty"), ('{"a":1,"a":2}', "twice")]
)
def test_malformed_config(hf, content, message):
    folder = hf.qwen3()
    (folder / "config.json").write_text(content)
    assert message in problems_of(folder)


def test_missing_config_and_missing_weights(hf):
    folder = hf.qwen3()
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    found = problems_of(folder)
    assert "config.json is missing" in found
    assert "holds no safetensors file" in found
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_checkpoint(folder / "nowhere")


@pytest.mark.parametrize(
    ("key", "value", "method"),
    [
        ("quantization_config", {"quant_method": "hqq", "quant_config": {}}, "'hqq'"),
        ("quantization_config", {"quant_method": "quark", "quant_mode": "eager_mode"}, "'quark'"),
        ("quantization", {"group_size": 64, "bits": 4}, "MLX's format, {'group_size': 64"),
    ],
)
def test_quantized_checkpoints_are_refused(hf, key, value, method):
    for name, folder in {"target": hf.qwen3(), "drafter": hf.dflash()}.items():
        edit_config(folder, **{key: value})
        with pytest.raises(ConfigError, match="expected bfloat16, float16 or float32") as caught:
            open_checkpoint(folder)
        assert f"{key} that the weights are quantized" in str(caught.value), name
        assert method in str(caught.value)
        assert "bookkeeping" not in str(caught.value)  # the key must not be removed from files that mean it


def test_configuration_errors_keep_their_type_when_the_files_are_sound(hf):
    folder = hf.qwen3()
    edit_config(folder, architectures=["GemmaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM"):
        open_checkpoint(folder)
    edit_config(folder, architectures=["Qwen3ForCausalLM"], unheard_of_switch=3)
    with pytest.raises(ConfigError, match="unheard_of_switch"):
        open_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(b"")
    assert "unheard_of_switch" in problems_of(folder)
    assert "truncated" in problems_of(folder)


def test_missing_extra_and_misshapen_tensors_are_named_together(hf):
    folder = hf.qwen3()

    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = np.ones((2, 2), np.float32)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1].copy()

    edit_tensors(folder / "model.safetensors", change)
    found = problems_of(folder)
    assert "tensor model.norm.weight is missing" in found
    assert "tensor model.layers.9.mlp.up_proj.weight is not one that this configuration has" in found
    assert "tensor model.embed_tokens.weight has shape [95, 32], expected [96, 32]" in found


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int32"])
def test_dtypes_that_are_not_read(hf, dtype):
    import ml_dtypes

    folder = hf.qwen3()
    header, path = {"float8_e4m3fn": "F8_E4M3"}, folder / "model.safetensors"
    kind = getattr(ml_dtypes, dtype, None) or getattr(np, dtype)
    if (
        dtype in header
    ):  # the library cannot write it, so the header is edited: two bytes are one bfloat16 or two float8
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8 : 8 + length])
        entries["model.norm.weight"] |= {"dtype": "F8_E4M3", "shape": [64]}
        text = json.dumps(entries).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    else:
        edit_tensors(path, lambda tensors: tensors.update({"model.norm.weight": np.ones(32, kind)}))
    found = problems_of(folder)
    assert f"tensor model.norm.weight has dtype {dtype}, expected bfloat16, float16, float32" in found


def test_sources_of_one_array_must_agree_in_dtype(hf):
    folder = hf.qwen3()
    edit_tensors(
        folder / "model.safetensors",
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": np.ones((48, 32), np.float32)}),
    )
    assert "form one array but have dtypes bfloat16, float32; give --dtype" in problems_of(folder)
    assert str(open_checkpoint(folder, "float16").plan.steps[0].dtype) == "float16"


def test_tied_head_beside_its_embedding(hf):
    folder = hf.qwen3(tie_word_embeddings=True)
    path = folder / "model.safetensors"
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    assert "lm_head.weight repeats model.embed_tokens.weight and is left out" in open_checkpoint(folder).notices
    edit_tensors(path, lambda tensors: tensors["lm_head.weight"].__setitem__((0, 0), 3))
    assert "lm_head.weight differs from model.embed_tokens.weight, though config.json ties them" in problems_of(folder)


def test_names_that_mean_the_same_tensor(hf):
    folder = hf.dflash()
    path = folder / "model.safetensors"
    edit_tensors(path, lambda tensors: tensors.update({"model.norm.weight": tensors["norm.weight"].copy()}))
    assert "'model.norm.weight' and 'norm.weight' both stand for norm.weight" in problems_of(folder).replace(
        "'norm.weight' and 'model.norm.weight'", "'model.norm.weight' and 'norm.weight'"
    )


def test_buffers_are_left_out_with_a_notice(hf):
    folder = hf.qwen3()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    assert f"{name} is not needed and left out" in open_checkpoint(folder).notices


def test_several_safetensors_files_without_an_index(hf):
    folder = hf.qwen3(shards=2)
    (folder / INDEX).unlink()
    assert "2 safetensors files, neither model.safetensors nor" in problems_of(folder)
    folder = hf.qwen3("other")
    save_file({"x": np.ones(2)}, folder / "consolidated.safetensors")
    assert "left alone: consolidated.safetensors" in " ".join(open_checkpoint(folder).notices)


def test_one_file_counts_over_an_index(hf, bits):
    """As in transformers: saving a model over another one may leave the index and shards of that one."""
    folder, small = hf.qwen3(shards=2), hf.qwen3("small", vocab_size=64)
    (folder / "model.safetensors").write_bytes((small / "model.safetensors").read_bytes())
    edit_config(folder, vocab_size=64)
    opened, expected = open_checkpoint(folder), open_checkpoint(small).load()
    ours = opened.load()
    assert all(bits(ours[name]) == bits(expected[name]) for name in expected)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert f"left alone: {INDEX}, {', '.join(shards)}" in " ".join(opened.notices)


def test_files_beside_shards_are_mentioned(hf):
    folder = hf.qwen3(shards=2)
    assert not open_checkpoint(folder).notices
    save_file({"x": np.ones(2)}, folder / "optimizer.safetensors")
    assert (
        f"{INDEX} is read; other files of weights are left alone: optimizer.safetensors"
        in open_checkpoint(folder).notices
    )


def test_adapters_and_other_formats_say_what_they_are(hf):
    folder = hf.qwen3()
    (folder / "model.safetensors").rename(folder / "model-Q4_K_M.gguf")
    assert "only in formats not read here (model-Q4_K_M.gguf)" in problems_of(folder)
    (folder / "config.json").rename(folder / "adapter_config.json")
    assert "holds an adapter (adapter_config.json), not a model: merge it" in problems_of(folder)
