"""The command `suzuri` as a process: exit codes when nobody can read what it prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from suzuri.cli import COMMANDS

ROOT = Path(__file__).parents[2]
FITS = ("plan", "inkling", "--experts", "nvfp4", "--gpu", "h200", "--num-gpus", "8")
DOES_NOT_FIT = ("plan", "inkling", "--gpu", "h200", "--num-gpus", "8")
CLOSED = "standard output is closed"


def exit_code(words: tuple[str, ...], *, stderr_too: bool = False) -> tuple[int, bytes]:
    """(exit code, stderr) of a command line whose output goes into a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "suzuri", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer if stderr_too else subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    return result.returncode, result.stderr or b""


@pytest.mark.parametrize(
    "words",
    [
        FITS,
        DOES_NOT_FIT,
        (*FITS, "--json"),
        (*FITS, "--command"),
        ("inspect", "tiny"),
        ("inspect", "tiny", "--json"),
        ("--help",),
        ("--version",),
        (),
        *((name, "--help") for name in COMMANDS),
    ],
    ids=lambda words: " ".join(words) or "nothing",
)
def test_a_reader_that_went_away_is_no_verdict(words: tuple[str, ...]) -> None:
    assert exit_code(words) == (141, b"")


@pytest.mark.parametrize(
    "words", [("plan", "tiny"), ("nonsense",), ("plan", "tiny", "--num-gpus", "x"), FITS]
)
def test_nor_is_a_refusal_that_nobody_reads(words: tuple[str, ...]) -> None:
    assert exit_code(words, stderr_too=True) == (141, b"")


@pytest.mark.parametrize("words", [FITS, DOES_NOT_FIT, ("inspect", "tiny"), ("--help",)])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_an_error_in_words(words: tuple[str, ...]) -> None:
    for target, complaint in ((">&-", CLOSED), (">/dev/full", "No space left on device")):
        result = subprocess.run(
            ["sh", "-c", f'exec "$@" {target}', "sh", sys.executable, "-m", "suzuri", *words],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            check=False,
        )
        assert result.returncode == 2
        assert result.stderr.decode().count("\n") == 1
        assert complaint in result.stderr.decode()


def test_a_read_pipe_changes_no_exit_code() -> None:
    for words, code in ((FITS, 0), (DOES_NOT_FIT, 1), (("nonsense",), 2)):
        result = subprocess.run(
            [sys.executable, "-m", "suzuri", *words], cwd=ROOT, capture_output=True, check=False
        )
        assert result.returncode == code


WAITING = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
SPINNING = {"GOMP_SPINCOUNT": "1000"}
LOOK = (
    "import os, sys; from suzuri.cli import let_idle_threads_sleep; let_idle_threads_sleep();"
    "print('torch' in sys.modules, [os.environ.get(name) for name in sys.argv[1:]])"
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, WAITING), ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}), (SPINNING, {})],
)
def test_threads_sleep_while_they_wait_unless_the_user_said_how(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    """Said before torch is loaded, which reads it then and never again."""
    kept = {name: x for name, x in os.environ.items() if name not in {**WAITING, **SPINNING}}
    result = subprocess.run(
        [sys.executable, "-c", LOOK, *WAITING],
        cwd=ROOT,
        env=kept | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == f"False {[expected.get(name) for name in WAITING]}"
