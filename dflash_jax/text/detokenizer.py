"""Text that is safe to show from a growing list of token ids: whole characters, nothing a stop string may still take back."""

import codecs
import itertools
from collections.abc import Sequence

from dflash_jax.text.token_bytes import REPLACEMENT
from dflash_jax.text.tokenizer import Tokenizer

# Tokens, or bytes, that wait for a character's end; and of tokens those that are kept then, the first and the last of them: a
# character has four bytes at most, and byte fallback gives every byte of a run up once four of them made none.
_MOST_WAITING, _KEPT = 32, 8
_UTF8 = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Text of one request, piece by piece.

    What has been given out never changes: bytes of an unfinished character and a possible beginning of a stop string wait.

    Args:
      tokenizer: None for requests without text; every piece is then empty.
      stops: strings that end the text: the first to be completed, the longest of several that are completed at once.
      include_stop: keep the stop string.
      special: special tokens are text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        special: bool = False,
    ):
        self.tokenizer, self.stops, self.include_stop, self.special = tokenizer, tuple(stops), include_stop, special
        self.text = ""
        self.found: str | None = None
        self._given = 0
        # Bytes behind the last piece of text, where a text is the bytes of its tokens.
        self._joins, self._bytes = tokenizer is not None and tokenizer.joins_bytes, b""
        # Otherwise tokens of the newest piece of text and those after it, how many make that piece, and its text when they stand
        # alone.
        self._ids: list[int] = []
        self._read, self._known = 0, ""

    def add(self, token: int, *, watch: bool = True) -> bool:
        """Takes one token. True when it completes a stop string (`watch` False looks for none): the text then ends there."""
        return self._extend(self._piece(token), watch=watch)

    def add_all(self, tokens: Sequence[int]) -> list[int]:
        """Takes tokens where no stop string is looked for. Characters of the text up to each."""
        pieces = [self._piece(token) for token in tokens]
        ends = itertools.accumulate(map(len, pieces), initial=len(self.text))
        self.text += "".join(pieces)
        return list(ends)[1:]

    def _piece(self, token: int) -> str:
        """Text that a token adds; empty while the last character may be unfinished."""
        if self.tokenizer is None:
            return ""
        if self._joins and not self._bytes and (text := self.tokenizer.alone(token, special=self.special)) is not None:
            return text
        if self.tokenizer.is_silent(token, special=self.special):
            return ""
        if self._joins:
            self._bytes += self.tokenizer.token_bytes.of(token)
            return self._joined()
        self._ids.append(token)
        return self._decoded(self.tokenizer)

    def finish(self, *, watch: bool = True) -> bool:
        """No token follows: what waited for its last bytes becomes text. True when that completes a stop string."""
        if self.tokenizer is None or self.found is not None:
            return False
        piece = self._joined(everything=True) if self._joins else self._decoded(self.tokenizer, everything=True)
        return self._extend(piece, watch=watch)

    def take(self, *, everything: bool = False) -> str:
        """The text not given out before that can no longer be taken back; all of it at the end."""
        end = len(self.text)
        if not everything and self.found is None:
            end = max(end - self._held_back(), self._given)
        piece, self._given = self.text[self._given : end], end
        return piece

    def _joined(self, *, everything: bool = False) -> str:
        """Text that the bytes behind it add; empty while the last character may be unfinished."""
        text, left = self._bytes.decode("utf-8", "replace"), b""
        if text.endswith(REPLACEMENT) and not everything:
            if len(self._bytes) <= _MOST_WAITING:
                return ""
            decoder = _UTF8("replace")
            text, left = decoder.decode(self._bytes), decoder.getstate()[0]
        self._bytes = left
        return text

    def _decoded(self, tokenizer: Tokenizer, *, everything: bool = False) -> str:
        """Text that the newest tokens add; empty while the last character may be unfinished.

        Decoded together with the piece before, because decoders treat a text's first token in ways of their own. A decoder that
        changes its mind about that piece (byte fallback, when a byte that fits nothing follows) cannot change what was given.
        """
        text = tokenizer.decode(self._ids, special=self.special)
        if len(text) <= len(self._known):
            return ""
        if text.endswith(REPLACEMENT) and not everything:
            return self._shortened(tokenizer, text) if len(self._ids) - self._read > _MOST_WAITING else ""
        piece = text[len(self._known) :]
        del self._ids[: self._read]
        self._read, self._known = len(self._ids), tokenizer.decode(self._ids, special=self.special)
        return piece

    def _shortened(self, tokenizer: Tokenizer, text: str) -> str:
        """Text of many tokens that are no character, the last of it held back; those in their middle are dropped.

        The first ones stay because byte fallback judges a run of bytes as a whole, the last ones because the next byte may end a
        character with them. Without this, a request that never gets out of broken bytes would decode all of them for each new one.
        """
        first = self._read + _KEPT
        shorter = [*self._ids[:first], *self._ids[-_KEPT:]]
        left = tokenizer.decode(shorter, special=self.special)
        if left[-2:] != text[-2:]:  # a decoder of another kind: it reads all
            return ""
        piece = text[len(self._known) : -1]
        self._ids, self._known = shorter, left[:-1]
        return piece

    def _extend(self, piece: str, *, watch: bool) -> bool:
        before = len(self.text)
        self.text += piece
        if not watch or not piece:
            return False
        hits = []
        for stop in self.stops:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                hits.append((at + len(stop), at, stop))
        if not hits:
            return False
        end, start, self.found = min(hits)
        self.text = self.text[: end if self.include_stop else start]
        return True

    def _held_back(self) -> int:
        """Characters at the end that a stop string could still begin with."""
        longest = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
