"""The device that a user named, or in plain words why it cannot be used."""

from typing import Any

import torch

from suzuri.kernels.gpu_support import gpu_support
from suzuri.log import get_logger
from suzuri.model.fingerprint import architecture

_log = get_logger(__name__)
KINDS = "must be cpu, cuda or cuda:N"


def device_named(name: str, label: str) -> torch.device:
    """`label` begins the ValueError: the flag or field and what was given."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{label}: {KINDS}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"{label}: {KINDS}")
    if torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(
            f"{label}: the torch installed here ({torch.__version__}) is built for the CPU alone; "
            "install one for your GPU (https://pytorch.org/get-started says how), or leave the "
            "device at cpu"
        )
    count = torch.cuda.device_count()
    if not count:
        raise ValueError(
            f"{label}: torch finds no GPU on this machine; suzuri doctor tells why, and cpu works "
            "without one"
        )
    if (device.index or 0) >= count:
        raise ValueError(f"{label}: torch finds {count} GPU(s), cuda:0 to cuda:{count - 1}")
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{label}: the GPU cannot be used ({reason}); suzuri doctor tells more"
        ) from error
    _refuse_unfit(device, label)
    return device


def _refuse_unfit(device: torch.device, label: str) -> None:
    """A GPU that the kernels cannot run on is refused; one that nobody has tried is told."""
    cuda: Any = torch.cuda
    shared = None
    if torch.version.hip is None:
        shared = int(cuda.get_device_properties(device).shared_memory_per_block_optin)
    found = gpu_support(architecture(device), shared)
    if found.status == "no":
        raise ValueError(f"{label}: {found.reason}")
    if found.status == "compiles":
        _log.warning(found.reason)
