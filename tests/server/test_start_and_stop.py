"""The life of `suzuri serve`: what it refuses before it loads, and how it ends."""

import concurrent.futures
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import START_SECONDS, children, start

ROOT = Path(__file__).parents[2]


def serve(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "suzuri", "serve", *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=START_SECONDS,
        check=False,
    )


def test_what_cannot_be_served_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """s07: the port, the keys, the model, the memory; exit code 2 and the fix in words."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = serve("--port", port)
    assert found.returncode == 2
    assert f"--port {port}: cannot listen there" in found.stderr
    empty = tmp_path / "keys"
    empty.write_text("\n")
    found = serve("--api-key-file", str(empty))
    assert found.returncode == 2
    assert "there is no key in it" in found.stderr
    found = serve("inkling", "--random-weights", "--port", "0")
    assert found.returncode == 2
    assert "the model does not fit: weights" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """s05: long before the deadline."""
    running = start(tmp_path / "log.txt", "--drain-seconds", "60")
    body = {"prompt": "x", "max_tokens": 390, "ignore_eos": True, "stream": True}
    with running.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(3) == 0


@pytest.mark.parametrize("seconds", ["20", "0.5"])
def test_a_drain_ends_every_stream(tmp_path: Path, seconds: str) -> None:
    """s05: SIGTERM during 50 streams, 34 of them queued: all end whole, or with an error."""
    running = start(tmp_path / "log.txt", "--drain-seconds", seconds)
    inner = children(running.process.pid)
    body: dict[str, Any] = {"prompt": "x", "stream": True, "seed": 1, "ignore_eos": True}
    body["max_tokens"] = 60 if seconds == "20" else 390

    def read(client: httpx.Client) -> list[str]:
        with client.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200
            return [line for line in stream.iter_lines() if line]

    limits = httpx.Limits(max_connections=60)
    with (
        httpx.Client(base_url=running.url, timeout=60, limits=limits) as client,
        concurrent.futures.ThreadPoolExecutor(50) as pool,
    ):
        reads = [pool.submit(read, client) for _ in range(50)]
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if running.metric("num_requests_running") + running.metric("num_requests_waiting") > 49:
                break
        sent = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        with contextlib.suppress(httpx.TransportError):  # all may have ended by now
            refused = client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
        streams = [read.result() for read in reads]
    code = running.process.wait(30)
    took = time.monotonic() - sent
    log = running.log.read_text()
    assert code == 0, log
    assert took < float(seconds) + 4
    told = 0
    for lines in streams:
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2].removeprefix("data: "))
        if "error" in last:
            told += 1
            assert "shutting down" in last["error"]["message"]
        else:
            assert last["choices"][0]["finish_reason"] == "length"
    assert (told == 0) == (seconds == "20")
    assert not any(Path(f"/proc/{pid}").exists() for pid in inner)
    assert "Traceback" not in log, log
