"""What every result file says of the run: commit, hardware, fingerprint, command."""

import datetime
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from suzuri import __version__
from suzuri.kernels.matmul import buckets
from suzuri.tools.bench.shapes import ROOT


def gpu_name(device: torch.device) -> str | None:
    """As the driver tells it; None on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def header(what: str, device: torch.device, config: dict[str, Any]) -> dict[str, Any]:
    """The head of a result file."""
    return {
        "what": what,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "suzuri": __version__,
        "commit": commit(),
        "command": command(sys.argv),
        "config": {name: without_folder(value) for name, value in config.items()},
        "hardware": hardware(device),
        "fingerprint": fingerprint(device),
    }


def command(words: Sequence[str]) -> str:
    """How the run was called: `suzuri ...`, or `python` and the script; of files elsewhere their
    names alone, because where they lay says nothing to others."""
    program = Path(words[0])
    is_suzuri = program.name in ("suzuri", "__main__.py", "-m")
    begun = ["suzuri"] if is_suzuri else ["python", _in_project(program)]
    return shlex.join([*begun, *(str(without_folder(word)) for word in words[1:])])


def without_folder(value: object) -> object:
    """The name of a path that is absolute, in a word like --out=/some/file too; else the value."""
    if isinstance(value, list | tuple):
        return [without_folder(one) for one in cast(Sequence[object], value)]
    if isinstance(value, Path):
        return value.name if value.is_absolute() else str(value)
    if not isinstance(value, str):
        return value
    if value.startswith("/"):
        return Path(value).name
    flag, sign, path = value.partition("=/")
    return f"{flag}={Path(path).name}" if sign else value


def _in_project(program: Path) -> str:
    full = program.resolve()
    return str(full.relative_to(ROOT)) if full.is_relative_to(ROOT) else program.name


def commit(folder: Path = ROOT) -> str:
    """The checked-out commit, with + behind it when files differ from it; "unknown" elsewhere."""
    if not (folder / ".git").exists():
        return "unknown"
    head = _git(folder, "rev-parse", "--short", "HEAD")
    return head + ("+" if head and _git(folder, "status", "--porcelain", "-uno") else "") or (
        "unknown"
    )


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def hardware(device: torch.device) -> dict[str, Any]:
    """The device and, of a GPU, its memory; the machine's architecture and cores' threads."""
    found: dict[str, Any] = {
        "device": device.type,
        "gpu": gpu_name(device),
        "num_gpus": 1 if device.type == "cuda" else 0,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["memory_bytes"] = torch.cuda.mem_get_info(device)[1]
    return found


def fingerprint(device: torch.device) -> dict[str, object]:
    """What bits may depend on; on a GPU that of the matmul self-test."""
    python = platform.python_version()
    if device.type == "cuda":
        return {**buckets.fingerprint(device), "python": python}
    return {"torch": torch.__version__, "python": python}


def write(path: str | None, document: dict[str, Any]) -> None:
    """Replaces the file at once, so that nobody reads half of it. Does nothing without a path."""
    if path is None:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    part.replace(target)
