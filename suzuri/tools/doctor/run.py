"""`suzuri doctor`: one report about this machine, to read or to paste into an issue.

host.py asks the machine, the other files judge the answers, report.py prints them.
Whatever a probe runs into becomes a line of the report.
"""

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from suzuri import __version__
from suzuri.tools.doctor.config import DoctorConfig
from suzuri.tools.doctor.gpus import amd_lines, nvidia_lines
from suzuri.tools.doctor.host import Answer, Host, this_machine
from suzuri.tools.doctor.nvidia import Nvidia, read_nvidia
from suzuri.tools.doctor.packages import package_lines
from suzuri.tools.doctor.pytorch import parse_facts, start_torch, torch_lines
from suzuri.tools.doctor.report import Line, Private, cleaned, show
from suzuri.tools.doctor.resources import memory_bytes, resource_lines, space
from suzuri.tools.doctor.system import system_lines

Found = TypeVar("Found")
SHOWN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SUZURI_LOG")
SHOWN_PREFIX = "NCCL_"
ONLY_WHETHER = ("HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE")
MODEL_SECONDS = 120.0
FOLDER = "give the folder of a model, or leave MODEL away to look at the machine alone"
PROBE_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
"""What a machine nobody foresaw can make a probe raise."""
_INSPECT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from suzuri.tools.inspect.config import InspectConfig
from suzuri.tools.inspect.run import run_inspect
try:
    code = run_inspect(InspectConfig(model=sys.argv[2], json=True))
except (ValueError, OSError) as error:
    print(json.dumps({"refused": str(error)}))
    code = 2
sys.exit(code)
"""


def run_doctor(config: DoctorConfig, host: Host | None = None) -> int:
    """Print the report. Returns the exit code: 0, or 1 when there is a problem."""
    host = host or this_machine()
    with Console(stderr=True).status("asking the driver and torch; this can take a minute"):
        lines = report(host, config.model)
    return show(lines, __version__, as_json=config.json)


def report(host: Host, model: Path | None = None) -> list[Line]:
    """Every line of the report, with nothing private left in it. Never raises for the machine."""
    torch = start_torch(host)
    try:
        found_nvidia, nvidia_error = _guarded(lambda: read_nvidia(host))
        found_torch, torch_error = _guarded(torch.answer)
    finally:
        torch.stop()
    nvidia = found_nvidia or Nvidia(error=nvidia_error)
    answer = found_torch or Answer(error=torch_error)
    facts = parse_facts(answer.text)
    sections: dict[str, Callable[[], list[Line]]] = {
        "system": lambda: system_lines(host),
        "resources": lambda: resource_lines(host, len(nvidia.gpus)),
        "GPUs": lambda: [*nvidia_lines(host, nvidia), *amd_lines(host)],
        "torch": lambda: torch_lines(host, facts, answer, nvidia),
        "packages": lambda: package_lines(host, facts),
        "environment": lambda: environment_lines(host),
    }
    if model is not None:
        sections["model"] = lambda: model_lines(host, model, nvidia)
    lines: list[Line] = []
    for area, probe in sections.items():
        found, error = _guarded(probe)
        fallback = Line(area=area, name=area, value=f"not readable: {error}", status="note")
        lines += [fallback] if found is None else found
    return cleaned(lines, _private(host))


def environment_lines(host: Host) -> list[Line]:
    """Variables that change what libraries do; of private ones only whether they are set."""
    environment = host.environment
    lines = [
        Line(area="environment", name=name, value=value or "empty")
        for name, value in sorted(environment.items())
        if name in SHOWN or name.startswith(SHOWN_PREFIX)
    ]
    told = [f"{name} {'set' if environment.get(name) else 'unset'}" for name in ONLY_WHETHER]
    lines.append(Line(area="environment", name="hub", value=", ".join(told)))
    return lines


def model_lines(host: Host, folder: Path, nvidia: Nvidia) -> list[Line]:
    """A model folder: its disk, whether it is complete, its size beside the memory here."""
    found = space(host, str(folder))
    package = str(Path(__file__).resolve().parents[3])
    answer = host.start_python(
        _INSPECT, package, str(folder), called="suzuri inspect", seconds=MODEL_SECONDS
    ).answer()
    fix = f"suzuri inspect {folder} lists everything"
    try:
        document: Mapping[str, Any] = json.loads(answer.text[answer.text.index("{") :])
        if "refused" in document:
            value = str(document["refused"])
            return [Line(area="model", name="files", value=value, status="problem", fix=FOLDER)]
        faults = [str(fault) for fault in document["faults"]]
        num_bytes = int(document["bytes"])
        verdict = str(document["verdict"])
    except (ValueError, KeyError, TypeError):
        value = answer.error or "suzuri inspect gave an answer that is not understood"
        return [Line(area="model", name="files", value=value, status="problem", fix=fix)]
    lines = [
        Line(
            area="model",
            name="files",
            value=f"{folder}: {verdict}",
            status="problem" if faults else "ok",
            fix=fix if faults else "",
        )
    ]
    if found.error:
        lines.append(Line(area="model", name="disk", value=found.error, status="note"))
    memory, _ = memory_bytes(host)
    cards = sum(gpu.number("memory.total") or 0 for gpu in nvidia.gpus) * 2**20
    value = f"weights {num_bytes / 1e9:,.1f} GB as stored"
    if nvidia.gpus:
        value += f"; {len(nvidia.gpus)} GPU(s) have {cards / 1e9:,.1f} GB"
    if memory is not None:
        value += f"; RAM {memory / 1e9:,.1f} GB"
    room = cards if nvidia.gpus else memory
    fits = room is None or num_bytes < room
    lines.append(
        Line(
            area="model",
            name="size",
            value=value,
            status="ok" if fits else "note",
            fix="" if fits else f"it does not fit as it is: suzuri plan {folder} --gpu NAME",
        )
    )
    return lines


def _guarded(probe: Callable[[], Found]) -> tuple[Found | None, str]:
    """(the probe's result, "") or (None, what it ran into)."""
    try:
        return probe(), ""
    except PROBE_ERRORS as error:
        return None, f"{type(error).__name__}: {error}"


def _private(host: Host) -> Private:
    names = {platform.node(), platform.node().split(".")[0]}
    names |= {host.environment.get(name, "") for name in ("USER", "LOGNAME", "USERNAME")}
    if sys.platform != "win32":
        found = re.findall(rf"^([^:]+):[^:]*:{os.getuid()}:", host.read("/etc/passwd") or "", re.M)
        names |= set(found)
    home = host.home
    names.add(home.rstrip("/").rsplit("/", 1)[-1])
    return Private(home=home, names=tuple(sorted(filter(None, names), key=len, reverse=True)))
