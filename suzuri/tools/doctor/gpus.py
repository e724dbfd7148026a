"""`suzuri doctor`: judges drivers, GPUs and the links between them."""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from suzuri.tools.doctor.host import Host
from suzuri.tools.doctor.nvidia import AMD_VENDOR, Gpu, Nvidia, count_on_bus
from suzuri.tools.doctor.report import Line
from suzuri.tools.doctor.system import container_of, is_wsl

AREA = "GPUs"
OLDEST_CAPABILITY = (8, 0)
"""The first with bf16 arithmetic."""
_WAYS = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe through the CPU",
    "SYS": "PCIe across CPU sockets",
}
# Part of nvidia-smi's complaint, and what helps.
_REMEDIES = (
    (
        "version mismatch",
        "the driver was updated while loaded: restart the machine (in a container: restart it too)",
    ),
    (
        "communicate with the nvidia driver",
        "the kernel module is not loaded: sudo modprobe nvidia, or install the driver for this "
        "kernel and restart",
    ),
    (
        "device handle",
        "a GPU fell off the bus: look at dmesg for Xid lines and restart the machine",
    ),
    (
        "unknown error",
        "a container lost its GPUs (often after systemctl daemon-reload): restart the container",
    ),
    ("no devices", "the driver runs but sees no GPU: look at dmesg for NVRM and Xid lines"),
    ("did not answer", "a GPU hangs: look at dmesg for Xid lines and restart the machine"),
    ("insufficient permissions", "this account may not use /dev/nvidia*: ask for the group video"),
)


def nvidia_lines(host: Host, nvidia: Nvidia) -> list[Line]:
    """Driver, each GPU, the links between them, and the switch's service."""
    if nvidia.error:
        return _without_driver(host, nvidia)
    driver = f"NVIDIA {nvidia.driver or 'version not known'}, CUDA up to {nvidia.cuda or '?'}"
    lines = [Line(area=AREA, name="driver", value=driver)]
    missing = nvidia.num_on_bus - len(nvidia.gpus)
    if missing > 0 and not container_of(host):
        lines.append(
            Line(
                area=AREA,
                name="driver",
                value=f"{missing} of {nvidia.num_on_bus} GPUs on the bus are not with the driver",
                status="problem",
                fix="one has failed or belongs to another driver: dmesg, lspci -k",
            )
        )
    lines += [_gpu_line(gpu, nvidia) for gpu in nvidia.gpus]
    idle = [str(gpu.index) for gpu in nvidia.gpus if gpu.text("persistence_mode") == "Disabled"]
    if idle and not is_wsl(host):
        lines.append(
            Line(
                area=AREA,
                name="persistence",
                value=f"off on GPU {', '.join(idle)}",
                status="note",
                fix="the first call of each process waits for the GPU to wake: "
                "sudo nvidia-smi -pm 1",
            )
        )
    return [*lines, *_links(nvidia), *_fabric(nvidia)]


def _without_driver(host: Host, nvidia: Nvidia) -> list[Line]:
    if nvidia.is_absent:
        if not nvidia.num_on_bus and not nvidia.driver:
            return [Line(area=AREA, name="driver", value="no NVIDIA driver and no NVIDIA GPU seen")]
        inside = container_of(host)
        fix = (
            "start the container with --gpus all (NVIDIA container toolkit)"
            if inside
            else "install the NVIDIA driver; if it is installed, put nvidia-smi on PATH"
        )
        if inside and nvidia.num_on_bus and not nvidia.driver:
            value = "the host has an NVIDIA GPU; this container was not given one"
            return [Line(area=AREA, name="driver", value=value, status="note", fix=fix)]
        value = f"{nvidia.num_on_bus} NVIDIA GPU(s) on the bus, but there is no nvidia-smi"
        return [Line(area=AREA, name="driver", value=value, status="problem", fix=fix)]
    complaint = nvidia.error.lower()
    fix = next((fix for part, fix in _REMEDIES if part in complaint), "look at dmesg for NVRM")
    value = nvidia.error + (f" (kernel module {nvidia.driver})" if nvidia.driver else "")
    if not nvidia.num_on_bus and not nvidia.driver and "did not answer" not in complaint:
        # The tools are installed, as in many images, on a machine without a card.
        value += "; no NVIDIA GPU on the bus"
        return [Line(area=AREA, name="driver", value=value, status="note", fix=fix)]
    return [Line(area=AREA, name="driver", value=value, status="problem", fix=fix)]


def _gpu_line(gpu: Gpu, nvidia: Nvidia) -> Line:
    """One GPU; the first fault decides the state, and every remark is kept."""
    total, free = gpu.number("memory.total"), gpu.number("memory.free")
    parts = [gpu.text("name") or "name not known"]
    if total is None:
        parts.append("memory shared with the CPU or not told")
    else:
        left = "" if free is None else f" ({free / 1024:.1f} free)"
        parts.append(f"{total / 1024:.1f} GiB{left}")
    capability, watts = gpu.capability, gpu.number("power.limit")
    if capability:
        parts.append("compute capability {}.{}".format(*capability))
    if watts is not None:
        parts.append(f"{watts:.0f} W")
    for field, name in (("ecc.mode.current", "ECC"), ("mig.mode.current", "MIG")):
        state = gpu.text(field)
        if state:
            parts.append(f"{name} {({'Enabled': 'on', 'Disabled': 'off'}).get(state, state)}")
    faults, remarks = _faults(gpu), _remarks(gpu, nvidia)
    return Line(
        area=AREA,
        name=f"GPU {gpu.index}",
        value=", ".join([*parts, *(what for what, _ in (*faults, *remarks))]),
        status="problem" if faults else "note" if remarks else "ok",
        fix="; ".join(fix for _, fix in (*faults, *remarks)),
    )


def _faults(gpu: Gpu) -> list[tuple[str, str]]:
    """(what, fix) of what stops work on this GPU."""
    faults: list[tuple[str, str]] = []
    broken = [text for text in gpu.answers.values() if re.search(r"reset|ERR!|Unknown Err", text)]
    if broken:
        faults.append((f"nvidia-smi reports {broken[0]}", "sudo nvidia-smi -r, or restart"))
    errors = gpu.number("ecc.errors.uncorrected.volatile.total")
    if errors:
        faults.append(
            (
                f"{errors:.0f} uncorrected memory errors since the driver was loaded",
                "reset the GPU (sudo nvidia-smi -r); if they come back, the card is broken",
            )
        )
    return faults


def _remarks(gpu: Gpu, nvidia: Nvidia) -> list[tuple[str, str]]:
    """(what, fix) of what a user should know about this GPU."""
    remarks: list[tuple[str, str]] = []
    total, free = gpu.number("memory.total"), gpu.number("memory.free")
    if total and free is not None and free < 0.9 * total:
        bus = gpu.text("pci.bus_id")
        users = [user for user in nvidia.users if bus and user.bus == bus]
        names = [
            user.name + (f" {user.mebibytes / 1024:.1f} GiB" if user.mebibytes else "")
            for user in users
        ]
        who = ", ".join(names[:5]) or "processes that are not visible from here"
        remarks.append((f"in use by {who}", "end them if the memory is needed"))
    if gpu.text("mig.mode.current") == "Enabled":
        remarks.append(("split by MIG", "a slice has a part of the memory: sudo nvidia-smi -mig 0"))
    watts, usual = gpu.number("power.limit"), gpu.number("power.default_limit")
    if watts and usual and watts < 0.9 * usual:
        remarks.append((f"capped below its {usual:.0f} W", f"sudo nvidia-smi -pl {usual:.0f}"))
    if gpu.capability and gpu.capability < OLDEST_CAPABILITY:
        remarks.append(("too old for bf16", "Suzuri's GPU path needs compute capability 8.0"))
    return remarks


def _links(nvidia: Nvidia) -> list[Line]:
    count = len(nvidia.gpus)
    if count < 2:
        return []
    pairs = count * (count - 1) // 2
    if not nvidia.links:
        reason = nvidia.links_error or "nvidia-smi topo -m gave an answer that is not understood"
        return [Line(area=AREA, name="links", value=reason, status="note")]
    ways = sorted(nvidia.links.items(), key=lambda item: -item[1])
    linked = sum(number for way, number in ways if way.startswith("NV"))
    shown = [
        f"{number} {f'NVLink ({way})' if way.startswith('NV') else _WAYS.get(way, way)}"
        for way, number in ways
    ]
    if linked == pairs:
        names = ", ".join(way for way, _ in ways)
        value = f"all {pairs} pairs NVLink ({names})" if pairs > 1 else f"NVLink ({names})"
        return [Line(area=AREA, name="links", value=value)]
    value = f"of {pairs} pair(s): {', '.join(shown)}"
    fix = "without NVLink between all GPUs, splitting layers over GPUs (--tp) is slower"
    return [Line(area=AREA, name="links", value=value, status="note", fix=fix)]


def _fabric(nvidia: Nvidia) -> list[Line]:
    """NVSwitch machines refuse CUDA until the fabric manager has set up the switches."""
    states = {gpu.text("fabric.state") for gpu in nvidia.gpus} - {""}
    results = {gpu.text("fabric.status") for gpu in nvidia.gpus} - {"", "Success"}
    waiting = states - {"Completed"}
    service = nvidia.fabric_service
    if not states and not nvidia.has_switch:
        return []
    told = ", ".join(sorted(states | results)) or "no state told"
    value = f"NVSwitch fabric: {told}" + (f"; service {service}" if service else "")
    if waiting or results or (not states and service in ("inactive", "failed")):
        return [
            Line(
                area=AREA,
                name="fabric",
                value=value,
                status="problem",
                fix="CUDA fails with error 802 until it is set up: install the "
                f"nvidia-fabricmanager of exactly the driver's version ({nvidia.driver}), then "
                "sudo systemctl enable --now nvidia-fabricmanager",
            )
        ]
    return [Line(area=AREA, name="fabric", value=value)]


def amd_lines(host: Host) -> list[Line]:
    """AMD GPUs by rocm-smi; nothing where there are none."""
    num_on_bus = count_on_bus(host, AMD_VENDOR)
    what = ("--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--json")
    answer = host.run("rocm-smi", *what, seconds=10.0)
    if answer.is_absent and not (num_on_bus and host.exists("/dev/kfd")):
        return []
    if answer.error:
        fix = "without it AMD GPUs are not looked at; see ROCm's installation page"
        return [Line(area=AREA, name="ROCm", value=answer.error, status="note", fix=fix)]
    cards = parse_rocm(answer.text)
    if not cards:
        value = "rocm-smi gave an answer that is not understood"
        return [Line(area=AREA, name="ROCm", value=value, status="note")]
    return [Line(area=AREA, name=name, value=value) for name, value in cards.items()]


def parse_rocm(text: str) -> dict[str, str]:
    """Cards and the driver in rocm-smi's JSON, as name to text."""
    start = text.find("{")
    try:
        document: object = json.loads(text[start:]) if start >= 0 else None
    except ValueError:
        return {}
    if not isinstance(document, Mapping):
        return {}
    found: dict[str, str] = {}
    for name, card in cast(Mapping[str, Any], document).items():
        if not isinstance(card, Mapping):
            continue
        values = cast(Mapping[str, Any], card)
        if "Driver version" in values:
            found["ROCm"] = f"driver {values['Driver version']}"
        total = str(values.get("VRAM Total Memory (B)", ""))
        used = str(values.get("VRAM Total Used Memory (B)", "0"))
        if total.isdigit() and used.isdigit():
            series = values.get("Card Series") or values.get("Card series") or "AMD GPU"
            free = (int(total) - int(used)) / 2**30
            found[name] = f"{series}, {int(total) / 2**30:.1f} GiB ({free:.1f} free)"
    return found
