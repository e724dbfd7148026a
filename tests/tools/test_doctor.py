"""`suzuri doctor`: what it says of machines that are odd, broken or private, and that it ends."""

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest

from suzuri.tools.doctor import resources
from suzuri.tools.doctor import run as doctor
from suzuri.tools.doctor.config import DoctorConfig
from suzuri.tools.doctor.host import MAX_OUTPUT, Answer, Host, Running, ask
from suzuri.tools.doctor.packages import (
    PURPOSES,
    Requirement,
    is_allowed,
    package_lines,
    parse_requirement,
    requirements,
)
from suzuri.tools.doctor.report import Line, Private, cleaned, show, verdict
from suzuri.tools.doctor.resources import Space, memory_bytes
from suzuri.tools.doctor.system import container_of, cpu_limit, is_wsl
from tests.tools.doctor_machines import by_name, machine
from tests.waiting import PATIENCE, until

REPOSITORY = Path(__file__).parents[2]

# Child processes.


@pytest.mark.parametrize(
    "script",
    ["sleep 60", "sleep 60 & exec sleep 60", "trap '' TERM INT HUP; while :; do sleep 1; done"],
)
def test_a_program_that_hangs_is_given_up(script: str) -> None:
    answer = ask(["/bin/sh", "-c", script], "it", 0.3, {"PATH": os.environ["PATH"]})
    assert answer.is_late
    assert answer.error == "it did not answer in 0.3 s"


def test_a_grandchild_that_keeps_the_pipe_open_does_not_hold_the_answer_back() -> None:
    answer = ask(["/bin/sh", "-c", "sleep 600 & echo done"], "it", PATIENCE, dict(os.environ))
    assert (answer.text, answer.error) == ("done\n", "")


def test_a_child_that_nobody_waits_for_can_be_ended(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = f"echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep 600"
    running = Running(["/bin/sh", "-c", script], "it", PATIENCE, dict(os.environ))
    until(mark.exists)
    running.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_endless_output_is_cut() -> None:
    answer = ask(["/bin/sh", "-c", "exec yes"], "it", PATIENCE, dict(os.environ))
    assert answer.error and not answer.is_late
    assert len(answer.text) < 2 * MAX_OUTPUT


def test_how_a_program_ended_is_told_in_words(tmp_path: Path) -> None:
    def shell(script: str) -> Answer:
        return ask(["/bin/sh", "-c", script], "it", PATIENCE, dict(os.environ))

    assert shell("echo bad luck; exit 9").error == "it ended with code 9: bad luck"
    assert shell("kill -ABRT $$").error == "it was ended by SIGABRT"
    assert shell(r"printf '\033[4mGPU0\033[0m \001\377\n'").text == "GPU0 \ufffd\n"
    host = machine(tmp_path)
    assert host.run("no-such-program") == Answer(
        error="no-such-program is not installed", is_absent=True
    )
    (tmp_path / "bin" / "broken").write_bytes(b"\x7fELF not really")
    (tmp_path / "bin" / "broken").chmod(0o755)
    assert "cannot be started" in host.run("broken").error


# Memory, limits, containers.


def test_limits_of_control_groups_count(tmp_path: Path) -> None:
    new = machine(
        tmp_path / "v2",
        proc__self__cgroup="0::/a/b\n",
        proc__meminfo="MemTotal:  67108864 kB\nMemAvailable: 33554432 kB\n",
    )
    (new.root / "sys/fs/cgroup/a/b").mkdir(parents=True)
    (new.root / "sys/fs/cgroup/a/memory.max").write_text("8589934592\n")
    (new.root / "sys/fs/cgroup/a/b/memory.max").write_text("max\n")
    (new.root / "sys/fs/cgroup/a/b/cpu.max").write_text("150000 100000\n")
    assert memory_bytes(new) == (8 << 30, 8 << 30)
    assert cpu_limit(new) == 1.5
    old = machine(tmp_path / "v1", proc__self__cgroup="4:cpu,cpuacct:/x\n5:memory:/x\n")
    for name, text in {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/x/memory.limit_in_bytes": "1073741824",
        "cpu/x/cpu.cfs_quota_us": "-1",
        "cpu/x/cpu.cfs_period_us": "100000",
    }.items():
        path = old.root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_bytes(old)[0] == 1 << 30
    assert cpu_limit(old) is None
    assert memory_bytes(machine(tmp_path / "none")) == (None, None)


def test_small_shared_memory_names_the_flag_of_this_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "space", lambda *_: Space(free=64 << 20, total=64 << 20))
    host = machine(tmp_path, **{".dockerenv": "", "dev__shm__x": "", "proc__version": "Microsoft"})
    assert container_of(host) == "docker" and is_wsl(host)
    for num_gpus, status in ((8, "problem"), (1, "note")):
        line = by_name(resources.resource_lines(host, num_gpus), "shared memory")
        assert line.status == status and "--shm-size" in line.fix


def test_a_disk_that_does_not_answer_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Space(error="the file system did not answer in 5 s")
    monkeypatch.setattr(resources, "space", lambda *_: late)
    line = by_name(resources.resource_lines(machine(tmp_path), 0), "hub cache")
    assert line.status == "problem" and "did not answer" in line.value


def test_a_folder_that_does_not_exist_yet_is_measured_at_its_parent(tmp_path: Path) -> None:
    found = resources.space(doctor.this_machine(), str(tmp_path / "not" / "yet"))
    assert found.error == "" and found.device == tmp_path.stat().st_dev
    assert 0 < found.free <= found.total


# Packages.


def test_versions_are_compared_as_numbers() -> None:
    assert is_allowed("2.13.0+cpu", ">=2.11,<2.15")
    assert is_allowed("2.9", ">=2.9.0") and is_allowed("0.17.9", "~=0.17.6")
    assert is_allowed("1.1.414", "==1.1.414") and is_allowed("1.2.3", "==1.2.*")
    for version, allowed in (
        ("2.9.1", ">=2.11"),
        ("2.15.0", "<2.15"),
        ("0.18", "~=0.17.6"),
        ("0.3.0", ">=0.2.1,<0.3"),
        ("1.3", "==1.2.*"),
    ):
        assert not is_allowed(version, allowed), (version, allowed)
    assert parse_requirement("Pillow >=11.3 ; extra == 'media'") == Requirement(
        package="pillow", allowed=">=11.3", extra="media"
    )
    assert parse_requirement("pyright[nodejs]==1.1.414", "dev").package == "pyright"


def test_every_extra_of_the_project_is_told_with_its_purpose() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = {item.extra for item in requirements() if item.extra}
    assert extras == set(project["optional-dependencies"])
    for item in requirements():
        if item.extra:
            assert item.package in PURPOSES, f"what is {item.package} for?"


def test_missing_packages_come_with_the_line_that_installs_them() -> None:
    needed = (
        Requirement(package="rich", allowed=">=1"),
        Requirement(package="no-such-package", allowed=">=2,<3"),
        Requirement(package="numpy", allowed=">=99"),
        Requirement(package="no-such-extra", allowed="", extra="media"),
    )
    lines = package_lines(doctor.this_machine(), {}, needed)
    assert by_name(lines, "rich").status == "ok"
    missing = by_name(lines, "no-such-package")
    assert (missing.status, missing.fix) == ("problem", "pip install 'no-such-package>=2,<3'")
    assert "wanted >=99" in by_name(lines, "numpy").value
    extra = by_name(lines, "extra media")
    assert extra.status == "note" and "pip install 'suzuri[media]'" in extra.fix


# Privacy and printing.


def test_nothing_private_is_left_in_a_line() -> None:
    private = Private(home="/home/jdoe", names=("jdoe", "node17-lab"))
    for text, shown in {
        "/home/jdoe/models/x": "~/models/x",
        "/home/jdoe2/x": "~other/x",
        "/Users/alice/x on node17-lab": "~other/x on <name>",
        "/scratch/jdoe/x": "/scratch/<name>/x",
        "token hf_AbCdEfGhIjKlMnOp": "token <token>",
        "10.0.12.7:29500 and fe80::1ff:fe23:4567:890a": "<address>:29500 and <address>",
        "de:ad:be:ef:00:01": "<address>",
        "GPU-8f7a1b2c-1111-2222-3333-444455556666": "GPU-<id>",
        "https://me:secret@mirror/x": "https://<login>@mirror/x",
    }.items():
        (line,) = cleaned([Line(area="a", name="b", value=text, fix=text)], private)
        assert (line.value, line.fix) == (shown, shown)
    kept = "torch 2.11.0+cu130, driver 580.159.04, std::bad_alloc, 00000000:17:00.0, 12 GiB"
    assert private.hide(kept) == kept
    assert Private(home="/", names=("", "a", "root")).hide("/a/root") == "/a/root"


def test_of_secret_variables_only_whether_they_are_set_is_told(tmp_path: Path) -> None:
    environment = {
        "HF_TOKEN": "hf_verysecretvalue",
        "AWS_SECRET_ACCESS_KEY": "terrible",
        "NCCL_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    host = Host(environment=environment, root=tmp_path)
    lines = doctor.environment_lines(host)
    assert [(line.name, line.value) for line in lines[:2]] == [
        ("CUDA_VISIBLE_DEVICES", "empty"),
        ("NCCL_SOCKET_IFNAME", "eth0"),
    ]
    text = str(lines)
    assert "HF_TOKEN set" in text and "HF_HOME unset" in text
    assert "secret" not in text and "terrible" not in text


def test_exit_code_and_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    fine = Line(area="a", name="b", value="c")
    note = Line(area="a", name="n", value="v", status="note", fix="f")
    bad = Line(area="disk", name="tmp", value="full ™ \udcff", status="problem", fix="free it")
    assert verdict([fine, note]) == "OK: 2 checks, 1 note(s), no problem"
    assert show([fine, note], "0", as_json=False) == 0
    capsys.readouterr()
    assert show([fine, bad, bad], "0", as_json=False) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("2 problem(s): first disk, tmp: full")
    assert "-> free it" in "\n".join(out)
    assert show([fine, bad], "0", as_json=True) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["problems"] == 1 and document["lines"][0]["status"] == "ok"


def test_the_report_of_a_machine_that_answers_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No /proc, no /sys, no python that starts, no tools, another system."""

    def broken(_: Host) -> list[Line]:
        raise KeyError("a field that this kernel does not have")

    monkeypatch.setattr(doctor, "system_lines", broken)
    host = Host(
        environment={"PATH": ""},
        root=tmp_path / "nothing",
        python=str(tmp_path / "no-python"),
        platform="darwin",
    )
    assert doctor.run_doctor(DoctorConfig(json=True), host) == 1
    document = json.loads(capsys.readouterr().out)
    lines = {line["name"]: line for line in document["lines"]}
    assert "cannot be started" in lines["torch"]["value"]
    assert "a field that this kernel does not have" in lines["system"]["value"]


def test_the_command_here_prints_one_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.run_doctor(DoctorConfig())
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK: " if code == 0 else tuple("123456789"))
    assert str(Path.home()) not in out or str(Path.home()) == "/"
    for word in ("Python", "memory", "torch", "numpy", "HF_TOKEN"):
        assert word in out


def test_an_output_that_knows_ascii_only_is_enough(tmp_path: Path) -> None:
    code = (
        "from suzuri.tools.doctor.report import *\n"
        "line = Line(area='a', name='b', value='EPYC\\u2122 \\u65e5\\u672c', fix='\\u2026')\n"
        "import sys; sys.exit(show([line], '1', as_json=False))"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    answer = ask(
        [sys.executable, "-c", code], "it", 60, {**environment, "PYTHONPATH": str(REPOSITORY)}
    )
    assert answer.error == ""
    assert "EPYC? ??" in answer.text and answer.text.isascii()
