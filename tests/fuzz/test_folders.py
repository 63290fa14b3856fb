"""Seeded mutations of a small model folder: every one ends in a named error, or in the model that the files still describe.

A mutation changes one file or two: a value, a key or the text of a JSON file, a safetensors header, bytes, a file's kind. What
loads must hold the tensors that the safetensors library reads and, where its `config.json` was left alone, the configuration it
had. Run with `pytest -m fuzz`; a failure names its seeds, and `mutate(folder, seed)` makes the same folder again.
"""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

import dflash_jax as dj
from dflash_jax.checkpoints.pair import open_pair
from dflash_jax.models import family_of, to_huggingface

pytestmark = pytest.mark.fuzz

MUTATIONS, CHUNKS, MOST_SECONDS = int(os.environ.get("MUTATIONS", "2000")), 20, 20
TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64},
    "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False,
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16, "use_sliding_window": True,
    "max_window_layers": 1, "eos_token_id": 256, "bos_token_id": None, "dtype": "float32", "use_cache": True,
}  # fmt: skip
DRAFT: dict[str, Any] = TARGET | {
    "architectures": ["DFlashDraftModel"], "tie_word_embeddings": False, "block_size": 4, "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 299, "target_layer_ids": [0, 1], "causal": False},
}  # fmt: skip
INDEX = "model.safetensors.index.json"
JSON_FILES = (
    "config.json", "config.json", "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
    "special_tokens_map.json", "added_tokens.json", INDEX, "draft/config.json", "draft/config.json",
)  # fmt: skip
WEIGHTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "draft/model.safetensors")
OTHERS = ("chat_template.jinja",)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 300, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.0, -0.5, 1e-30,
    1e300, "", "a", "0", "true", "NaN", "\N{GRINNING FACE}" * 3, "x" * 5000, "\0", "../../etc/passwd", [], [[]], [None],
    [0] * 2000, {}, {"a": 1}, {"content": "<|end|>"}, [{"content": 5}], ["full_attention"], {"": {"": []}},
)  # fmt: skip
KEYS = (
    "rope_scaling", "rope_theta", "quantization_config", "num_experts", "use_qk_norm", "layer_types", "text_config",
    "transformer_layer_config", "eagle_config", "dflash_config", "use_swa", "is_causal", "head_dim", "kv_lora_rank", "auto_map",
    "eos_token", "chat_template", "added_tokens_decoder", "additional_special_tokens", "vocab", "merges", "truncation", "padding",
    "post_processor", "normalizer", "weight_map", "__metadata__", "pad_token_id", "block_size", "anything", "\ufeff",
)  # fmt: skip
# What no JSON library writes, put in a value's place as text.
TEXTS = (
    b"1e400", b"-1e999", b"NaN", b"Infinity", b'"\\ud800"', b'"\\udc00\\ud800"', b"[" * 200_000, b"{" * 9, b"9" * 5000,
    b"\xff\xfe", b'{"a":' * 150 + b"1" + b"}" * 150, b"nul", b"'a'", b"",
)  # fmt: skip


def tokenizer_files(folder: Path) -> None:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(symbols)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|user|>"])
    backend.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "eos_token": "<|end|>", "model_max_length": 10**30, "additional_special_tokens": ["<|user|>"],
            "added_tokens_decoder": {
                "256": {"content": "<|end|>", "special": True, "lstrip": False},
                "257": {"content": "<|user|>", "special": True},
            },
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "special_tokens_map.json": {"eos_token": {"content": "<|end|>", "lstrip": False}},
        "added_tokens.json": {"<|end|>": 256, "<|user|>": 257},
        "generation_config.json": {"eos_token_id": [256], "temperature": 0.6, "top_k": 20},
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in two shards with a tokenizer, and its drafter in `draft`."""
    folder, rng = tmp_path_factory.mktemp("fuzz") / "model", np.random.default_rng(0)
    for config, where in ((TARGET, folder), (DRAFT, folder / "draft")):
        where.mkdir()
        (where / "config.json").write_text(json.dumps(config))
        table = family_of(config).parameters(family_of(config).config(config))
        arrays = {row.name: rng.normal(size=row.shape).astype(np.float32) * 0.1 for row in table}
        tensors = {name: np.ascontiguousarray(array) for name, array in to_huggingface(table, arrays).items()}
        if config is DRAFT:
            save_file(tensors, where / "model.safetensors")
            continue
        names, placed = list(tensors), {}
        for shard, part in zip(WEIGHTS[:2], (names[::2], names[1::2]), strict=True):
            save_file({name: tensors[name] for name in part}, where / shard, metadata={"format": "pt"})
            placed |= dict.fromkeys(part, shard)
        (where / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placed}))
    tokenizer_files(folder)
    return folder


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys or indices."""
    found, waiting = [], [value]
    while waiting:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(min(len(each), 50)) if isinstance(each, list) else []
        found += [(each, key) for key in keys]
        waiting += [each[key] for key in keys]
    return found


def change_value(value: Any, random: random.Random) -> Any:
    """One change of a JSON value: another value, a key more, less or renamed, two values exchanged."""
    spots = places(value)
    # Half of the changes are near the top, where keys mean most.
    near = [spot for spot in spots if spot[0] is value]
    within, key = random.choice(near if near and random.random() < 0.5 else spots) if spots else ({}, None)
    match random.choice(("set", "set", "set", "near", "delete", "add", "add", "rename", "exchange")):
        case "set" if spots:
            within[key] = deepcopy(random.choice(VALUES))
        case "near" if spots and isinstance(within[key], int | float):
            within[key] = random.choice(
                (within[key] + 1, within[key] - 1, within[key] * 2, -within[key], float(within[key]))
            )
        case "delete" if isinstance(within, dict) and key is not None:
            del within[key]
        case "rename" if isinstance(within, dict) and key is not None:
            within[random.choice(KEYS)] = within.pop(key)
        case "exchange" if spots:
            other, name = random.choice(spots)
            within[key], other[name] = deepcopy(other[name]), deepcopy(within[key])  # one may lie in the other
        case _ if isinstance(value, dict):
            value[random.choice(KEYS)] = deepcopy(random.choice(VALUES))
    return value


def change_text(raw: bytes, random: random.Random) -> bytes:
    """One change of a file's bytes."""
    at = random.randrange(len(raw) + 1)
    match random.choice(("cut", "flip", "insert", "remove", "literal", "twice")):
        case "cut":
            return raw[:at]
        case "flip":
            return bytes(byte ^ (1 << random.randrange(8)) if i == at else byte for i, byte in enumerate(raw))
        case "insert":
            return raw[:at] + random.randbytes(random.choice((1, 4, 100))) + raw[at:]
        case "remove":
            return raw[:at] + raw[at + random.choice((1, 7, 64)) :]
        case "twice":
            return raw.replace(b"{", b'{"a": 1, "a": 2, ', 1)
    ends = [i for i, byte in enumerate(raw[:4000]) if byte in b",}"]
    at = random.choice(ends) if ends else 0
    start = raw.rfind(b":", 0, at) + 1
    return raw[:start] + random.choice(TEXTS) + raw[at:]


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def change_header(raw: bytes, random: random.Random) -> bytes:
    """One change of a safetensors header, with its length set right or left as it was."""
    length = int.from_bytes(raw[:8], "little")
    header, body = raw[8 : 8 + length], raw[8 + length :]
    changed = dumped(change_value(json.loads(header), random)) if random.random() < 0.6 else change_text(header, random)
    if random.random() < 0.2:
        return random.choice((0, 1, 2**40, 2**64 - 1)).to_bytes(8, "little") + changed + body
    return (len(changed) if random.random() < 0.9 else length).to_bytes(8, "little") + changed + body


def change_dtype(raw: bytes, random: random.Random) -> bytes:
    """Another type or shape for one tensor of a header that is sound otherwise."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    entry = header[random.choice([name for name in header if name != "__metadata__"])]
    entry["dtype"] = random.choice(
        ("F16", "BF16", "I32", "F64", "U8", "F8_E4M3", "F8_E8M0", "F4", "C64", "F99", 5, None)
    )
    if random.random() < 0.7:
        wide = {"F16": 2, "BF16": 2, "F64": 8, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "C64": 8, "F4": 0.5}.get(
            entry["dtype"], 4
        )
        size = (entry["data_offsets"][1] - entry["data_offsets"][0]) / wide
        entry["shape"] = [int(size)]
    text = dumped(header)
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def change_kind(path: Path, random: random.Random) -> None:
    """Another thing in a file's place."""
    raw = path.read_bytes()
    path.unlink()
    match random.choice(("gone", "empty", "folder", "outside", "nowhere", "pointer", "closed", "pipe")):
        case "empty":
            path.write_bytes(b"")
        case "folder":
            path.mkdir()
        case "outside":
            path.symlink_to("/etc/hostname")
        case "nowhere":
            path.symlink_to("nowhere")
        case "pointer":
            path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        case "closed":
            path.write_bytes(raw)
            path.chmod(0)
        case "pipe":
            os.mkfifo(path)


def mutate(folder: Path, seed: int) -> list[str]:
    """Changes one file of the folder, seldom two. Returns their names."""
    rng, changed = random.Random(seed), []
    for _ in range(1 if rng.random() < 0.9 else 2):
        name = rng.choice(rng.choice((JSON_FILES, JSON_FILES, JSON_FILES, WEIGHTS, OTHERS)))
        path = folder / name
        if name in changed:
            continue
        changed.append(name)
        raw, way = path.read_bytes(), rng.random()
        if way < 0.08:
            change_kind(path, rng)
        elif name in WEIGHTS:
            path.write_bytes(rng.choice((change_header, change_header, change_dtype, change_text))(raw, rng))
        elif name in OTHERS or way < 0.35:
            path.write_bytes(change_text(raw, rng))
        else:
            value = json.loads(raw)
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                value = change_value(value, rng)
            path.write_bytes(dumped(value))
    return changed


def use(folder: Path) -> dict[str, Any] | None:
    """What loads from a folder: configurations and tensors. None where an error with a name says why it does not."""
    try:
        target, drafter = open_pair(folder)
        found = {}
        for role, checkpoint in (("target", target), ("draft", drafter)):
            if checkpoint is not None:
                found[role] = (checkpoint.config, {name: np.asarray(each) for name, each in checkpoint.load().items()})
        model = dj.load(folder, max_batch=1, max_model_len=32, page_size=16)
    except dj.DFlashError as error:
        str(error).encode()
        return None
    if model.tokenizer is not None:
        for act in (_encode, _chat):
            try:
                act(model)
            except dj.DFlashError as error:
                str(error).encode()
    return found


def _encode(model: dj.Model) -> None:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("def f(x):\n <|end|> é")
    assert all(isinstance(token, int) and 0 <= token < 2**31 for token in ids)
    model.tokenizer.decode(ids).encode()


def _chat(model: dj.Model) -> None:
    assert model.tokenizer is not None
    model.tokenizer.encode_chat([{"role": "user", "content": "hello"}])


@pytest.fixture
def bounded() -> Iterator[Callable[[float], None]]:
    """Interrupts what takes longer than it may."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _wrong(found: dict[str, Any], folder: Path, changed: list[str], sound: dict[str, Any]) -> str | None:
    """What differs between a loaded pair and what its files say."""
    for role, (config, arrays) in found.items():
        where = folder if role == "target" else folder / "draft"
        settings = "config.json" if role == "target" else "draft/config.json"
        if settings not in changed and config != sound[role][0]:
            return f"another configuration of the {role}, whose file was left alone"
        stored: dict[str, np.ndarray] = {}
        for path in where.glob("*.safetensors"):
            stored |= load_file(path)
        family = family_of(json.loads((where / "config.json").read_text()))
        named = {family.canonical(name): array for name, array in stored.items()}
        for parameter in family.parameters(config):
            pieces = [named[source.name].reshape(source.shape) for source in parameter.sources]
            whole = np.concatenate([piece.reshape(-1) for piece in pieces]).astype(arrays[parameter.name].dtype)
            if not np.array_equal(whole, arrays[parameter.name].reshape(-1)):
                return f"other numbers in {parameter.name} of the {role} than in its file"
    return None


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_mutated_folders_end_in_named_errors_or_load_as_they_are(
    original: Path, tmp_path: Path, bounded: Callable[[float], None], chunk: int
) -> None:
    sound = use(original)
    assert sound is not None
    assert sound.keys() == {"target", "draft"}
    failures, loaded = [], 0
    for seed in range(chunk, MUTATIONS, CHUNKS):
        folder = tmp_path / str(seed)
        shutil.copytree(original, folder)
        changed, started = mutate(folder, seed), time.perf_counter()
        try:
            bounded(MOST_SECONDS)
            found = use(folder)
            if found is not None:
                loaded += 1
                if problem := _wrong(found, folder, changed, sound):
                    failures.append(f"{seed} {changed}: {problem}")
        except BaseException as error:  # panics of Rust are no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            seconds = time.perf_counter() - started
            failures.append(f"{seed} {changed} after {seconds:.1f} s: {type(error).__name__}: {str(error)[:300]}")
        finally:
            bounded(0)
        shutil.rmtree(folder)
    assert not failures, "\n".join(failures)
    assert 0 < loaded < MUTATIONS // CHUNKS  # both ends are reached
