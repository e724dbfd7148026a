"""Python code of a model, run in a process of its own with limits. No torch here.

What holds everywhere: time, processor time, memory and the size of a file are bounded, and so is
what comes back; the code sees no environment variable, no file descriptor and no module but the
standard library. On Linux, where the system lets a process be shut in (`is_shut_in`), the code also
has no network, sees and signals no other process, reads no file but the standard library and the
system's, writes to an empty folder of bounded size alone, and nothing of it outlives the run. What
does not hold: a hole in the kernel is not held off, nor is all memory bounded at once: each of
`processes` may take `memory_mb`. Where `is_shut_in` is false the code may read and write what this
user may, and signal what this user runs: `required` then refuses. sandbox_process.py does it.
"""

# pyright: strict

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
from pathlib import Path

from suzuri.envs import sandbox_process

END_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Raises ValueError naming the field."""

    seconds: float = 5.0
    """Of wall time; of processor time as many, rounded up."""

    memory_mb: int = 512
    """Address space of a process."""

    output_bytes: int = 4000
    """Of what is printed and reported; the rest is dropped and said to be."""

    file_mb: int = 1
    """Of any file that is written, in a folder that is removed afterwards; of all of them together
    eight times as much."""

    processes: int = 16
    """Processes and threads. Where the code is not shut in: of this user in all, root excepted."""

    required: bool = False
    """Whether code is refused where the system does not let it be shut in."""

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "output_bytes", "file_mb", "processes"):
            value = getattr(self, name)
            if not 0 < value < 2**40:
                raise ValueError(f"{name} = {value!r}: must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeResult:
    """What a run printed, errors included. `status`: "ok", "error" (an exception or another exit
    code), "timed_out". `is_cut_off`: whether it had no network; `is_shut_in`: whether it saw no
    files and processes either."""

    output: str
    status: str
    is_cut_off: bool
    is_shut_in: bool


async def run_python(code: str, limits: SandboxLimits | None = None) -> CodeResult:
    """Runs `code` as a program. A caller that is cancelled ends it."""
    limits = limits or SandboxLimits()
    told, tell = os.pipe()
    numbers = (
        int(limits.seconds) + 1,
        limits.memory_mb << 20,
        limits.file_mb << 20,
        limits.file_mb << 23,
        limits.processes + 2,  # those that watch it are two
        tell,
        limits.required,
    )
    with tempfile.TemporaryDirectory(prefix="suzuri-code-") as folder:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-u", str(Path(sandbox_process.__file__))),
                *(str(int(number)) for number in numbers),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"},
                start_new_session=True,
                pass_fds=(tell,),
            )
        finally:
            os.close(tell)
        try:
            output, status = await _watched(process, code, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            shut_out = int(os.read(told, 1) or b"0")
            os.close(told)
            await _ended(process)
    return CodeResult(
        output=output,
        status=status,
        is_cut_off=shut_out >= sandbox_process.NETWORK,
        is_shut_in=shut_out == sandbox_process.EVERYTHING,
    )


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Returns once nothing is left of a process that was killed. What it wrote must be read: with a
    full buffer asyncio reads no more, and never sees the end. Where it was not shut in, something
    of it may live on and hold the pipe: that is not waited for."""
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            while await process.stdout.read(65536):
                pass
            await process.wait()


async def _watched(
    process: asyncio.subprocess.Process, code: str, limits: SandboxLimits
) -> tuple[str, str]:
    assert process.stdin is not None and process.stdout is not None
    found = bytearray()

    async def converse(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sink.write(code.encode("utf-8", "replace"))
            await sink.drain()
        sink.close()
        while piece := await source.read(65536):
            found.extend(piece[: max(limits.output_bytes + 1 - len(found), 0)])
        await process.wait()

    try:
        async with asyncio.timeout(limits.seconds):
            await converse(process.stdout, process.stdin)
    except TimeoutError:
        return _text(found, limits) + f"\n(stopped after {limits.seconds} s)", "timed_out"
    return _text(found, limits), "ok" if process.returncode == 0 else "error"


def _text(found: bytearray, limits: SandboxLimits) -> str:
    text = found[: limits.output_bytes].decode("utf-8", "replace")
    more = "\n(the rest was left out)" if len(found) > limits.output_bytes else ""
    return text.rstrip("\n") + more
