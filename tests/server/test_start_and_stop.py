"""The life of `suzuri serve`: what it refuses before it loads, and how it ends."""

import concurrent.futures
import contextlib
import json
import os
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
from tests.waiting import PATIENCE, until

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


def starting(log: Path) -> subprocess.Popen[bytes]:
    with open(log, "w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "suzuri", "serve", "tiny", "--port", "0"],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=ROOT,
        )


def children_of(process: subprocess.Popen[bytes], count: int) -> list[int]:
    """The processes that a server has started, once they are so many."""
    until(lambda: process.poll() is not None or len(children(process.pid)) >= count)
    assert process.poll() is None, "the server has ended"
    return children(process.pid)


@pytest.mark.parametrize("seconds", [0.0, 0.7, 2.0])
def test_a_signal_while_it_starts_ends_all(tmp_path: Path, seconds: float) -> None:
    """s05: whatever has been started by then; exit code 0."""
    process = starting(tmp_path / "log.txt")
    inner = children_of(process, 2)
    time.sleep(seconds)
    inner = [*inner, *children(process.pid)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in inner)
    assert "Traceback" not in (tmp_path / "log.txt").read_text()


def test_an_engine_that_is_killed_while_it_starts(tmp_path: Path) -> None:
    """The server ends with words; it never served, so nothing is started again."""
    process = starting(tmp_path / "log.txt")
    engines: list[int] = []
    while not engines:
        inner = children_of(process, 2)
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in inner}
        engines = [pid for pid, line in lines.items() if b"engine.worker" in line]
    os.kill(engines[0], signal.SIGKILL)
    assert process.wait(PATIENCE) == 2
    assert "ended while loading (signal 9)" in (tmp_path / "log.txt").read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in inner)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """s05: before the deadline, and before what runs has ended."""
    log = tmp_path / "log.txt"
    running = start(log, "--drain-seconds", "3600")
    body = {"prompt": "x", "max_tokens": 390, "n": 128, "ignore_eos": True, "stream": True}
    with running.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # kept: the stream would end with it
        assert next(lines).startswith("data: {")
        running.process.send_signal(signal.SIGTERM)
        until(lambda: "1 requests may end within 3600 s" in log.read_text())
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE) == 0
    assert "1 requests are told that the server ends" in log.read_text()


@pytest.mark.parametrize("seconds", ["3600", "0.5"])
def test_a_drain_ends_every_stream(tmp_path: Path, seconds: str) -> None:
    """s05: SIGTERM during 50 streams, 34 of them queued: all end whole, or with an error."""
    running = start(tmp_path / "log.txt", "--drain-seconds", seconds)
    inner = children(running.process.pid)
    body: dict[str, Any] = {"prompt": "x", "stream": True, "seed": 1, "ignore_eos": True}
    body["max_tokens"] = 60 if seconds == "3600" else 390

    def read(client: httpx.Client) -> list[str]:
        with client.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200
            return [line for line in stream.iter_lines() if line]

    limits = httpx.Limits(max_connections=60)
    with (
        httpx.Client(base_url=running.url, timeout=PATIENCE, limits=limits) as client,
        concurrent.futures.ThreadPoolExecutor(50) as pool,
    ):
        reads = [pool.submit(read, client) for _ in range(50)]
        until(lambda: running.metric("request_params_n_count") == 50)
        running.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.TransportError):  # all may have ended by now
            until(lambda: client.get("/health/ready").status_code == 503)
            refused = client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
        streams = [read.result() for read in reads]
    code = running.process.wait(PATIENCE)
    log = running.log.read_text()
    assert code == 0, log
    told = 0
    for lines in streams:
        assert lines[-1] == "data: [DONE]"
        last = json.loads(lines[-2].removeprefix("data: "))
        if "error" in last:
            told += 1
            assert "shutting down" in last["error"]["message"]
        else:
            assert last["choices"][0]["finish_reason"] == "length"
    assert (told == 0) == (seconds == "3600")
    assert not any(Path(f"/proc/{pid}").exists() for pid in inner)
    assert "Traceback" not in log, log


def test_the_model_alone_is_enough_and_no_key_is_told(tmp_path: Path) -> None:
    """s08 s12: defaults go together and are printed; keys are in no log, metric or error."""
    keys = tmp_path / "keys"
    keys.write_text("first-secret\nsecond-secret\n")
    log = tmp_path / "log.txt"
    running = start(log, "--api-key-file", str(keys))
    with running.client() as client:
        texts: list[str] = []
        for key in ("first-secret", "second-secret", "wrong-secret", ""):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            for path in ("/v1/models", "/metrics", "/openapi.json", "/get_model_info", "/nothing"):
                answer = client.get(path, headers=headers)
                knows = key in ("first-secret", "second-secret")
                assert answer.status_code == (
                    (404 if path == "/nothing" else 200) if knows else 401
                )
                texts.append(answer.text)
        body = {"prompt": "x", "first-secret": 1}
        texts.append(client.post("/v1/completions", json=body, headers=headers).text)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE) == 0
    told = log.read_text()
    assert "tokens of context" in told
    assert "bfloat16 on cpu" in told
    assert not any("secret" in text for text in [*texts, told])
