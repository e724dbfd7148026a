"""Python code of a model, run in a process of its own with limits. No torch here.

What holds: time, processor time, memory, output, files and processes are bounded; the code sees no
environment variable, no file descriptor and no module but the standard library; where the system
allows it (`is_cut_off`), no network. What does not: it may read files that this user may read. For
code that somebody hostile wrote, run the whole sampler in a container.
"""

# pyright: strict

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile

RUNNER = """
import ctypes, os, resource, sys
seconds, memory, size, processes, tell = map(int, sys.argv[1:6])
flags = 0x10000000 | 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
cut_off = ctypes.CDLL(None, use_errno=True).unshare(flags) == 0
os.write(tell, b"1" if cut_off else b"0")
os.close(tell)
for limit, value in (
    (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
    (resource.RLIMIT_NPROC, processes), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
code = sys.stdin.read()
sys.argv[:] = ["-"]
exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
"""


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
    """Of any file that is written, in a folder that is removed afterwards."""

    processes: int = 64
    """Of this user in all, so well above what else runs."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < 2**40:
                raise ValueError(f"{field.name} = {value!r}: must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeResult:
    """What a run printed, errors included. `status`: "ok", "error" (an exception or another exit
    code), "timed_out". `is_cut_off`: whether it had no network."""

    output: str
    status: str
    is_cut_off: bool


async def run_python(code: str, limits: SandboxLimits | None = None) -> CodeResult:
    """Runs `code` as a program. A caller that is cancelled ends it."""
    limits = limits or SandboxLimits()
    told, tell = os.pipe()
    words = (
        str(int(limits.seconds) + 1),
        str(limits.memory_mb << 20),
        str(limits.file_mb << 20),
        str(limits.processes),
    )
    with tempfile.TemporaryDirectory(prefix="suzuri-code-") as folder:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-u", "-c", RUNNER, *words, str(tell),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"},
                start_new_session=True,
                pass_fds=(tell,),
            )  # fmt: skip
        finally:
            os.close(tell)
        try:
            output, status = await _watched(process, code, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            is_cut_off = os.read(told, 1) == b"1"
            os.close(told)
            await process.wait()
    return CodeResult(output=output, status=status, is_cut_off=is_cut_off)


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
