"""`suzuri doctor`: asks torch in a child process, because a broken one can end the whole process.

The child prints one JSON object per line as it goes, so that a crash still tells how far it came.
"""

import json
import re
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from suzuri.tools.doctor.host import Answer, Host, Running
from suzuri.tools.doctor.nvidia import Nvidia
from suzuri.tools.doctor.report import Line

AREA = "torch"
TORCH_SECONDS = 120.0
"""A cold import from a network disk takes a minute."""
MARK = "@@"
CHILD = """
import json
def say(**facts):
    print("\\n@@" + json.dumps(facts, default=str), flush=True)
def attempt(name, run):
    say(stage=name)
    try:
        run()
    except Exception as error:
        say(**{"failed " + name: type(error).__name__ + ": " + str(error)[:300]})
def versions():
    import torch
    say(version=torch.__version__, cuda=torch.version.cuda, hip=getattr(torch.version, "hip", None))
def gpus():
    import torch
    say(available=torch.cuda.is_available(), count=torch.cuda.device_count())
    if not torch.cuda.is_available():
        torch.cuda.init()
    say(cudnn=torch.backends.cudnn.version(), archs=torch.cuda.get_arch_list())
    for i in range(torch.cuda.device_count()):
        attempt("GPU %d" % i, lambda i=i: add(i))
    pairs = [(i, j) for i in range(torch.cuda.device_count()) for j in range(i)]
    say(pairs=len(pairs), peers=sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs))
def add(i):
    import torch
    ones = torch.ones(4096, dtype=torch.bfloat16, device="cuda:%d" % i)
    total = float((ones + ones).float().sum())
    if total != 8192.0:
        raise ValueError("4096 times 1 + 1 gave %r" % total)
    say(**{"GPU %d" % i: torch.cuda.get_device_capability(i)})
def nccl():
    import torch
    say(nccl=".".join(str(part) for part in torch.cuda.nccl.version()))
def metal():
    import torch
    say(metal=torch.backends.mps.is_available())
def triton():
    import triton
    say(triton=triton.__version__)
def renderers():
    import tml_renderers
    say(renderers=True)
def run():
    attempt("import of torch", versions)
    import torch
    if torch.version.cuda or getattr(torch.version, "hip", None):
        attempt("GPUs", gpus)
        attempt("nccl", nccl)
    attempt("metal", metal)
    attempt("import of triton", triton)
    attempt("import of tml_renderers", renderers)
    say(stage="end")
run()
"""


def start_torch(host: Host) -> Running:
    """The child at work; parse_facts reads what it prints."""
    return host.start_python(CHILD, called="torch", seconds=TORCH_SECONDS)


def parse_facts(text: str) -> dict[str, Any]:
    """The child's facts, later ones over earlier ones; other output is passed over."""
    facts: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                told: object = json.loads(line[len(MARK) :])
            except ValueError:
                continue
            if isinstance(told, dict):
                facts |= cast(dict[str, Any], told)
    return facts


def torch_lines(host: Host, facts: Mapping[str, Any], answer: Answer, nvidia: Nvidia) -> list[Line]:
    """Torch, its GPUs, Triton. `facts` are those of `answer`, the child's."""
    version = facts.get("version")
    if version is None:
        return [_no_torch(facts, answer)]
    cuda, hip = facts.get("cuda"), facts.get("hip")
    build = f"CUDA {cuda} build" if cuda else f"ROCm {hip} build" if hip else "CPU build"
    lines = [_build_line(f"{version}, {build}", str(cuda or ""), str(hip or ""), nvidia)]
    if facts.get("stage") != "end":
        lines.append(_cut_short(facts, answer))
    if cuda or hip:
        lines += _gpu_lines(host, facts, nvidia)
    if facts.get("metal"):
        value = "Apple GPU seen by torch"
        fix = "Suzuri computes on the CPU here"
        lines.append(Line(area=AREA, name="Metal", value=value, status="note", fix=fix))
    return [*lines, *_triton(host, facts, is_needed=bool(facts.get("available")))]


def _no_torch(facts: Mapping[str, Any], answer: Answer) -> Line:
    failed = str(facts.get("failed import of torch", ""))
    if "No module named 'torch'" in failed:
        value, fix = (
            "not installed",
            "pip install torch (see constraints-cpu.txt for the CPU build)",
        )
    elif failed:
        value, fix = f"does not import: {failed}", "pip install --force-reinstall torch"
    else:
        value = answer.error or "told nothing"
        fix = (
            "the disk that holds it is very slow, or a GPU hangs: try python -c 'import torch'"
            if answer.is_late
            else "pip install --force-reinstall torch"
        )
    return Line(area=AREA, name="torch", value=value, status="problem", fix=fix)


def _cut_short(facts: Mapping[str, Any], answer: Answer) -> Line:
    value = f"{answer.error or 'torch ended early'}, at: {facts.get('stage', 'the start')}"
    fix = "a GPU or its driver hangs or is broken: dmesg; CUDA_VISIBLE_DEVICES= goes without"
    return Line(area=AREA, name="torch", value=value, status="problem", fix=fix)


def _build_line(value: str, cuda: str, hip: str, nvidia: Nvidia) -> Line:
    """Whether this build of torch and this driver go together."""
    driver = _numbers(nvidia.cuda)
    if nvidia.gpus and not cuda:
        major = driver[0] if driver else 0
        fix = "there is an NVIDIA GPU: install the " + (
            f"build for CUDA {major} from https://pytorch.org/get-started/locally"
            if major
            else "CUDA build from https://pytorch.org/get-started/locally"
        )
        return Line(area=AREA, name="torch", value=value, status="problem", fix=fix)
    wanted = _numbers(cuda)
    if nvidia.gpus and driver and wanted:
        value += f"; the driver runs CUDA up to {nvidia.cuda}"
        if wanted[0] > driver[0]:
            fix = (
                f"the driver {nvidia.driver} is too old for this torch: update the driver, or "
                f"install torch's build for CUDA {driver[0]} "
                "(https://pytorch.org/get-started/locally)"
            )
            return Line(area=AREA, name="torch", value=value, status="problem", fix=fix)
        if wanted > driver:
            fix = "works within one major version, but the driver cannot compile its PTX: update it"
            return Line(area=AREA, name="torch", value=value, status="note", fix=fix)
    return Line(area=AREA, name="torch", value=value)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _gpu_lines(host: Host, facts: Mapping[str, Any], nvidia: Nvidia) -> list[Line]:
    expected = bool(nvidia.gpus) or host.exists("/dev/kfd")
    trouble = str(facts.get("failed GPUs", ""))
    if not facts.get("available"):
        hidden = host.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "none")
        value = "torch sees no GPU" + (f": {trouble}" if trouble and expected else "")
        if not expected:
            return [Line(area=AREA, name="GPUs", value=value)]
        fix = "CUDA_VISIBLE_DEVICES hides them" if hidden else _cuda_remedy(trouble)
        state = "note" if hidden else "problem"
        return [Line(area=AREA, name="GPUs", value=value, status=state, fix=fix)]
    count = int(facts.get("count") or 0)
    works = [i for i in range(count) if f"GPU {i}" in facts]
    lines = [_computing_line(facts, count, works)]
    for i in range(count):
        failed = facts.get(f"failed GPU {i}")
        if failed:
            is_full = "out of memory" in str(failed)
            lines.append(
                Line(
                    area=AREA,
                    name=f"GPU {i}",
                    value=f"cannot add numbers: {failed}",
                    status="note" if is_full else "problem",
                    fix="it is full: end what holds it" if is_full else _cuda_remedy(str(failed)),
                )
            )
    pairs, peers = facts.get("pairs"), facts.get("peers")
    if isinstance(pairs, int) and isinstance(peers, int) and pairs:
        value = f"{peers} of {pairs} pairs of GPUs reach each other's memory"
        fix = "exchange goes through the CPU's memory; virtual machines and IOMMU settings do that"
        fewer = peers < pairs
        status = "note" if fewer else "ok"
        lines.append(
            Line(area=AREA, name="peers", value=value, status=status, fix=fix if fewer else "")
        )
    return lines


def _computing_line(facts: Mapping[str, Any], count: int, works: list[int]) -> Line:
    libraries = [f"{name} {facts[name]}" for name in ("cudnn", "nccl") if facts.get(name)]
    value = f"{len(works)} of {count} compute" + (f"; {', '.join(libraries)}" if works else "")
    known = [str(arch) for arch in cast(list[Any], facts.get("archs") or [])]
    capabilities = {tuple(cast(list[int], facts[f"GPU {i}"])) for i in works}
    foreign = [
        f"sm_{major}{minor}"
        for major, minor in sorted(capabilities)
        if known and not _is_covered(major, minor, known)
    ]
    if foreign:
        fix = f"this torch was built for {' '.join(known)}, not for {foreign[0]}: use a newer torch"
        return Line(area=AREA, name="GPUs", value=value, status="note", fix=fix)
    return Line(area=AREA, name="GPUs", value=value)


def _is_covered(major: int, minor: int, known: list[str]) -> bool:
    """Machine code of a lower minor version runs within the major one; ROCm names are no sm_."""
    if not any(arch.startswith("sm_") for arch in known):
        return True
    for arch in known:
        found = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", arch)
        if found and int(found[1]) == major and int(found[2]) <= minor:
            return True
    return False


def _cuda_remedy(trouble: str) -> str:
    lower = trouble.lower()
    if "802" in lower or "not yet initialized" in lower:
        return "the NVSwitch fabric is not set up: start nvidia-fabricmanager"
    if "no kernel image" in lower:
        return "this torch was not built for this GPU: install a newer torch"
    if "too old" in lower:
        return "update the driver, or install torch's build for an older CUDA"
    if "not compiled" in lower:
        return "install the CUDA build from https://pytorch.org/get-started/locally"
    return "nvidia-smi works but torch does not: restart the machine or the container; dmesg"


def _triton(host: Host, facts: Mapping[str, Any], *, is_needed: bool) -> list[Line]:
    version, failed = facts.get("triton"), facts.get("failed import of triton")
    if version is None:
        value = "not installed" if "No module" in str(failed) else str(failed or "not asked")
        if not is_needed:
            return [Line(area=AREA, name="Triton", value=value)]
        fix = "GPU kernels need it; it comes with torch's CUDA build: pip install triton"
        return [Line(area=AREA, name="Triton", value=value, status="problem", fix=fix)]
    path = host.environment.get("PATH", "")
    named = host.environment.get("CC")
    compiler = named or next((c for c in ("cc", "gcc", "clang") if shutil.which(c, path=path)), "")
    header = Path(sysconfig.get_paths().get("include", "")) / "Python.h"
    missing = [] if compiler else ["a C compiler (apt install gcc)"]
    if not header.exists():
        missing.append("Python.h (apt install python3-dev)")
    if missing and is_needed:
        fix = f"Triton builds its launcher when first used and needs {' and '.join(missing)}"
        value = str(version)
        return [Line(area=AREA, name="Triton", value=value, status="problem", fix=fix)]
    return [Line(area=AREA, name="Triton", value=str(version))]
