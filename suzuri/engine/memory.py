"""Free memory of this machine, as far as this process may have it: containers count. No torch here.

`suzuri doctor` reads control groups with the same functions.
"""

# pyright: strict

from collections.abc import Callable
from pathlib import Path

Read = Callable[[str], str | None]
"""The text of a small file such as /proc/meminfo; None where it cannot be read."""
UNLIMITED = 1 << 60
"""Limits from here on are the kernel's way of saying none."""
# Of the two versions of control groups: limit, what is in use, and in memory.stat the file pages
# that the kernel would give up first, which are in use but can be had.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def read_text(name: str) -> str | None:
    """The text of a small file of this machine; None where it cannot be read."""
    try:
        return Path(name).read_text("utf-8", "replace")
    except (OSError, ValueError):
        return None


def available_memory(read: Read = read_text) -> int | None:
    """Bytes that can be had without swapping and within every control group that this process is
    in; None where the system does not tell (macOS)."""
    rooms = [meminfo(read).get("MemAvailable"), *_group_rooms(read)]
    return min((room for room in rooms if room is not None), default=None)


def memory_limit(read: Read = read_text) -> int | None:
    """Bytes that the control groups grant in all; None without a limit."""
    limits = [
        limit
        for file, _, _ in _FILES
        for folder in group_folders(read, "memory")
        if (limit := _number(read(f"{folder}/{file}"))) is not None
    ]
    return min((limit for limit in limits if limit < UNLIMITED), default=None)


def group_folders(read: Read, controller: str) -> list[str]:
    """Folders of this process's control group and every group above it, in both versions.

    Some of them need not exist: in a container the group's own folder is often the topmost one.
    """
    found: list[str] = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base = "/sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = f"/sys/fs/cgroup/{controller}"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += ["/".join([base, *parts[:count]]) for count in range(len(parts), -1, -1)]
    return found


def _group_rooms(read: Read) -> list[int]:
    rooms: list[int] = []
    for folder in group_folders(read, "memory"):
        for limit_file, used_file, reclaimed in _FILES:
            limit = _number(read(f"{folder}/{limit_file}"))
            used = _number(read(f"{folder}/{used_file}")) or 0
            if limit is None or limit >= UNLIMITED:
                continue
            stat = dict(
                line.split(maxsplit=1)
                for line in (read(f"{folder}/memory.stat") or "").splitlines()
                if " " in line
            )
            rooms.append(max(0, limit - used + min(used, _number(stat.get(reclaimed)) or 0)))
    return rooms


def meminfo(read: Read = read_text) -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    values: dict[str, int] = {}
    for line in (read("/proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        if (number := _number((rest.split() or [""])[0])) is not None:
            values[key] = number * 1024
    return values


def _number(text: str | None) -> int | None:
    """A whole number, None for anything else ("max")."""
    return int(text) if text is not None and text.strip().isdecimal() else None
