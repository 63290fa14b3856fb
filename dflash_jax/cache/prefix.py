"""Names for what full pages hold, so that requests with the same beginning can share them.

Keys and values of a page depend on every token up to its last one, on what pictures among them show, and on nothing else of a
request. The key of a page is the digest of its own tokens, of pictures that begin in it, and of the key before it: equal keys mean
equal beginnings.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


def extend_keys(
    keys: list[bytes],
    tokens: Sequence[int],
    page_size: int,
    root: bytes,
    marks: Sequence[tuple[int, bytes]] = (),
) -> None:
    """Appends to `keys` those of the full pages of `tokens` that it lacks.

    Args:
      keys: of the first pages of the same tokens.
      root: tells apart pages that hold different things for equal tokens.
      marks: of each picture the place of its first token, and what names its content: its tokens are those of any other.
    """
    for page in range(len(keys), len(tokens) // page_size):
        start, stop = page * page_size, (page + 1) * page_size
        content = np.asarray(tokens[start:stop], np.int32).tobytes()
        content += b"".join(at.to_bytes(8, "little") + name for at, name in marks if start <= at < stop)
        keys.append(hashlib.blake2b(content, key=keys[-1] if keys else root, digest_size=16).digest())
