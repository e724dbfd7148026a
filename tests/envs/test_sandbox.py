"""Code of a model: what it prints comes back, and what it must not do does not happen."""

import asyncio
import errno
import os
import time
from pathlib import Path

import pytest

from suzuri.envs import sandbox_process
from suzuri.envs.sandbox import CodeResult, SandboxLimits, run_python


def run(code: str, **limits: float) -> CodeResult:
    return asyncio.run(run_python(code, SandboxLimits(**limits)))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def shut_in() -> None:
    if not run("").is_shut_in:
        pytest.skip("this system lets no process be shut in (namespaces)")


def test_what_is_printed_comes_back() -> None:
    found = run("import math\nprint(math.factorial(20))\nprint('ü')")
    assert (found.output, found.status) == ("2432902008176640000\nü", "ok")


def test_errors_are_told_in_pythons_words() -> None:
    found = run("print(1)\nprint(1 / 0)")
    assert found.status == "error"
    assert found.output.startswith("1\n") and "ZeroDivisionError: division by zero" in found.output
    assert "sandbox" not in found.output, "it is told of its own code alone"
    assert "SyntaxError" in run("1 +").output
    assert run("raise SystemExit(3)").status == "error"
    assert run("").status == "ok"


def test_code_that_does_not_end_is_ended_with_all_its_children() -> None:
    found = run("import os, time\nos.fork()\nprint('on', flush=True)\ntime.sleep(600)", seconds=1.5)
    assert found.status == "timed_out"
    assert found.output.startswith("on") and found.output.endswith("(stopped after 1.5 s)")


def test_limits_hold() -> None:
    assert "MemoryError" in run("x = bytearray(2 << 30)", memory_mb=300).output
    long = run("print('x' * 10**7)", output_bytes=100)
    assert long.output == "x" * 100 + "\n(the rest was left out)"
    big = run("open('f', 'wb').write(b'x' * (2 << 20))", file_mb=1)
    assert big.status == "error"


def test_it_sees_nothing_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUZURI_SECRET", "s3cret")
    found = run(
        "import os\nprint(dict(os.environ))\nprint(os.getcwd())\n"
        "for fd in range(3, 64):\n"
        "    try: print('open', fd, os.fstat(fd))\n"
        "    except OSError: pass"
    )
    assert "s3cret" not in found.output and "SUZURI" not in found.output
    lines = found.output.splitlines()
    assert lines[1] == "/tmp" if found.is_shut_in else "suzuri-code-" in lines[1]
    assert lines[2:] == [], "no descriptor but those of input, output and errors"
    assert "ModuleNotFoundError" in run("import torch").output


def test_without_a_network_where_the_system_can_cut_it_off() -> None:
    code = "import socket\nprint([name for _, name in socket.if_nameindex()])"
    found = run(code)
    if found.is_cut_off:
        assert found.output == "['lo']"
    else:
        assert found.status == "ok"


def test_many_at_once() -> None:
    async def all_of_them() -> list[CodeResult]:
        limits = SandboxLimits(seconds=60)
        return await asyncio.gather(*(run_python(f"print({i} ** 2)", limits) for i in range(8)))

    assert [one.output for one in asyncio.run(all_of_them())] == [str(i**2) for i in range(8)]


def test_limits_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="seconds = 0"):
        SandboxLimits(seconds=0)
    with pytest.raises(ValueError, match="file_mb = -1"):
        SandboxLimits(file_mb=-1)


# Attacks

FORKS = """
import os
made = 0
try:
    while True:
        if os.fork() == 0:
            import time
            time.sleep(600)
        made += 1
except OSError as error:
    print(made, error.errno)
"""


@pytest.mark.usefixtures("shut_in")
def test_a_fork_bomb_comes_to_its_limit_and_ends_with_the_program() -> None:
    found = run(FORKS, processes=10, seconds=60)
    assert (found.output, found.status) == (f"9 {errno.EAGAIN}", "ok")


THREADS = """
import threading
made, wait = 0, threading.Event()
try:
    while True:
        threading.Thread(target=wait.wait, daemon=True).start()
        made += 1
except RuntimeError:
    print(made)
"""


@pytest.mark.usefixtures("shut_in")
def test_threads_count_as_processes() -> None:
    assert run(THREADS, processes=6, seconds=60).output == "5"


@pytest.mark.usefixtures("shut_in")
def test_nothing_outlives_the_program() -> None:
    """One that leaves its session and holds the output open is ended with the rest."""
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('x')"
    found = run(code, seconds=60)
    assert (found.output, found.status) == ("x", "ok"), "nobody waited for the one that sleeps"


MANY_FILES = """
import os
held = 0
try:
    for place in range(5000):
        with open(f"f{place}", "wb") as file:
            file.write(b"x" * SIZE)
        held += 1
except OSError as error:
    print(held, error.errno)
"""


@pytest.mark.usefixtures("shut_in")
@pytest.mark.parametrize(("size", "most"), [(1 << 20, 8), (1, 1000)])
def test_files_are_bounded_together(size: int, most: int) -> None:
    found = run(MANY_FILES.replace("SIZE", str(size)), seconds=60)
    held, number = map(int, found.output.split())
    assert 0 < held <= most and number == errno.ENOSPC


@pytest.mark.usefixtures("shut_in")
def test_files_of_others_are_neither_read_nor_written(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("s3cret")
    os.chmod(secret, 0o666)
    for path in (secret, "/etc/passwd", "/proc/self/environ", "/proc/1/environ", __file__):
        found = run(f"print(open({str(path)!r}).read())")
        assert found.output.splitlines()[-1].startswith("FileNotFoundError"), path
    for path in (tmp_path / "new", secret):
        assert "FileNotFoundError" in run(f"open({str(path)!r}, 'w').write('x')").output
    for path in ("/new", "/usr/lib/new", os.__file__):
        found = run(f"open({path!r}, 'w').write('x')")
        assert "Read-only file system" in found.output, path
    assert secret.read_text() == "s3cret" and len(list(tmp_path.iterdir())) == 1


SIGNALS = """
import os
me = os.getpid()
for other in [*range(1, me), *range(me + 1, TOP)]:
    try:
        os.kill(other, 0)
        print("sees", other)
    except ProcessLookupError:
        pass
os.kill(1, 9)
print(os.getppid(), "lives")
"""


@pytest.mark.usefixtures("shut_in")
def test_no_process_but_its_own_can_be_signalled() -> None:
    """It sees the first of its own processes alone, which it cannot end."""
    found = run(SIGNALS.replace("TOP", str(os.getpid() + 2000)), seconds=60)
    assert found.output == "sees 1\n1 lives"


RIGHTS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for call in (
    lambda: libc.unshare(0x10000000), lambda: libc.mount(b"t", b"/tmp", b"tmpfs", 0, None),
    lambda: libc.umount2(b"/tmp", 2), lambda: libc.chroot(b"/tmp"), lambda: libc.setuid(0),
    lambda: libc.ptrace(16, 1, 0, 0),
):
    print(call(), ctypes.get_errno() == 1)
"""


@pytest.mark.usefixtures("shut_in")
def test_rights_are_gone_and_do_not_come_back() -> None:
    lines = run(RIGHTS).output.splitlines()
    assert lines[:4] == ["-1 True"] * 4 and lines[5:] == ["-1 True"]
    assert lines[4].startswith("-1 ")


def test_limits_are_not_raised_again_and_signals_not_to_be_ignored() -> None:
    code = "import resource as r\nr.setrlimit(r.RLIMIT_AS, (1 << 50, 1 << 50))"
    assert "not allowed to raise" in run(code).output or os.geteuid() == 0
    code = (
        "import signal\nfor number in range(1, 32):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n    except OSError: pass\n"
        "print('on', flush=True)\nwhile True: pass"
    )
    found = run(code, seconds=1.5)
    assert (found.status, found.output[:2]) == ("timed_out", "on")


def test_descriptors_are_bounded() -> None:
    code = "import os\nmade = 0\ntry:\n    while True:\n        os.dup(0)\n        made += 1\n"
    found = run(code + "except OSError as error: print(made, error.errno)")
    assert found.output == f"61 {errno.EMFILE}"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_without_end_is_cut_off_and_ended(stream: str) -> None:
    found = run(f"import sys\nwhile True: sys.{stream}.write('x' * 9999)", seconds=1, file_mb=1)
    assert found.status == "timed_out"
    assert found.output.startswith("x" * 4000) and len(found.output) < 4100


def test_output_that_nobody_reads_in_time_holds_nothing_up() -> None:
    """On a loop that others keep busy a reader falls behind and stops; its process ends all the
    same."""
    flood = "import os\nwhile True: os.write(1, b'x' * 65536)"

    async def main() -> list[CodeResult]:
        runs = [
            asyncio.ensure_future(run_python(flood, SandboxLimits(seconds=0.5))) for _ in range(6)
        ]
        while not all(one.done() for one in runs):
            time.sleep(0.03)
            await asyncio.sleep(0)
        return [await one for one in runs]

    found = asyncio.run(asyncio.wait_for(main(), 60))
    assert [one.status for one in found] == ["timed_out"] * 6


# Where the system does not let it be shut in


@pytest.fixture
def open_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sandbox whose change of the root fails."""
    own = Path(sandbox_process.__file__)
    variant = tmp_path / "process.py"
    text = own.read_text("utf-8")
    assert "\nPIVOT_ROOT = {" in text
    variant.write_text(text.replace("\nPIVOT_ROOT = {", "\nPIVOT_ROOT = {} and {"), "utf-8")
    monkeypatch.setattr(sandbox_process, "__file__", str(variant))


@pytest.mark.usefixtures("open_system")
def test_code_runs_all_the_same_and_the_result_says_so() -> None:
    found = run("import os\nprint(6 * 7, 'suzuri-code-' in os.getcwd())")
    assert (found.output, found.status, found.is_shut_in) == ("42 True", "ok", False)
    assert "MemoryError" in run("x = bytearray(2 << 30)", memory_mb=300).output


@pytest.mark.usefixtures("open_system")
def test_code_is_refused_where_being_shut_in_is_required() -> None:
    found = run("print(6 * 7)", required=True)
    assert found.status == "error" and found.output.startswith("no code is run here")
    assert "42" not in found.output


@pytest.mark.parametrize(
    ("refused", "found"),
    [
        (lambda flags: True, (sandbox_process.NOTHING, False)),
        (lambda flags: flags & sandbox_process.NEW_MOUNTS, (sandbox_process.NETWORK, False)),
    ],
)
def test_what_a_system_refuses_is_told(refused: object, found: tuple[int, bool]) -> None:
    class Refusing(sandbox_process.Libc):
        def __call__(self, name: str, *arguments: object) -> None:
            (flags,) = arguments
            if refused(flags):  # pyright: ignore[reportCallIssue]
                raise OSError(errno.EPERM, name)

    assert sandbox_process.shut_in(Refusing(), 1) == found


def test_a_system_call_that_fails_says_which() -> None:
    with pytest.raises(OSError, match="umount2: "):
        sandbox_process.Libc()("umount2", b"/no such place", 0)
