"""A radix tree over integers: paths, some of them with a value at their end.

Paths that lead to no value are kept up to a number of tokens, least recently used first. Who uses
it: prefix_cache.py.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

COMPARED_AT_ONCE = 4096


class Node(Generic[T]):
    """A run of keys that ends at depth `end`. Compared and hashed by identity.

    A node that is no root has a value, or several children, or none: runs are as long as they can
    be. A value stays in its node whatever is split or joined around it.
    """

    __slots__ = ("children", "end", "keys", "needed", "parent", "value")

    def __init__(self, parent: "Node[T] | None", keys: tuple[int, ...]) -> None:
        self.parent = parent
        self.keys = keys
        self.end: int = (parent.end if parent else 0) + len(keys)
        self.children: dict[int, Node[T]] = {}
        self.value: T | None = None
        self.needed = 0  # itself when it has a value, and each child that is needed


class Radix(Generic[T]):
    """One tree per root; they share nothing but the limit of `max_bare` tokens on paths that lead
    to no value."""

    def __init__(self, max_bare: int) -> None:
        assert max_bare >= 0, f"max_path_tokens is {max_bare}, it must be at least 0"
        self.max_bare = max_bare
        self.bare_tokens = 0
        """Tokens of the nodes with no value in or below them."""
        self._roots: dict[Hashable, Node[T]] = {}
        self._leaves: OrderedDict[Node[T], Hashable] = OrderedDict()  # bare ones; to their roots

    def walk(self, root: Hashable, keys: tuple[int, ...]) -> tuple[Node[T] | None, int]:
        """The last node on the way of `keys` (None: no such root) and how many keys it and those
        above it share with them: all up to its end, or the way ends within its run."""
        node, depth = self._roots.get(root), 0
        while node is not None and depth < len(keys):
            child = node.children.get(keys[depth])
            if child is None:
                break
            node = child
            depth += _shared(node.keys, keys, depth)
            if depth < node.end:
                break
        return node, depth

    def remember(self, root: Hashable, keys: tuple[int, ...]) -> None:
        """Adds the path, or makes it the one used last."""
        if keys:
            self._add(root, keys, ends=False)
            self._prune()

    def put(self, root: Hashable, keys: tuple[int, ...], value: T) -> Node[T]:
        """The node at the end of `keys`. Its value is `value`, or the one that it has already."""
        assert keys, "the root of a tree has no value"
        node = self._add(root, keys, ends=True)
        if node.value is not None:
            return node
        node.value = value
        self._leaves.pop(node, None)
        above: Node[T] | None = node
        while above is not None:
            above.needed += 1
            if above.needed > 1:
                break
            self.bare_tokens -= len(above.keys)
            above = above.parent
        self._prune()
        return node

    def drop(self, root: Hashable, node: Node[T]) -> None:
        """Takes the value away; the path stays, as the one used last."""
        assert node.value is not None, "dropped twice"
        node.value = None
        above: Node[T] | None = node
        while above is not None:
            above.needed -= 1
            if above.needed > 0:
                break
            self.bare_tokens += len(above.keys)
            above = above.parent
        if not node.children:
            self._leaves[node] = root
        self._join(node)
        self._prune()

    def forget(self, root: Hashable) -> None:
        """Drops a tree with all its values."""
        for node in self._below(self._roots.pop(root, None)):
            self._leaves.pop(node, None)
            if not node.needed:
                self.bare_tokens -= len(node.keys)

    def roots(self) -> list[Hashable]:
        return list(self._roots)

    def values(self, root: Hashable) -> list[T]:
        nodes = self._below(self._roots.get(root))
        return [node.value for node in nodes if node.value is not None]

    def _add(self, root: Hashable, keys: tuple[int, ...], *, ends: bool) -> Node[T]:
        """The node where `keys` end; `ends`: make it end there and nowhere later."""
        self._roots.setdefault(root, Node(None, ()))
        node, depth = self.walk(root, keys)
        assert node is not None
        if depth < node.end and (ends or depth < len(keys)):
            node = self._split(node, depth)
        if depth < len(keys):
            rest = keys[depth:]
            self.bare_tokens += len(rest)
            if node in self._leaves:
                node.keys += rest
                node.end += len(rest)
            else:
                parent, node = node, Node(node, rest)
                parent.children[rest[0]] = node
                self._leaves[node] = root
        if node in self._leaves:
            self._leaves.move_to_end(node)
        return node

    def _split(self, node: Node[T], depth: int) -> Node[T]:
        """Cuts the run of `node` at `depth`: returns the new node of the upper part."""
        parent, size = node.parent, len(node.keys) - (node.end - depth)
        assert parent is not None and 0 < size < len(node.keys)
        upper = Node(parent, node.keys[:size])
        upper.needed = min(node.needed, 1)
        parent.children[upper.keys[0]] = upper
        node.parent, node.keys = upper, node.keys[size:]
        upper.children[node.keys[0]] = node
        return upper

    def _join(self, node: Node[T]) -> None:
        """Gives the run of `node` to its only child, when nothing else keeps it."""
        if node.parent is None or node.value is not None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        child.parent, child.keys = node.parent, node.keys + child.keys
        node.parent.children[child.keys[0]] = child

    def _prune(self) -> None:
        """Shortens the bare paths used least recently, from their ends, to the limit."""
        while (excess := self.bare_tokens - self.max_bare) > 0:
            leaf, root = next(iter(self._leaves.items()))
            if excess < len(leaf.keys):
                leaf.keys = leaf.keys[:-excess]
                leaf.end -= excess
                self.bare_tokens -= excess
                continue
            parent = leaf.parent
            assert parent is not None
            del self._leaves[leaf], parent.children[leaf.keys[0]]
            self.bare_tokens -= len(leaf.keys)
            if parent.parent is None and not parent.children:
                del self._roots[root]
            self._join(parent)

    def _below(self, node: Node[T] | None) -> Iterator[Node[T]]:
        waiting = [node] if node else []
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def check(self) -> None:
        """AssertionError unless links, runs, counts and the list of bare leaves are right."""
        bare, leaves = 0, set[Node[T]]()
        for name, root in self._roots.items():
            assert root.parent is None and not root.keys and root.children, f"root {name!r}"
            for node in self._below(root):
                place = f"root {name!r}, node that ends at {node.end}"
                needed = (node.value is not None) + sum(
                    1 for child in node.children.values() if child.needed
                )
                assert node.needed == needed, f"{place}: {node.needed} for {needed} that need it"
                bare += 0 if needed else len(node.keys)
                for key, child in node.children.items():
                    assert child.parent is node and child.keys[0] == key, f"{place}: child {key}"
                    assert child.end == node.end + len(child.keys), f"{place}: end of child {key}"
                if node.parent is not None:
                    assert node.value is not None or len(node.children) != 1, f"{place}: not joined"
                    if not needed and not node.children:
                        leaves.add(node)
                        assert self._leaves.get(node) == name, f"{place}: not among the bare leaves"
        assert leaves == set(self._leaves), "bare leaves that are none"
        assert bare == self.bare_tokens, f"{self.bare_tokens} bare tokens, counted {bare}"
        assert bare <= self.max_bare, f"{bare} tokens of paths, at most {self.max_bare}"


def _shared(run: tuple[int, ...], keys: tuple[int, ...], start: int) -> int:
    """How many keys `run` and keys[start:] begin with in common. Slices are compared, not single
    keys; every key is copied once, and those of the block that differs twice."""
    size, done = min(len(run), len(keys) - start), 0
    while done < size:
        step = min(COMPARED_AT_ONCE, size - done)
        if run[done : done + step] != keys[start + done : start + done + step]:
            break
        done += step
    else:
        return size
    while step > 1:  # the first difference is within `step` keys from `done` on
        half = step // 2
        if run[done : done + half] == keys[start + done : start + done + half]:
            done, step = done + half, step - half
        else:
            step = half
    return done
