"""The KV cache: page pools on the device, and the host's account of who owns which page."""

from dflash_jax.cache.allocator import PageAllocator
from dflash_jax.cache.pages import Pages, make_pages, page_bytes, slots_of
from dflash_jax.cache.prefix import extend_keys
from dflash_jax.cache.specs import LayerSpec, layer_specs
from dflash_jax.quantization.kv_formats import CacheScales, check_cache_dtype

__all__ = [
    "CacheScales", "LayerSpec", "PageAllocator", "Pages", "check_cache_dtype", "extend_keys", "layer_specs",
    "make_pages", "page_bytes", "slots_of",
]  # fmt: skip
