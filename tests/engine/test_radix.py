"""The tree of prefixes: splits, joins, and paths that are forgotten."""

import random

import pytest

from suzuri.engine.radix import Radix
from tests.engine.cache_world import common_length


def test_paths_are_forgotten_from_their_ends_least_recently_used_first():
    tree = Radix[int](10)
    tree.remember("a", (1, 1, 1, 1))
    tree.remember("a", (2, 2, 2, 2))
    tree.remember("a", (1, 1))  # used again
    tree.remember("b", (3, 3, 3, 3))
    tree.check()
    ways = [("a", (1,) * 4), ("a", (2,) * 4), ("b", (3,) * 4)]
    assert [tree.walk(*way)[1] for way in ways] == [4, 2, 4]
    tree.remember("b", (4,) * 30)
    tree.check()
    assert tree.bare_tokens == 10
    assert tree.walk("b", (4,) * 30)[1] == 10
    assert tree.roots() == ["b"]


def test_paths_of_points_do_not_count_and_stay():
    tree = Radix[str](3)
    node = tree.put("a", (1,) * 20, "point")
    tree.remember("a", (1,) * 10 + (2,) * 9)
    tree.check()
    assert (tree.bare_tokens, tree.walk("a", (1,) * 10 + (2,) * 9)[1]) == (3, 13)
    tree.drop("a", node)
    tree.check()
    assert tree.bare_tokens == 3


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_agrees_with_a_list_of_paths(seed: int):
    """Splits keep values in place; runs are joined again; salts that are empty are gone."""
    rng, tree = random.Random(seed), Radix[object](10**6)
    paths: set[tuple[int, ...]] = set()
    values: dict[tuple[int, ...], object] = {}
    nodes = {}
    for _ in range(150):
        keys = tuple(rng.choice([0, 1]) for _ in range(rng.randint(1, 14)))
        action = rng.random()
        if action < 0.4:
            tree.remember("a", keys)
            paths.add(keys)
        elif action < 0.8:
            value = object()
            node = tree.put("a", keys, value)
            paths.add(keys)
            assert node.value is values.setdefault(keys, value)
            nodes[keys] = node
        elif values:
            keys = rng.choice(sorted(values))
            tree.drop("a", nodes[keys])
            del values[keys]
        tree.check()
        assert set(tree.values("a")) == set(values.values())
        for path, value in values.items():
            assert nodes[path].value is value
            assert tree.walk("a", path) == (nodes[path], len(path))
        _, shared = tree.walk("a", keys)
        assert shared == max((common_length(path, list(keys)) for path in paths), default=0)
    tree.forget("a")
    tree.check()
    assert (tree.bare_tokens, tree.roots()) == (0, [])


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 4097, 9999, 12287, 12288, 19999])
def test_long_runs_part_where_they_differ(at: int):
    tree, keys = Radix[int](10**6), tuple(range(1000, 21000))
    tree.remember("a", keys)
    assert tree.walk("a", (*keys[:at], 0, *keys[at + 1 :]))[1] == at
    assert tree.walk("a", keys[:at])[1] == at
    assert tree.walk("a", (*keys, 5))[1] == 20000
