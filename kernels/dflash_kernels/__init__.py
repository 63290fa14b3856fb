"""Attention and cache operations for the GPU: arrays in, arrays out. Knows no model.

Letters: B sequences, T query tokens per sequence, S keys, N query heads, K key/value heads, H head dim, P pages, p page size.
"""

from dflash_kernels.cache_write.api import cache_write
from dflash_kernels.dispatch import NoImplementationError
from dflash_kernels.paged_attention.api import paged_attention

__all__ = ["NoImplementationError", "cache_write", "paged_attention"]
