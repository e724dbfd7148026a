"""Cards by name and by numbers, families by exact capability, KV dtypes by family."""

from pathlib import Path

import pytest

from suzuri.model.config import preset
from suzuri.tools.plan.card import find_card, machine_memory, match
from suzuri.tools.plan.changes import find_changes
from suzuri.tools.plan.config import PlanConfig
from suzuri.tools.plan.families import FALLBACK, FAMILIES, family_of, kv_dtypes
from suzuri.tools.plan.hardware import CATALOG
from suzuri.tools.plan.request import check_kv_dtype, request_of
from suzuri.tools.plan.run import run_plan
from tests.tools.doctor_machines import machine

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("h200", "H200"),
        ("H200", "H200"),
        ("NVIDIA H200", "H200"),
        ("h20", "H20"),
        ("RTX PRO 6000", "RTX PRO 6000"),
        ("rtx-pro-6000", "RTX PRO 6000"),
        ("rtxpro6000", "RTX PRO 6000"),
        ("6000 pro", "RTX PRO 6000"),
        ("rtx6000pro", "RTX PRO 6000"),
        ("6000-pro-rtx", "RTX PRO 6000"),
        ("pro6000", "RTX PRO 6000"),
        ("6000pro96gb", "RTX PRO 6000"),
        ("4090rtx", "RTX 4090"),
        ("sxmh100", "H100 SXM"),
        ("H100NVL", "H100 NVL"),
        ("ultra mac", "Mac Ultra"),
        ("UltraM3", "Mac Ultra"),
        ("sparkdgx", "DGX Spark"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("h100-sxm", "H100 SXM"),
        ("H100 SXM 80GB", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100_pcie", "H100 PCIe"),
        ("h100 nvl", "H100 NVL"),
        ("A100-SXM4-40GB", "A100 40 GB"),
        ("a100 80", "A100 80 GB"),
        ("b200", "B200"),
        ("gb200", "GB200"),
        ("b300", "B300"),
        ("gh200", "GH200"),
        ("l40s", "L40S"),
        ("a6000", "RTX A6000"),
        ("4090", "RTX 4090"),
        ("GeForce RTX 5090", "RTX 5090"),
        ("mi300", "MI300X"),
        ("AMD Instinct MI325X", "MI325X"),
        ("mi355x", "MI355X"),
        ("dgx spark", "DGX Spark"),
        ("DGX-Spark", "DGX Spark"),
        ("gb10", "DGX Spark"),
        ("strix-halo", "Strix Halo"),
        ("mac ultra", "Mac Ultra"),
        ("M3 Ultra", "Mac Ultra"),
        ("CPU", "CPU"),
    ],
)
def test_a_name_in_any_spelling(asked: str, name: str) -> None:
    assert match(asked).name == name


def test_every_name_and_alias_means_its_own_card() -> None:
    for gpu in CATALOG:
        for name in (gpu.name, *gpu.aliases):
            for spelling in (name, name.upper(), name.lower().replace(" ", "-"), f" {name} "):
                assert match(spelling) is gpu, spelling


@pytest.mark.parametrize(
    ("asked", "listed"),
    [
        ("h100", "H100 SXM or H100 NVL or H100 PCIe"),
        ("h100 80gb", "H100 SXM or H100 PCIe"),
        ("a100", "A100 40 GB or A100 80 GB"),
        ("rtx 6000", "RTX A6000 or RTX PRO 6000"),
        ("rtx", "RTX A6000 or RTX PRO 6000 or RTX 4090 or RTX 5090"),
        ("rtx6000", "RTX A6000 or RTX PRO 6000"),
        ("6000rtx", "RTX A6000 or RTX PRO 6000"),
        ("rtx4090ti", "nearest: RTX 4090"),
        ("pro6000pro", "nearest: RTX PRO 6000"),
        ("h2000", "nearest: H200"),
        ("rtx 3090", "nearest: RTX "),
        ("v100", "nearest: "),
        ("banana", "there are A100 40 GB, "),
        ("", "there are A100 40 GB, "),
        ("nvidia", "there are A100 40 GB, "),
    ],
)
def test_an_ambiguous_or_unknown_name_is_refused(asked: str, listed: str) -> None:
    with pytest.raises(ValueError, match=r"--gpu") as refused:
        match(asked)
    assert listed in str(refused.value)
    if asked not in ("", "nvidia"):
        assert "--memory 96 --bandwidth 1.8 --tflops 400" in str(refused.value)


def test_memory_is_what_drivers_report() -> None:
    for name, low, high in (
        ("h100-sxm", 79.5, 79.7),
        ("h200", 139.8, 140.5),
        ("b200", 178, 179.5),
        ("rtx pro 6000", 95.0, 95.6),
        ("dgx spark", 119, 122),
        ("a100 40", 39, 40.01),
    ):
        assert low <= match(name).memory_bytes / GIB <= high


def test_catalog_is_complete() -> None:
    names = [gpu.name for gpu in CATALOG]
    assert len(names) == len(set(names)) == 23
    for gpu in CATALOG:
        assert gpu.capability in FAMILIES
        assert gpu.source
        assert gpu.memory_bytes or gpu.needs_memory
        assert 1e10 < gpu.floor_bandwidth <= gpu.bandwidth < 1e13
        assert 1e11 < gpu.floor_bf16 <= gpu.bf16 < 1e16
        assert (gpu.fp4 is not None) == family_of(gpu.capability).fp4


def test_a_card_by_numbers() -> None:
    gpu = find_card(None, memory=96, bandwidth=1.8, tflops=400)
    assert (gpu.memory_bytes, gpu.floor_bandwidth, gpu.floor_bf16) == (
        int(0.995 * 96 * GIB),
        1.8e12,
        400e12,
    )
    assert family_of(gpu.capability) is FALLBACK
    # A card by the number on its box is planned like the same card by name.
    assert 0 <= 1 - gpu.memory_bytes / match("rtx pro 6000").memory_bytes < 0.002
    assert 0 <= 1 - find_card("h200", memory=141).memory_bytes / match("h200").memory_bytes < 0.002
    changed = find_card("h200", memory=100, tflops=800, link=25)
    assert (changed.memory_bytes, changed.floor_bf16) == (int(99.5 * GIB), 800e12)
    assert (changed.floor_bandwidth, changed.link.bandwidth) == (4.2e12, 25e9)
    assert find_card("spark", memory=100).system_bytes == 0
    assert find_card("cpu", memory=64).memory_bytes == int(0.995 * 64 * GIB)
    assert find_card("cpu").memory_bytes > GIB


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 64),
        (
            {
                "proc/self/cgroup": "0::/box/inner\n",
                "sys/fs/cgroup/box/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/box/inner/memory.max": "max\n",
            },
            8,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/box\n4:memory:/box\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{12 * GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            12,
        ),
        (
            {
                "proc/self/cgroup": "0::/box\n",
                "sys/fs/cgroup/box/memory.max": f"{99 * GIB}\n",
            },
            64,
        ),
    ],
    ids=["no limit", "v2", "v1", "limit above"],
)
def test_memory_of_the_cpu_is_what_the_control_group_grants(
    files: dict[str, str], gib: int, tmp_path: Path
) -> None:
    host = machine(tmp_path, proc__meminfo=f"MemTotal: {64 << 20} kB\n", **files)
    assert machine_memory(host) == gib * GIB


def test_a_machine_that_does_not_tell_its_memory_is_asked_for_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--gpu cpu: give --memory"):
        machine_memory(machine(tmp_path))


def test_one_machine_is_one_cpu_and_no_plan_buys_more_of_them() -> None:
    config = preset("inkling-small")
    cpu = find_card("cpu", memory=64)
    with pytest.raises(ValueError, match=r"--num-gpus 4: .*one device; leave --num-gpus away"):
        request_of(config, PlanConfig(model="", num_gpus=4), cpu)
    request = request_of(config, PlanConfig(model=""), cpu)
    changes = find_changes(config, request)
    assert changes
    assert all(change.request.gpu.name != "CPU" for change in changes)


def test_families_are_chosen_by_exact_capability_q06() -> None:
    features = {
        number: (family_of(number).fp8_kv, family_of(number).fp4)
        for number in ("8.0", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1", "cpu")
    }
    assert features == {
        "8.0": (False, False),
        "8.9": (True, False),
        "9.0": (True, False),
        "10.0": (True, True),
        "10.3": (True, True),
        "12.0": (True, True),
        "12.1": (True, True),
        "cpu": (False, False),
    }
    assert family_of("cpu").platform == "cpu"
    # A number that nobody listed has no feature, however high it is.
    for number in ("8.7", "9.1", "10.1", "11.0", "12.2", "13.0", "99.0", "", "9"):
        assert family_of(number) is FALLBACK
    assert kv_dtypes(FALLBACK) == ("bf16",)
    assert FALLBACK.name == "no listed family"


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2", "int8", "nvfp4", "auto", "", "BF16"])
def test_kv_dtypes_that_do_not_work_are_refused_with_those_that_do_q07(kv_dtype: str) -> None:
    for gpu in CATALOG:
        works = kv_dtypes(family_of(gpu.capability))
        check_kv_dtype("bf16", gpu)
        if kv_dtype in works:
            check_kv_dtype(kv_dtype, gpu)
            continue
        with pytest.raises(ValueError, match=r"--kv-dtype") as refused:
            check_kv_dtype(kv_dtype, gpu)
        assert str(refused.value).endswith(f": {', '.join(works)}")
        assert gpu.name in str(refused.value)


def test_kv_dtype_is_refused_before_the_model_is_looked_for_q07() -> None:
    asked = PlanConfig(model="no/such-model", gpu="a100 80 gb", kv_dtype="fp8")
    with pytest.raises(ValueError, match=r"what works on A100 80 GB, Ampere \(8.0\): bf16$"):
        run_plan(asked.resolve())
