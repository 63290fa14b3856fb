"""Small tokenizers whose tokens are whole and broken pieces of UTF-8."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dflash_jax.text.tokenizer import Tokenizer

# Tokens of more than one byte: words, characters cut anywhere, characters glued to the beginning of the next, U+FFFD itself.
PIECES = (
    b"ab", b"abc", b"stop", b"STOP here", b"\n\n", b" the", "é".encode(), "é ".encode(), b" \xe4", b"\xbd\xa0", b"\xa0\xe5\xa5",
    b"\xf0\x9f", b"\x98\x80!", b"x\xf0", "你".encode(), "😀".encode(), "\ufffd".encode(), b"\xff\xfe", b"stop\xc3",
)  # fmt: skip
SPECIAL = "<|end|>"


def byte_symbols() -> list[str]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def byte_level() -> Tokenizer:
    """Ids 0 to 255 are the bytes, then come PIECES, then one special token."""
    symbols = byte_symbols()
    names = symbols + ["".join(symbols[byte] for byte in piece) for piece in PIECES]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([SPECIAL])
    return Tokenizer(backend, special={"eos_token": SPECIAL})


def byte_fallback() -> Tokenizer:
    """The other kind: words with a mark for spaces, and tokens such as <0xE4> for bytes that no word covers."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["a", "▁b", "▁stop", "你", ".", "▁"]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def metaspace() -> Tokenizer:
    """The same vocabulary with the decoder that puts one space before a text and takes it off, and special tokens."""
    backend = byte_fallback().backend
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens([SPECIAL])
    backend.add_tokens(["<tool>"])
    return Tokenizer(backend)


def ids_of(data: bytes | str, pieces: Sequence[bytes] = ()) -> list[int]:
    """Byte-level ids of `data`: one for each byte, except that the given PIECES are one token wherever they come next."""
    data = data.encode() if isinstance(data, str) else data
    ids, at = [], 0
    while at < len(data):
        piece = next((piece for piece in pieces if data.startswith(piece, at)), None)
        ids.append(data[at] if piece is None else 256 + PIECES.index(piece))
        at += 1 if piece is None else len(piece)
    return ids
