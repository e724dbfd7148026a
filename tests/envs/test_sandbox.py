"""Code of a model: what it prints comes back, and what it must not do does not happen."""

import asyncio
import time
from pathlib import Path

import pytest

from suzuri.envs.sandbox import CodeResult, SandboxLimits, run_python


def run(code: str, **limits: float) -> CodeResult:
    return asyncio.run(run_python(code, SandboxLimits(**limits)))  # pyright: ignore[reportArgumentType]


def test_what_is_printed_comes_back() -> None:
    found = run("import math\nprint(math.factorial(20))\nprint('ü')")
    assert (found.output, found.status) == ("2432902008176640000\nü", "ok")


def test_errors_are_told_in_pythons_words() -> None:
    found = run("print(1)\nprint(1 / 0)")
    assert found.status == "error"
    assert found.output.startswith("1\n") and "ZeroDivisionError: division by zero" in found.output
    assert "SyntaxError" in run("1 +").output
    assert run("raise SystemExit(3)").status == "error"
    assert run("").status == "ok"


def test_code_that_does_not_end_is_ended_with_all_its_children() -> None:
    begin = time.monotonic()
    found = run("import os, time\nos.fork()\nprint('on', flush=True)\ntime.sleep(60)", seconds=1.5)
    assert found.status == "timed_out"
    assert found.output.startswith("on") and found.output.endswith("(stopped after 1.5 s)")
    assert time.monotonic() - begin < 30


def test_limits_hold() -> None:
    assert "MemoryError" in run("x = bytearray(2 << 30)", memory_mb=300).output
    long = run("print('x' * 10**7)", output_bytes=100)
    assert long.output == "x" * 100 + "\n(the rest was left out)"
    big = run("open('f', 'wb').write(b'x' * (2 << 20))", file_mb=1)
    assert big.status == "error"


def test_it_sees_nothing_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUZURI_SECRET", "s3cret")
    found = run(
        "import os\nprint(dict(os.environ))\nprint(os.getcwd())\nprint(os.listdir('/proc/self/fd'))"
    )
    assert "s3cret" not in found.output
    lines = found.output.splitlines()
    assert "suzuri-code-" in lines[1] and not Path(lines[1]).exists()
    assert len(lines[2].split(",")) <= 4, "stdin, stdout, stderr, and the folder that is listed"
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
        return await asyncio.gather(*(run_python(f"print({i} ** 2)") for i in range(8)))

    assert [one.output for one in asyncio.run(all_of_them())] == [str(i**2) for i in range(8)]


def test_limits_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="seconds = 0"):
        SandboxLimits(seconds=0)
