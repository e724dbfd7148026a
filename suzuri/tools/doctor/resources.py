"""`suzuri doctor`: memory, shared memory, limits of this process, free disk."""

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from suzuri.engine.memory import available_memory, meminfo, memory_limit
from suzuri.tools.doctor.host import Host
from suzuri.tools.doctor.report import Line, Status
from suzuri.tools.doctor.system import container_of

AREA = "resources"
GIB = 1 << 30
SMALLEST_RELEASE = 157 * 10**9
"""Bytes of the smallest released checkpoint, Inkling-Small in NVFP4, rounded up."""
_SPACE = """
import json, os, shutil, sys
path = os.path.abspath(sys.argv[1])
while not os.path.isdir(path) and os.path.dirname(path) != path:
    path = os.path.dirname(path)
usage = shutil.disk_usage(path)
print(json.dumps({"free": usage.free, "total": usage.total, "device": os.stat(path).st_dev,
                  "writable": os.access(path, os.W_OK)}))
"""
# name, what to have at least, how to show it, and who needs it
_LIMITS = (
    ("RLIMIT_NOFILE", 4096, 1, "open files", "ulimit -n 65536", "each connection takes one"),
    ("RLIMIT_NPROC", 4096, 1, "processes", "ulimit -u 65536", "every thread counts"),
    ("RLIMIT_STACK", 4 << 20, 1 << 20, "stack, MiB", "ulimit -s 8192", "compilers need it"),
)
FEWEST_FILES = 256
"""Open files below which a server fails at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """Free and whole bytes of the file system that holds a folder, or why they are not known."""

    free: int = 0
    total: int = 0
    device: int = 0
    is_writable: bool = True
    error: str = ""


def resource_lines(host: Host, num_gpus: int) -> list[Line]:
    """Memory, shared memory, limits, and the disks that Suzuri writes to."""
    return [
        _memory(host),
        *_shared_memory(host, num_gpus),
        *_limits(num_gpus),
        *_disks(host),
    ]


def space(host: Host, folder: str) -> Space:
    """Asks in a child, because a network disk that is gone blocks whoever asks."""
    called = "the file system"
    answer = host.start_python(
        _SPACE, folder, called=called, seconds=5.0, is_isolated=True
    ).answer()
    if answer.error:
        return Space(error=answer.error)
    try:
        found: Any = json.loads(answer.text)
        return Space(
            free=int(found["free"]),
            total=int(found["total"]),
            device=int(found["device"]),
            is_writable=bool(found["writable"]),
        )
    except (ValueError, KeyError, TypeError):
        return Space(error=f"{called} gave an answer that is not understood")


def memory_bytes(host: Host) -> tuple[int | None, int | None]:
    """(RAM, RAM that is available), limits of the control group included; None: not known."""
    total, limit = _total(host), memory_limit(host.read)
    if limit is not None and (total is None or limit < total):
        total = limit
    return total, available_memory(host.read)


def _total(host: Host) -> int | None:
    total = meminfo(host.read).get("MemTotal")
    if total is None and host.platform == "darwin":
        answer = host.run("sysctl", "-n", "hw.memsize")
        if not answer.error and answer.text.strip().isdigit():
            return int(answer.text)
    return total


def _memory(host: Host) -> Line:
    total, available = _total(host), available_memory(host.read)
    limit = memory_limit(host.read)
    if total is None:
        return Line(area=AREA, name="memory", value="not known", status="note")
    value = f"{_gib(total)}"
    if available is not None:
        value += f", {_gib(available)} available"
    if limit is not None and limit < total:
        value += f"; the control group grants {_gib(limit)}"
    return Line(area=AREA, name="memory", value=value)


def _shared_memory(host: Host, num_gpus: int) -> list[Line]:
    if host.platform != "linux":
        return []
    found = space(host, str(host.path("/dev/shm")))
    if not host.exists("/dev/shm") or found.error:
        reason = found.error or "there is no /dev/shm"
        return [Line(area=AREA, name="shared memory", value=reason, status="note")]
    value = f"/dev/shm {_gib(found.total)}, {_gib(found.free)} free"
    if min(found.total, found.free) >= GIB:
        return [Line(area=AREA, name="shared memory", value=value)]
    kind = container_of(host)
    fix = "processes of several GPUs exchange data through it; "
    fix += (
        {
            "docker": "start the container with --shm-size 16g (or --ipc=host)",
            "podman": "start the container with --shm-size 16g (or --ipc=host)",
            "kubernetes": "mount an emptyDir with medium: Memory at /dev/shm",
        }.get(kind, "enlarge it from outside the container")
        if kind
        else "free it (ls -l /dev/shm), or mount -o remount,size=16g /dev/shm"
    )
    status: Status = "problem" if num_gpus > 1 else "note"
    return [Line(area=AREA, name="shared memory", value=value, status=status, fix=fix)]


def _limits(num_gpus: int) -> list[Line]:
    try:
        import resource
    except ImportError:
        return [Line(area=AREA, name="limits", value="not known here", status="note")]
    lines: list[Line] = []
    for constant, wanted, unit, name, command, reason in _LIMITS:
        if not hasattr(resource, constant):
            continue
        soft, hard = resource.getrlimit(getattr(resource, constant))
        value = f"{_limit(soft, unit)} (at most {_limit(hard, unit)})"
        is_low = soft != resource.RLIM_INFINITY and soft < wanted
        status: Status = "note" if is_low else "ok"
        if is_low and constant == "RLIMIT_NOFILE" and soft < FEWEST_FILES:
            status = "problem"
        fix = f"{reason}: {command} before starting Suzuri" if is_low else ""
        lines.append(Line(area=AREA, name=name, value=value, status=status, fix=fix))
    if hasattr(resource, "RLIMIT_MEMLOCK"):
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        value = f"{_limit(soft, 1 << 20)} (at most {_limit(hard, 1 << 20)})"
        is_low = num_gpus > 1 and soft != resource.RLIM_INFINITY and soft < 1 << 30
        fix = "InfiniBand needs it: ulimit -l unlimited, or docker run --ulimit memlock=-1"
        lines.append(
            Line(
                area=AREA,
                name="locked, MiB",
                value=value,
                status="note" if is_low else "ok",
                fix=fix if is_low else "",
            )
        )
    return lines


def _limit(number: int, unit: int) -> str:
    # RLIM_INFINITY is -1 on Linux and 2**63 - 1 on macOS.
    return "unlimited" if number < 0 or number >= 1 << 62 else f"{number / unit:g}"


def _disks(host: Host) -> list[Line]:
    """The folders that Suzuri writes to; those on one file system share a line."""
    places = {
        "current folder": _current_folder(),
        "hub cache": hub_cache(host),
        "temporary files": _temporary_folder(host),
    }
    lines: list[Line] = []
    seen: dict[int, str] = {}
    for name, folder in places.items():
        if folder is None:
            lines.append(
                Line(
                    area=AREA,
                    name=name,
                    value="there is no such folder any more",
                    status="problem",
                    fix="change to a folder that exists",
                )
            )
            continue
        found = space(host, folder)
        if not found.error and found.device in seen:
            lines.append(Line(area=AREA, name=name, value=f"same disk as {seen[found.device]}"))
            continue
        seen[found.device] = name
        lines.append(_disk_line(name, found))
    return lines


def _disk_line(name: str, found: Space) -> Line:
    if found.error:
        return Line(
            area=AREA,
            name=name,
            value=found.error,
            status="problem" if "did not answer" in found.error else "note",
            fix="a network disk that is gone? (mount, df)",
        )
    value = f"{_gib(found.free)} free of {_gib(found.total)}"
    if not found.is_writable:
        return Line(
            area=AREA,
            name=name,
            value=f"{value}, not writable",
            status="note" if name == "current folder" else "problem",
            fix={
                "hub cache": "set HF_HOME to a folder that you may write to",
                "temporary files": "set TMPDIR to a folder that you may write to",
            }.get(name, "results are written elsewhere only"),
        )
    if found.free < GIB:
        return Line(
            area=AREA, name=name, value=value, status="problem", fix="nearly full: free some space"
        )
    if name == "hub cache" and found.free < SMALLEST_RELEASE:
        fix = (
            f"the smallest released checkpoint takes {SMALLEST_RELEASE / 1e9:.0f} GB (NVFP4); "
            "set HF_HOME to a larger disk before suzuri pull"
        )
        return Line(area=AREA, name=name, value=value, status="note", fix=fix)
    return Line(area=AREA, name=name, value=value)


def hub_cache(host: Host) -> str:
    """The folder where downloads of the Hugging Face hub go."""
    named = host.environment.get("HF_HUB_CACHE")
    if named:
        return os.path.expanduser(named)
    home = host.environment.get("HF_HOME")
    if not home:
        caches = host.environment.get("XDG_CACHE_HOME") or str(Path(host.home or "/") / ".cache")
        home = str(Path(caches) / "huggingface")
    return str(Path(os.path.expanduser(home)) / "hub")


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _temporary_folder(host: Host) -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # it tries to write, and no folder allowed it
        return host.environment.get("TMPDIR") or "/tmp"


def _gib(count: int) -> str:
    return f"{count / GIB:.3g} GiB" if count < 10 * GIB else f"{count / GIB:,.0f} GiB"
