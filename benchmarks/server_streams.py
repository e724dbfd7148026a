"""1,000 streams at one time on `tiny`, a third of which go away at random: all that the server held
comes back to where it was, and the others are correct to the bit.

    python benchmarks/server_streams.py [--streams 1000] [--tokens 24] [--json FILE]

Every stream asks for one of 20 seeds; before, each of these is answered alone. Exit code 1 when an
answer differs, something is still held a few seconds later, or memory grew from the second wave to
the last.
"""

import argparse
import asyncio
import json
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from suzuri.tools.bench.record import commit

ROOT = Path(__file__).parents[1]
SEEDS = 20
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def start() -> tuple[subprocess.Popen[str], str]:
    args = ("--max-context", "256", "--page-size", "16", "--max-running", "256")
    args += ("--max-queue", "4000")
    process = subprocess.Popen(
        [sys.executable, "-m", "suzuri", "serve", "tiny", "--port", "0", *args],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, line.split(" on ")[1].split("/v1")[0]


def memory_mb(pid: int) -> float:
    """Resident memory of the server and its processes."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    pages = [int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in pids]
    return sum(pages) * 4096 / 1e6


async def gauges(client: httpx.AsyncClient) -> list[float]:
    lines = (await client.get("/metrics")).text.splitlines()
    return [
        float(next(line for line in lines if line.startswith(f"suzuri:{name}{{")).split()[-1])
        for name in GAUGES
    ]


async def answer(client: httpx.AsyncClient, body: dict[str, Any], leave_after: float | None) -> str:
    """The text of a stream; "" where it was left."""
    text = ""

    async def read() -> None:
        nonlocal text
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200, await stream.aread()
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]

    try:
        await asyncio.wait_for(read(), leave_after)
    except TimeoutError:
        return ""
    return text


async def wave(
    client: httpx.AsyncClient, args: argparse.Namespace, expected: list[str], chance: random.Random
) -> dict[str, Any]:
    tasks: list[asyncio.Task[str]] = []
    wanted: list[str | None] = []
    began = time.monotonic()
    for index in range(args.streams):
        leaves = index % 3 == 0
        after = chance.uniform(0.01, args.within) if leaves else None
        tasks.append(asyncio.create_task(answer(client, body(args, index % SEEDS), after)))
        wanted.append(None if leaves else expected[index % SEEDS])
    texts = await asyncio.gather(*tasks)
    took = time.monotonic() - began
    wrong = sum(want not in (None, text) for text, want in zip(texts, wanted, strict=True))
    ended = time.monotonic()
    while any(await gauges(client)) and time.monotonic() - ended < 5:
        await asyncio.sleep(0.05)
    return {
        "seconds": round(took, 2),
        "wrong": wrong,
        "left": sum(want is None for want in wanted),
        "left_before_the_end": sum(text == "" for text in texts),
        "held_after": await gauges(client),
        "idle_after_seconds": round(time.monotonic() - ended, 2),
    }


def body(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    fields = {"max_tokens": args.tokens, "ignore_eos": True, "stream": True}
    return {"prompt": f"Number {seed} of them", "seed": seed, **fields}


async def run(url: str, pid: int, args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    limits = httpx.Limits(max_connections=args.streams + 10)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        expected = [await answer(client, body(args, seed), None) for seed in range(SEEDS)]
        chance = random.Random(0)
        waves: list[dict[str, Any]] = []
        for _ in range(args.waves):
            waves.append(await wave(client, args, expected, chance))
            waves[-1]["memory_mb"] = round(memory_mb(pid))
            print(waves[-1], flush=True)
    sound = all(w["wrong"] == 0 and not any(w["held_after"]) for w in waves)
    grew = waves[-1]["memory_mb"] - waves[min(1, len(waves) - 1)]["memory_mb"]
    return {"waves": waves, "grew_mb": grew}, sound and grew < args.may_grow_mb


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--within", type=float, default=4.0, help="seconds until one leaves")
    parser.add_argument("--may-grow-mb", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    process, url = start()
    try:
        found, sound = asyncio.run(run(url, process.pid, args))
    finally:
        process.terminate()
        code = process.wait(60)
    found = {
        "commit": commit(ROOT),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "streams": args.streams,
        "tokens": args.tokens,
        **found,
        "exit_code_of_the_server": code,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print("all correct, nothing held" if sound and code == 0 else "FAILED")
    return 0 if sound and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
