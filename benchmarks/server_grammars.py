"""The longest wait of one stream on `tiny` for a token, while others ask for answers that are bound
by a grammar whose masks take long.

    python benchmarks/server_grammars.py [--others 15] [--rounds 5] [--json FILE]

A round is one plain stream alone, beside `others` plain answers, and beside `others` answers of the
grammar, all of them asked for at once when the stream has begun; what they are is below. The same
for a server whose model computes on every core, and for one that leaves a core to the thread of the
masks (OMP_NUM_THREADS=1). Waits are seen by the client, which shares the machine. Exit code 1 when
the stream is not the same each time, or one of the others was refused at its start.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from suzuri.tools.bench.record import commit

ROOT = Path(__file__).parents[1]
GRAMMAR = "start: s\ns: s s | s s s | /[a-z]/"
"""Reads n letters in very many ways; a mask takes from 1 to 20 ms."""
WARM = 10
"""Tokens of the stream before the others are asked for."""


def start(threads: int) -> tuple[subprocess.Popen[str], str]:
    args = ("--max-context", "400", "--page-size", "16", "--max-running", "16")
    process = subprocess.Popen(
        [sys.executable, "-m", "suzuri", "serve", "tiny", "--port", "0", *args],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, line.split(" on ")[1].split("/v1")[0]


async def other(client: httpx.AsyncClient, seed: int, form: dict[str, str]) -> None:
    """Asks until it is cancelled, as an answer may end early. Never returns."""
    while True:
        body = {"prompt": "x", "seed": seed, "max_tokens": 300, **form}
        answer = await client.post("/v1/completions", json=body)
        # A hostile form may end its own request: "the output cannot go on".
        assert answer.status_code in (200, 400), answer.text
        seed += 1000


async def waits(
    client: httpx.AsyncClient, args: argparse.Namespace, form: dict[str, str] | None
) -> tuple[list[int], list[float]]:
    """The ids of the stream, and the seconds before each one after the others were asked for."""
    body = {"prompt": "Number 1", "seed": 1, "max_tokens": args.tokens, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}  # so that every token has a chunk
    ids: list[int] = []
    times: list[float] = []
    others: list[asyncio.Task[None]] = []
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            new = json.loads(line[6:])["choices"][0].get("token_ids", [])
            times += [time.monotonic()] * len(new)
            ids += new
            if len(times) == WARM and form is not None and not others:
                for seed in range(args.others):
                    others.append(asyncio.create_task(other(client, seed, form)))
    for task in others:
        task.cancel()  # but one that has failed
    for ended in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError), ended
    assert len(ids) == len(times) == args.tokens
    return ids, [b - a for a, b in zip(times[WARM - 1 :], times[WARM:], strict=False)]


async def idle(client: httpx.AsyncClient) -> None:
    while True:
        lines = (await client.get("/metrics")).text.splitlines()
        names = ("num_requests_running{", "num_requests_waiting{")
        held = [
            float(x.split()[-1]) for x in lines if x.startswith(tuple(f"suzuri:{n}" for n in names))
        ]
        if not any(held):
            return
        await asyncio.sleep(0.05)


CASES: dict[str, dict[str, str] | None] = {
    "alone": None,
    "beside plain answers": {},
    "beside answers of the grammar": {"grammar": GRAMMAR},
}


async def run(url: str, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[list[float]]] = {name: [] for name in CASES}
    seen: set[tuple[int, ...]] = set()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for round in range(args.rounds + 1):
            for name, form in CASES.items():
                ids, seconds = await waits(client, args, form)
                await idle(client)
                seen.add(tuple(ids))
                if round:  # the first one warms up
                    found[name].append(seconds)
    assert len(seen) == 1, "the stream depends on who is beside it"
    return {name: _summary(rounds) for name, rounds in found.items()}


def _summary(rounds: list[list[float]]) -> dict[str, Any]:
    longest = sorted(round(1000 * max(seconds), 1) for seconds in rounds)
    all_ms = [1000 * second for seconds in rounds for second in seconds]
    return {
        "longest_wait_ms": {"median": statistics.median(longest), "of_each_round": longest},
        "median_wait_ms": round(statistics.median(all_ms), 1),
        "tokens_per_second": round(len(all_ms) / sum(all_ms) * 1000, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--others", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    record: dict[str, Any] = {
        "commit": commit(ROOT),
        "machine": f"{platform.machine()}, {cores} cores, Python {platform.python_version()}",
        "others": args.others,
        "tokens": args.tokens,
        "grammar": GRAMMAR,
        "load_average_before": round(os.getloadavg()[0], 2),
        "threads_of_the_model": {},
    }
    for threads in sorted({1, cores}):
        process, url = start(threads)
        try:
            record["threads_of_the_model"][threads] = found = asyncio.run(run(url, args))
        except AssertionError as error:
            print(f"FAILED: {error}")
            return 1
        finally:
            process.terminate()
            process.wait(60)
        for name, one in found.items():
            print(f"{threads} threads, {name}: {one}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
