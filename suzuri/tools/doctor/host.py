"""What a probe of `suzuri doctor` may ask of the machine: files below /, and child processes.

A child that does not answer in time is killed, and given up if even that does not end it (a driver
that hangs in the kernel). Tests make a Host with a folder for / and programs of their own.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

MAX_OUTPUT = 1 << 20
MAX_FILE = 1 << 22
_PROGRAM_FOLDERS = (
    *("/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/nvidia/bin", "/usr/local/cuda/bin"),
    *("/usr/lib/wsl/lib", "/opt/rocm/bin"),
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a child process printed (both streams), and in words why it is no good answer.

    `error` is empty after exit code 0; `is_absent` when there is no such program.
    """

    text: str = ""
    error: str = ""
    is_absent: bool = False
    is_late: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """The machine as probes see it."""

    environment: Mapping[str, str]
    root: Path = Path("/")
    python: str = sys.executable or "python3"
    platform: str = sys.platform
    home: str = ""

    def path(self, name: str) -> Path:
        """The absolute path `name`, below this host's root."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Text of a small file such as /proc/meminfo; None where it cannot be read."""
        try:
            with self.path(name).open("rb") as file:
                return file.read(MAX_FILE).decode("utf-8", "replace")
        except (OSError, ValueError):
            return None

    def exists(self, name: str) -> bool:
        """Whether there is a file or a device of that name."""
        try:
            return self.path(name).exists()
        except (OSError, ValueError):
            return False

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder; none where it cannot be read."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except (OSError, ValueError):
            return []

    def find(self, program: str) -> str | None:
        """The program's path, from PATH or from where drivers put their tools."""
        found = shutil.which(program, path=self.environment.get("PATH", ""))
        for folder in _PROGRAM_FOLDERS:
            found = found or shutil.which(program, path=str(self.path(folder)))
        return found

    def run(self, program: str, *words: str, seconds: float = 5.0) -> Answer:
        """Run a program of this machine for at most about `seconds`."""
        found = self.find(program)
        if found is None:
            return Answer(error=f"{program} is not installed", is_absent=True)
        return ask([found, *words], program, seconds, self.environment)

    def start_python(
        self, code: str, *words: str, called: str, seconds: float, is_isolated: bool = False
    ) -> "Running":
        """Start Python code in a child. Isolated: without the user's site and PYTHON* variables."""
        # -P: a file torch.py in the current folder is not torch.
        flags = ["-I"] if is_isolated else ["-P"]
        command = [self.python, *flags, "-X", "utf8", "-c", code, *words]
        return Running(command, called, seconds, self.environment)


def this_machine() -> Host:
    """The machine that runs this program."""
    return Host(environment=dict(os.environ), home=_home())


def _home() -> str:
    try:
        return str(Path.home())
    except (RuntimeError, OSError):
        return ""


def ask(
    command: Sequence[str], called: str, seconds: float, environment: Mapping[str, str]
) -> Answer:
    """Run one command for at most about `seconds`; never raises for what the command does."""
    return Running(command, called, seconds, environment).answer()


class Running:
    """A child process at work. `answer` waits for it; whoever does not wait must `stop` it."""

    def __init__(
        self, command: Sequence[str], called: str, seconds: float, environment: Mapping[str, str]
    ) -> None:
        self._called = called
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._output = bytearray()
        self._child: subprocess.Popen[bytes] | None = None
        self._error = ""
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
            assert self._child.stdout is not None
            # A thread, because a grandchild may hold the pipe open after the child has ended.
            self._reader = threading.Thread(
                target=_collect, args=(self._child.stdout, self._output), daemon=True
            )
            self._reader.start()
        except (OSError, ValueError, RuntimeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
            self._error = f"{called} cannot be started: {reason}"
            self.stop()

    def stop(self) -> None:
        """End the child and what it started, if they still run."""
        if self._child is not None and self._child.poll() is None:
            _kill(self._child)

    def answer(self) -> Answer:
        """Wait for the end or for the time limit, counted from the start."""
        if self._error or self._child is None:
            return Answer(error=self._error)
        is_late = False
        try:
            self._child.wait(max(0.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            is_late = True
        finally:  # an interrupt too must not leave the child behind
            self.stop()
        self._reader.join(1.0)
        if self._reader.is_alive():
            _kill(self._child)
        text = _ESCAPES.sub("", bytes(self._output).decode("utf-8", "replace"))
        if is_late:
            error = f"{self._called} did not answer in {self._seconds:g} s"
            return Answer(text=text, error=error, is_late=True)
        if len(self._output) > MAX_OUTPUT:
            return Answer(text=text, error=f"{self._called} printed more than {MAX_OUTPUT} bytes")
        code = self._child.returncode
        if not code:
            return Answer(text=text)
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
        return Answer(text=text, error=f"{self._called} {how}" + (last and f": {last[:200]}"))


def _collect(pipe: IO[bytes], output: bytearray) -> None:
    """Keep the first MAX_OUTPUT bytes; closing the pipe ends a program that never stops."""
    with contextlib.suppress(OSError, ValueError), pipe:
        while len(output) <= MAX_OUTPUT:
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                return
            output += piece


def _kill(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):
        if sys.platform != "win32":
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
