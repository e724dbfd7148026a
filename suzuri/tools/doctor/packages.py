"""`suzuri doctor`: the packages that Suzuri needs, those of its extras, and what is missing.

What is needed stands in pyproject.toml (a checkout) or in the installed package's metadata.
"""

import dataclasses
import importlib.metadata
import json
import platform
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from suzuri.tools.doctor.host import Host
from suzuri.tools.doctor.report import Line

AREA = "packages"
PURPOSES = {
    "soundfile": "sound files",
    "soxr": "sound at other rates than 16 kHz",
    "av": "M4A, AAC and WebM clips",
    "huggingface-hub": "download from the Hugging Face hub",
    "transformers": "comparison with the public implementation",
    "matplotlib": "plots of benchmark results",
    "reasoning-gym": "problems for RL (brings pycosat, which needs a C compiler)",
    "math-verify": "grading of mathematical answers",
    "jsonschema-rs": "grading of answers by a JSON schema",
    "hypothesis": "tests",
    "openai": "tests of the server",
    "schemathesis": "tests of the server",
    "pytest": "tests",
    "pytest-timeout": "tests that hang end and say where",
    "pytest-xdist": "tests on several cores",
    "triton": "GPU kernels; tests of them without a GPU",
    "pyright": "type checks",
    "ruff": "lint and format",
}
"""What an optional package is for."""
WATCHED = ("huggingface-hub", "transformers")
"""Packages whose version helps with an issue though no extra may name them."""
MODULES = {"pillow": "PIL", "pytest-xdist": "xdist"}
IN_TORCH_CHILD = ("torch", "tml-renderers", "transformers")
"""These load torch; pytorch.py asks for them where it matters."""
NOT_IMPORTED = ("pyright", "ruff", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
_WHEELS = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")}
"""For which (system, processor) tml-renderers publishes wheels."""
_CHILD = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print("\\n@@" + json.dumps({name: type(error).__name__ + ": " + str(error)[:200]}))
print("\\n@@" + json.dumps({"": "end"}))
"""
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requirement:
    """A package with its allowed versions ("" for any); `extra` is "" for what is always needed."""

    package: str
    allowed: str
    extra: str = ""


def package_lines(
    host: Host, facts: Mapping[str, Any], needed: tuple[Requirement, ...] | None = None
) -> list[Line]:
    """One line per needed package, then one per extra. `facts` are what torch's child told."""
    wanted = requirements() if needed is None else needed
    broken = _broken(host, wanted)
    lines = [
        _package_line(item, broken, facts)
        for item in wanted
        if not item.extra and item.package != "torch"
    ]
    torch = [item for item in wanted if item.package == "torch" and not item.extra]
    version = facts.get("version")
    if torch and version and not is_allowed(str(version), torch[0].allowed):
        fix = f"pip install 'torch{torch[0].allowed}'"
        lines.append(Line(area=AREA, name="torch", value=str(version), status="problem", fix=fix))
    named = {item.package for item in wanted}
    for package in WATCHED:
        version = installed(package)
        if package not in named and version:
            lines.append(Line(area=AREA, name=package, value=version))
    return [*lines, *_extras(wanted, broken)]


def requirements() -> tuple[Requirement, ...]:
    """What pyproject.toml asks for: of the checkout, or as it was when Suzuri was installed."""
    project = Path(__file__).resolve().parents[3] / "pyproject.toml"
    try:
        document = tomllib.loads(project.read_text(encoding="utf-8"))
        table: Any = document.get("project", {})
        if table.get("name") == "suzuri":
            found = [parse_requirement(text) for text in table.get("dependencies", [])]
            for extra, texts in table.get("optional-dependencies", {}).items():
                found += [parse_requirement(text, extra) for text in texts]
            return tuple(found)
    except (OSError, ValueError, AttributeError):
        pass  # no checkout: the metadata below say the same
    try:
        texts = importlib.metadata.requires("suzuri") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(parse_requirement(text) for text in texts)


def parse_requirement(text: str, extra: str = "") -> Requirement:
    """A requirement as packaging tools write it; its extra may stand in the marker."""
    found = _REQUIREMENT.match(text)
    if found is None:
        return Requirement(package=text.strip(), allowed="", extra=extra)
    marked = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", found[3] or "")
    return Requirement(
        package=normal(found[1]),
        allowed=found[2].strip(),
        extra=extra or (marked[1] if marked else ""),
    )


def normal(package: str) -> str:
    """The package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", package).lower()


def installed(package: str) -> str | None:
    """The version that is installed; None when it is not."""
    try:
        return str(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return "of unreadable version"  # files of the package are damaged


def is_allowed(version: str, allowed: str) -> bool:
    """Whether a version satisfies a list such as ">=2.11,<2.15". Unknown clauses are satisfied."""
    numbers = _release(version)
    for clause in allowed.split(","):
        found = re.fullmatch(r"\s*(>=|<=|==|!=|~=|<|>)\s*([0-9][^\s]*)\s*", clause)
        if not found or not numbers:
            continue
        bound = _release(found[2])
        size = len(bound) if found[2].endswith(".*") else max(len(bound), len(numbers))
        ours = (*numbers, *[0] * size)[:size]
        theirs = (*bound, *[0] * size)[:size]
        holds = {
            ">=": ours >= theirs,
            "<=": ours <= theirs,
            "==": ours == theirs,
            "!=": ours != theirs,
            "<": ours < theirs,
            ">": ours > theirs,
            "~=": ours >= theirs and ours[: len(bound) - 1] == bound[:-1],
        }
        if not holds[found[1]]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _broken(host: Host, wanted: tuple[Requirement, ...]) -> dict[str, str]:
    """Package to error, for those that are installed and do not import."""
    modules = {
        MODULES.get(item.package, item.package.replace("-", "_")): item.package
        for item in wanted
        if item.package not in (*IN_TORCH_CHILD, *NOT_IMPORTED) and installed(item.package)
    }
    if not modules:
        return {}
    answer = host.start_python(
        _CHILD, *modules, called="the import of packages", seconds=60.0
    ).answer()
    broken: dict[str, str] = {}
    ended = False
    for line in answer.text.splitlines():
        try:
            told: object = json.loads(line[2:]) if line.startswith("@@") else {}
        except ValueError:
            continue
        for module, error in cast(dict[str, str], told).items():
            ended = ended or not module
            if module in modules:
                broken[modules[module]] = f"does not import: {error}"
    if not ended:
        broken.setdefault("numpy", answer.error or "the import of packages ended early")
    return broken


def _package_line(item: Requirement, broken: Mapping[str, str], facts: Mapping[str, Any]) -> Line:
    package, version = item.package, installed(item.package)
    install = f"pip install '{package}{item.allowed}'"
    if package == "tml-renderers":
        here = (platform.system().lower(), platform.machine().lower())
        if version is None and here not in _WHEELS:
            value = f"not installed, and no wheel for {here[0]} {here[1]} is published"
            fix = "wheels exist for Linux (glibc) on x86-64 and ARM, and for macOS on ARM"
            return Line(area=AREA, name=package, value=value, status="problem", fix=fix)
        failed = facts.get("failed import of tml_renderers")
        if version and failed and facts.get("version"):
            broken = {**broken, package: f"does not import: {failed}"}
    if version is None:
        return Line(area=AREA, name=package, value="missing", status="problem", fix=install)
    if package in broken:
        value, fix = f"{version}, {broken[package]}", f"pip install --force-reinstall {package}"
        return Line(area=AREA, name=package, value=value, status="problem", fix=fix)
    if not is_allowed(version, item.allowed):
        value = f"{version}, wanted {item.allowed}"
        return Line(area=AREA, name=package, value=value, status="problem", fix=install)
    return Line(area=AREA, name=package, value=version)


def _extras(wanted: tuple[Requirement, ...], broken: Mapping[str, str]) -> list[Line]:
    """One line per extra, in the order of pyproject.toml."""
    extras: dict[str, list[Requirement]] = {}
    for item in wanted:
        if item.extra:
            extras.setdefault(item.extra, []).append(item)
    lines: list[Line] = []
    for extra, items in extras.items():
        have: list[str] = []
        lack: list[str] = []
        for item in items:
            version = installed(item.package)
            purpose = PURPOSES.get(item.package, "not told")
            if version is None:
                lack.append(f"{item.package} missing ({purpose})")
            elif item.package in broken:
                lack.append(f"{item.package} {version} ({purpose}) {broken[item.package]}")
            elif not is_allowed(version, item.allowed):
                lack.append(f"{item.package} {version} ({purpose}), wanted {item.allowed}")
            else:
                have.append(f"{item.package} {version}")
        lines.append(
            Line(
                area=AREA,
                name=f"extra {extra}",
                value=", ".join([*lack, *have]),
                status="note" if lack else "ok",
                fix=f"pip install 'suzuri[{extra}]' (in a checkout: pip install -e '.[{extra}]')"
                if lack
                else "",
            )
        )
    return lines
