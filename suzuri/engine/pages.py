"""Pages and slots by number: who holds which, and which are free. Integers only, no tensors.

docs/engine.md, State, tells what the numbers stand for. Read next: prefix_cache.py.
"""

from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfPages(Exception):
    """A pool has fewer free pages than asked for. Control flow inside the engine."""


class Pool:
    """Reference counts of the ids 1 .. size - 1; id 0 is the page that nobody owns.

    References are of two sorts. *Held* ones (`take`, `share`, `release`) belong to somebody who
    needs the page now. *Kept* ones (`keep`, `let_go`) belong to the prefix cache, which can give
    them up at any time; a page with kept references only is *spare*. All is counted as it happens:
    no call costs more than the pages that it names.
    """

    def __init__(self, name: str, size: int) -> None:
        assert size >= 1, f"pool {name!r}: size {size} has no room for page 0"
        self.name, self.size = name, size
        self.spare = 0
        """Pages with kept references only: what the prefix cache could free."""
        self.watched: set[int] = set()
        """Pages whose becoming spare is noted, once, in `woken`."""
        self.woken: list[int] = []
        self._references = [0] * size
        self._kept = [0] * size
        self._free = list(range(size - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - 1 - len(self._free)

    def take(self, count: int = 1) -> list[int]:
        """`count` free pages, each with one held reference. OutOfPages (and nothing taken) when
        fewer are free."""
        if count <= 0:
            return []
        if count > len(self._free):
            raise OutOfPages(f"{count} of pool {self.name!r}, {len(self._free)} are free")
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for id in taken:
            self._references[id] = 1
        return taken

    def share(self, ids: Iterable[int]) -> None:
        """One more held reference each; somebody must have one already."""
        references, kept = self._references, self._kept
        for id in ids:
            count = references[id]
            assert count > 0, f"pool {self.name!r}: page {id} is free, it cannot be shared"
            if count == kept[id]:
                self.spare -= 1
            references[id] = count + 1

    def release(self, ids: Iterable[int]) -> None:
        """One held reference less each; a page without any reference is free again."""
        references, kept = self._references, self._kept
        for id in ids:
            count = references[id] - 1
            assert count >= kept[id], f"pool {self.name!r}: page {id} released too often"
            references[id] = count
            if count == 0:
                self._free.append(id)
            elif count == kept[id]:
                self.spare += 1
                if id in self.watched:
                    self.watched.discard(id)
                    self.woken.append(id)

    def keep(self, ids: Iterable[int]) -> None:
        """One more kept reference each; somebody must have a reference already."""
        references, kept = self._references, self._kept
        for id in ids:
            assert references[id] > 0, f"pool {self.name!r}: page {id} is free, it cannot be kept"
            references[id] += 1
            kept[id] += 1

    def let_go(self, ids: Iterable[int]) -> None:
        """One kept reference less each; a page without any reference is free again."""
        references, kept = self._references, self._kept
        for id in ids:
            assert kept[id] > 0, f"pool {self.name!r}: page {id} let go too often"
            references[id] -= 1
            kept[id] -= 1
            if references[id] == 0:
                self.spare -= 1
                self._free.append(id)

    def references(self, id: int) -> int:
        """References of both sorts."""
        return self._references[id]

    def keepers(self, id: int) -> int:
        """Kept references when the page is spare, 0 when it is not."""
        return self._kept[id] if self._kept[id] == self._references[id] else 0

    def check(self, held: Counter[int]) -> None:
        """AssertionError unless the references are those in `held` (of both sorts) and the ids
        are cut into free and used ones without rest."""
        for id, count in enumerate(self._references):
            assert count == held[id], (
                f"pool {self.name!r}: page {id} has {count} references, {held[id]} are known"
            )
            assert 0 <= self._kept[id] <= count, f"pool {self.name!r}: page {id}: kept > all"
        strays = [id for id in held if not 0 < id < self.size and held[id]]
        assert not strays, f"pool {self.name!r}: pages {strays} do not exist"
        free = Counter(self._free)
        for id in range(1, self.size):
            wanted = 0 if self._references[id] else 1
            assert free[id] == wanted, f"pool {self.name!r}: page {id} is {free[id]} times free"
        assert free.total() == self.free and 0 not in free, f"pool {self.name!r}: page 0 is free"
        spare = sum(1 for id in range(self.size) if self.keepers(id))
        assert spare == self.spare, f"pool {self.name!r}: {self.spare} spare, counted {spare}"


class Table:
    """The pages of one sequence in one pool. `pages[m]` is the page of positions m * T ..
    m * T + T - 1 (T is `page_size`), 0 where it was dropped."""

    def __init__(self, pool: Pool, page_size: int) -> None:
        assert page_size >= 1, f"pages of {page_size} tokens"
        self.pool, self.page_size = pool, page_size
        self.pages: list[int] = []
        self._first = 0  # blocks before it are 0

    def missing(self, length: int) -> int:
        """Pages that are still to be taken so that each position < `length` has one."""
        return max(-(-length // self.page_size) - len(self.pages), 0)

    def grow(self, length: int) -> None:
        """Takes them. OutOfPages (and nothing taken) when the pool has fewer."""
        self.pages += self.pool.take(self.missing(length))

    def drop_before(self, position: int) -> None:
        """Releases the pages whose positions are all < `position`. They do not come back."""
        first = min(position // self.page_size, len(self.pages))
        if first > self._first:
            self.pool.release(self.pages[self._first : first])
            self.pages[self._first : first] = [0] * (first - self._first)
            self._first = first

    def held(self) -> list[int]:
        return self.pages[self._first :]

    def clear(self) -> None:
        """Releases every page; the table is as new."""
        self.pool.release(self.held())
        self.pages, self._first = [], 0

    def cover(self, start: int, stop: int) -> tuple[int, tuple[int, ...]]:
        """First block and pages of positions `start` .. `stop` - 1: what a resume point keeps.

        All of them must still be there.
        """
        first = max(start, 0) // self.page_size
        pages = tuple(self.pages[first : -(-stop // self.page_size)])
        assert first >= self._first and first + len(pages) == -(-stop // self.page_size), (
            f"pool {self.pool.name!r}: positions {start} .. {stop - 1} are not all there: blocks "
            f"{self._first} .. {len(self.pages) - 1} of {self.page_size}"
        )
        return first, pages

    def adopt(self, first_block: int, pages: Sequence[int]) -> None:
        """Shares the pages of a resume point. The table must be empty."""
        assert not self.pages, f"pool {self.pool.name!r}: a sequence that has pages cannot resume"
        self.pool.share(pages)
        self.pages = [0] * first_block + list(pages)
        self._first = first_block

    def copy_on_write(self, block: int) -> tuple[int, int] | None:
        """Makes page `block` this sequence's own before its first write there after `adopt`.

        When somebody else has the page too, a fresh one takes its place and (source, destination)
        says what to copy; else None, as for a block that has no page yet. OutOfPages changes
        nothing. The source may be freed and taken again within the same step: a step does its
        copies first, in the order in which they were made, and then writes. To be called on resume
        only: the sequence that has filled a page so far may go on filling it, however many share
        what is below.
        """
        if block >= len(self.pages) or self.pool.references(self.pages[block]) <= 1:
            return None
        source = self.pages[block]
        (destination,) = self.pool.take()
        self.pool.release((source,))
        self.pages[block] = destination
        return source, destination
