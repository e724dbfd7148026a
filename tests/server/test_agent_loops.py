"""Tool loops of 30 turns, unmodified: the official SDK, and agent frameworks where installed.

scripts/reproduce/server_agents.py runs all of them and records versions.
"""

import pytest

from tests.server.agent_loops import LOOPS, check, run_loop


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("module", LOOPS)
def test_thirty_tool_turns_lose_nothing(module: str, stream: bool) -> None:
    """p19: what was called comes back as a call, once."""
    pytest.importorskip(module)
    loop, thoughts = LOOPS[module]
    check(run_loop(loop, stream=stream), thoughts=thoughts)
