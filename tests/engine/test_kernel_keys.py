"""Two processes that meet kernels in different orders look for them under the same names."""

import json
import os
import subprocess
import sys


def hashes(seed: int, how: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.hashed", str(seed), how],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout)


def test_hashes_do_not_depend_on_what_was_hashed_before() -> None:
    first, second = hashes(1, "settled"), hashes(2, "settled")
    assert first == second
    assert len(set(first.values())) == len(first) > 5


def test_without_it_they_do() -> None:
    """Or the test above could not fail."""
    assert hashes(1, "plain") != hashes(2, "plain")
