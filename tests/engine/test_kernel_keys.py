"""Two processes that meet kernels in different orders look for them under the same names."""

import json

from tests.engine.apart import run_apart


def hashes(seed: int, how: str) -> dict[str, str]:
    return json.loads(run_apart("hashed", str(seed), how, timeout=300))


def test_hashes_do_not_depend_on_what_was_hashed_before() -> None:
    first, second = hashes(1, "settled"), hashes(2, "settled")
    assert first == second
    assert len(set(first.values())) == len(first) > 5


def test_without_it_they_do() -> None:
    """Or the test above could not fail."""
    assert hashes(1, "plain") != hashes(2, "plain")
