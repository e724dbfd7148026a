"""The table of GPUs, for hardware that is not here, against what compiling for it gave."""

import json
import re
from pathlib import Path

import pytest

from suzuri.kernels import gpu_support
from suzuri.kernels.gpu_support import gpu_support as support

TARGETS = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/kernel-targets.json").read_text()
)["targets"]
NVIDIA_SHARED = {
    # CUDA C++ programming guide, technical specifications per compute capability: opt-in, a block.
    **{"sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448},
    **{"sm_103": 232_448, "sm_120": 101_376, "sm_121": 101_376},
}
ADAPTS = {"matmul._matmul", "grouped_gemm._grouped_gemm"}
"""Their tiles shrink to what the GPU has."""


@pytest.mark.parametrize(
    ("architecture", "status"),
    [
        *(("sm_80", "compiles"), ("sm_86", "compiles"), ("sm_89", "compiles")),
        *(("sm_90", "measured"), ("sm_100", "compiles"), ("sm_103", "compiles")),
        *(("sm_120", "compiles"), ("sm_121", "compiles"), ("gfx950", "compiles")),
        *(("sm_70", "no"), ("sm_75", "no"), ("gfx942", "no"), ("gfx90a", "no"), ("xpu", "no")),
        ("gfx942:sramecc+:xnack-", "no"),
    ],
)
def test_each_gpu_is_answered_by_name(architecture: str, status: str):
    found = support(architecture, NVIDIA_SHARED.get(architecture))
    assert found.status == status
    assert found.reason.startswith(architecture.split(":", maxsplit=1)[0])


def test_a_refusal_says_what_is_missing():
    assert "compute capability 8.0" in support("sm_75").reason
    assert "65,536" in support("gfx942").reason and "73,728" in support("gfx942").reason
    assert support("sm_90", 50_000).status == "no"


def test_the_needs_are_those_of_the_compiled_kernels():
    """Every kernel compiled for every target; what does not adapt is within what is promised."""
    assert set(TARGETS) == gpu_support.COMPILED
    for target, kernels in TARGETS.items():
        limit = NVIDIA_SHARED.get(target, gpu_support.GFX_SHARED.get(target))
        assert limit is not None and len(kernels) >= 12
        kind = "gfx" if target.startswith("gfx") else "sm"
        for kernel, needed in kernels.items():
            assert isinstance(needed, int), (target, kernel, needed)
            runs = support(target, NVIDIA_SHARED.get(target)).status != "no"
            if kernel not in ADAPTS and runs:
                assert needed <= limit, (target, kernel, needed)
        if kernels["relative_attention.rows_kernel"] > gpu_support.ATTENTION_BYTES[kind]:
            # With more stages in flight where there is the room.
            assert re.fullmatch(r"sm_(90|10\d)", target)
