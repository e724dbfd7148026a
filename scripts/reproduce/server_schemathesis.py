"""What schemathesis makes of our OpenAPI, at every route: no answer may be a fault of the server.

    python scripts/reproduce/server_schemathesis.py [--examples 300] [--seed 1] [--write]

Starts `suzuri serve` on `tiny` (random weights) and sends requests that the schema allows, ones
that it does not, and ones with a valid conversation or prompt and few fields besides, which reach
the engine. An answer with status 500 or above, and an engine that was started again, are faults.
Exit code 0: none; 1: some, each with the request that shows it. --write keeps the counts in
benchmarks/results/server-schemathesis.json.
"""

import argparse
import contextlib
import json
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

ROOT = Path(__file__).parents[2]
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/completions": {"prompt": "hi", "max_tokens": 9},
    "/generate": {"input_ids": [5, 6, 7], "text": None, "media": None},
    "/tokenize": {"messages": [{"role": "user", "content": "hi"}], "prompt": None},
}
ALL_CHECKS: list[Any] = list(HealthCheck)
RESULT = ROOT / "benchmarks" / "results" / "server-schemathesis.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--examples", type=int, default=300, help="per route and kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    words = ("serve", "tiny", "--port", "0", "--max-context", "400", "--allow-weight-updates")
    command = [sys.executable, "-m", "suzuri", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" on ")[1].split("/v1")[0]
        found = _run(url, args.examples, args.seed)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    faults: list[str] = found["faults"]
    if process.returncode != 0:
        faults.append(f"the server ended with exit code {process.returncode}")
    for fault in faults:
        print(fault, file=sys.stderr)
    found["machine"] = f"{platform.machine()}, {platform.system()}"
    found["versions"] = {name: version(name) for name in ("schemathesis", "hypothesis", "fastapi")}
    if args.write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    total = sum(sum(counts.values()) for counts in found["statuses"].values())
    print(f"{total} requests, {len(faults)} faults")
    return 1 if faults else 0


def _run(url: str, examples: int, seed: int) -> dict[str, Any]:
    statuses: dict[str, Counter[str]] = {}
    faults: list[str] = []
    began = time.monotonic()
    with httpx.Client(base_url=url, timeout=60) as client:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for result in schema.get_all_operations():
            operation: Any = result.ok()  # pyright: ignore[reportAttributeAccessIssue]
            name = f"{operation.method.upper()} {operation.path}"
            statuses[name] = Counter()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                # A route without parameters has nothing to get wrong.
                with contextlib.suppress(Unsatisfiable):
                    strategy = operation.as_strategy(generation_mode=mode)
                    _ask(strategy, statuses[name], faults, examples, seed, thin=False)
            if operation.path in BASES:
                strategy = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
                _ask(strategy, statuses[name], faults, examples, seed, thin=True)
            print(name, dict(statuses[name]), flush=True)
        restarts = next(
            float(line.split()[-1])
            for line in client.get("/metrics").text.splitlines()
            if line.startswith("suzuri:engine_restarts{")
        )
        if restarts:
            faults.append(f"the engine was started again {restarts:g} times")
    return {
        "statuses": {name: dict(counts) for name, counts in statuses.items()},
        "faults": faults,
        "examples": examples,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
    }


def _ask(
    strategy: Any,
    statuses: "Counter[str]",
    faults: list[str],
    examples: int,
    seed: int,
    *,
    thin: bool,
) -> None:
    draw = random.Random(seed)

    @seeded(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=ALL_CHECKS,
    )
    @given(case=strategy)
    def ask(case: Any) -> None:
        if thin and isinstance(case.body, dict):
            kept = draw.sample(sorted(case.body), min(3, len(case.body)))
            case.body = {name: case.body[name] for name in kept} | BASES[case.operation.path]
        response = case.call(timeout=60)
        statuses[str(response.status_code)] += 1
        if response.status_code >= 500:
            faults.append(f"{response.status_code}: {case.as_curl_command()[:2000]}")

    ask()


if __name__ == "__main__":
    sys.exit(main())
