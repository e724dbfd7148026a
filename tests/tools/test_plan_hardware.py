"""Cards by name and by numbers, families by exact capability, KV dtypes by family."""

import pytest

from suzuri.tools.plan.card import find_card, match
from suzuri.tools.plan.config import PlanConfig
from suzuri.tools.plan.families import FALLBACK, FAMILIES, family_of, kv_dtypes
from suzuri.tools.plan.hardware import CATALOG
from suzuri.tools.plan.request import check_kv_dtype
from suzuri.tools.plan.run import run_plan

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
