"""What nvidia-smi and /sys tell about NVIDIA GPUs, read for `suzuri doctor`.

Read next: gpus.py, which judges it.
"""

import dataclasses
import re
from collections.abc import Mapping

from suzuri.tools.doctor.host import Host

NVIDIA_VENDOR, AMD_VENDOR = "0x10de", "0x1002"
QUERY_SECONDS = 10.0
"""Without persistence mode the driver wakes every GPU for each question."""
_FIELDS = (
    *("index", "pci.bus_id", "name", "memory.total", "memory.free", "driver_version"),
    *("compute_cap", "power.limit", "power.default_limit", "ecc.mode.current"),
    *("ecc.errors.uncorrected.volatile.total", "mig.mode.current", "persistence_mode"),
    *("fabric.state", "fabric.status"),
)
_ABSENT = ("n/a", "[n/a]", "not supported", "[not supported]", "requested functionality")
_MODULE = "/proc/driver/nvidia/version"
_REFUSED = re.compile(r'Field "([\w.]+)" is not a valid field')
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS|X")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: the answers to nvidia-smi's fields, by field name."""

    index: int
    answers: Mapping[str, str]

    def text(self, field: str) -> str:
        """The answer; empty where this GPU or driver has none."""
        answer = self.answers.get(field, "").strip()
        return "" if answer.lower().startswith(_ABSENT) else answer

    def number(self, field: str) -> float | None:
        """The answer as a number; None where it is none."""
        try:
            return float(self.text(field))
        except ValueError:
            return None

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability, (9, 0) for an H200."""
        found = re.fullmatch(r"(\d+)\.(\d+)", self.text("compute_cap"))
        return (int(found[1]), int(found[2])) if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuUser:
    """A process that holds GPU memory. The name is without its folder."""

    bus: str
    name: str
    mebibytes: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nvidia:
    """Everything known about the NVIDIA side. `error` is empty when nvidia-smi answered.

    `cuda` is the newest CUDA version that the driver runs. `links` counts GPU pairs by the way
    between them (NV18, PIX, SYS, ...). `num_on_bus` comes from /sys, whatever the driver says.
    """

    gpus: tuple[Gpu, ...] = ()
    users: tuple[GpuUser, ...] = ()
    driver: str = ""
    cuda: str = ""
    links: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    links_error: str = ""
    num_on_bus: int = 0
    has_switch: bool = False
    fabric_service: str = ""
    error: str = ""
    is_absent: bool = False


def read_nvidia(host: Host) -> Nvidia:
    """Ask the driver. Never raises; after one late answer nothing more is asked."""
    num_on_bus = count_on_bus(host, NVIDIA_VENDOR)
    has_switch = any("nvswitch" in name for name in host.names("/dev"))
    module = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", host.read(_MODULE) or "")
    known = Nvidia(num_on_bus=num_on_bus, has_switch=has_switch, driver=module[1] if module else "")
    # The plain call comes first: where the driver does not work it says why.
    plain = host.run("nvidia-smi", seconds=QUERY_SECONDS)
    if plain.error:
        return dataclasses.replace(known, error=plain.error, is_absent=plain.is_absent)
    cuda = re.search(r"CUDA(?: \w+)? Version\s*:\s*(\d+\.\d+)", plain.text)
    gpus, error = _query(host)
    if error or len(gpus) == 0:
        shown = " ".join(plain.text.split())[:80]
        reason = error or f"nvidia-smi gave an answer that is not understood: {shown!r}"
        return dataclasses.replace(known, error=reason, cuda=cuda[1] if cuda else "")
    links: dict[str, int] = {}
    links_error = ""
    if len(gpus) > 1:
        topology = host.run("nvidia-smi", "topo", "-m", seconds=QUERY_SECONDS)
        links, links_error = parse_topology(topology.text), topology.error
    return dataclasses.replace(
        known,
        gpus=gpus,
        users=_users(host),
        driver=gpus[0].text("driver_version") or known.driver,
        cuda=cuda[1] if cuda else "",
        links=links,
        links_error=links_error,
        fabric_service=_fabric_service(host) if has_switch else "",
    )


def count_on_bus(host: Host, vendor: str) -> int:
    """GPUs of a vendor on the PCI bus: display and 3D controllers."""
    count = 0
    for device in host.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{device}"
        if (host.read(f"{folder}/vendor") or "").strip() == vendor:
            count += (host.read(f"{folder}/class") or "").startswith(("0x0300", "0x0302", "0x0380"))
    return count


def parse_gpus(text: str, fields: tuple[str, ...]) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's comma-separated answer; lines of another kind are passed over."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(fields) and cells[0].isascii() and cells[0].isdigit():
            answers = dict(zip(fields, cells, strict=True))
            gpus.append(Gpu(index=int(cells[0]), answers=answers))
    return tuple(gpus)


def parse_topology(text: str) -> dict[str, int]:
    """How many pairs of GPUs are linked in which way, from `nvidia-smi topo -m`."""
    rows: dict[int, list[str]] = {}
    for line in text.splitlines():
        found = re.match(r"\s*GPU(\d+)\s+(.*)", line)
        cells = found[2].split() if found else []
        if found and cells and _LINK.fullmatch(cells[0]):
            rows[int(found[1])] = cells
    order = sorted(rows)
    links: dict[str, int] = {}
    for i, row in enumerate(order):
        for column in range(i + 1, len(order)):
            cells = rows[row]
            way = cells[column] if column < len(cells) else ""
            if _LINK.fullmatch(way):
                links[way] = links.get(way, 0) + 1
    return links


def _query(host: Host) -> tuple[tuple[Gpu, ...], str]:
    """(GPUs, error). Fields that this driver does not know are left out, one after the other."""
    fields = _FIELDS
    while True:
        answer = host.run(
            "nvidia-smi",
            f"--query-gpu={','.join(fields)}",
            "--format=csv,noheader,nounits",
            seconds=QUERY_SECONDS,
        )
        refused = _REFUSED.search(answer.text)
        if refused is None or refused[1] not in fields or len(fields) == 1:
            return parse_gpus(answer.text, fields), answer.error
        fields = tuple(field for field in fields if field != refused[1])


def _users(host: Host) -> tuple[GpuUser, ...]:
    answer = host.run(
        "nvidia-smi",
        "--query-compute-apps=gpu_bus_id,used_memory,process_name",
        "--format=csv,noheader,nounits",
        seconds=QUERY_SECONDS,
    )
    users: list[GpuUser] = []
    for line in "" if answer.error else answer.text.splitlines():
        bus, _, rest = line.partition(",")
        used, _, name = rest.partition(",")
        if ":" not in bus:
            continue
        # A process name can be a whole command line with paths in it.
        program = name.strip().split(" ")[0].replace("\\", "/").rsplit("/", 1)[-1]
        is_number = used.strip().replace(".", "", 1).isdigit()
        users.append(
            GpuUser(
                bus=bus.strip(),
                name=program[:40] or "a process",
                mebibytes=float(used) if is_number else None,
            )
        )
    return tuple(users)


def _fabric_service(host: Host) -> str:
    """What systemd says of the service; empty where there is no systemd to ask."""
    answer = host.run("systemctl", "is-active", "nvidia-fabricmanager")
    state = answer.text.strip().splitlines()[-1:] or [""]
    return state[0] if state[0] in ("active", "inactive", "failed", "activating") else ""
