"""Random workloads over pools, tables and prefix cache, and the broken builds that they notice.

c03, c04: every hit restores all kinds of state, with hits counted. k08: no page is lost or freed
twice, the part without a model. The plain sequences are in cache_world.py.
"""

import dataclasses
from collections.abc import Hashable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule

from suzuri.engine.pages import Table
from suzuri.engine.prefix_cache import Match, PointState, PrefixCache
from tests.engine.cache_world import BIG, Sequence, World, play

SHAPES = {
    "pages of 4": {},
    "pages of 1": {"page_size": 1, "window": 3, "pages": 60},
    "pages of 128": {"page_size": 128, "window": 20, "pages": 12, "snapshots": 12},
    "window of a page": {"page_size": 4, "window": 4, "snapshots": 20},
    "window longer than all": {"page_size": 3, "window": 64, "pages": 40},
    "window of itself": {"window": 1},
    "no local layers": {"window": 0},
    "many points": {"pages": 60, "snapshots": 40},
    "few paths": {"max_path_tokens": 20},
    "no paths": {"max_path_tokens": 0},
    "undo of 3": {"undo": 3, "page_size": 2, "pages": 40},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_random_workload_reads_only_its_own_state(shape: str, seed: int):
    """c03, c04, k08: contents, counts, matches and evictions after every operation; at the end
    everything is free again."""
    world = World(**SHAPES[shape])
    play(world, seed, 200)
    stats = world.cache.stats
    assert stats.hits > 0
    assert stats.hit_tokens > 0
    assert stats.evictions.total() > 0


class Machine(RuleBasedStateMachine):
    """Sequences that grow, resume, fork, end and are preempted while points come and go."""

    sequences: Bundle[Sequence] = Bundle("sequences")

    @initialize(
        page_size=st.sampled_from([1, 3, 4, 128]),
        window=st.sampled_from([0, 1, 5, 30]),
        snapshots=st.sampled_from([3, 16]),
        max_path_tokens=st.sampled_from([0, 12, 10**6]),
    )
    def begin(self, page_size: int, window: int, snapshots: int, max_path_tokens: int) -> None:
        self.world = World(
            page_size=page_size,
            window=window,
            pages=14 if page_size > 1 else 44,
            snapshots=snapshots,
            max_path_tokens=max_path_tokens,
        )

    @rule(
        target=sequences,
        root=st.sampled_from(["a", "b"]),
        prompt=st.lists(st.sampled_from([0, 1, BIG]), min_size=1, max_size=12),
    )
    def start(self, root: Hashable, prompt: list[int]) -> Sequence:
        return self.world.start(root, prompt)[0]

    @rule(
        target=sequences,
        other=sequences,
        cut=st.integers(1, 30),
        tail=st.lists(st.sampled_from([0, 1]), max_size=5),
    )
    def start_like(self, other: Sequence, cut: int, tail: list[int]) -> Sequence:
        return self.world.start(other.root, other.tokens[:cut] + tail)[0]

    @rule(sequence=sequences, count=st.integers(1, 20))
    def run_on(self, sequence: Sequence, count: int) -> None:
        if sequence in self.world.running and not self.world.run(sequence, count):
            self.world.resume(sequence)
            self.world.check()

    @rule(sequence=sequences, token=st.sampled_from([0, 1]))
    def generate(self, sequence: Sequence, token: int) -> None:
        if sequence.computed == len(sequence.tokens) < 25:
            sequence.tokens.append(token)
            self.run_on(sequence, 1)

    @rule(sequence=sequences, keep=st.booleans())
    def finish(self, sequence: Sequence, keep: bool) -> None:
        if sequence in self.world.running:
            self.world.finish(sequence, keep=keep)

    @rule(sequence=sequences)
    def preempt(self, sequence: Sequence) -> None:
        if sequence in self.world.running:
            self.world.release(sequence)
            self.world.resume(sequence)
            self.world.check()

    @rule(sequence=sequences)
    def pin(self, sequence: Sequence) -> None:
        self.world.pin(sequence.root, [*sequence.tokens, 9])

    @precondition(lambda self: self.world.pins)
    @rule()
    def unpin(self) -> None:
        self.world.unpin()

    @rule(pool=st.sampled_from(["global", "local", "snapshot"]), count=st.integers(1, 14))
    def make_room(self, pool: str, count: int) -> None:
        if pool in self.world.pools:
            self.world.make_room(pool, count)
            self.world.check()

    @rule(root=st.sampled_from(["a", "b"]))
    def clear(self, root: Hashable) -> None:
        self.world.clear(root)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


Machine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestMachine = Machine.TestCase


# Broken builds: each must be noticed by the same workloads.


class NoCopy(Table):
    def copy_on_write(self, block: int) -> None:
        return None


class EarlyFree(Table):
    def drop_before(self, position: int) -> None:
        super().drop_before(position + 1)


class CopyForgotten(World):
    table_class = NoCopy


class PageFreedEarly(World):
    table_class = EarlyFree


class ConvNotRestored(World):
    """c03: pages come back, conv inputs do not."""

    def restore(self, sequence: Sequence, match: Match) -> None:
        sequence.conv = dict.fromkeys(range(match.length), 0)


class SnapshotOfOneRowLess(World):
    """A resume one token before the point reads one conv input more than the point's own."""

    def restore(self, sequence: Sequence, match: Match) -> None:
        assert match.point is not None
        kept = self.snapshots[match.point.snapshot]
        kept.pop(max(kept) - self.taps + 1, None)
        super().restore(sequence, match)


class Unchecked(PrefixCache):
    def _assert_complete(self, length: int, state: PointState) -> None:
        pass


class LocalPagesLost(World):
    """c04: a point that has lost one kind of state is used all the same."""

    cache_class = Unchecked

    def state(self, sequence: Sequence, length: int, snapshot: int) -> PointState:
        state = super().state(sequence, length, snapshot)
        return dataclasses.replace(state, local_pages=())

    def adopt(self, table: Table, match: Match) -> None:
        if table.pool.name == "global":
            super().adopt(table, match)
        else:
            table.grow(match.length)


class SnapshotFreedEarly(World):
    """The cache does not keep a snapshot of its own: somebody else's overwrites it."""

    def leave_point(self, sequence: Sequence) -> None:
        super().leave_point(sequence)
        for page in range(1, self.pools["snapshot"].size):
            if self.pools["snapshot"].keepers(page):
                self.snapshots[page] = {}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (CopyForgotten, "reads another's row"),
        (PageFreedEarly, "not all there|reads another's row"),
        (ConvNotRestored, "conv input"),
        (SnapshotOfOneRowLess, "conv input"),
        (LocalPagesLost, "reads another's row"),
        (SnapshotFreedEarly, "conv input"),
    ],
)
def test_broken_builds_are_noticed(broken: type[World], message: str):
    noticed = 0
    for seed in range(10):
        try:
            play(broken(pages=60), seed, 200)
        except AssertionError as error:
            noticed += 1
            assert any(part in str(error) for part in message.split("|")), error
    assert noticed >= 5
