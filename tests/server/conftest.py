"""One real server for all tests of this folder: `suzuri serve` on `tiny`, in its own processes."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.waiting import PATIENCE, until

MODEL_ARGS = ("tiny", "--max-context", "400", "--page-size", "16", "--max-running", "16")
START_SECONDS = 180
"""The loops for the CPU are compiled at the first start after a change."""


@dataclasses.dataclass
class Running:
    """A server process and how to reach it."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def engine_pid(self) -> int:
        """The engine's process, found among the children."""
        for pid in children(self.process.pid):
            if b"suzuri.engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError("no engine runs")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE)

    def metric(self, name: str) -> float:
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Of one moment."""
        lines = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text.splitlines()
        return [
            sum(float(line.split()[-1]) for line in lines if line.startswith(f"suzuri:{name}{{"))
            for name in names
        ]

    def wait_idle(self, seconds: float = PATIENCE) -> None:
        """Until nothing runs, waits or holds a page."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        until(lambda: not any(self.metrics(*names)), seconds)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def start(log: Path, *args: str) -> Running:
    """A server on a free port, once it serves."""
    with open(log, "w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "suzuri", "serve", *MODEL_ARGS, "--port", "0", *args],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=Path(__file__).parents[2],
        )
    assert process.stdout is not None
    line = process.stdout.readline()  # "serving tiny on http://127.0.0.1:PORT/v1 ..."
    assert line.startswith("serving"), log.read_text()
    url = line.split(" on ")[1].split("/v1")[0]
    return Running(process=process, url=url, log=log)


def stop(running: Running) -> int:
    running.process.send_signal(signal.SIGTERM)
    try:
        return running.process.wait(PATIENCE)
    finally:
        if running.process.poll() is None:
            os.kill(running.process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start(tmp_path_factory.mktemp("server") / "log.txt")
    yield running
    assert stop(running) == 0
    assert "Traceback" not in running.log.read_text()
