"""Names for what full pages hold, so that requests with the same beginning can share them.

Keys and values of a page depend on every token up to its last one and on nothing else of a request. The key of a page is the
digest of its own tokens and of the key before it: equal keys mean equal beginnings.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


def extend_keys(keys: list[bytes], tokens: Sequence[int], page_size: int, root: bytes) -> None:
    """Appends to `keys` those of the full pages of `tokens` that it lacks.

    Args:
      keys: of the first pages of the same tokens.
      root: tells apart pages that hold different things for equal tokens.
    """
    for page in range(len(keys), len(tokens) // page_size):
        content = np.asarray(tokens[page * page_size : (page + 1) * page_size], np.int32).tobytes()
        keys.append(hashlib.blake2b(content, key=keys[-1] if keys else root, digest_size=16).digest())
