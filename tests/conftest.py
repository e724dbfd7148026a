"""Settings of every test process, before anything imports torch or Triton.

Idle threads must sleep, not spin: some tests use two threads in each of two processes on two cores,
and spinning made them more than ten times slower.
"""

import os
import shutil

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


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Several processes share a GPU: what a test needed at its peak goes back after it."""
    if item.get_closest_marker("gpu"):
        import torch

        torch.cuda.empty_cache()
