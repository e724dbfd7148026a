"""Settings of every test process, before anything imports torch or Triton.

Idle threads must sleep, not spin: some tests use two threads in each of two processes on two cores,
and spinning made them more than ten times slower.
"""

import os
import shutil
import threading
import time
import weakref
from collections.abc import Generator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:
    # Triton kernels run in its interpreter where there is no GPU; Triton reads this when imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with the marker `gpu` are skipped, not failed, where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


_looked_at: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Several processes share a GPU: what a test needed at its peak goes back after it. And no test
    leaves a thread behind that computes: taking turns with one, whatever follows in the process is
    many times slower, and fails where nobody looks for the cause."""
    found = yield
    if item.get_closest_marker("gpu"):
        import torch

        torch.cuda.empty_cache()
    left = [thread for thread in threading.enumerate() if thread not in _looked_at]
    _looked_at.update(left)
    end = time.monotonic() + 60
    while left := _computing(left):
        if time.monotonic() > end:
            pytest.fail(f"left threads that compute: {left}", pytrace=False)
    return found


def _computing(threads: list[threading.Thread]) -> list[threading.Thread]:
    """Those that use a processor at the moment, looking for 20 ms."""
    threads = [thread for thread in threads if thread is not threading.current_thread()]
    before = [_nanoseconds(thread) for thread in threads]
    if threads:
        time.sleep(0.02)
    return [
        thread
        for thread, used in zip(threads, before, strict=True)
        if _nanoseconds(thread) - used > 2_000_000
    ]


def _nanoseconds(thread: threading.Thread) -> int:
    """Of processor time; 0 once it has ended, and where the system does not say."""
    try:
        text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
    except OSError:
        return 0
    return int(text.split()[0])
