"""The tests of ops, run before they are timed: an op with wrong numbers has no speed."""

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from suzuri.tools.bench.shapes import ROOT

TESTS = ROOT / "tests" / "kernels"
UNTESTED = "untested"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one op's tests. `problem` is empty when they are green: some passed, none failed."""

    passed: int
    problem: str


def files_of(op: str, folder: Path = TESTS) -> list[Path]:
    """The test files of an op. Raises ValueError where there are none."""
    names = (f"test_{op}.py", f"test_{op}_kernel.py")
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise ValueError(
            f"{op}: no tests in {folder} (an installed wheel has none); give --no-test to report "
            "untested figures"
        )
    return found


def run_tests(ops: Sequence[str], *, on_gpu: bool, folder: Path = TESTS) -> dict[str, Verdict]:
    """Runs the tests of all these ops in one pytest process, those for a GPU too on a GPU."""
    files = {op: files_of(op, folder) for op in ops}
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        words = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
        words += ["-o", "junit_family=xunit1", "--continue-on-collection-errors"]
        words += ["-m", "not multi_gpu" if on_gpu else "not gpu and not multi_gpu"]
        words += [str(path) for paths in files.values() for path in paths]
        done = subprocess.run(
            words, cwd=folder.parents[1], capture_output=True, text=True, check=False
        )
        if not report.is_file():
            last = [*done.stdout.splitlines(), *done.stderr.splitlines(), "pytest said nothing"]
            why = f"its tests could not run: {next(line for line in reversed(last) if line)}"
            return {op: Verdict(passed=0, problem=why) for op in ops}
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {op: _verdict(cases, paths) for op, paths in files.items()}


def _verdict(cases: Sequence[ElementTree.Element], paths: Sequence[Path]) -> Verdict:
    modules = {path.stem for path in paths}
    own = [case for case in cases if modules & set(_words(case))]
    red = [case for case in own if any(case.find(k) is not None for k in ("failure", "error"))]
    passed = [case for case in own if not red and case.find("skipped") is None]
    if red:
        return Verdict(passed=len(own) - len(red), problem=f"{len(red)} red: {red[0].get('name')}")
    if not passed:
        return Verdict(passed=0, problem="no test ran")
    return Verdict(passed=len(passed), problem="")


def _words(case: ElementTree.Element) -> list[str]:
    """A test's module path; of a file that could not be collected, its own name."""
    return f"{case.get('classname') or ''}.{case.get('name') or ''}".split("[")[0].split(".")
