"""Tool loops of the official SDK and of agent frameworks, unmodified, 30 tool turns each.

    python -m venv /tmp/agents
    python -c 'import site; print(*site.getsitepackages(), sep="\\n")' \\
        > "$(/tmp/agents/bin/python -c 'import site; print(site.getsitepackages()[0])')/here.pth"
    /tmp/agents/bin/pip install openai-agents 'pydantic-ai-slim[openai]'
    /tmp/agents/bin/python scripts/reproduce/server_agents.py [--write]

The loops are those of tests/server/agent_loops.py, with the server in this process and a model
that follows a script. Exit code 0: nothing was lost; 1: something was; 2: a framework is missing.
--write keeps the versions in benchmarks/results/server-agents.json.
"""

import argparse
import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "server-agents.json"
PACKAGES = {"openai": "openai", "agents": "openai-agents", "pydantic_ai": "pydantic-ai-slim"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.server.agent_loops import LOOPS, TURNS, check, expected_calls, run_loop

    found: list[dict[str, Any]] = []
    for module, (loop, thoughts) in LOOPS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{PACKAGES[module]} is not installed", file=sys.stderr)
            return 2
        for stream in (False, True):
            done = run_loop(loop, stream=stream)
            try:
                check(done, thoughts=thoughts)
                lost = ""
            except AssertionError as error:
                lost = str(error) or "an assertion of agent_loops.check"
            found.append(
                {
                    "package": f"{PACKAGES[module]} {version(PACKAGES[module])}",
                    "streamed": stream,
                    "tool_turns": TURNS,
                    "calls": f"{len(done.ran)} of {len(expected_calls())}",
                    "thoughts_sent_back": thoughts,
                    "lost": lost,
                }
            )
            print(found[-1])
    if args.write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    failed = sum(bool(item["lost"]) for item in found)
    print(f"{len(found) - failed} of {len(found)} loops lost nothing")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
