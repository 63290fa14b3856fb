"""The account of pages under any order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from dflash_jax.cache import PageAllocator, extend_keys
from dflash_jax.errors import CapacityError


class Account(RuleBasedStateMachine):
    """Requests that take, share, publish, find and give back pages, beside a plain count of each page's owners.

    `holds` is what was last published of each page and not given to another since; `idle` the published pages without an owner,
    the first to be given up first.
    """

    requests = Bundle("requests")

    @initialize(pages=st.integers(0, 12))
    def start(self, pages: int) -> None:
        self.pages, self.owners = PageAllocator(pages), [0] * pages
        self.holds: dict[int, bytes] = {}
        self.idle: list[int] = []

    @rule(target=requests, count=st.integers(0, 14))
    def allocate(self, count: int) -> list[int]:
        free = self.owners.count(0)
        if count > free:
            with pytest.raises(CapacityError, match=f"{count} pages wanted, {free} of {len(self.owners)} free"):
                self.pages.allocate(count)
            return []
        got = self.pages.allocate(count)
        assert len(set(got)) == count
        assert all(self.owners[page] == 0 for page in got)
        given_up = self.idle[: max(0, count - (free - len(self.idle)))]
        assert set(got) & set(self.idle) == set(given_up), (
            "unpublished pages go first, then those longest without an owner"
        )
        del self.idle[: len(given_up)]
        for page in got:
            self.holds.pop(page, None)
            self.owners[page] = 1
        return got

    @rule(held=requests, keys=st.lists(st.integers(0, 20), max_size=6))
    def publish(self, held: list[int], keys: list[int]) -> None:
        for page, number in zip(held, keys, strict=False):
            key = number.to_bytes()
            if self.owners[page] == 0:
                with pytest.raises(ValueError, match=f"page {page} "):
                    self.pages.publish(page, key)
                continue
            self.pages.publish(page, key)
            if key not in self.holds.values():
                self.holds.setdefault(page, key)

    @rule(target=requests, keys=st.lists(st.integers(0, 20), max_size=6))
    def find(self, keys: list[int]) -> list[int]:
        where = {key: page for page, key in self.holds.items()}
        expected = []
        for key in keys:
            if key.to_bytes() not in where:
                break
            expected.append(where[key.to_bytes()])
        found = self.pages.find([key.to_bytes() for key in keys])
        assert found == expected
        for page in found:
            self.owners[page] += 1
        self.idle = [page for page in self.idle if page not in found]
        return found

    @rule()
    def forget(self) -> None:
        self.pages.forget()
        self.holds, self.idle = {}, []

    @rule(target=requests, held=requests, part=st.floats(0, 1))
    def share(self, held: list[int], part: float) -> list[int]:
        shared = [page for page in held if self.owners[page]][: round(part * len(held))]
        self.pages.share(shared)
        for page in shared:
            self.owners[page] += 1
        return shared

    @rule(held=consumes(requests))
    def free(self, held: list[int]) -> None:
        self.pages.free(held)
        for page in reversed(held):
            self.owners[page] -= 1
            if self.owners[page] == 0 and page in self.holds:
                self.idle.append(page)

    @rule(held=requests, change=st.sampled_from(("share", "free")), data=st.data())
    def name_a_page_nobody_owns(self, held: list[int], change: str, data: st.DataObject) -> None:
        nobodys = [page for page, owners in enumerate(self.owners) if owners == 0]
        wrong = data.draw(st.sampled_from([*nobodys, -1, len(self.owners), 2**31]))
        place = data.draw(st.integers(0, len(held)))
        with pytest.raises(ValueError, match=f"page {wrong} "):
            getattr(self.pages, change)([*held[:place], wrong, *held[place:]])

    @rule(held=requests)
    def free_twice_in_one_call(self, held: list[int]) -> None:
        if held:
            with pytest.raises(ValueError, match=f"page {held[0]} "):
                self.pages.free([*held, *[held[0]] * self.owners[held[0]]])

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "owners"):
            self.pages.check_integrity()
            assert self.pages.num_free == self.owners.count(0)
            assert self.pages.num_published == len(self.holds)


Account.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)
TestAccount = Account.TestCase


def test_all_or_nothing() -> None:
    pages = PageAllocator(4)
    pages.allocate(3)
    with pytest.raises(CapacityError, match="2 pages wanted, 1 of 4 free: wait for running requests"):
        pages.allocate(2)
    assert pages.num_free == 1
    with pytest.raises(ValueError, match="-1"):
        pages.allocate(-1)


def test_a_shared_page_is_free_only_after_its_last_owner() -> None:
    pages = PageAllocator(3)
    first = pages.allocate(2)
    pages.share(first[:1])
    pages.free(first)
    assert pages.num_free == 2
    pages.free(first[:1])
    assert pages.num_free == 3
    pages.check_integrity()


def test_reclaim_after_any_interrupted_change() -> None:
    """Half of a change is left behind; the account is whole again, and what it still knows of published pages is true."""
    for spoil in (lambda p: p._free.pop(), lambda p: p._owners.__setitem__(2, 0), lambda p: p._pages.pop(b"a"),
                  lambda p: p._keys.pop(1), lambda p: p._idle.pop(1), lambda p: p._idle.clear()):  # fmt: skip
        pages = PageAllocator(6)
        held = pages.allocate(4)
        pages.publish(0, b"a")
        pages.publish(1, b"b")
        pages.free([held[1]])
        spoil(pages)
        pages.reclaim()
        pages.check_integrity()
        assert pages.num_free == 6
        for key, page in ((b"a", 0), (b"b", 1)):
            assert pages.find([key]) in ([page], [])
        pages.reclaim()
        assert sorted(pages.allocate(6)) == list(range(6))
        assert pages.num_published == 0


def test_the_check_finds_a_wrong_account() -> None:
    for spoil in (lambda p: p._free.append(p._free[0]), lambda p: p._free.pop(), lambda p: p._free.append(0),
                  lambda p: p._owners.__setitem__(0, 0), lambda p: p._owners.__setitem__(0, -1)):  # fmt: skip
        pages = PageAllocator(5)
        assert pages.allocate(1) == [0]
        pages.check_integrity()
        spoil(pages)
        with pytest.raises(AssertionError, match="page"):
            pages.check_integrity()


def test_names_of_full_pages_follow_their_beginnings() -> None:
    """Only full pages have names; they come out the same however many tokens were known when, and tell any difference before."""

    def names(tokens: list[int], *, stops: tuple[int, ...] = (), root: bytes = b"a") -> list[bytes]:
        keys: list[bytes] = []
        for stop in (*stops, len(tokens)):
            extend_keys(keys, tokens[:stop], 4, root)
        return keys

    tokens = list(range(14))
    whole = names(tokens)
    assert len(whole) == len(set(whole)) == 3
    assert names(tokens[:12]) == whole
    assert names(tokens[:11]) == whole[:2]
    assert names(tokens[:3]) == []
    assert names(tokens, stops=(2, 6, 7, 9)) == whole
    for place in range(12):
        other = names([*tokens[:place], 99, *tokens[place + 1 :]])
        assert [a == b for a, b in zip(other, whole, strict=True)] == [page < place // 4 for page in range(3)]
    assert not set(names(tokens, root=b"b")) & set(whole)
    repeated = names([7] * 12)
    assert len(set(repeated)) == 3  # the same tokens at another place are another page
