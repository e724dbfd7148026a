"""Free memory as this process may have it: the machine's, and what its control groups leave."""

import pytest

from suzuri.engine import load
from suzuri.engine.memory import available_memory, memory_limit, read_text

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: 5 kB\nMemAvailable:   {32 << 20} kB\nHugePages: 0\n"
UNLIMITED = "9223372036854771712\n"


def room(**files: str) -> int | None:
    """`available_memory` of a machine with these files; `__` for the slash."""
    there = {"/" + name.replace("__", "/"): text for name, text in files.items()}
    return available_memory(there.get)


def group(folder: str, **files: object) -> dict[str, str]:
    """Files of a control group."""
    return {
        f"sys__fs__cgroup__{folder}{name.replace('_dot_', '.')}": f"{value}\n"
        for name, value in files.items()
    }


def test_without_groups_it_is_what_the_kernel_says() -> None:
    assert room(proc__meminfo=MEMINFO) == 32 * GIB
    assert room(proc__meminfo=MEMINFO, proc__self__cgroup="0::/\n") == 32 * GIB
    assert room() is None
    assert room(proc__meminfo="nonsense\n") is None


def test_version_2_counts_what_the_group_has_in_use() -> None:
    files = {"proc__meminfo": MEMINFO, "proc__self__cgroup": "0::/\n"}
    own = group("", memory_dot_max=8 * GIB, memory_dot_current=5 * GIB)
    assert room(**files, **own) == 3 * GIB
    # Pages of files that were only read are in use, but go when somebody needs the room.
    stat = group("", memory_dot_stat=f"anon {GIB}\ninactive_file {4 * GIB}\nactive_file 7")
    assert room(**files, **own, **stat) == 7 * GIB
    assert room(**files, **group("", memory_dot_max="max", memory_dot_current=5 * GIB)) == 32 * GIB
    assert room(**files, **group("", memory_dot_max=GIB, memory_dot_current=2 * GIB)) == 0
    assert room(**files, **group("", memory_dot_max=GIB)) == GIB
    assert room(**files, **group("", memory_dot_max=900 * GIB)) == 32 * GIB


def test_every_group_above_counts() -> None:
    files = {"proc__meminfo": MEMINFO, "proc__self__cgroup": "0::/pod/a\n"}
    above = group("pod__", memory_dot_max=6 * GIB, memory_dot_current=5 * GIB)
    own = group("pod__a__", memory_dot_max=4 * GIB, memory_dot_current=GIB)
    assert room(**files, **own) == 3 * GIB
    assert room(**files, **above, **own) == GIB
    # Inside a container the path may be that of the host, and only the topmost folder be there.
    inside = group("", memory_dot_max=2 * GIB, memory_dot_current=0)
    assert room(**files, **inside) == 2 * GIB


def test_version_1_and_both_versions_together() -> None:
    files = {
        "proc__meminfo": MEMINFO,
        "proc__self__cgroup": "5:cpu,cpuacct:/x\n4:memory,hugetlb:/x\n0::/y\n",
    }
    free = group("memory__x__", memory_dot_limit_in_bytes=UNLIMITED, memory_dot_usage_in_bytes=GIB)
    assert room(**files, **free) == 32 * GIB
    own = group(
        "memory__x__",
        memory_dot_limit_in_bytes=4 * GIB,
        memory_dot_usage_in_bytes=3 * GIB,
        memory_dot_stat=f"inactive_file 5\ntotal_inactive_file {GIB}",
    )
    assert room(**files, **own) == 2 * GIB
    both = group("y__", memory_dot_max=GIB, memory_dot_current=0)
    assert room(**files, **own, **both) == GIB
    there = {"/" + name.replace("__", "/"): text for name, text in {**files, **own}.items()}
    assert memory_limit(there.get) == 4 * GIB
    assert memory_limit({}.get) is None


def test_this_machine_and_the_engine_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine and `suzuri trace` may take is one number."""
    from suzuri.tools import loading

    assert loading.available_memory is load.available_memory is available_memory
    monkeypatch.setattr(load, "available_memory", lambda: 12345)
    assert load.free_memory("cpu") == 12345
    assert read_text("/no/such/file") is None
    found = available_memory()
    assert found is None or found > 0
