"""Machines for the tests of `suzuri doctor`: scripts as programs, GPUs as nvidia-smi tells them."""

import os
from pathlib import Path

from suzuri.tools.doctor.host import Host
from suzuri.tools.doctor.nvidia import Gpu
from suzuri.tools.doctor.report import Line


def machine(tmp_path: Path, programs: dict[str, str] | None = None, /, **files: str) -> Host:
    """A host with these shell scripts as programs; files by path, `__` for the slash."""
    root = tmp_path / "root"
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folder = tmp_path / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for name, script in (programs or {}).items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return Host(environment=environment, root=root, home=str(tmp_path / "home" / "jdoe"))


def card(index: int, **changes: str) -> Gpu:
    answers = {
        "index": str(index),
        "pci.bus_id": f"00000000:0{index}:00.0",
        "name": "NVIDIA H200",
        "memory.total": "143771",
        "memory.free": "143000",
        "driver_version": "580.159.04",
        "compute_cap": "9.0",
        "power.limit": "700.00",
        "power.default_limit": "700.00",
        "ecc.mode.current": "Enabled",
        "ecc.errors.uncorrected.volatile.total": "0",
        "mig.mode.current": "Disabled",
        "persistence_mode": "Enabled",
        "fabric.state": "Completed",
        "fabric.status": "Success",
    }
    answers |= {name.replace("__", "."): value for name, value in changes.items()}
    return Gpu(index=index, answers=answers)


def by_name(lines: list[Line], name: str) -> Line:
    found = [line for line in lines if line.name == name]
    assert len(found) == 1, [line.name for line in lines]
    return found[0]
