"""Resume points: what earlier prompts left behind, found by prefix, evicted by kind of state.

docs/engine.md, Prefix cache, has the rules. No tensors: pages and snapshots are ids of pages.Pool.
The tree is radix.py.
"""

import collections
import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from suzuri.engine.pages import Pool
from suzuri.engine.radix import Node, Radix

SIBLINGS = 8
"""Branches looked at, at most, for a point one token past a divergence."""


class Span(NamedTuple):
    """Pages of consecutive blocks, the first of them `first_block`."""

    first_block: int
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointState:
    """Every kind of state of a sequence's first N tokens.

    All global pages; local pages of positions N - window .. N - 1; the snapshot of the conv inputs
    N - taps .. N - 1. A sequence that has resumed has all of it one token further on. A model
    without layers of a kind has no pages of it. `extra`: by pool, the same for further stacks of
    layers.
    """

    global_pages: tuple[int, ...]
    snapshot: int
    local_first_block: int = 0
    local_pages: tuple[int, ...] = ()
    extra: Mapping[str, Span] = dataclasses.field(default_factory=dict[str, Span])

    def spans(self) -> dict[str, Span]:
        """By pool, for the pools that it uses."""
        spans = {
            "global": Span(0, self.global_pages),
            "local": Span(self.local_first_block, self.local_pages),
            "snapshot": Span(0, (self.snapshot,)),
            **self.extra,
        }
        return {pool: span for pool, span in spans.items() if span.pages}


class Point:
    """A resume point in the tree. Callers see it through a `Match`."""

    __slots__ = (
        "alive",
        "is_behind",
        "node",
        "pins",
        "queued",
        "resumed",
        "root",
        "spans",
        "state",
        "used",
    )

    def __init__(self, root: Hashable, state: PointState) -> None:
        self.root = root
        self.state = state
        self.spans = state.spans()
        self.node: Node[Point] | None = None
        self.used = 0  # the clock at its last use
        self.pins = 0
        self.alive = True
        self.resumed = False
        """A request has gone on from here."""
        self.is_behind = False
        """Its conversation has gone on to later points, or has left the way to it."""
        self.queued: set[str] = set()  # pools in whose queue it is


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """What the cache has for a prompt.

    `length` tokens can be resumed from `point` (0 and None: nothing). The point lies at `length`,
    or one token further: then its last token is not used and may be another than the prompt's.
    `shared` tokens lie in the tree, with or without state. `branch`: when a point at that length
    (it is `shared`) would have saved a worthwhile number of tokens, None when not.
    """

    length: int
    point: PointState | None
    branch: int | None
    shared: int = 0
    entry: Point | None = None
    left: Point | None = None
    """The next point after `entry` on a way that the prompt shares in part."""


@dataclasses.dataclass(kw_only=True)
class Stats:
    """Counts since the start. `evictions`: by the pool that was short of pages."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    shared_tokens: int = 0
    """Tokens of used matches that lay in the tree, with or without state."""
    inserted: int = 0
    evictions: Counter[str] = dataclasses.field(default_factory=Counter[str])


class PrefixCache:
    """Resume points over a set of pools.

    Pools are named as in docs/engine.md, State: "global", "local", "snapshot" and, for the stack of
    draft depths, the same with a prefix. `window` tokens of local pages belong to a point (0
    without local layers; `extra_windows`: of other pools that hold a window). At most
    `max_path_tokens` tokens of paths that lead to no point are remembered. A branch is worth
    learning from `min_branch_gain` tokens on.

    Eviction order, for each pool on its own: first the points that a conversation has left behind,
    where that frees a page. Then the page used least recently by any of its points, and with it the
    points that keep it, but for pages of the same age the one that fewest keep. So of a
    conversation's points the longest goes first when all were used at once. No cost grows with the
    number of points except by its logarithm.
    """

    def __init__(
        self,
        pools: Mapping[str, Pool],
        *,
        page_size: int,
        window: int,
        max_path_tokens: int,
        min_branch_gain: int,
        extra_windows: Mapping[str, int] | None = None,
    ) -> None:
        assert min_branch_gain >= 1, f"min_branch_gain is {min_branch_gain}, it must be at least 1"
        self.page_size, self.min_branch_gain = page_size, min_branch_gain
        self.stats = Stats()
        self._pools = dict(pools)
        self._windows = {"local": window, **(extra_windows or {})}
        self._tree = Radix[Point](max_path_tokens)
        self._points: set[Point] = set()
        self._pinned: set[Point] = set()
        self._clock = 0
        self._age = {name: [0] * pool.size for name, pool in self._pools.items()}
        # A queue holds, for each point that may have spare pages, a lower bound of their age. A
        # point found to have none leaves it, and comes back when a page that it watches is spare.
        self._queues = {name: list[tuple[int, int, int, Point]]() for name in self._pools}
        self._watchers = {name: dict[int, set[Point]]() for name in self._pools}
        self._behind = {name: collections.deque[Point]() for name in self._pools}
        self._serial = itertools.count()

    @property
    def points(self) -> int:
        return len(self._points)

    @property
    def path_tokens(self) -> int:
        """Tokens remembered without a point."""
        return self._tree.bare_tokens

    # Finding

    def match(self, root: Hashable, keys: Sequence[int]) -> Match:
        """The longest resume for a prompt, at most len(keys) - 1. Changes nothing.

        `keys`: one integer of any size per token. The point may be evicted at any `make_room`
        until it is pinned or its pages are shared.
        """
        keys = tuple(keys)
        last, shared = self._tree.walk(root, keys)
        most = min(shared, len(keys) - 1)
        node = last
        while node is not None and (node.value is None or node.end > most):
            node = node.parent
        length, entry = (node.end, node.value) if node is not None else (0, None)
        if last is not None and most > 0 and length < most:
            beyond = _point_at(last, shared, most + 1)
            if beyond is not None:
                length, entry = most, beyond
        gain = shared - length
        left = None
        if entry is not None and last is not None and length < shared < last.end:
            left = last.value if _point_above(last) is entry else None
        return Match(
            length=length,
            point=entry.state if entry else None,
            branch=shared if shared < len(keys) and gain >= self.min_branch_gain else None,
            shared=shared,
            entry=entry,
            left=left,
        )

    def use(self, match: Match) -> None:
        """Counts a match, and makes its point the one used last. To be called once for every
        prompt that is admitted, hit or miss."""
        self.stats.shared_tokens += match.shared
        if match.entry is None:
            self.stats.misses += 1
            return
        assert match.entry.alive, "the point has been evicted since the match; pin it"
        self.stats.hits += 1
        self.stats.hit_tokens += match.length
        self._touch(match.entry)
        match.entry.resumed = True
        if match.left is not None and match.left.alive:
            self._leave_behind(match.left)

    def pin(self, match: Match) -> None:
        """Keeps the point of a match, if there is one, from being evicted. Pins are counted."""
        if (point := match.entry) is None:
            return
        assert point.alive or point.pins, "the point has been evicted since the match"
        point.pins += 1
        if point.pins == 1:
            self._pinned.add(point)
            for name, span in point.spans.items():
                self._pools[name].share(span.pages)

    def unpin(self, match: Match) -> None:
        if (point := match.entry) is None:
            return
        assert point.pins > 0, "unpinned more often than pinned"
        point.pins -= 1
        if point.pins == 0:
            self._pinned.discard(point)
            for name, span in point.spans.items():
                self._pools[name].release(span.pages)

    # Adding

    def insert(self, root: Hashable, keys: Sequence[int], length: int, state: PointState) -> bool:
        """Adds a point after keys[:length]; it takes references of its own.

        False, and no reference taken, when there is one already; that one counts as used.
        """
        self._assert_complete(length, state)
        point = Point(root, state)
        point.node = node = self._tree.put(root, tuple(keys[:length]), point)
        if node.value is not None and node.value is not point:
            self._touch(node.value)
            return False
        self._points.add(point)
        self.stats.inserted += 1
        for name, span in point.spans.items():
            self._pools[name].keep(span.pages)
        if (before := _point_above(node)) is not None:
            # A client that drops the thoughts of a turn comes back to where the turn began, and a
            # long turn must not have made that point an old one.
            self._touch(before)
            self._leave_what_served(before)
        self._touch(point)
        return True

    def remember(self, root: Hashable, keys: Sequence[int]) -> None:
        """Adds a path without state, so that branches can be learned from it."""
        self._tree.remember(root, tuple(keys))

    def _assert_complete(self, length: int, state: PointState) -> None:
        assert length >= 1, "a resume point holds at least one token"
        assert state.snapshot > 0, "a resume point without a snapshot"
        spans = state.spans()
        blocks = -(-length // self.page_size)
        for name, pool in self._pools.items():
            if name.endswith("snapshot"):
                continue
            span = spans.get(name, Span(0, ()))
            window = self._windows.get(name)
            if not span.pages and (window == 0 or pool.used == 0):
                continue  # no layers of this kind
            first = max(length - window, 0) // self.page_size if window else 0
            assert span.first_block <= first, f"{name}: from block {span.first_block}, not {first}"
            assert span.first_block + len(span.pages) == blocks, f"{name}: pages are missing"
            assert 0 not in span.pages, f"{name}: a page has been dropped already"

    # Making room

    def make_room(self, pool: str, count: int) -> bool:
        """Evicts points until `count` pages of the pool are free. False, and nothing evicted, when
        that cannot be."""
        target = self._pools[pool]
        if target.free + target.spare < count:
            return False
        while target.free < count:
            self.stats.evictions[pool] += 1
            self._remove(self._oldest(target))
        return True

    def evictable(self, pool: str) -> int:
        """Pages that `make_room` could free: exact, counted by the pool as references change."""
        return self._pools[pool].spare

    def clear(self, root: Hashable = None) -> None:
        """Forgets all points and paths, or those of one root. What is pinned keeps its pages until
        it is unpinned, but can no longer be found or used."""
        for name in self._tree.roots() if root is None else [root]:
            for point in self._tree.values(name):
                self._bury(point)
            self._tree.forget(name)

    def _oldest(self, pool: Pool) -> Point:
        """The point that goes next for a page of this pool, out of its queue."""
        queue, name = self._queues[pool.name], pool.name
        behind = self._behind[name]
        while behind:
            point = behind.popleft()
            is_spare = any(pool.keepers(id) == 1 for id in self._watch_list(point, name))
            if point.alive and point.is_behind and is_spare:
                return point
        self._wake(pool)
        while queue:
            recency, keepers, _, point = heapq.heappop(queue)
            if not point.alive:
                continue
            ages = self._age[name]
            actual = min(
                ((ages[id], n) for id in self._watch_list(point, name) if (n := pool.keepers(id))),
                default=None,
            )
            point.queued.discard(name)
            if actual is None:
                for id in self._watch_list(point, name):
                    self._watchers[name].setdefault(id, set()).add(point)
                    pool.watched.add(id)
            elif actual > (recency, keepers):
                self._enqueue(point, name, actual)
            else:
                return point
        raise AssertionError(f"pool {name!r}: {pool.spare} spare pages that no point keeps")

    def _watch_list(self, point: Point, pool: str) -> Sequence[int]:
        """The pages that tell whether a point has spare ones, and the age of the oldest.

        Whoever holds a page of a kind that keeps everything holds all pages before it, so the last
        page is the first to become spare, has the fewest keepers and is the oldest.
        """
        pages = point.spans[pool].pages
        return pages if self._windows.get(pool) else pages[-1:]

    def _enqueue(self, point: Point, pool: str, bound: tuple[int, int]) -> None:
        if pool in point.queued:
            return
        point.queued.add(pool)
        queue = self._queues[pool]
        heapq.heappush(queue, (*bound, next(self._serial), point))
        if len(queue) > 2 * len(self._points) + 64:  # most are of points long gone
            queue[:] = [entry for entry in queue if entry[3].alive]
            heapq.heapify(queue)

    def _wake(self, pool: Pool) -> None:
        for id in pool.woken:
            for point in self._watchers[pool.name].pop(id, ()):
                self._enqueue(point, pool.name, (point.used, 0))
        pool.woken.clear()

    def _leave_what_served(self, last: Point) -> None:
        """Points above `last` that a request has resumed from, and those above them, have served:
        whoever resumed there has left `last` and a later one since. Not where several ways go on,
        which other conversations begin with too."""
        has_served, point = last.resumed, last
        while point.node is not None and (point := _point_above(point.node)) is not None:
            has_served = has_served or point.resumed
            assert point.node is not None
            if not has_served or point.is_behind or len(point.node.children) > 1:
                return
            self._leave_behind(point)

    def _leave_behind(self, point: Point) -> None:
        if point.is_behind:
            return
        point.is_behind = True
        for name in point.spans:
            behind = self._behind[name]
            behind.append(point)
            if len(behind) > 2 * len(self._points) + 64:
                kept = [point for point in behind if point.alive and point.is_behind]
                behind.clear()
                behind.extend(dict.fromkeys(kept))

    def _touch(self, point: Point) -> None:
        self._clock += 1
        point.used = self._clock
        point.is_behind = False
        for name, span in point.spans.items():
            ages = self._age[name]
            for id in span.pages:
                ages[id] = self._clock
            self._enqueue(point, name, (self._clock, 0))

    def _remove(self, point: Point) -> None:
        """Evicts a point: its place stays in the tree as a path."""
        assert point.node is not None and not point.pins
        self._bury(point)
        self._tree.drop(point.root, point.node)

    def _bury(self, point: Point) -> None:
        """Gives back all references of a point that is leaving the tree."""
        point.alive = False
        self._points.discard(point)
        for name, span in point.spans.items():
            pool, watchers = self._pools[name], self._watchers[name]
            pool.let_go(span.pages)
            for id in self._watch_list(point, name):
                if point in (waiting := watchers.get(id, set[Point]())):
                    waiting.discard(point)
                    if not waiting:
                        del watchers[id]
                        pool.watched.discard(id)

    # Checking

    def held(self) -> dict[str, Counter[int]]:
        """Every reference that points and pins have, by pool: for Pool.check."""
        held = {name: Counter[int]() for name in self._pools}
        for point in itertools.chain(self._points, self._pinned):
            for name, span in point.spans.items():
                held[name].update(span.pages)
        return held

    def check(self) -> None:
        """AssertionError unless tree, points and eviction queues agree."""
        self._tree.check()
        found = [p for root in self._tree.roots() for p in self._tree.values(root)]
        assert len(found) == len(self._points) and set(found) == self._points, "points of the tree"
        before: dict[tuple[str, int], tuple[int, int]] = {}
        for point in found:
            node = point.node
            assert point.alive and node is not None and node.value is point, "a point without node"
            self._assert_complete(node.end, point.state)
            assert bool(point.pins) == (point in self._pinned), "pins"
            for name, span in point.spans.items():
                pool = self._pools[name]
                assert all(pool.references(id) for id in span.pages), f"{name}: a free page"
                waits = name in point.queued or any(
                    point in self._watchers[name].get(id, ()) for id in span.pages
                )
                assert waits, f"{name}: a point that would never be evicted"
                if not self._windows.get(name):
                    for block, id in enumerate(span.pages):
                        place = (block, span.pages[block - 1] if block else 0)
                        assert before.setdefault((name, id), place) == place, (
                            f"{name}: page {id} follows two different pages"
                        )
        for name, pool in self._pools.items():
            kept = Counter(id for p in found if name in p.spans for id in p.spans[name].pages)
            spare = sum(1 for id, count in kept.items() if pool.keepers(id) == count)
            assert spare == pool.spare, f"{name}: {pool.spare} spare pages, counted {spare}"


def _point_above(node: Node[Point]) -> Point | None:
    """The longest point that `node` continues."""
    above = node.parent
    while above is not None and above.value is None:
        above = above.parent
    return None if above is None else above.value


def _point_at(node: Node[Point], shared: int, length: int) -> Point | None:
    """A point at `length` in `node` or right below it, where a way of `shared` keys ends."""
    below: Iterator[Node[Point]] = iter(())
    if shared == node.end:
        below = itertools.islice(node.children.values(), SIBLINGS)
    for near in (node, *below):
        if near.end == length and near.value is not None:
            return near.value
    return None
