"""Where keys and values live between steps: page pools on the device, and the host's account of who owns which page."""

from dflash_jax.cache.allocator import PageAllocator
from dflash_jax.cache.pages import Pages, make_pages, page_bytes, slots_of

__all__ = ["PageAllocator", "Pages", "make_pages", "page_bytes", "slots_of"]
