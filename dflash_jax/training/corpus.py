"""The corpus: Python sources that are installed anyway, with their licences, split into training, prompt and held-out files."""

import hashlib
import importlib.metadata
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dflash_jax.checkpoints.atomic import written_whole
from dflash_jax.errors import DFlashError
from dflash_jax.training.licences import permissive_licence
from dflash_jax.training.settings import EOS_ID, Settings
from dflash_jax.training.tokenizer import encode_files, train_tokenizer

Report = Callable[[str], None]


class TrainingError(DFlashError):
    """A training run cannot go on as asked."""


@dataclass(frozen=True)
class Package:
    """One source of files: a distribution, the standard library or a folder."""

    name: str
    version: str
    licence: str


@dataclass(frozen=True)
class SourceFile:
    """A Python file of the corpus, with the package it comes from and its path there."""

    package: Package
    path: str
    text: str
    sha256: str

    def part(self, settings: Settings) -> Literal["heldout", "prompts", "train"]:
        """Part of the corpus that it belongs to, decided by content, so that it does not depend on order, machine or seed."""
        place = int(self.sha256[:12], 16) % 10_000 / 100
        if place < settings.heldout_percent:
            return "heldout"
        return "prompts" if place < settings.heldout_percent + settings.prompt_percent else "train"


@dataclass(frozen=True)
class Corpus:
    """The three parts of the corpus.

    Attributes:
      tokens: the target's training files one after the other, each ended by the end-of-text id.
      prompt_tokens: files the target never sees. The drafter learns from continuations of their beginnings: continuations of
        what the target knows by heart are easier than anything a user will ask for.
      heldout: files no stage sees.
    """

    tokens: np.ndarray
    prompt_tokens: np.ndarray
    heldout: list[dict]
    manifest: dict
    tokenizer_path: Path


def standard_library() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not {"site-packages", "dist-packages"} & set(relative.parts):
            yield relative.as_posix(), path


def installed_files(distribution: importlib.metadata.Distribution) -> Iterator[tuple[str, Path]]:
    for file in sorted(distribution.files or [], key=str):
        if file.suffix == ".py":
            yield file.as_posix(), Path(str(file.locate()))


def is_source(text: str) -> bool:
    """Keeps hand-written files of a usual size: no tables of numbers, no minified or generated lines."""
    if not 500 < len(text) < 300_000:
        return False
    digits = sum(map(text.count, "0123456789"))
    return digits < 0.2 * len(text) and max(map(len, text.splitlines())) < 1000


def packages_of(settings: Settings) -> tuple[list[tuple[Package, Iterator[tuple[str, Path]]]], dict[str, str]]:
    """Sources to read, and the packages left out with the reason."""
    if settings.folder is not None:
        root = Path(settings.folder)
        files = ((path.relative_to(root).as_posix(), path) for path in sorted(root.rglob("*.py")))
        return [(Package(root.name, "", "not checked (a folder of your own)"), files)], {}
    version = ".".join(map(str, sys.version_info[:3]))
    found = [(Package("Python standard library", version, "PSF-2.0"), standard_library())]
    skipped = {}
    for name in settings.packages:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            skipped[name] = "not installed"
            continue
        licence = permissive_licence(distribution)
        if licence is None:
            skipped[name] = "licence not recognised as permissive"
            continue
        found.append((Package(name, distribution.version, licence), installed_files(distribution)))
    return found, skipped


def read_sources(settings: Settings) -> tuple[list[SourceFile], dict[str, str]]:
    """Every distinct file once, in a fixed order, and the packages left out with the reason."""
    sources, skipped = packages_of(settings)
    seen, files = set[str](), []
    for package, paths in sources:
        for relative, path in paths:
            try:
                text = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest in seen or not is_source(text):
                continue
            seen.add(digest)
            files.append(SourceFile(package, relative, text, digest))
    return files, skipped


def build_corpus(settings: Settings, folder: Path, report: Report) -> Corpus:
    """Reads, splits, trains the tokenizer on the training part, encodes. Kept in `folder`; a second call only reads it.

    Raises:
      TrainingError: too little text was found.
    """
    if (folder / "manifest.json").exists():
        return load_corpus(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files, skipped = read_sources(settings)
    parts = {name: [file for file in files if file.part(settings) == name] for name in ("train", "prompts", "heldout")}
    sizes = ", ".join(f"{name} {len(part)} files" for name, part in parts.items())
    if not all(parts.values()):
        raise TrainingError(
            f"the corpus is too small ({sizes}); install the `train` extra, or name a folder with more Python files"
        )
    report(f"corpus: {sizes}; {sum(len(file.text) for file in files) / 1e6:.1f} M characters")
    for name, reason in skipped.items():
        report(f"corpus: {name} left out: {reason}")
    used = [file.text for file in parts["train"] + parts["prompts"]]
    tokenizer = train_tokenizer(used, settings.vocab_size - 1)
    tokenizer.save(str(folder / "tokenizer.json"))
    report("corpus: tokenizer trained")
    counts = {}
    for name in ("train", "prompts"):
        tokens = encode_files(tokenizer, [file.text for file in parts[name]])
        np.save(folder / f"{name}.npy", tokens)
        counts[name] = len(tokens)
    kept = [asdict(file) for file in parts["heldout"]]
    (folder / "heldout.json").write_text(json.dumps(kept))
    manifest = {"packages": summary(files, settings), "left_out": skipped}
    manifest |= {"tokens": counts["train"], "prompt_tokens": counts["prompts"]}
    manifest["characters_per_token"] = sum(len(text) + 1 for text in used) / sum(counts.values())
    with written_whole(folder / "manifest.json") as scratch:  # last: the folder is believed once it has this
        scratch.write_text(json.dumps(manifest, indent=1))
    report(f"corpus: tokens {counts}, {manifest['characters_per_token']:.2f} characters each")
    return load_corpus(folder)


def summary(files: list[SourceFile], settings: Settings) -> list[dict]:
    """Per package: name, version, licence, files and bytes used, files held out."""
    rows: dict[Package, dict] = {}
    for file in files:
        row = rows.setdefault(file.package, asdict(file.package) | {"files": 0, "bytes": 0, "heldout_files": 0})
        if file.part(settings) == "heldout":
            row["heldout_files"] += 1
        else:
            row["files"] += 1
            row["bytes"] += len(file.text.encode())
    return list(rows.values())


def load_corpus(folder: Path) -> Corpus:
    return Corpus(
        tokens=np.load(folder / "train.npy"),
        prompt_tokens=np.load(folder / "prompts.npy"),
        heldout=json.loads((folder / "heldout.json").read_text()),
        manifest=json.loads((folder / "manifest.json").read_text()),
        tokenizer_path=folder / "tokenizer.json",
    )


def heldout_prompts(corpus: Corpus, length: int, count: int, seed: int) -> list[dict]:
    """Prompts of `length` tokens cut at random places of held-out files: `ids`, `text`, `source`, `licence`.

    Only cuts whose text encodes to the same ids again are taken, so that a prompt means the same as text and as ids.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    encoded = [encoding.ids for encoding in tokenizer.encode_batch([file["text"] for file in corpus.heldout])]
    usable = [index for index, ids in enumerate(encoded) if len(ids) > length]
    if not usable:
        raise TrainingError(f"no held-out file has more than {length} tokens; use a larger corpus")
    rng, prompts = np.random.default_rng(seed), []
    for _ in range(200 * count):
        index = usable[rng.integers(len(usable))]
        start = rng.integers(len(encoded[index]) - length)
        ids = encoded[index][start : start + length]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if EOS_ID in ids or tokenizer.encode(text).ids != ids:
            continue
        package = corpus.heldout[index]["package"]
        source = f"{package['name']} {package['version']}: {corpus.heldout[index]['path']}".replace("  ", " ")
        prompts.append({"ids": ids, "text": text, "source": source, "licence": package["licence"]})
        if len(prompts) == count:
            return prompts
    raise TrainingError(
        f"only {len(prompts)} of {count} prompts of {length} tokens could be cut from the held-out files"
    )


def heldout_windows(corpus: Corpus, length: int, count: int) -> np.ndarray:
    """`[<= count, length + 1]` windows over the held-out files, for the target's held-out loss."""
    from tokenizers import Tokenizer

    tokens = encode_files(Tokenizer.from_file(str(corpus.tokenizer_path)), [file["text"] for file in corpus.heldout])
    rows = min(count, len(tokens) // (length + 1))
    return tokens[: rows * (length + 1)].reshape(rows, length + 1).astype(np.int32)
