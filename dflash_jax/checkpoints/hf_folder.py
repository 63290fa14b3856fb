"""A Hugging Face model folder as files: which tensors it holds and where, and whether it may be trusted that far.

Only data is opened: config.json, the index and safetensors files, and of `mask_embedding.pt` one vector (`mask_file`). Every path
is a plain name inside the folder; a link may leave it only for the blobs of the hub cache that the folder is a snapshot of, or a
part of one.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_jax.checkpoints.json_files import read_object
from dflash_jax.checkpoints.mask_file import FILE as MASK_FILE
from dflash_jax.checkpoints.mask_file import NAME as MASK
from dflash_jax.checkpoints.mask_file import read_mask
from dflash_jax.checkpoints.safetensors import Tensor, read_header
from dflash_jax.config import shown
from dflash_jax.errors import CheckpointError

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
ADAPTER = "adapter_config.json"
# Where older releases of ModelOpt say how weights are quantized, and config.json does not.
MODELOPT = "hf_quant_config.json"
SIDECARS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHERS = (".gguf", ".npz", ".h5", ".msgpack", ".onnx")


@dataclass
class HuggingFaceFolder:
    """Contents of a Hugging Face model folder.

    Attributes:
      config: config.json, empty when it is not usable (which is then among the problems).
      tensors: by their own names.
      unreadable: tensors that the index places in a file which could not be read.
      complete: whether the names of all tensors are known, so that a missing one can be told.
      problems: what makes the folder unusable, one sentence each.
      notices: what was seen and left alone, one sentence each.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    complete: bool = True
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[Path]:
        """Every file that a conversion reads: weights, index, configuration and tokenizer."""
        names = {one.path.name for tensor in self.tensors.values() for one in tensor.stored} | {
            *SIDECARS,
            INDEX,
            MODELOPT,
        }
        return [self.folder / name for name in sorted(names) if (self.folder / name).is_file()]


def read_folder(path: str | Path) -> HuggingFaceFolder:
    """Reads configuration, index and headers of a folder; what is wrong goes into `problems`.

    Raises:
      CheckpointError: there is no such folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            str(folder), "is not a folder; give the folder that holds config.json and safetensors files"
        )
    result = HuggingFaceFolder(folder)
    names = sorted(entry.name for entry in folder.iterdir())
    if ADAPTER in names and CONFIG not in names:
        raise CheckpointError(
            str(folder), f"holds an adapter ({ADAPTER}), not a model: merge it into its base model and give that folder"
        )
    result.config = _read_config(result)
    for name in SIDECARS[1:]:
        if problem := _leaves(folder, name) if (folder / name).exists() else _lost(folder, name):
            result.problems.append(problem)
    if code := [name for name in names if name.endswith(".py")]:
        result.notices.append(f"Python files are never executed; left alone: {', '.join(code)}")
    # Where both are there, transformers reads the one file.
    if INDEX in names and SINGLE not in names:
        _read_shards(result, names)
    else:
        _read_single(result, names)
    if MASK_FILE in names:
        _read_mask(result)
    return result


def _read_mask(result: HuggingFaceFolder) -> None:
    """The vector of a drafter's mask that lies beside its safetensors."""
    problem = (
        _leaves(result.folder, MASK_FILE) if (result.folder / MASK_FILE).exists() else _lost(result.folder, MASK_FILE)
    )
    if MASK in result.tensors or f"{MASK}.weight" in result.tensors:
        result.notices.append(f"{MASK_FILE} is left alone: the safetensors hold {MASK}")
        return
    if problem is None:
        try:
            tensor, token = read_mask(result.folder / MASK_FILE)
        except ValueError as error:
            problem = str(error)
        else:
            nested = result.config.get("dflash_config")
            places = [*([nested] if isinstance(nested, dict) else []), result.config]
            said = next((one["mask_token_id"] for one in places if one.get("mask_token_id") is not None), token)
            if token not in (None, said):
                named = f"config.json says mask_token_id={shown(said)}"
                problem = f"{MASK_FILE} is of token {token}, {named}; fetch both from one release"
            else:
                result.tensors[MASK] = tensor
    if problem is not None:
        result.problems.append(problem)


def _read_config(result: HuggingFaceFolder) -> dict[str, Any]:
    config = _read_json(result, CONFIG)
    if config is None:
        return {}
    if "auto_map" in config:
        result.notices.append("config.json names code in auto_map; it is never executed")
    text = config.get("text_config")
    places = [config, text] if isinstance(text, dict) else [config]
    if (result.folder / MODELOPT).exists() and not any(one.get("quantization_config") for one in places):
        said = (_read_json(result, MODELOPT) or {}).get("quantization")
        if isinstance(said, dict) and (said.get("quant_algo") or said.get("kv_cache_quant_algo")):
            config["quantization_config"] = {**said, "quant_method": "modelopt"}
    return config


def _read_json(result: HuggingFaceFolder, name: str) -> dict[str, Any] | None:
    """A JSON object of the folder, or None with the problem recorded."""
    path = result.folder / name
    problem = _leaves(result.folder, name) if path.is_file() else _lost(result.folder, name)
    if problem is None:
        try:
            return read_object(path, infinity=name == CONFIG)
        except ValueError as error:
            problem = str(error)
    result.problems.append(problem)
    return None


def _leaves(folder: Path, name: str) -> str | None:
    """The problem with a file that is reached through a link out of the folder, None when it stays inside."""
    root, target = folder.resolve(), (folder / name).resolve()
    permitted = [root]
    for above in (root.parent, root.parent.parent):
        if above.name == "snapshots":
            permitted.append((above.parent / "blobs").resolve())
    if target.parent in permitted:
        return None
    return f"{name} leads out of the folder, to {target}; put the file itself there"


def _lost(folder: Path, name: str) -> str | None:
    """The problem with a link whose file is gone, as in a snapshot of the hub's cache that was copied without its blobs; None for
    anything else. Left out in silence, a tokenizer or the end tokens would be missing."""
    path = folder / name
    if not path.is_symlink() or path.exists():
        return None
    return f"{name} is a link to {path.readlink()}, which is not there; copy the files themselves (cp -rL), or fetch it again"


def _read_single(result: HuggingFaceFolder, names: list[str]) -> None:
    """The one safetensors file of a folder."""
    found = [name for name in names if name.endswith(".safetensors")]
    if SINGLE in found:
        _leave_alone(result, SINGLE, [name for name in [INDEX, *found] if name in names and name != SINGLE])
        found = [SINGLE]
    if len(found) == 1:
        result.tensors = _read_file(result, found[0]) or {}
        result.complete = bool(result.tensors)
        return
    result.complete = False
    if found:
        problem = (
            f"holds {len(found)} safetensors files, neither {SINGLE} nor {INDEX}; add the index that belongs to them"
        )
    elif pickles := [name for name in names if name.endswith(_PICKLES)]:
        problem = (
            f"holds weights only as pickles ({', '.join(pickles)}), which can run code and are never opened; "
            "convert them to safetensors, or take the safetensors release of the model"
        )
    elif others := [name for name in names if name.endswith(_OTHERS)]:
        problem = f"holds weights only in formats not read here ({', '.join(others)}); take the safetensors release of the model"
    else:
        problem = f"holds no safetensors file; expected {SINGLE} or {INDEX} with its shards"
    result.problems.append(problem)


def _leave_alone(result: HuggingFaceFolder, read: str, others: list[str]) -> None:
    if others:
        result.notices.append(f"{read} is read; other files of weights are left alone: {_some(others)}")


def _read_shards(result: HuggingFaceFolder, names: list[str]) -> None:
    """The shards an index names, and whether they hold what it says."""
    index = _read_json(result, INDEX)
    weight_map = index.get("weight_map") if index is not None else None
    if not isinstance(weight_map, dict) or not weight_map:
        if index is not None:
            result.problems.append(f"{INDEX} must hold an object `weight_map` that places every tensor; fetch it again")
        result.complete = False
        return
    placed: dict[str, list[str]] = defaultdict(list)
    for tensor, shard in weight_map.items():
        placed[shard if isinstance(shard, str) else repr(shard)].append(tensor)
    _leave_alone(result, INDEX, [name for name in names if name.endswith(".safetensors") and name not in placed])
    homes: dict[str, list[str]] = defaultdict(list)
    for shard, listed in placed.items():
        held = _read_file(result, shard, by_index=True)
        if held is None:
            result.unreadable += listed
            continue
        if absent := [name for name in listed if name not in held]:
            result.problems.append(
                f"{shard} lacks tensors that {INDEX} places in it: {_some(absent)}; fetch the shard again"
            )
            result.unreadable += absent
        expected = set(listed)
        for name, tensor in held.items():
            homes[name].append(shard)
            if name in expected:
                result.tensors[name] = tensor
        if unlisted := [name for name in held if name not in weight_map]:
            result.problems.append(
                f"{shard} holds tensors that {INDEX} does not name: {_some(unlisted)}; fetch the index again"
            )
    for name, shards in homes.items():
        if len(shards) > 1:
            result.problems.append(f"tensor {name} is in several shards ({', '.join(shards)}); it must be in one")


def _read_file(result: HuggingFaceFolder, name: str, *, by_index: bool = False) -> dict[str, Tensor] | None:
    """The tensors of one safetensors file, or None with the problems recorded."""
    path, problem = result.folder / name, None
    if by_index and (Path(name).name != name or "\\" in name or "\0" in name or not name.endswith(".safetensors")):
        problem = f"{INDEX} names {name!r}, expected the plain name of a .safetensors file in the folder; do not trust this source"
    elif not path.exists():
        problem = (
            _lost(result.folder, name)
            or f"{name} is missing{f', though {INDEX} names it' if by_index else ''}; fetch it"
        )
    else:
        problem = _leaves(result.folder, name)
    if problem is None:
        try:
            return read_header(path)
        except CheckpointError as error:
            result.problems += [f"{name}: {each}" for each in error.problems]
            return None
    result.problems.append(problem)
    return None


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
