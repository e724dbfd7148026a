"""`suzuri doctor`: drivers, GPUs and torch that are odd, old or broken."""

import json
from pathlib import Path

import pytest

from suzuri.tools.doctor import nvidia, pytorch
from suzuri.tools.doctor import run as doctor
from suzuri.tools.doctor.gpus import nvidia_lines, parse_rocm
from suzuri.tools.doctor.host import Answer, Host
from suzuri.tools.doctor.nvidia import Nvidia, parse_topology, read_nvidia
from suzuri.tools.doctor.pytorch import parse_facts, torch_lines
from tests.tools.doctor_machines import by_name, card, machine

BANNER = "| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: 13.0 |"
GOOD = Nvidia(gpus=(card(0),), driver="580.159.04", cuda="13.0", num_on_bus=1)
FACTS: dict[str, object] = {
    "stage": "end",
    "version": "2.11.0+cu130",
    "cuda": "13.0",
    "available": True,
    "count": 1,
    "GPU 0": [9, 0],
    "archs": ["sm_80", "sm_90", "sm_100"],
    "triton": "3.6.0",
    "pairs": 0,
    "peers": 0,
}


# The driver.


def test_gpus_are_read_though_the_driver_does_not_know_some_fields(tmp_path: Path) -> None:
    script = f"""
case "$*" in
  *fabric.state*) echo 'Field "fabric.state" is not a valid field to query.'; exit 2;;
  *fabric.status*) echo 'Field "fabric.status" is not a valid field to query.'; exit 2;;
  *query-gpu*) for i in 0 1; do
    echo "$i, 00000000:0$i:00.0, NVIDIA H200, 143771, 70000, 580.1, 9.0, 700.00, 700.00," \\
      "Enabled, 0, [N/A], Enabled"; done;;
  *compute-apps*) echo '00000000:01:00.0, 73000, /home/jdoe/secret/bin/python3.11 -m train';;
  topo*) printf '\\t\\033[4mGPU0\\tGPU1\\tNIC0\\033[0m\\nGPU0\\t X \\tNV18\\tPIX\\n'
         printf 'GPU1\\tNV18\\t X \\tSYS\\n\\nLegend:\\n  NV# = links\\n';;
  *) echo '{BANNER}';;
esac"""
    host = machine(tmp_path, {"nvidia-smi": script})
    nvidia = read_nvidia(host)
    assert (nvidia.error, nvidia.driver, nvidia.cuda) == ("", "580.1", "13.0")
    assert dict(nvidia.links) == {"NV18": 1}
    lines = nvidia_lines(host, nvidia)
    assert by_name(lines, "links").value == "NVLink (NV18)"
    used = by_name(lines, "GPU 1")
    assert used.status == "note" and "in use by python3.11 71.3 GiB" in used.value
    assert "MIG" not in used.value and "jdoe" not in used.value


@pytest.mark.parametrize(
    ("script", "status", "value", "fix"),
    [
        ("sleep 60", "problem", "nvidia-smi did not answer in 0.3 s", "dmesg"),
        ("head -c 3000 /dev/urandom", "problem", "not understood", "dmesg"),
        ("exit 0", "problem", "not understood", "dmesg"),
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "problem",
            "ended with code 18: Failed to initialize NVML",
            "restart the machine",
        ),
        (
            "echo 'Unable to determine the device handle for GPU0: Unknown Error'; exit 15",
            "problem",
            "code 15",
            "fell off the bus",
        ),
    ],
)
def test_a_driver_that_does_not_work_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, status: str, value: str, fix: str
) -> None:
    monkeypatch.setattr(nvidia, "QUERY_SECONDS", 0.3 if "sleep" in script else 20)
    bus = {
        "sys__bus__pci__devices__a__vendor": "0x10de\n",
        "sys__bus__pci__devices__a__class": "0x030200\n",
    }
    host = machine(tmp_path, {"nvidia-smi": script}, **bus)
    lines = nvidia_lines(host, read_nvidia(host))
    assert [line.status for line in lines] == [status]
    assert value in lines[0].value and fix in lines[0].fix


def test_a_gpu_without_driver_and_a_container_without_gpu(tmp_path: Path) -> None:
    bus = {
        "sys__bus__pci__devices__a__vendor": "0x10de\n",
        "sys__bus__pci__devices__a__class": "0x030200\n",
    }
    bare = Host(environment={"PATH": ""}, root=machine(tmp_path / "a", **bus).root)
    (line,) = nvidia_lines(bare, read_nvidia(bare))
    assert line.status == "problem" and "there is no nvidia-smi" in line.value
    boxed = Host(
        environment={"PATH": ""}, root=machine(tmp_path / "b", **bus, **{".dockerenv": ""}).root
    )
    (line,) = nvidia_lines(boxed, read_nvidia(boxed))
    assert line.status == "note" and "--gpus all" in line.fix
    none = Host(environment={"PATH": ""}, root=tmp_path / "nothing")
    (line,) = nvidia_lines(none, read_nvidia(none))
    assert (line.status, line.value) == ("ok", "no NVIDIA driver and no NVIDIA GPU seen")


def test_topologies() -> None:
    names = [f"GPU{i}" for i in range(8)]
    rows = ["\t".join([*names, "NIC0", "CPU Affinity", "NUMA Affinity"])]
    for i in range(8):
        cells = [" X " if i == j else "NV18" for j in range(8)]
        rows.append("\t".join([f"GPU{i}", *cells, "PIX", "0-55", "0"]))
    rows += ["NIC0\tPIX\tSYS", "Legend:", "  X    = Self"]
    links = parse_topology("\n".join(rows))
    assert links == {"NV18": 28}
    nvidia = Nvidia(gpus=tuple(card(i) for i in range(8)), links=links, num_on_bus=8)
    host = Host(environment={}, root=Path("/nowhere"))
    lines = nvidia_lines(host, nvidia)
    assert by_name(lines, "links").value == "all 28 pairs NVLink (NV18)"
    assert by_name(lines, "fabric").status == "ok"
    text = "GPU0 X NV4 SYS SYS\nGPU1 NV4 X SYS SYS\nGPU2 SYS SYS X NODE\nGPU3 SYS SYS NODE X"
    mixed = Nvidia(gpus=tuple(card(i) for i in range(4)), links=parse_topology(text))
    line = by_name(nvidia_lines(host, mixed), "links")
    assert line.status == "note"
    assert line.value == (
        "of 6 pair(s): 4 PCIe across CPU sockets, 1 NVLink (NV4), 1 PCIe through the CPU"
    )
    assert parse_topology("garbage\nGPU0\nGPU1 ???") == {}


@pytest.mark.parametrize(
    ("changes", "status", "value"),
    [
        ({}, "ok", "139.6 free), compute capability 9.0, 700 W, ECC on, MIG off"),
        ({"memory__free": "1000"}, "note", "in use by processes that are not visible"),
        ({"mig__mode__current": "Enabled"}, "note", "split by MIG"),
        ({"power__limit": "300.00"}, "note", "capped below its 700 W"),
        ({"compute_cap": "7.5"}, "note", "too old for bf16"),
        ({"ecc__errors__uncorrected__volatile__total": "3"}, "problem", "3 uncorrected memory"),
        ({"memory__free": "[GPU requires reset]"}, "problem", "[GPU requires reset]"),
        ({"memory__total": "[N/A]", "memory__free": "[N/A]"}, "ok", "memory shared with the CPU"),
        ({"name": "[Not Supported]", "compute_cap": "nine"}, "ok", "name not known"),
    ],
)
def test_a_gpu_is_judged(changes: dict[str, str], status: str, value: str) -> None:
    host = Host(environment={}, root=Path("/nowhere"))
    line = by_name(nvidia_lines(host, Nvidia(gpus=(card(0, **changes),), num_on_bus=1)), "GPU 0")
    assert line.status == status and value in line.value
    assert bool(line.fix) == (status != "ok")


def test_switch_fabric_that_is_not_set_up_is_a_problem() -> None:
    host = Host(environment={}, root=Path("/nowhere"))
    for state, result in (("In Progress", ""), ("Completed", "Failed"), ("Not Started", "")):
        gpus = tuple(card(i, fabric__state=state, fabric__status=result) for i in range(2))
        line = by_name(nvidia_lines(host, Nvidia(gpus=gpus, driver="580.1")), "fabric")
        assert line.status == "problem" and "(580.1)" in line.fix
    plain = tuple(card(i, fabric__state="[N/A]", fabric__status="[N/A]") for i in range(2))
    assert "fabric" not in [line.name for line in nvidia_lines(host, Nvidia(gpus=plain))]
    stopped = Nvidia(gpus=plain, has_switch=True, fabric_service="inactive")
    assert by_name(nvidia_lines(host, stopped), "fabric").status == "problem"


def test_rocm_cards_are_read() -> None:
    text = json.dumps(
        {
            "card0": {
                "Card Series": "AMD Instinct MI300X",
                "VRAM Total Memory (B)": str(192 * 2**30),
                "VRAM Total Used Memory (B)": str(2**30),
            },
            "system": {"Driver version": "6.12"},
        }
    )
    assert parse_rocm(f"WARNING: low power\n{text}") == {
        "card0": "AMD Instinct MI300X, 192.0 GiB (191.0 free)",
        "ROCm": "driver 6.12",
    }
    assert parse_rocm("{garbage") == parse_rocm("[1]") == parse_rocm("") == {}


# Torch.


@pytest.mark.parametrize(
    ("script", "value", "fix"),
    [
        ("sleep 60", "torch did not answer in 0.3 s", "very slow"),
        ("kill -SEGV $$", "torch was ended by SIGSEGV", "force-reinstall"),
        (
            """printf '@@{"failed import of torch": "No module named %storch%s"}' "'" "'" """,
            "not installed",
            "pip install torch",
        ),
        (
            """echo '@@{"failed import of torch": "OSError: libcudart.so.13: cannot open"}'""",
            "does not import: OSError: libcudart.so.13",
            "force-reinstall",
        ),
        ("echo '@@{broken'; echo '@@[1]'", "told nothing", "force-reinstall"),
    ],
)
def test_a_torch_that_is_missing_or_broken_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, value: str, fix: str
) -> None:
    monkeypatch.setattr(pytorch, "TORCH_SECONDS", 0.3 if "sleep" in script else 20.0)
    host = machine(tmp_path, {"python": script})
    host = Host(environment=host.environment, root=host.root, python=str(tmp_path / "bin/python"))
    answer = pytorch.start_torch(host).answer()
    (line,) = torch_lines(host, parse_facts(answer.text), answer, Nvidia())
    assert line.status == "problem"
    assert value in line.value and fix in line.fix


def test_the_child_tells_about_the_torch_that_is_here() -> None:
    answer = pytorch.start_torch(doctor.this_machine()).answer()
    facts = parse_facts(answer.text)
    assert answer.error == "" and facts["stage"] == "end"
    torch = pytest.importorskip("torch")
    assert facts["version"] == torch.__version__
    assert facts["renderers"] is True


def test_a_crash_on_the_way_names_the_step(tmp_path: Path) -> None:
    text = '@@{"version": "2.11.0", "cuda": "13.0"}\nnoise\n@@{"stage": "GPU 3"}\nAborted'
    answer = Answer(text=text, error="torch was ended by SIGABRT: Aborted")
    lines = torch_lines(machine(tmp_path), parse_facts(text), answer, GOOD)
    assert [line.value for line in lines if "GPU 3" in line.value] == [
        "torch was ended by SIGABRT: Aborted, at: GPU 3"
    ]


@pytest.mark.parametrize(
    ("cuda", "driver_cuda", "status", "fix"),
    [
        ("13.0", "13.0", "ok", ""),
        ("12.8", "13.0", "ok", ""),
        ("13.1", "13.0", "note", "within one major version"),
        ("13.0", "12.8", "problem", "too old for this torch"),
        (None, "12.8", "problem", "build for CUDA 12"),
        ("13.0", "", "ok", ""),
    ],
)
def test_torch_and_driver_must_go_together(
    tmp_path: Path, cuda: str | None, driver_cuda: str, status: str, fix: str
) -> None:
    nvidia = Nvidia(gpus=(card(0),), driver="580.1", cuda=driver_cuda)
    facts = {**FACTS, "cuda": cuda}
    line = by_name(torch_lines(machine(tmp_path), facts, Answer(), nvidia), "torch")
    assert line.status == status and fix in line.fix


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({}, "GPUs", "ok", "1 of 1 compute"),
        ({"GPU 0": [12, 0]}, "GPUs", "note", "not for sm_120"),
        ({"GPU 0": [8, 9]}, "GPUs", "ok", "1 of 1 compute"),
        (
            {"available": False, "count": 0, "failed GPUs": "RuntimeError: Error 802"},
            "GPUs",
            "problem",
            "nvidia-fabricmanager",
        ),
        ({"failed GPU 0": "OutOfMemoryError: CUDA out of memory"}, "GPU 0", "note", "it is full"),
        ({"failed GPU 0": "no kernel image"}, "GPU 0", "problem", "not built for this GPU"),
        ({"pairs": 6, "peers": 2}, "peers", "note", "2 of 6 pairs"),
        ({"triton": None}, "Triton", "problem", "pip install triton"),
    ],
)
def test_what_torch_tells_of_gpus_is_judged(
    tmp_path: Path, changes: dict[str, object], name: str, status: str, words: str
) -> None:
    lines = torch_lines(machine(tmp_path), FACTS | changes, Answer(), GOOD)
    line = by_name(lines, name)
    assert line.status == status
    assert words in f"{line.value} {line.fix}"
