"""Worker processes of `suzuri sft`: their files, and what interrupts and kills do."""

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from suzuri.training.jsonl import JsonlData
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]
CHATS = ROOT / "recipes" / "data" / "chats.jsonl"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run with two workers that has come to its second step, at the head of its own group."""
    flags = ["--model=tiny", "--random-weights", "--steps=100000", "--batch_size=2"]
    flags += [f"--train={CHATS}", "--data_workers=2", f"--run_dir={tmp_path / 'run'}"]
    child = subprocess.Popen(
        [sys.executable, "-m", "suzuri", "sft", *flags],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    lines = tmp_path / "run" / "metrics.jsonl"
    try:
        until(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 2)
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the workers of one that has ended, too
        child.communicate()


def workers(child: subprocess.Popen[str]) -> list[int]:
    """Its processes that make samples."""
    text = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text()
    found = [int(pid) for pid in text.split()]
    return [p for p in found if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_files_are_opened_again_by_a_worker(tmp_path: Path) -> None:
    """A descriptor is a number that means another file there, or none."""
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    sent = pickle.dumps(JsonlData([str(path)]))
    other = pickle.loads(sent)
    assert [other.conversation(i).text for i in range(other.size)] == ["one", "two"]
    path.write_text('{"text": "six"}\n{"text": "eleven"}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path} was changed since")):
        pickle.loads(sent)


def test_ctrl_c_of_the_whole_group_is_the_trainers_to_obey(run: subprocess.Popen[str]) -> None:
    """A terminal sends it to every process: workers that died of it left a queue half read."""
    pids = workers(run)
    assert len(pids) == 2
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 130
    assert out.startswith("stopped after step ")
    assert "Traceback" not in err
    until(lambda: not any(map(is_alive, pids)))


def test_workers_that_somebody_ended_with_the_trainer_are_no_fault(
    run: subprocess.Popen[str],
) -> None:
    os.killpg(run.pid, signal.SIGTERM)
    out, err = run.communicate(timeout=PATIENCE)
    assert (run.returncode, out[:19]) == (130, "stopped after step "), err


def test_workers_end_with_a_trainer_that_was_killed(run: subprocess.Popen[str]) -> None:
    pids = workers(run)
    run.kill()
    run.wait(PATIENCE)
    until(lambda: not any(map(is_alive, pids)))


def test_the_death_of_a_worker_is_told(run: subprocess.Popen[str]) -> None:
    os.kill(workers(run)[0], signal.SIGKILL)
    _, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 1
    assert "a data worker died, perhaps for want of memory; give fewer data_workers" in err
    assert "Traceback" not in err
