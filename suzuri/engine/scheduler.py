"""Which tokens of which sequences run next: queues, admission, preemption. No tensors.

Read `Scheduler.schedule` first; docs/engine.md says what it promises. The engine reports results
with `finish`; everything that a sequence holds goes back there and nowhere else.
"""

# pyright: strict

import collections
import dataclasses
import heapq
from collections.abc import Hashable

from suzuri.engine.config import EngineConfig
from suzuri.engine.pages import Pool, Table
from suzuri.engine.plan import Counters, Plan, Work
from suzuri.engine.prefix_cache import Match, PointState, PrefixCache
from suzuri.engine.request import Request, Sequence, Status

NO_MATCH = Match(length=0, point=None, branch=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What the model asks of its state: window 0 without local layers."""

    window: int
    has_global: bool


class Scheduler:
    """Queues and pools of one engine.

    `waiting` is a heap by key: priority and arrival on one scale, so that nobody waits for ever.
    `running` holds admitted sequences in order of their key.
    """

    def __init__(
        self, config: EngineConfig, shape: Shape, pools: dict[str, Pool], cache: PrefixCache
    ) -> None:
        self.config, self.shape, self.pools, self.cache = config, shape, pools, cache
        self.running: list[Sequence] = []
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._num_waiting = 0
        self._held: dict[Hashable, list[Sequence]] = collections.defaultdict(list)
        self._leaders: dict[Hashable, Sequence] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._points: list[tuple[Sequence, int, PointState]] = []
        self._ended: list[tuple[int, int, int]] = []
        self._chunked: list[Sequence] = []
        """Ran a chunk in the step planned last: pages behind their windows are still theirs."""
        self._free_slots = list(range(config.max_running, 0, -1))
        self._free_tables: list[int] = []
        self._refused: tuple[int, ...] = ()
        """What was free, spares included, when the first in the queue did not fit."""
        self._order = 0
        self.counters = Counters()

    # Queues

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first or their next turn."""
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self._num_waiting > 0

    def add(self, request: Request) -> None:
        """Queue every sequence of a request."""
        for sequence in request.sequences:
            self._order += 1
            sequence.order = self._order
            age = self.counters.steps + request.priority * self.config.aging
            sequence.key = (age, self._order)
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, self._order, sequence))
            self._wait(sequence)

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed; the engine ends them."""
        late: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.status is not Status.FINISHED:
                late.append(sequence)
        return late

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._num_waiting += 1
        heapq.heappush(self._waiting, (sequence.key, sequence))

    # Planning

    def schedule(self) -> Plan:
        """The next step. Changes the state of pools and sequences as if it had run already."""
        plan = Plan()
        plan.before, self._ended = self._ended, plan.before
        self._drop_behind_windows(plan)
        while True:
            budget = self.config.token_budget - self._decodes(plan)
            self._admissions(plan, self._prefills(plan, budget))
            will_go_on = any(s.in_flight or s.owes_mask for s in self.running)
            if plan.works or not self.running or will_go_on:
                break
            # Prefills hold everything between them and none can go on: the last one gives way.
            self.preempt(self.running[-1])
        # Last, so that what was preempted just now makes room for what was admitted.
        plan.tables, self._free_tables = self._free_tables, plan.tables
        self._publish_points()
        counters = self.counters
        counters.steps += 1
        counters.computed_tokens += plan.num_tokens
        return plan

    def _drop_behind_windows(self, plan: Plan) -> None:
        """Gives back the local pages that only the chunks of the step before had to see. Not within
        that step, which still reads and writes them."""
        for sequence in self._chunked:
            if sequence.status is Status.RUNNING and sequence.local_table is not None:
                self._drop(sequence, sequence.computed)
                plan.changed.append(sequence)
        self._chunked.clear()

    def _drop(self, sequence: Sequence, start: int) -> None:
        """Local pages that no query from `start` on can see, or one undone before it; a resume
        point may ask for one token more."""
        if self.shape.window and sequence.local_table is not None:
            sequence.local_table.drop_before(start - self.config.undo - self.shape.window)

    def _decodes(self, plan: Plan) -> int:
        """One token for every sequence that only lacks its newest one."""
        works = plan.works
        for sequence in list(self.running):
            start = sequence.computed
            length = len(sequence.tokens) + sequence.in_flight
            if start != length - 1 or sequence.status is not Status.RUNNING or sequence.points:
                continue
            if length >= sequence.limit and sequence.in_flight:
                continue  # its last token is on the way
            if sequence.matcher is not None and (sequence.in_flight or sequence.owes_mask):
                continue  # what may come next depends on the token that is on the way
            if length > sequence.event and not self._make_room(plan, sequence, length):
                continue
            sequence.computed = length
            from_device = sequence.in_flight > 0
            sequence.in_flight += 1
            works.append(Work(sequence, start, 1, True, from_device, sequence.slot, length))
        # Victims of preemption come later in the order than what was planned, so none is in it.
        plan.num_tokens = len(works)
        return len(works)

    def _prefills(self, plan: Plan, budget: int) -> int:
        """Chunks of admitted sequences, in order of their key."""
        waiting = [s for s in self.running if s.is_prefilling]
        for i, sequence in enumerate(waiting):
            if budget <= 0:
                break
            if sequence.status is not Status.RUNNING:
                continue
            others = i + 1 < len(waiting) or self._num_waiting > 0
            budget -= self._chunk(plan, sequence, budget, share=others)
        return budget

    def _admissions(self, plan: Plan, budget: int) -> None:
        while budget > 0 and self._free_slots and (sequence := self._next_waiting()):
            if sequence.in_flight:
                break  # preempted in this step: its newest token is not known yet
            room = (sequence.order, *(pool.free + pool.spare for pool in self.pools.values()))
            if room == self._refused and self.running:
                break  # nothing has changed since it did not fit
            is_stuck = not self.running
            if not self._admit(plan, sequence, self._match(sequence), budget) and not (
                # Alone, what the cache has for it may be all that stands in its way.
                is_stuck and self._admit(plan, sequence, NO_MATCH, budget)
            ):
                self._refused = room
                break
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            budget -= self._chunk(plan, sequence, budget, share=self._num_waiting > 0)

    def _next_waiting(self) -> Sequence | None:
        while self._waiting:
            sequence = self._waiting[0][1]
            if sequence.status is not Status.WAITING:
                heapq.heappop(self._waiting)  # aborted while it waited: counted then
                continue
            group = self._group(sequence)
            if group not in self._leaders or not sequence.request.uses_cache(sequence.index):
                return sequence
            # The same prompt is being prefilled: cheaper to wait for it than to repeat it.
            heapq.heappop(self._waiting)
            sequence.status = Status.HELD
            self._held[group].append(sequence)
        return None

    def _group(self, sequence: Sequence) -> Hashable:
        return sequence.request.root, sequence.request.group

    def _admit(self, plan: Plan, sequence: Sequence, match: Match, budget: int) -> bool:
        """Give a waiting sequence its slot and what the prefix cache has for it."""
        if match.point is not None:
            self.cache.pin(match)
        try:
            if not self._has_head_room(sequence, match, budget):
                return False
            sequence.slot = self._free_slots.pop()
            sequence.global_table = Table(self.pools["global"], self.config.page_size)
            sequence.local_table = Table(self.pools["local"], self.config.page_size)
            sequence.status = Status.RUNNING
            sequence.computed = 0
            if match.point is not None and not self._resume(plan, sequence, match):
                self._release(sequence)
                sequence.status = Status.WAITING
                return False
        finally:
            if match.point is not None:
                self.cache.unpin(match)
        self._plan_points(sequence, match)
        if sequence.request.uses_cache(sequence.index):
            self.cache.use(match)
            # From now on, also should it never finish: who diverges from it learns the branch.
            self.cache.remember(sequence.request.root, sequence.request.keys)
        sequence.num_cached = match.length
        sequence.event = 0
        self.counters.admissions += 1
        self.counters.cached_tokens += match.length
        self.counters.prompt_tokens += sequence.length
        self._insert_running(sequence)
        if sequence.computed < sequence.num_prompt - 1:
            self._leaders.setdefault(self._group(sequence), sequence)
        return True

    def _match(self, sequence: Sequence) -> Match:
        if not sequence.request.uses_cache(sequence.index):
            return NO_MATCH
        return self.cache.match(sequence.request.root, sequence.keys())

    def _resume(self, plan: Plan, sequence: Sequence, match: Match) -> bool:
        """Take over the state of a point; a page that it shares and writes to is copied."""
        point = match.point
        assert point is not None and sequence.global_table and sequence.local_table
        size = self.config.page_size
        copies: list[tuple[str, int, int]] = []
        sequence.computed = match.length
        block, end = match.length // size, -(-match.length // size)
        # A point one token longer may have a page that this length does not need.
        first = point.local_first_block
        sequence.global_table.adopt(0, point.global_pages[:end])
        sequence.local_table.adopt(first, point.local_pages[: max(end - first, 0)])
        for name, table in (("global", sequence.global_table), ("local", sequence.local_table)):
            if match.length % size and self._uses(name):
                if not self.cache.make_room(name, 1):
                    return False
                copied = table.copy_on_write(block)
                if copied is not None:
                    copies.append((name, *copied))
        plan.copies += copies
        plan.restores.append((point.snapshot, sequence.slot, match.length))
        plan.changed.append(sequence)
        return True

    def _plan_points(self, sequence: Sequence, match: Match) -> None:
        """Where this prefill is cut to leave resume points."""
        if not sequence.request.uses_cache(sequence.index):
            sequence.points = []
            return
        wanted = {sequence.num_prompt}
        if match.branch is not None:
            wanted.add(match.branch)
        stride = self.config.resume_stride
        if stride:
            wanted.update(range(stride, sequence.num_prompt, stride))
        sequence.points = sorted(n for n in wanted if n > match.length)

    def _chunk(self, plan: Plan, sequence: Sequence, budget: int, *, share: bool) -> int:
        """Plan a chunk; returns its tokens. With `share` it leaves half of a large budget."""
        if sequence.matcher is not None and (sequence.in_flight or sequence.owes_mask):
            return 0
        left = sequence.length - sequence.computed
        count = min(left, self.config.chunk, budget)
        if share and count == budget and budget > 1:
            count = max(1, budget // 2)
        start = sequence.computed
        cut = next((n for n in sequence.points if n > start), None)
        if cut is not None:
            count = min(count, cut - start)
        count = self._fitting(sequence, start, count)
        if count <= 0:
            return 0
        self._grow(plan, sequence, start + count)
        end = start + count
        sequence.computed = end
        samples = end == sequence.length
        length = sequence.length
        from_device = start >= len(sequence.tokens)
        if samples:
            sequence.in_flight += 1
        plan.works.append(Work(sequence, start, count, samples, from_device, sequence.slot, length))
        plan.num_tokens += count
        self._chunked.append(sequence)
        self.counters.recomputed_tokens += max(0, min(end, sequence.recomputed) - start)
        if sequence.points and sequence.points[0] <= end:
            while sequence.points and sequence.points[0] <= end:
                sequence.points.pop(0)
            self._leave_point(plan, sequence, end)
        return count

    def _fitting(self, sequence: Sequence, start: int, count: int) -> int:
        """As many tokens as there are pages for without taking any from a running sequence."""
        self._drop(sequence, start)
        for name, table in self._tables(sequence):
            if not self._uses(name):
                continue
            pool = self.pools[name]
            while count > 0 and (missing := table.missing(start + count)) > pool.free:
                if self.cache.make_room(name, missing):
                    break
                count //= 2
        return count

    # State

    def _uses(self, pool: str) -> bool:
        return self.shape.has_global if pool == "global" else self.shape.window > 0

    def _has_head_room(self, sequence: Sequence, match: Match, budget: int) -> bool:
        """Whether a chunk fits and leaves a page for each running sequence to go on.

        Of local pages, which come back after the step, as many as what is left of its budget takes.
        """
        size = self.config.page_size
        for name in ("global", "local"):
            if not self._uses(name):
                continue
            pool = self.pools[name]
            chunk = self.config.chunk if name == "global" else min(self.config.chunk, budget)
            first = min(match.length + chunk, sequence.length)
            blocks = -(-first // size) - match.length // size
            reserve = min(len(self.running), pool.size // 16) if self.running else 0
            need = min(blocks, pool.size - 1)
            if pool.free < need + reserve and not self.cache.make_room(name, need + reserve):
                if self.running:
                    return False
                if not self.cache.make_room(name, min(need, 1)):
                    return False
        return True

    def _make_room(self, plan: Plan, sequence: Sequence, length: int) -> bool:
        """Pages for a decoding sequence so that positions below `length` have one.

        Preempts the least important running sequence where the pools are empty, at worst this one:
        then False.
        """
        while self._fitting(sequence, length - 1, 1) < 1:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        self._grow(plan, sequence, length)
        return True

    def _grow(self, plan: Plan, sequence: Sequence, length: int) -> None:
        for name, table in self._tables(sequence):
            if self._uses(name):
                table.grow(length)
        size = self.config.page_size
        sequence.event = -(-length // size) * size
        plan.changed.append(sequence)

    def _tables(self, sequence: Sequence) -> tuple[tuple[str, Table], tuple[str, Table]]:
        assert sequence.global_table is not None and sequence.local_table is not None
        return ("global", sequence.global_table), ("local", sequence.local_table)

    def preempt(self, sequence: Sequence) -> None:
        """It gives its state up and waits for its turn, where it was in the order."""
        self.counters.preemptions += 1
        sequence.recomputed = max(sequence.recomputed, sequence.computed)
        self.running.remove(sequence)
        self._end_lead(sequence)
        self._release(sequence)
        self._wait(sequence)

    def _release(self, sequence: Sequence) -> None:
        for table in (sequence.global_table, sequence.local_table):
            if table is not None:
                table.clear()
        sequence.global_table = sequence.local_table = None
        if sequence.slot:
            self._free_slots.append(sequence.slot)
            sequence.slot = 0
        if sequence.table >= 0:
            self._free_tables.append(sequence.table)
            sequence.table = -1
        sequence.computed = 0
        sequence.points = []

    def _insert_running(self, sequence: Sequence) -> None:
        """Keep `running` in order of the keys; almost always the newest comes last."""
        place = len(self.running)
        while place and self.running[place - 1].key > sequence.key:
            place -= 1
        self.running.insert(place, sequence)

    # Resume points

    def _leave_point(self, plan: Plan, sequence: Sequence, length: int) -> None:
        """A point at the end of a chunk planned in this step."""
        if (state := self._point_state(sequence, length)) is not None:
            plan.after.append((sequence.slot, state.snapshot, length))
            self._points.append((sequence, length, state))

    def _point_state(self, sequence: Sequence, length: int) -> PointState | None:
        """The state of a sequence at a length, with a new snapshot; None when there is no room."""
        assert sequence.global_table is not None and sequence.local_table is not None
        if not self.cache.make_room("snapshot", 1):
            return None
        size = self.config.page_size
        end = -(-length // size)
        first = max(0, length - self.shape.window) // size if self.shape.window else end
        local = tuple(sequence.local_table.pages[first:end]) if self.shape.window else ()
        if self.shape.window and not all(local):
            return None
        return PointState(
            global_pages=tuple(sequence.global_table.pages[:end]) if self.shape.has_global else (),
            local_first_block=first,
            local_pages=local,
            snapshot=self.pools["snapshot"].take(1)[0],
        )

    def _publish_points(self) -> None:
        """Points made in this step can be used from the next on: their rows are being written."""
        for sequence, length, state in self._points:
            keys = sequence.keys()
            self.cache.insert(sequence.request.root, keys, length, state)
            self.pools["snapshot"].release([state.snapshot])  # the cache holds its own reference
        self._points.clear()
        for leader in [s for s in self._leaders.values() if s.computed >= s.num_prompt]:
            self._end_lead(leader)

    def _end_lead(self, sequence: Sequence) -> None:
        """Sequences that waited for this one's prefill go back to the queue."""
        group = self._group(sequence)
        if self._leaders.get(group) is not sequence:
            return
        del self._leaders[group]
        for held in self._held.pop(group, ()):
            if held.status is Status.HELD:
                self._num_waiting -= 1
                self._wait(held)

    # Ends

    def finish(self, sequence: Sequence, *, keep: bool) -> None:
        """A sequence ends, wherever it is. `keep`: its turn becomes a resume point."""
        status, sequence.status = sequence.status, Status.FINISHED
        if status is Status.FINISHED:
            return
        self.counters.finished += 1
        if status in (Status.WAITING, Status.HELD):
            self._num_waiting -= 1
            return
        self._points = [point for point in self._points if point[0] is not sequence]
        self.running.remove(sequence)
        self._end_lead(sequence)
        length = len(sequence.tokens) - 1
        is_known = sequence.computed >= length > sequence.num_prompt
        if keep and is_known and sequence.request.uses_cache(sequence.index):
            state = self._point_state(sequence, length)
            if state is not None:
                self._ended.append((sequence.slot, state.snapshot, length))
                self.cache.insert(sequence.request.root, sequence.keys(), length, state)
                self.pools["snapshot"].release([state.snapshot])
        self._release(sequence)

    def check(self) -> None:
        """Every page, slot and snapshot is held by whom it should be. AssertionError says which."""
        held: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        for name, counts in self.cache.held().items():
            held[name] += counts
        slots: list[int] = []
        for sequence in self.running:
            assert sequence.status is Status.RUNNING
            assert sequence.global_table is not None and sequence.local_table is not None
            held["global"].update(sequence.global_table.held())
            held["local"].update(sequence.local_table.held())
            slots.append(sequence.slot)
        for name, pool in self.pools.items():
            pool.check(held[name])
        everyone = sorted([*slots, *self._free_slots])
        assert everyone == list(range(1, self.config.max_running + 1)), f"slots: {everyone}"
        keys = [sequence.key for sequence in self.running]
        assert keys == sorted(keys), "running is out of order"
        waiting = {id(s) for _, s in self._waiting if s.status is Status.WAITING}
        held_back = sum(s.status is Status.HELD for group in self._held.values() for s in group)
        assert len(waiting) + held_back == self._num_waiting, "waiting count"
        self.cache.check()
