"""The prefix cache: what is found, what is evicted, what becomes a point.

c03, c04: a hit has every kind of state, and hits are counted. Random workloads over the same
sequences: test_prefix_cache_random.py.
"""

import dataclasses
from collections.abc import Hashable

import pytest

from suzuri.engine.pages import Pool
from suzuri.engine.prefix_cache import Match, PointState, PrefixCache, Span
from tests.engine.cache_world import BIG, World

# What is found


def run_all(world: World, root: Hashable, prompt: list[int]) -> Match:
    """Runs a prompt to its end, and ends."""
    sequence, match = world.start(root, prompt)
    while sequence.computed < len(prompt):
        assert world.run(sequence, len(prompt))
    world.finish(sequence, keep=False)
    return match


@pytest.mark.parametrize("page_size", [1, 4, 128])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9])
def test_an_identical_prompt_recomputes_one_token(page_size: int, length: int):
    world, prompt = World(page_size=page_size, pages=60), list(range(length))
    assert run_all(world, "a", prompt) == Match(length=0, point=None, branch=None)
    for _ in range(3):
        match = run_all(world, "a", prompt)
        assert match.length == length - 1
        assert (match.point is None) == (length == 1)
        assert match.branch is None
    stats = world.cache.stats
    assert stats.inserted == 1
    assert (stats.hits, stats.misses) == ((3, 1) if length > 1 else (0, 4))
    assert stats.hit_tokens == 3 * (length - 1)
    assert stats.shared_tokens == 3 * length


def test_a_longer_prompt_resumes_at_the_point():
    world = World()
    run_all(world, "a", [1, 2, 3, 4, 5])
    assert run_all(world, "a", [1, 2, 3, 4, 5, 6]).length == 5
    assert run_all(world, "a", [1, 2, 3, 4, 5, 6, 7]).length == 6


def test_a_prompt_that_ends_before_the_point_finds_nothing():
    world = World()
    run_all(world, "a", [1, 2, 3, 4, 5])
    match = world.cache.match("a", [1, 2, 3, 4])
    assert (match.length, match.point, match.shared, match.branch) == (0, None, 4, None)


def test_a_prompt_with_another_last_token_resumes_before_it():
    """The last token of a prompt is often the one that differs in the next turn."""
    world = World()
    run_all(world, "a", [1, 2, 3, 4, 5])
    assert run_all(world, "a", [1, 2, 3, 4, 6, 7]).length == 4  # within a run
    assert run_all(world, "a", [1, 2, 3, 4, 8, 9]).length == 4  # where runs part
    assert world.cache.match("a", [1, 2, 3, 5, 5, 5]).length == 0


@pytest.mark.parametrize("keys", [[], [1], [1, 2, 3]])
def test_an_empty_tree_finds_nothing(keys: list[int]):
    cache = World().cache
    match = cache.match("a", keys)
    assert match == Match(length=0, point=None, branch=None)
    cache.use(match)
    cache.pin(match)
    cache.unpin(match)
    assert (cache.stats.misses, cache.stats.hits) == (1, 0)


def test_the_third_request_hits_the_branch_that_the_second_learned():
    world, system = World(), [5, 5, 6, 7, 5, 5, 6]
    first = run_all(world, "a", [*system, 1, 1])
    second = run_all(world, "a", [*system, 2, 2])
    third = run_all(world, "a", [*system, 3, 3])
    assert [(m.length, m.branch) for m in (first, second, third)] == [(0, None), (0, 7), (7, None)]
    assert third.shared == 7


def test_branches_that_would_gain_little_are_not_learned():
    world = World()  # worthwhile from 2 tokens on
    run_all(world, "a", [1, 2, 3])
    assert world.cache.match("a", [1, 2, 3, 4, 5]).branch is None
    world.cache.remember("a", [1, 2, 3, 4, 5, 6])
    assert world.cache.match("a", [1, 2, 3, 4, 9]).branch is None
    assert world.cache.match("a", [1, 2, 3, 4, 5, 9]).branch == 5
    assert world.cache.match("a", [1, 2, 3, 4, 5]).branch is None  # its end makes a point anyway


def test_roots_share_nothing():
    world, prompt = World(), [1, 2, 3, 4, 5]
    roots: list[Hashable] = [(0, None, "tenant a"), (0, None, "tenant b"), (1, None, "tenant a")]
    for root in roots:
        assert run_all(world, root, prompt).shared == 0
    world.clear(roots[0])
    assert [world.cache.match(root, prompt).length for root in roots] == [0, 4, 4]


def test_media_tokens_are_numbers_of_any_size():
    world, picture = World(), [BIG + i for i in range(5)]
    run_all(world, "a", [1, *picture, 2])
    assert run_all(world, "a", [1, *picture, 2, 3]).length == 7
    other = [picture[0] + 1, *picture[1:]]
    assert world.cache.match("a", [1, *other, 2, 3]).shared == 1


def test_matching_changes_nothing_and_using_sets_the_order():
    world = World(snapshots=4)
    prompts = [[n, n, n, n] for n in (1, 2, 3)]
    for prompt in prompts:
        run_all(world, "a", prompt)
    world.cache.use(world.cache.match("a", [*prompts[0], 0]))
    world.cache.match("a", [*prompts[1], 0])
    for n, left in ((2, [4, 0, 4]), (3, [4, 0, 0]), (1, [0, 0, 0])):
        assert world.make_room("snapshot", world.pools["snapshot"].free + 1), n
        assert [world.cache.match("a", [*p, 0]).length for p in prompts] == left
    assert world.cache.stats.evictions == {"snapshot": 3}


def test_an_equal_point_counts_as_used_and_takes_no_reference():
    world = World(snapshots=5)
    run_all(world, "a", [1, 1, 1])
    run_all(world, "a", [2, 2, 2])
    pool = world.pools["global"]
    sequence, _ = world.start("a", [1, 1, 1])
    used = pool.used
    assert world.run(sequence, 3)
    assert pool.used == used
    world.finish(sequence, keep=False)
    assert world.make_room("snapshot", world.pools["snapshot"].free + 1)
    assert [world.cache.match("a", [n] * 4).length for n in (1, 2)] == [3, 0]


def test_pins_hold_against_eviction_and_are_counted():
    world = World()
    for n in (1, 2):
        run_all(world, "a", [n] * 6)
    match = world.cache.match("a", [1] * 7)
    world.cache.pin(match)
    world.cache.pin(match)
    world.cache.unpin(match)
    pool = world.pools["global"]
    assert world.cache.evictable("global") == 2
    assert not world.cache.make_room("global", pool.size - 1)
    assert world.cache.points == 2  # nothing was thrown away in vain
    assert world.cache.make_room("global", pool.size - 3)
    assert [world.cache.match("a", [n] * 7).length for n in (1, 2)] == [6, 0]
    world.cache.unpin(match)
    assert world.cache.make_room("global", pool.size - 1)
    with pytest.raises(AssertionError, match="more often than pinned"):
        world.cache.unpin(match)


def test_a_pinned_point_outlives_a_cleared_tree_but_cannot_be_used():
    world = World()
    run_all(world, "a", [1] * 6)
    match = world.cache.match("a", [1] * 7)
    world.cache.pin(match)
    world.cache.clear()
    assert world.pools["global"].used == 2
    assert world.cache.match("a", [1] * 7).shared == 0
    with pytest.raises(AssertionError, match="evicted"):
        world.cache.use(match)
    world.cache.unpin(match)
    assert world.pools["global"].used == 0


def test_a_match_that_was_not_pinned_may_be_gone():
    world = World()
    run_all(world, "a", [1] * 6)
    match = world.cache.match("a", [1] * 7)
    assert world.make_room("snapshot", world.pools["snapshot"].size - 1)
    with pytest.raises(AssertionError, match="pin it"):
        world.cache.use(match)
    with pytest.raises(AssertionError, match="since the match"):
        world.cache.pin(match)


def test_an_evicted_point_leaves_its_path():
    world = World()
    run_all(world, "a", [1] * 6)
    assert world.make_room("snapshot", world.pools["snapshot"].size - 1)
    match = run_all(world, "a", [1] * 6 + [2, 2])
    assert (match.length, match.branch) == (0, 6)


# What is evicted


def test_only_points_that_free_pages_of_that_pool_go():
    """A running sequence needs the pages of the older point; the younger one's are free to go."""
    world = World(window=0, pages=20, snapshots=10)
    held, _ = world.start("a", [1] * 8)
    assert world.run(held, 8)
    run_all(world, "a", [2] * 8)
    assert world.make_room("global", world.pools["global"].free + 1)
    assert [world.cache.match("a", [n] * 9).length for n in (1, 2)] == [8, 0]
    assert world.cache.evictable("global") == 0
    assert not world.make_room("global", world.pools["global"].free + 1)
    assert world.make_room("snapshot", world.pools["snapshot"].free + 1)
    assert world.cache.points == 0


def conversation(world: World, turns: int) -> None:
    sequence, _ = world.start("a", [0] * 4)
    for turn in range(turns):
        sequence.tokens = sequence.tokens + [turn] * 4
        sequence.points = {len(sequence.tokens)}
        assert world.run(sequence, 100)
    world.finish(sequence, keep=False)


def test_the_longest_point_of_a_conversation_gives_way_for_global_pages():
    world = World(window=0, snapshots=10)
    conversation(world, 3)  # points at 8, 12, 16 that share their pages
    assert world.make_room("global", world.pools["global"].free + 1)
    assert world.cache.match("a", [0] * 8 + [1] * 4 + [2] * 5).length == 12


def test_the_oldest_point_gives_way_for_local_pages_and_snapshots():
    world = World(window=3, snapshots=10)
    conversation(world, 3)
    assert world.make_room("local", world.pools["local"].free + 1)
    assert world.cache.points == 2
    assert world.cache.match("a", [0] * 8 + [9]).length == 0
    assert world.make_room("snapshot", world.pools["snapshot"].free + 1)
    assert world.cache.match("a", [0] * 8 + [1] * 4 + [9]).length == 0
    assert world.cache.match("a", [0] * 8 + [1] * 4 + [2] * 5).length == 16
    assert world.cache.stats.evictions == {"local": 1, "snapshot": 1}


def test_points_that_share_every_page_go_together():
    world = World(window=0, snapshots=10)
    run_all(world, "a", [2] * 4)
    sequence, _ = world.start("a", [1] * 5)
    assert world.run(sequence, 5)
    sequence.tokens.append(1)
    assert world.run(sequence, 1)
    world.finish(sequence, keep=True)  # 5 and 6 tokens in the same two pages
    assert (world.cache.points, world.cache.evictable("global")) == (3, 3)
    world.cache.use(world.cache.match("a", [2] * 5))
    assert world.make_room("global", world.pools["global"].free + 1)
    assert world.cache.points == 1
    assert world.cache.match("a", [2] * 5).length == 4


def test_a_point_in_use_comes_back_into_the_queue():
    """Found to have nothing to give while a sequence runs, it gives when that has ended."""
    world = World(window=0, pages=9, snapshots=10)
    held, _ = world.start("a", [1] * 8)
    assert world.run(held, 8)
    run_all(world, "a", [2] * 4)
    assert world.make_room("global", world.pools["global"].free + 1)
    assert not world.make_room("global", world.pools["global"].free + 1)
    world.finish(held, keep=False)
    assert world.make_room("global", world.pools["global"].size - 1)
    assert world.cache.points == 0


def test_queues_do_not_grow_with_points_long_gone():
    world = World(snapshots=3, window=0, pages=40)
    for n in range(120):
        run_all(world, "a", [n, n, n])
    assert world.cache.points <= 2
    assert max(len(queue) for queue in world.cache._queues.values()) < 80


def turn(world: World, prompt: list[int], answer: list[int]) -> list[int]:
    """Runs a prompt and its answer; points at the end of both. Returns both."""
    sequence, _ = world.start("a", prompt)
    while sequence.computed < len(prompt):
        assert world.run(sequence, 100)
    sequence.tokens = [*prompt, *answer]
    assert world.run(sequence, 100)
    world.finish(sequence, keep=True)
    return [*prompt, *answer]


def lengths(world: World, *prompts: list[int]) -> list[int]:
    return [world.cache.match("a", prompt).length for prompt in prompts]


def evict(world: World, pool: str, count: int = 1) -> None:
    for _ in range(count):
        assert world.make_room(pool, world.pools[pool].free + 1)


@pytest.mark.parametrize("pool", ["snapshot", "local"])
def test_points_that_a_conversation_has_left_behind_go_before_older_ones(pool: str):
    world = World(window=3, snapshots=20, pages=60)
    other = turn(world, [9] * 8, [8] * 4)
    first = turn(world, [1] * 8, [2] * 4)
    turn(world, [*first, *[3] * 4], [4] * 4)
    ways = ([1] * 8 + [7], [*first, 7], [*first, *[3] * 4, 7], [*other, 7])
    assert lengths(world, *ways) == [8, 12, 16, 12]
    evict(world, pool)
    assert lengths(world, *ways) == [0, 12, 16, 12]
    evict(world, pool)
    assert lengths(world, *ways) == [0, 0, 16, 12]
    evict(world, pool)  # nothing else is behind: the oldest
    assert lengths(world, [9] * 8 + [7], ways[-1]) == [0, 12]


def test_a_point_left_behind_that_is_used_again_is_as_any_other():
    world = World(window=3, snapshots=20, pages=60)
    first = turn(world, [1] * 8, [2] * 4)
    turn(world, [*first, *[3] * 4], [4] * 4)
    turn(world, [9] * 8, [8] * 4)
    world.cache.use(world.cache.match("a", [1] * 8 + [7]))
    evict(world, "snapshot")
    assert lengths(world, [1] * 8 + [7], [*first, 7]) == [8, 8]


def test_where_several_ways_go_on_nothing_is_left_behind():
    world = World(window=3, snapshots=30, pages=90)
    system = [5] * 8
    run_all(world, "a", [*system, 0])
    ends = [turn(world, [*system, n, n, n], [n] * 4) for n in (1, 2, 3)]  # 1 learns the branch
    ends = [turn(world, [*end, 4, 4, 4], [5] * 4) for end in ends]
    oldest = world.cache.points
    evict(world, "snapshot", 6)  # of each conversation the first turn's prompt and its end
    assert world.cache.points == oldest - 6
    assert lengths(world, [*system, 6], *([*end, 6] for end in ends)) == [8, 22, 22, 22]


def test_the_rest_of_a_turn_whose_thoughts_were_dropped_goes_first():
    world = World(window=3, snapshots=20, pages=60)
    turn(world, [9] * 8, [8] * 4)
    whole = turn(world, [1] * 8, [2, 2, 2, 2, 3, 3])
    turn(world, [1] * 8 + [2, 3, 3, 4, 4], [6] * 4)
    evict(world, "snapshot")
    assert lengths(world, [*whole, 7], [1] * 8 + [2, 3, 3, 4, 4, 7], [9] * 8 + [7]) == [8, 13, 8]


def test_the_prompt_of_a_turn_counts_as_used_when_the_turn_ends():
    """However long it took: who drops the thoughts comes back to the prompt."""
    world = World(window=3, snapshots=20, pages=60)
    slow, _ = world.start("a", [1] * 8)
    assert world.run(slow, 8)
    turn(world, [9] * 8, [8] * 4)
    slow.tokens += [2] * 6
    assert world.run(slow, 100)
    world.finish(slow, keep=True)
    evict(world, "snapshot")
    assert lengths(world, [1] * 8 + [7], [9] * 8 + [7]) == [8, 0]


def test_the_list_of_what_was_left_behind_does_not_grow():
    world = World(snapshots=5, pages=60)
    for n in range(100):
        first = turn(world, [n, n, n], [n, n])
        turn(world, [*first, 1], [2, 2])
    assert world.cache.points < 5
    assert max(len(behind) for behind in world.cache._behind.values()) < 80


# Points of other shapes


def pools_and_cache(names: list[str], **options: int) -> tuple[dict[str, Pool], PrefixCache]:
    pools = {name: Pool(name, 20) for name in names}
    cache = PrefixCache(
        pools,
        page_size=4,
        window=6,
        max_path_tokens=1000,
        min_branch_gain=1,
        extra_windows={"draft_local": 3},
    )
    return pools, cache


def test_a_point_holds_further_pools():
    names = ["global", "local", "snapshot", "draft_global", "draft_local", "draft_snapshot"]
    pools, cache = pools_and_cache(names)
    pages = {name: tuple(pool.take(3)) for name, pool in pools.items()}
    state = PointState(
        global_pages=pages["global"],
        local_first_block=0,
        local_pages=pages["local"],
        snapshot=pages["snapshot"][0],
        extra={
            "draft_global": Span(0, pages["draft_global"]),
            "draft_local": Span(1, pages["draft_local"][1:]),
            "draft_snapshot": Span(0, pages["draft_snapshot"][:1]),
        },
    )
    lacking = dataclasses.replace(state, extra={})
    with pytest.raises(AssertionError, match="draft_global: pages are missing"):
        cache.insert("a", list(range(10)), 10, lacking)
    assert cache.insert("a", list(range(10)), 10, state)
    for name, pool in pools.items():
        pool.release(pages[name])
        assert cache.evictable(name) == pool.used == len(state.spans()[name].pages)
    cache.check()
    assert cache.make_room("draft_local", 19)
    assert all(pool.used == 0 for pool in pools.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local_pages": ()}, "local: pages are missing"),
        ({"local_first_block": 1, "local_pages": (2, 3)}, "local: from block 1, not 0"),
        ({"local_pages": (0, 2, 3)}, "local: a page has been dropped already"),
        ({"global_pages": (1, 2)}, "global: pages are missing"),
        ({"global_pages": ()}, "global: pages are missing"),
        ({"snapshot": 0}, "without a snapshot"),
    ],
)
def test_a_point_without_one_kind_is_refused(change: dict[str, object], message: str):
    """c03, c04: what lacks a kind of state never becomes a point."""
    pools, cache = pools_and_cache(["global", "local", "snapshot"])
    for pool in pools.values():
        pool.take(3)
    state = PointState(global_pages=(1, 2, 3), local_pages=(1, 2, 3), snapshot=1)
    with pytest.raises(AssertionError, match=message):
        cache.insert("a", list(range(9)), 9, dataclasses.replace(state, **change))
    assert cache.points == cache.path_tokens == 0


def test_models_without_a_kind_of_layers_have_points_without_it():
    pools, cache = pools_and_cache(["global", "local", "snapshot"])
    (snapshot,), local = pools["snapshot"].take(), pools["local"].take(1)
    state = PointState(global_pages=(), local_pages=tuple(local), snapshot=snapshot)
    assert cache.insert("a", [1, 2, 3], 3, state)
    assert cache.match("a", [1, 2, 3, 4]).point is state
