"""Modules of this folder that see kernels as Triton does: in processes of their own, because the
interpreter, where it is on, is on for all of a process."""

import os
import subprocess
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from suzuri.engine.compile_server import NoDriver


def run_apart(module: str, *words: str, timeout: float = 900, **environment: str) -> str:
    """What `python -m tests.engine.MODULE WORDS` prints, without the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.engine.{module}", *words],
        env={**os.environ, "TRITON_INTERPRET": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pretend_target() -> None:
    """Triton describes and compiles kernels for an H100 or H200 from here on, and touches none."""
    stand_in: Any = NoDriver(GPUTarget("cuda", 90, 32))
    driver.set_active(stand_in)
