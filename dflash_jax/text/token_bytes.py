"""Bytes of single tokens, from the vocabulary: a token may be a part of a character."""

import tokenizers

# What decoders write for bytes that are no character, or not yet one.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenBytes:
    """Bytes of the tokens of a tokenizer's backend, cached.

    Attributes:
      whole: whether a text is the bytes of its tokens one after the other, as byte-level decoders make it.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend, self._found = backend, dict[int, bytes]()
        self._byte_level = "ByteLevel" in repr(backend.decoder)
        self.whole = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in kept]
        # GPT-2's alphabet: bytes that are no printable letter are those from 256 on.
        self._letters = {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}

    def of(self, token: int) -> bytes:
        """Bytes of one token; none of an id that no token has."""
        if (found := self._found.get(token)) is None:
            found = self._found[token] = self._of(self._backend.id_to_token(token) or "")
        return found

    def _of(self, name: str) -> bytes:
        if self._byte_level and all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        if self.whole:
            return name.encode("utf-8", "replace")
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode("utf-8", "replace")
