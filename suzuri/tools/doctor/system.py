"""`suzuri doctor`: operating system, C library, Python, processor, container, text encoding."""

import locale
import os
import platform
import re
import sys
import sysconfig

from suzuri.engine.memory import group_folders
from suzuri.tools.doctor.host import Host
from suzuri.tools.doctor.report import Line

AREA = "system"
NEWEST_PYTHON = (3, 13)
OLDEST_GLIBC = (2, 28)
"""What the wheels of torch and of tml-renderers ask for."""
_CONTAINERS = {
    "/.dockerenv": "docker",
    "/run/.containerenv": "podman",
    "/.singularity.d": "apptainer",
    "/run/systemd/container": "systemd-nspawn or the like",
}
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16")


def system_lines(host: Host) -> list[Line]:
    """The machine without its memory, disks and GPUs."""
    return [
        _operating_system(host),
        *_container(host),
        *_c_library(host),
        _python(),
        _cpu(host),
        _encoding(host),
    ]


def container_of(host: Host) -> str | None:
    """What kind of container this process runs in; None outside of any that is recognised."""
    for mark, kind in _CONTAINERS.items():
        if host.exists(mark):
            return kind
    groups = host.read("/proc/1/cgroup") or ""
    for word, kind in (("kubepods", "kubernetes"), ("docker", "docker"), ("lxc", "lxc")):
        if word in groups:
            return kind
    if host.exists("/var/run/secrets/kubernetes.io"):
        return "kubernetes"
    return None


def is_wsl(host: Host) -> bool:
    """Whether this is Linux inside Windows."""
    return "microsoft" in (host.read("/proc/version") or "").lower()


def cpu_limit(host: Host) -> float | None:
    """How many cores' time the control group grants; None without a limit."""
    limits: list[float] = []
    for text in _group_files(host, "cpu", "cpu.max"):
        quota, _, period = text.strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            limits.append(int(quota) / int(period))
    periods = _group_files(host, "cpu", "cpu.cfs_period_us")
    for quota, period in zip(_group_files(host, "cpu", "cpu.cfs_quota_us"), periods, strict=False):
        if quota.strip().isdigit() and period.strip().isdigit() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _group_files(host: Host, controller: str, file: str) -> list[str]:
    """The texts of `file` in this process's control group and every group above it."""
    texts = [host.read(f"{folder}/{file}") for folder in group_folders(host.read, controller)]
    return [text for text in texts if text is not None]


def _operating_system(host: Host) -> Line:
    release = re.match(r"\d+(\.\d+){0,2}", platform.release())
    kernel = f"{platform.system()} {release[0] if release else '?'} {platform.machine()}"
    if host.platform == "darwin":
        return Line(
            area=AREA, name="system", value=f"macOS {platform.mac_ver()[0]} {platform.machine()}"
        )
    if host.platform == "win32":
        return Line(
            area=AREA,
            name="system",
            value=f"Windows {platform.release()}",
            status="problem",
            fix="Suzuri runs on Linux and macOS: install WSL 2 and run it there",
        )
    pretty = re.search(r'^PRETTY_NAME="?([^"\n]*)', host.read("/etc/os-release") or "", re.M)
    name = pretty[1] if pretty else "unknown distribution"
    return Line(area=AREA, name="system", value=f"{name}, {kernel}")


def _container(host: Host) -> list[Line]:
    lines: list[Line] = []
    kind = container_of(host)
    if kind:
        lines.append(Line(area=AREA, name="container", value=kind))
    if is_wsl(host):
        lines.append(Line(area=AREA, name="container", value="WSL (Linux inside Windows)"))
    return lines or [Line(area=AREA, name="container", value="none seen")]


def _c_library(host: Host) -> list[Line]:
    if host.platform != "linux":
        return []
    name, version = platform.libc_ver()
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if name != "glibc":
        return [
            Line(
                area=AREA,
                name="C library",
                value=f"{name or 'not glibc (musl?)'} {version}".strip(),
                status="problem",
                fix="torch has no wheels for it; use a distribution with glibc (Debian, Ubuntu, "
                "Fedora) or such a container",
            )
        ]
    if numbers < OLDEST_GLIBC:
        return [
            Line(
                area=AREA,
                name="C library",
                value=f"glibc {version}",
                status="problem",
                fix=f"older than {'.'.join(map(str, OLDEST_GLIBC))}, which torch's wheels need; "
                "use a newer distribution or a container",
            )
        ]
    return [Line(area=AREA, name="C library", value=f"glibc {version}")]


def _python() -> Line:
    version = platform.python_version()
    build = platform.python_implementation()
    bits = 64 if sys.maxsize > 1 << 32 else 32
    value = f"{build} {version}, {bits} bit"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        value += ", free-threaded"
    if bits == 32:
        return Line(
            area=AREA,
            name="Python",
            value=value,
            status="problem",
            fix="torch needs a 64-bit Python",
        )
    if sys.version_info[:2] > NEWEST_PYTHON or build != "CPython" or "free" in value:
        newest = ".".join(map(str, NEWEST_PYTHON))
        return Line(
            area=AREA,
            name="Python",
            value=value,
            status="note",
            fix=f"Suzuri is tested on CPython 3.11 to {newest}, with the GIL",
        )
    return Line(area=AREA, name="Python", value=value)


def _cpu(host: Host) -> Line:
    info = host.read("/proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.M)
    name = model[1].strip() if model else _cpu_name(host)
    cores = os.cpu_count() or 0
    # A core list of this process counts as well as a quota of its control group.
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else cores
    value = f"{name or platform.machine()}, {cores} cores"
    limit = cpu_limit(host)
    if allowed < cores:
        value += f", {allowed} of them for this process"
    if limit is not None and limit < allowed:
        value += f", limited to {limit:g} cores' time by the control group"
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.M)
    have = [flag for flag in _CPU_FLAGS if flags and flag in flags[1].split()]
    if have:
        value += f" ({' '.join(have)})"
    usable = min(allowed, limit if limit is not None else allowed)
    if cores and usable < 2:
        return Line(
            area=AREA,
            name="CPU",
            value=value,
            status="note",
            fix="one core is little: the server, the tokenizer and the engine share it",
        )
    return Line(area=AREA, name="CPU", value=value)


def _cpu_name(host: Host) -> str:
    """Where /proc/cpuinfo has no name: macOS, ARM."""
    if host.platform == "darwin":
        answer = host.run("sysctl", "-n", "machdep.cpu.brand_string")
        return "" if answer.error else answer.text.strip()
    answer = host.run("lscpu")
    found = re.search(r"^Model name:\s*(.+)$", answer.text, re.M)
    return found[1].strip() if found and not answer.error else ""


def _encoding(host: Host) -> Line:
    text = locale.getpreferredencoding(False)
    output = getattr(sys.stdout, "encoding", None) or "unknown"
    names = sys.getfilesystemencoding()
    value = f"text {text}, output {output}, file names {names}"
    if all(one.lower().replace("-", "") == "utf8" for one in (text, output, names)):
        return Line(area=AREA, name="encoding", value=value)
    return Line(
        area=AREA,
        name="encoding",
        value=value,
        status="note",
        fix="not UTF-8 throughout: set PYTHONUTF8=1, or LANG=C.UTF-8, before starting Suzuri",
    )
