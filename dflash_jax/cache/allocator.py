"""The host's account of pages: free ones, how many owners each other one has, and which contents may be used again.

Target and drafter use the same page indices in pools of their own, so one account serves both, and a page that two requests
share is shared for both models.

A page whose content is worth finding again is published under a key that stands for that content. Without an owner it is free
like any other, but handed out last, the one longest without an owner first; until then `find` gives it a new owner.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from dflash_jax.errors import CapacityError


class PageAllocator:
    """Hands out pages `0 .. num_pages - 1`.

    Contract: every page returned by `allocate` or `find`, or named to `share`, is later named to `free` exactly once per owner.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._owners = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: dict[int, None] = {}  # published pages without an owner, the next one to give up first
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out; published ones without an owner are among them."""
        return len(self._free) + len(self._idle)

    @property
    def num_published(self) -> int:
        return len(self._keys)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one owner each, or none at all.

        Raises:
          CapacityError: fewer are free.
        """
        if count < 0:
            raise ValueError(f"{count} pages cannot be allocated")
        if count > self.num_free:
            raise CapacityError(
                f"{count} pages wanted, {self.num_free} of {self.num_pages} free: wait for running requests, send shorter ones, "
                "or load the model with a larger num_pages"
            )
        while len(self._free) < count:
            page = next(iter(self._idle))
            del self._idle[page], self._pages[self._keys.pop(page)]
            self._free.append(page)
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
        # The last of a sequence's pages are of use only after the first: they are given up before them.
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Lets `find` know what an owned page holds. Nothing may be written to it from now on, by any owner.

        Where another page has the same content already, that one stays the one to be found.
        """
        if not self._owned(page):
            raise ValueError(f"page {page} has no owner and cannot be published")
        if key not in self._pages and page not in self._keys:
            self._pages[key], self._keys[page] = page, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages published under `keys`, in order, up to the first key that is not known. Each gains an owner."""
        found = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._owners[page] += 1
            found.append(page)
        return found

    def knows(self, key: bytes) -> bool:
        """Whether `find` would find a page under `key`."""
        return key in self._pages

    def forget(self) -> None:
        """Makes every published page an ordinary one: their contents are gone."""
        self._free += self._idle
        self._idle.clear()
        self._keys.clear()
        self._pages.clear()

    def reclaim(self) -> None:
        """Takes every owner from every page, whatever state an interrupted call has left; published pages can still be found."""
        keys = {page: key for page, key in self._keys.items() if self._pages.get(key) == page}
        # Those of running sequences are given up after those that were free before, their last ones first.
        idle = [page for page in self._idle if page in keys]
        idle += [page for page in reversed(keys) if page not in self._idle]
        free = [page for page in range(self.num_pages - 1, -1, -1) if page not in keys]
        pages, owners = {key: page for page, key in keys.items()}, [0] * self.num_pages
        # At once: another interrupt finds the account as it was, or whole.
        self._keys, self._pages, self._owners, self._idle, self._free = keys, pages, owners, dict.fromkeys(idle), free

    def _owned(self, page: int) -> bool:
        # -1 stands for no page in tables; as an index it would be the last one.
        return 0 <= page < self.num_pages and self._owners[page] > 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is either free once or owned, never both and never neither."""
        free = {*self._free, *self._idle}
        if len(free) != self.num_free:
            raise AssertionError("a page is free twice")
        wrong = [page for page in range(self.num_pages) if (self._owners[page] == 0) != (page in free)]
        if wrong or any(owners < 0 for owners in self._owners):
            raise AssertionError(f"pages {wrong} are neither free nor owned, or both")
        published = {page: key for key, page in self._pages.items()}
        if published != self._keys or not self._idle.keys() <= self._keys.keys():
            raise AssertionError("the keys of published pages do not agree")
