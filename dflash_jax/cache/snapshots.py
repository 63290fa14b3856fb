"""Snapshots of recurrent states for later prompts: the host's account of a pool of them on the device.

Pages alone are no beginning of a prompt for a target with recurrent states: a state after exactly their last token has to be there
too. A snapshot is such a state, under the key of the page that ends where it was taken.
"""

from collections.abc import Callable, Sequence


class SnapshotAccount:
    """Finds snapshots by key, and says which row of the pool the next one goes to. A row is one copy of a slot's states.

    Nothing has to be given back: a row is read by the call that follows `find`, and who takes it later writes to it later on the
    same device.

    Args:
      count: rows; 0 keeps nothing.
    """

    def __init__(self, count: int):
        self.count = count
        self._rows: dict[bytes, int] = {}  # the one found or taken longest ago first

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def find(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """The largest number of `keys` whose last one has a snapshot, and its row; 0 and -1 where none has."""
        for number in range(len(keys), 0, -1):
            row = self._rows.pop(keys[number - 1], -1)
            if row >= 0:
                self._rows[keys[number - 1]] = row
                return number, row
        return 0, -1

    def free_row(self, alive: Callable[[bytes], bool]) -> int:
        """A row for a new snapshot, which nobody finds until it is published.

        Args:
          alive: whether the page with a key can be found still. Snapshots without their pages go first, then the one that was
            found or taken longest ago.
        """
        if len(self._rows) >= self.count:
            oldest = next(iter(self._rows))
            del self._rows[next((key for key in self._rows if not alive(key)), oldest)]
        taken = {*self._rows.values()}
        return next(row for row in range(self.count) if row not in taken)

    def publish(self, row: int, key: bytes) -> None:
        """Lets `find` know that `row` holds the state after the page with `key`."""
        self._rows[key] = row

    def forget(self) -> None:
        """No row holds anything that may be used."""
        self._rows = {}

    def check_integrity(self) -> None:
        """Raises AssertionError where a row stands under two keys, or a key's row is none of the pool's."""
        rows = list(self._rows.values())
        if len({*rows}) != len(rows) or any(not 0 <= row < self.count for row in rows):
            raise AssertionError(f"snapshots are not in rows of their own among {self.count}: {rows}")


def snapshot_places(cached: int, shared: int, length: int, page_size: int, *, apart: int, every: int) -> list[int]:
    """After which tokens of a prompt its state is kept, in ascending order.

    Every place costs a call that reads all weights, and a row of the pool. In order of worth: the end of what another prompt has
    in common with this one, as a third is likely to have it too; the end of the last whole page, where a conversation goes on; and
    some places on the way, for prompts that leave this one nobody knows where.

    Args:
      cached: tokens whose state was found.
      shared: tokens of pages that this prompt has in common with others.
      length: tokens of the prompt.
      apart: tokens that a place must be past the one before it: fewer save less than the call costs.
      every: tokens from one place on the way to the next.
    """
    last = (length - 1) // page_size * page_size
    places = [cached]
    for place in (shared, last, *range(every, length, every)):
        if cached < place <= last and all(abs(place - other) >= apart for other in places):
            places.append(place)
    return sorted(places[1:])
