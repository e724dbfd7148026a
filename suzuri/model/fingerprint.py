"""What a logit's bits depend on besides weights and tokens: versions, device, dtypes and kernels.

Two engines with equal fingerprints and weights give equal bits; docs/exactness.md says why.
"""

# pyright: strict

import hashlib
import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parents[1]
ROOMS = ("kernels", "model")
"""The rooms whose code decides bits."""


def numerics_fingerprint(device: torch.device, dtype: str) -> dict[str, str]:
    """Names and values, all text: `arch` (sm_90, gfx942, or cpu and its instruction set), versions
    of torch, triton and numba ("none" where one is missing), `dtypes`, and `kernels`, a hash of the
    sources."""
    return {
        "arch": architecture(device),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "numba": _version("numba"),
        "dtypes": f"weights, activations and caches {dtype}; router, norms, convs and sums float32",
        "kernels": source_hash(),
    }


def source_hash(rooms: Sequence[str] = ROOMS, pattern: str = "*.py") -> str:
    """A hash over every file of the rooms ("": the package), the same wherever they lie."""
    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted((PACKAGE / room).rglob(pattern)):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(PACKAGE).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def architecture(device: torch.device) -> str:
    """sm_90, gfx942, or cpu and its instruction set."""
    if device.type != "cuda":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    ask: Any = getattr(torch.cuda, "get_device_properties")  # noqa: B009  (has no types)
    properties = ask(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName)
    return f"sm_{properties.major}{properties.minor}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
