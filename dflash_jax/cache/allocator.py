"""The host's account of pages: free ones, and how many owners each other one has.

Target and drafter use the same page indices in pools of their own, so one account serves both, and a page that two requests
share is shared for both models.
"""

from collections import Counter
from collections.abc import Sequence

from dflash_jax.errors import CapacityError


class PageAllocator:
    """Hands out pages `0 .. num_pages - 1`.

    Contract: every page returned by `allocate` or named to `share` is later named to `free` exactly once per owner.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._owners = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one owner each, or none at all.

        Raises:
          CapacityError: fewer are free.
        """
        if count < 0:
            raise ValueError(f"{count} pages cannot be allocated")
        if count > len(self._free):
            raise CapacityError(
                f"{count} pages wanted, {len(self._free)} of {self.num_pages} free: wait for running requests, send shorter ones, "
                "or load the model with a larger num_pages"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds an owner to pages in use; changes nothing where one of them has none."""
        for page in pages:
            if not self._owned(page):
                raise ValueError(f"page {page} has no owner and cannot be shared")
        for page in pages:
            self._owners[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Takes one owner from each page; a page without owners is free again. Changes nothing where that is too many."""
        for page, times in Counter(pages).items():
            if not self._owned(page) or self._owners[page] < times:
                raise ValueError(f"page {page} is already free")
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def _owned(self, page: int) -> bool:
        # -1 stands for no page in tables; as an index it would be the last one.
        return 0 <= page < self.num_pages and self._owners[page] > 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is either free once or owned, never both and never neither."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a page is free twice")
        wrong = [page for page in range(self.num_pages) if (self._owners[page] == 0) != (page in free)]
        if wrong or any(owners < 0 for owners in self._owners):
            raise AssertionError(f"pages {wrong} are neither free nor owned, or both")
