"""How much memory something takes, measured in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MEASURE = """
import pathlib

def growth(action):
    status = pathlib.Path("/proc/self/status")
    def field(name):
        line = next(x for x in status.read_text().splitlines() if x.startswith(name))
        return int(line.split()[1]) * 1024
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = field("VmRSS")
    action()
    return field("VmHWM") - before

"""


def peak_growths(setup: str, *actions: str) -> list[int]:
    """Bytes that the peak resident size rises above the size before, for each action in turn.

    `setup` is lines of Python, each action an expression. The process gives memory back to the
    system as soon as it frees it, so that what is taken again counts again: a measure that shares
    its heap with whatever ran before can read 0.
    """
    try:
        _RESET.write_text("5")
        _STATUS.read_text()
    except OSError:
        pytest.skip("this system does not tell the peak memory of a process")
    lines = [f"print('grown', growth(lambda: {action}))" for action in actions]
    program = "\n".join([_MEASURE, setup, *lines])
    # Every block from 64 kB on gets pages of its own, which go when it is freed.
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | own | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    return [int(words[1]) for words in found if words and words[0] == "grown"]
