"""The account of pages under any order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from dflash_jax.cache import PageAllocator
from dflash_jax.errors import CapacityError


class Account(RuleBasedStateMachine):
    """Requests that take, share and give back pages, beside a plain count of each page's owners."""

    requests = Bundle("requests")

    @initialize(pages=st.integers(0, 12))
    def start(self, pages: int) -> None:
        self.pages, self.owners = PageAllocator(pages), [0] * pages

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
        for page in got:
            self.owners[page] = 1
        return got

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
        for page in held:
            self.owners[page] -= 1

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


def test_the_check_finds_a_wrong_account() -> None:
    for spoil in (lambda p: p._free.append(p._free[0]), lambda p: p._free.pop(), lambda p: p._free.append(0),
                  lambda p: p._owners.__setitem__(0, 0), lambda p: p._owners.__setitem__(0, -1)):  # fmt: skip
        pages = PageAllocator(5)
        assert pages.allocate(1) == [0]
        pages.check_integrity()
        spoil(pages)
        with pytest.raises(AssertionError, match="page"):
            pages.check_integrity()
