"""Pools and tables: reference counts, windows, copy on write (k08, the part without a model)."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.engine.pages import OutOfPages, Pool, Table


def test_pool_hands_out_every_page_once_and_never_page_0():
    pool = Pool("global", 6)
    assert sorted(pool.take(3) + pool.take() + pool.take(1)) == [1, 2, 3, 4, 5]
    assert (pool.free, pool.used) == (0, 5)


def test_too_many_pages_take_nothing():
    pool = Pool("local", 4)
    pool.take(2)
    with pytest.raises(OutOfPages, match="2 of pool 'local', 1 are free"):
        pool.take(2)
    assert pool.free == 1
    assert pool.take(0) == []
    assert pool.free == 1


def test_a_page_is_free_when_the_last_reference_goes():
    pool = Pool("global", 3)
    (page,) = pool.take()
    pool.share([page, page])
    assert pool.references(page) == 3
    pool.release([page, page])
    assert (pool.references(page), pool.free) == (1, 1)
    pool.release([page])
    assert (pool.references(page), pool.free) == (0, 2)


def test_wrong_releases_and_shares_are_noticed():
    pool = Pool("global", 3)
    (page,) = pool.take()
    pool.keep([page])
    pool.release([page])
    with pytest.raises(AssertionError, match=f"page {page} released too often"):
        pool.release([page])  # the reference left is the cache's
    pool.let_go([page])
    with pytest.raises(AssertionError, match=f"page {page} let go too often"):
        pool.let_go([page])
    with pytest.raises(AssertionError, match="released too often"):
        pool.release([page])
    for id in (0, page):
        with pytest.raises(AssertionError, match=f"page {id} is free"):
            pool.share([id])
        with pytest.raises(AssertionError, match=f"page {id} is free"):
            pool.keep([id])


def test_spare_pages_are_those_with_kept_references_only():
    pool = Pool("global", 5)
    a, b = pool.take(2)
    pool.keep([a, a, b])
    assert (pool.spare, pool.keepers(a)) == (0, 0)
    pool.release([a])
    assert (pool.spare, pool.keepers(a), pool.keepers(b)) == (1, 2, 0)
    pool.share([a])
    assert pool.spare == 0
    pool.release([a, b])
    assert pool.spare == 2
    pool.let_go([a])
    assert (pool.spare, pool.free) == (2, 2)
    pool.let_go([a, b])
    assert (pool.spare, pool.free) == (0, 4)


def test_a_watched_page_is_noted_once_when_it_becomes_spare():
    pool = Pool("global", 4)
    a, b = pool.take(2)
    pool.keep([a, b])
    pool.watched.add(a)
    pool.release([b])
    assert pool.woken == []
    pool.release([a])
    pool.share([a])
    pool.release([a])
    assert pool.woken == [a]
    assert not pool.watched


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (Counter[int](), "page 1 has 1 references, 0 are known"),
        (Counter({1: 2}), "page 1 has 1 references, 2 are known"),
        (Counter({1: 1, 2: 1}), "page 2 has 0 references, 1 are known"),
        (Counter({1: 1, 9: 1}), r"pages \[9\] do not exist"),
    ],
)
def test_check_names_pool_and_page(held: Counter[int], message: str):
    pool = Pool("draft_local", 4)
    assert pool.take() == [1]
    pool.check(Counter({1: 1}))
    with pytest.raises(AssertionError, match=f"pool 'draft_local': {message}"):
        pool.check(held)


def test_check_sees_a_page_that_is_free_and_used():
    class ForgetsToMark(Pool):
        def take(self, count: int = 1) -> list[int]:
            pages = super().take(count)
            self._free += pages
            return pages

    pool = ForgetsToMark("global", 4)
    pages = pool.take()
    with pytest.raises(AssertionError, match="page 1 is 1 times free"):
        pool.check(Counter(pages))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("tsrkl"), st.integers(0, 7)), max_size=60))
def test_counts_follow_a_plain_model(operations: list[tuple[str, int]]):
    pool, held, kept = Pool("global", 6), Counter[int](), Counter[int]()
    for operation, n in operations:
        known = sorted((held + kept).elements())
        some = known[n % len(known)] if known else 0
        if operation == "t" and n <= pool.free:
            pages = pool.take(n)
            assert not set(pages) & set(known)
            held.update(pages)
        elif operation == "s" and some:
            pool.share([some])
            held[some] += 1
        elif operation == "k" and some:
            pool.keep([some])
            kept[some] += 1
        elif operation == "r" and held[some]:
            pool.release([some])
            held[some] -= 1
        elif operation == "l" and kept[some]:
            pool.let_go([some])
            kept[some] -= 1
        pool.check(held + kept)
        assert pool.spare == sum(1 for page in kept if kept[page] and not held[page])
        assert pool.free == 5 - len(+(held + kept))


@pytest.mark.parametrize("page_size", [1, 4, 128])
def test_table_grows_by_what_is_missing(page_size: int):
    pool = Pool("global", 200)
    table = Table(pool, page_size)
    held = 0
    for length in (0, 1, page_size, page_size + 1, 3 * page_size, 3 * page_size, 2):
        missing = table.missing(length)
        assert missing == max(0, -(-length // page_size) - held)
        table.grow(length)
        held += missing
        assert len(table.pages) == pool.used == held
    assert len(set(table.pages)) == held
    table.clear()
    assert (pool.used, table.pages, table.missing(page_size)) == (0, [], 1)


def test_a_table_without_room_stays_as_it_is():
    table = Table(Pool("global", 4), 4)
    table.grow(8)
    before = list(table.pages)
    with pytest.raises(OutOfPages):
        table.grow(17)
    assert table.pages == before


def test_pages_before_the_window_are_released_and_stay_away():
    pool = Pool("local", 9)
    table = Table(pool, 4)
    table.grow(14)
    pages = list(table.pages)
    for position, dropped in ((-3, 0), (0, 0), (3, 0), (4, 1), (4, 1), (11, 2), (7, 2)):
        table.drop_before(position)
        assert table.pages == [0] * dropped + pages[dropped:]
        assert pool.used == len(table.held()) == 4 - dropped
    table.grow(17)  # position 16 is in the fifth block, whatever was dropped
    assert len(table.pages) == 5
    assert table.held() == [*pages[2:], table.pages[4]]
    table.drop_before(100)
    assert (table.held(), pool.used) == ([], 0)
    table.clear()
    assert pool.used == 0


def test_cover_is_what_a_point_keeps():
    table = Table(Pool("local", 9), 4)
    table.grow(14)
    pages = tuple(table.pages)
    assert table.cover(0, 14) == (0, pages)
    assert table.cover(-5, 4) == (0, pages[:1])
    assert table.cover(7, 8) == (1, pages[1:2])
    assert table.cover(7, 9) == (1, pages[1:3])
    table.drop_before(8)
    assert table.cover(8, 14) == (2, pages[2:])
    with pytest.raises(AssertionError, match=r"positions 7 \.\. 13 are not all there"):
        table.cover(7, 14)
    with pytest.raises(AssertionError, match="not all there"):
        table.cover(8, 17)


def test_adopted_pages_are_shared_and_given_back():
    pool = Pool("local", 9)
    first, second = Table(pool, 4), Table(pool, 4)
    first.grow(14)
    block, pages = first.cover(6, 14)
    second.adopt(block, pages)
    assert second.pages == [0, *pages]
    assert [pool.references(page) for page in first.pages] == [1, 2, 2, 2]
    with pytest.raises(AssertionError, match="cannot resume"):
        second.adopt(block, pages)
    second.drop_before(8)
    assert [pool.references(page) for page in first.pages] == [1, 1, 2, 2]
    first.clear()
    assert pool.used == 2
    second.clear()
    assert pool.used == 0


def test_copy_on_write_replaces_only_what_is_shared():
    pool = Pool("global", 5)
    first, second = Table(pool, 4), Table(pool, 4)
    first.grow(6)
    second.adopt(0, first.pages)
    shared = first.pages[1]
    copied = second.copy_on_write(1)
    assert copied == (shared, second.pages[1])
    assert second.pages[0] == first.pages[0]
    assert second.pages[1] != shared
    assert first.pages[1] == shared
    assert [pool.references(page) for page in second.pages] == [2, 1]
    assert first.copy_on_write(1) is None  # the only one that has it
    assert second.copy_on_write(1) is None
    assert second.copy_on_write(2) is None  # no page there yet


def test_copy_on_write_without_room_changes_nothing():
    pool = Pool("global", 3)
    first, second = Table(pool, 4), Table(pool, 4)
    first.grow(8)
    second.adopt(0, first.pages)
    with pytest.raises(OutOfPages):
        second.copy_on_write(1)
    assert second.pages == first.pages
    pool.check(Counter(first.pages + second.pages))


def test_the_page_of_a_kept_reference_alone_is_copied_too():
    """A resume point reads its page as long as it lives, also when its sequence has ended."""
    pool = Pool("global", 4)
    first, second = Table(pool, 4), Table(pool, 4)
    first.grow(3)
    (page,) = first.pages
    pool.keep([page])
    first.clear()
    second.adopt(0, [page])
    copied = second.copy_on_write(0)
    assert copied is not None
    assert copied[0] == page
    assert pool.keepers(page) == 1
