"""Plain sequences over the real pools, tables and prefix cache, with page contents as lists.

The state of a token is a number made from it and all tokens before it, so whoever reads another
sequence's row, a freed page or a stale conv input reads a wrong number. Scheduling is left out: a
sequence that finds no page loses all it has and starts again.
"""

import random
from collections import Counter
from collections.abc import Hashable

from suzuri.engine.pages import Pool, Table
from suzuri.engine.prefix_cache import Match, PointState, PrefixCache

FREED = -1
BIG = 2**200 + 7  # a media token


class Sequence:
    def __init__(self, root: Hashable, prompt: list[int]) -> None:
        self.root, self.tokens, self.num_prompt = root, list(prompt), len(prompt)
        self.computed = self.resumed = 0
        self.points: set[int] = {len(prompt)}
        self.tables: dict[str, Table] = {}
        self.conv: dict[int, int] = {}


class World:
    """`check` after every operation: contents, references, the tree."""

    table_class: type[Table] = Table
    cache_class: type[PrefixCache] = PrefixCache

    def __init__(
        self,
        *,
        page_size: int = 4,
        window: int = 6,
        taps: int = 4,
        pages: int = 24,
        snapshots: int = 6,
        max_path_tokens: int = 10**6,
        undo: int = 1,
    ) -> None:
        self.page_size, self.window, self.taps, self.undo = page_size, window, taps, undo
        self.remembers_all = max_path_tokens >= 10**6
        self.kinds = ("global", "local") if window else ("global",)
        self.pools = {name: Pool(name, pages) for name in self.kinds}
        self.pools["snapshot"] = Pool("snapshot", snapshots)
        self.cache = self.cache_class(
            self.pools,
            page_size=page_size,
            window=window,
            max_path_tokens=max_path_tokens,
            min_branch_gain=2,
        )
        self.rows = {name: [[FREED] * page_size for _ in range(pages)] for name in self.kinds}
        self.snapshots: list[dict[int, int]] = [{} for _ in range(snapshots)]
        self.running: list[Sequence] = []
        self.inserted: dict[tuple[Hashable, tuple[int, ...]], PointState] = {}
        self.paths: set[tuple[Hashable, tuple[int, ...]]] = set()
        self.pins: list[Match] = []

    # What a plain reader of the rules would expect

    def truth(self, sequence: Sequence) -> list[int]:
        """The state of each token."""
        states: list[int] = []
        for token in sequence.tokens:
            states.append(hash((states[-1] if states else sequence.root, token)))
        return states

    def alive(self) -> dict[tuple[Hashable, tuple[int, ...]], PointState]:
        """Points that a prompt one token longer resumes."""
        found = {}
        for (root, keys), state in self.inserted.items():
            match = self.cache.match(root, (*keys, -5))
            if match.length == len(keys) and match.point is state:
                found[root, keys] = state
        return found

    def spare(self, pool: str) -> set[int]:
        """Pages that nobody but unpinned points holds."""
        kept = {page for state in self.alive().values() for page in pages_of(state, pool)}
        pinned = {p for m in self.pins if m.point is not None for p in pages_of(m.point, pool)}
        return kept - set(self.held_by_sequences()[pool]) - pinned

    def held_by_sequences(self) -> dict[str, Counter[int]]:
        held = {name: Counter[int]() for name in self.pools}
        for sequence in self.running:
            for name, table in sequence.tables.items():
                held[name].update(table.held())
        return held

    def expect(self, root: Hashable, prompt: list[int]) -> int:
        """Length that can be resumed: at a point, or one token before it where the ways part."""
        # Where paths are forgotten, the tree itself says how far it goes.
        known = self.remembers_all
        shared = self.shared(root, prompt) if known else self.cache.match(root, prompt).shared
        most = min(shared, len(prompt) - 1)
        lengths = [0]
        for other, keys in self.alive():
            common = common_length(keys, prompt)
            if other == root and len(keys) <= min(common, most):
                lengths.append(len(keys))
            elif other == root and len(keys) - 1 == most and common >= min(len(keys), shared):
                lengths.append(most)
        return max(lengths)

    def shared(self, root: Hashable, prompt: list[int]) -> int:
        paths = [keys for other, keys in self.paths if other == root]
        return max((common_length(keys, prompt) for keys in paths), default=0)

    # Operations

    def start(self, root: Hashable, prompt: list[int]) -> tuple[Sequence, Match]:
        expected, shared = self.expect(root, prompt), self.shared(root, prompt)
        sequence = Sequence(root, prompt)
        self.running.append(sequence)
        match = self.resume(sequence)
        assert match.length == expected, f"{match} for {expected}"
        assert match.shared == shared if self.remembers_all else match.shared <= shared
        self.cache.remember(root, prompt)
        self.paths.add((root, tuple(prompt)))
        self.check()
        return sequence, match

    def resume(self, sequence: Sequence) -> Match:
        size = self.page_size
        sequence.tables = {name: self.table_class(self.pools[name], size) for name in self.kinds}
        sequence.conv, sequence.computed, sequence.resumed = {}, 0, 0
        match = self.cache.match(sequence.root, sequence.tokens)
        self.cache.use(match)
        if match.branch is not None:
            sequence.points.add(match.branch)
        if match.point is None:
            return match
        self.cache.pin(match)
        for name in self.kinds:
            self.adopt(sequence.tables[name], match)
        has_room = all(self.copy(table, match.length) for table in sequence.tables.values())
        if has_room:
            self.restore(sequence, match)
            sequence.computed = sequence.resumed = match.length
        else:
            self.release(sequence)
        self.cache.unpin(match)
        return match

    def adopt(self, table: Table, match: Match) -> None:
        assert match.point is not None
        span = match.point.spans()[table.pool.name]
        table.adopt(span.first_block, span.pages)

    def copy(self, table: Table, length: int) -> bool:
        name = table.pool.name
        if not self.make_room(name, 1):
            return False
        copied = table.copy_on_write(length // self.page_size)
        if copied is not None:
            self.rows[name][copied[1]] = list(self.rows[name][copied[0]])
        return True

    def restore(self, sequence: Sequence, match: Match) -> None:
        assert match.point is not None
        kept = self.snapshots[match.point.snapshot]
        for position in range(max(0, match.length - self.taps + 1), match.length):
            sequence.conv[position] = kept.get(position, FREED)

    def run(self, sequence: Sequence, count: int) -> bool:
        """Runs the next tokens, at most to where a point is due. False: no room, state lost."""
        end = min(sequence.computed + count, len(sequence.tokens))
        end = min([end, *(n for n in sequence.points if n > sequence.computed)])
        for name, table in sequence.tables.items():
            missing = table.missing(end)
            if missing and not self.make_room(name, missing):
                self.release(sequence)
                self.check()
                return False
            table.grow(end)
        states = self.truth(sequence)
        for position in range(sequence.computed, end):
            for name, table in sequence.tables.items():
                page = table.pages[position // self.page_size]
                self.rows[name][page][position % self.page_size] = states[position]
            sequence.conv[position] = states[position]
        sequence.computed = end
        for position in [p for p in sequence.conv if p < end - self.taps - self.undo]:
            del sequence.conv[position]
        if end in sequence.points:
            self.leave_point(sequence)
        if "local" in sequence.tables:
            sequence.tables["local"].drop_before(end - self.undo - self.window + 1)
        self.check()
        return True

    def leave_point(self, sequence: Sequence) -> None:
        length = sequence.computed
        # Right after a resume at N - 1 the inputs that a point there would need are not all there.
        if length <= sequence.resumed or not self.make_room("snapshot", 1):
            return
        (snapshot,) = self.pools["snapshot"].take()
        self.snapshots[snapshot] = {
            p: sequence.conv[p] for p in range(max(0, length - self.taps), length)
        }
        state = self.state(sequence, length, snapshot)
        keys = tuple(sequence.tokens[:length])
        if self.cache.insert(sequence.root, sequence.tokens, length, state):
            self.inserted[sequence.root, keys] = state
        self.paths.add((sequence.root, keys))
        self.pools["snapshot"].release([snapshot])

    def state(self, sequence: Sequence, length: int, snapshot: int) -> PointState:
        _, pages = sequence.tables["global"].cover(0, length)
        if not self.window:
            return PointState(global_pages=pages, snapshot=snapshot)
        first, local = sequence.tables["local"].cover(length - self.window, length)
        return PointState(
            global_pages=pages, local_first_block=first, local_pages=local, snapshot=snapshot
        )

    def release(self, sequence: Sequence) -> None:
        for table in sequence.tables.values():
            table.clear()
        sequence.computed, sequence.resumed, sequence.conv = 0, 0, {}

    def finish(self, sequence: Sequence, *, keep: bool) -> None:
        if keep:
            self.leave_point(sequence)
        self.release(sequence)
        self.running.remove(sequence)
        self.check()

    def make_room(self, pool: str, count: int) -> bool:
        """As the cache does it, compared with what should be possible."""
        before = self.alive()
        free, spare = self.pools[pool].free, self.spare(pool)
        assert self.cache.evictable(pool) == len(spare)
        possible = self.cache.make_room(pool, count)
        assert possible == (free + len(spare) >= count)
        after = self.alive()
        if not possible or free >= count:
            assert after == before
        for key in before.keys() - after.keys():
            gone = [p for p in pages_of(before[key], pool) if not self.pools[pool].references(p)]
            assert gone, f"evicting the point at {len(key[1])} freed nothing in {pool}"
        return possible

    def pin(self, root: Hashable, prompt: list[int]) -> None:
        match = self.cache.match(root, prompt)
        self.cache.pin(match)
        if match.point is not None:
            self.pins.append(match)
        self.check()

    def unpin(self) -> None:
        if self.pins:
            self.cache.unpin(self.pins.pop(0))
        self.check()

    def clear(self, root: Hashable) -> None:
        self.cache.clear(root)
        self.inserted = {key: state for key, state in self.inserted.items() if key[0] != root}
        self.paths = {key for key in self.paths if key[0] != root}
        self.check()

    def check(self) -> None:
        """Everybody reads exactly its own state; every reference is somebody's."""
        self.cache.check()
        held, points = self.held_by_sequences(), self.cache.held()
        for name, pool in self.pools.items():
            pool.check(held[name] + points[name])
            for page in range(1, pool.size):
                if not pool.references(page):
                    if name == "snapshot":
                        self.snapshots[page] = {}
                    else:
                        self.rows[name][page] = [FREED] * self.page_size
        for sequence in self.running:
            states, end = self.truth(sequence), sequence.computed
            query = max(end - self.undo, sequence.resumed)  # the first that can still be run
            first = {"global": 0, "local": max(0, query - self.window + 1)}
            for name, table in sequence.tables.items():
                for p in range(first[name], end):
                    page = table.pages[p // self.page_size]
                    found = self.rows[name][page][p % self.page_size]
                    assert found == states[p], f"{name}: position {p} of {end} reads another's row"
            for p in range(max(0, end - self.taps + 1), end):
                assert sequence.conv[p] == states[p], f"conv input of position {p} of {end}"

    def drain(self) -> None:
        """Everything ends: every page, slot and snapshot is free again."""
        for sequence in list(self.running):
            self.finish(sequence, keep=False)
        while self.pins:
            self.unpin()
        for name, pool in self.pools.items():
            assert self.make_room(name, pool.size - 1) and pool.used == 0
        self.cache.clear()
        assert self.cache.points == self.cache.path_tokens == 0
        self.check()


def pages_of(state: PointState, pool: str) -> tuple[int, ...]:
    span = state.spans().get(pool)
    return span.pages if span else ()


def common_length(a: tuple[int, ...], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def random_prompt(rng: random.Random, texts: list[list[int]], longest: int) -> list[int]:
    """The beginning of an earlier text, or all of it, and some tokens."""
    text = rng.choice(texts) if texts else []
    start = text[: rng.choice([len(text), rng.randint(0, len(text))])]
    tail = [rng.choice([0, 1, 2, BIG]) for _ in range(rng.choice([0, 1, 2, 9]))]
    return (start + tail)[:longest] or [0]


def play(world: World, seed: int, steps: int, longest: int = 40) -> None:
    """A random workload: prompts that share beginnings, neighbours that end at any moment."""
    rng, texts = random.Random(seed), list[list[int]]()
    for _ in range(steps):
        action = rng.random()
        if not world.running or (action < 0.2 and len(world.running) < 4):
            root, prompt = rng.choice(["a", "a", "a", "b"]), random_prompt(rng, texts, longest)
            texts.append(prompt)
            world.start(root, prompt)
            continue
        sequence = rng.choice(world.running)
        if action < 0.75:
            if sequence.computed == len(sequence.tokens) and len(sequence.tokens) < longest:
                sequence.tokens.append(rng.choice([0, 1, 2]))
            if not world.run(sequence, rng.choice([1, 2, 5, 50])):
                world.resume(sequence)
                world.check()
        elif action < 0.88:
            if sequence.computed == len(sequence.tokens):
                texts.append(list(sequence.tokens))
            world.finish(sequence, keep=rng.random() < 0.8)
        elif action < 0.93:
            world.pin(sequence.root, [*sequence.tokens, 3])
        elif action < 0.96:
            world.unpin()
        elif action < 0.99:
            pool = rng.choice(list(world.pools))
            world.make_room(pool, rng.randint(1, world.pools[pool].size))
            world.check()
        else:
            world.clear(rng.choice(["a", "b"]))
    world.drain()
