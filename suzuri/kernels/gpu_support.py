"""Which GPUs the kernels run on, answered from a name before anything is loaded.

The needs were read off the kernels compiled for each target without the hardware
(scripts/compile_kernels.py, benchmarks/results/kernel-targets.json). No kernel needs Hopper: the
bulk copy engine is used where a GPU has one, and plain loads have the same bits.
"""

import re
from typing import Literal, NamedTuple

Status = Literal["measured", "compiles", "no"]


class Support(NamedTuple):
    """`status`: measured on such a GPU, only compiled for it, or it cannot run; and why."""

    status: Status
    reason: str


ATTENTION_BYTES = {"sm": 90_112, "gfx": 73_728}
"""Shared memory of a program of the largest kernel whose tiles do not adapt to the GPU."""
COMPILED = {"sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx942", "gfx950"}
MEASURED = {"sm_90": "an H200"}
GFX_SHARED = {"gfx942": 65_536, "gfx950": 163_840}
"""Shared memory of a workgroup, bytes."""


def gpu_support(architecture: str, shared_memory: int | None = None) -> Support:
    """What to expect of a GPU named as in a fingerprint: sm_90, gfx942.

    shared_memory: bytes a program may have, where the driver says so.
    """
    name = architecture.split(":", maxsplit=1)[0]
    number = re.fullmatch(r"sm_(\d+)", name)
    if number is not None and int(number[1]) < 80:
        return Support(
            "no",
            f"{name}: the kernels multiply bf16 on tensor cores, which NVIDIA GPUs have from "
            "compute capability 8.0 on",
        )
    if number is None and not re.fullmatch(r"gfx[0-9a-f]+", name):
        return Support("no", f"{name}: neither an NVIDIA (sm_90) nor an AMD GPU (gfx942)")
    if number is None and name not in COMPILED:
        known = ", ".join(sorted(x for x in COMPILED if x.startswith("gfx")))
        return Support("no", f"{name}: of AMD's GPUs the kernels were compiled for {known} alone")
    needed = ATTENTION_BYTES["gfx" if number is None else "sm"]
    there = shared_memory or GFX_SHARED.get(name)
    if there is not None and there < needed:
        return Support(
            "no",
            f"{name}: attention needs {needed:,} bytes of shared memory in a program, this GPU "
            f"has {there:,}",
        )
    if name in MEASURED:
        return Support("measured", f"{name}: tested and measured on {MEASURED[name]}")
    what = "compile" if name in COMPILED else "were compiled for others of its kind"
    return Support(
        "compiles",
        f"{name}: the kernels {what}, but nobody has run them there yet; let "
        "`suzuri verify MODEL --device cuda` speak first",
    )
