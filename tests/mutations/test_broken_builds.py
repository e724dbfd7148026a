"""The golden traces notice a broken build: each patch is one classic mistake in the model's source.

A patch is applied to a copy of the package, which then traces a golden case in its own process.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import suzuri

PACKAGE = Path(suzuri.__file__).parent
GOLDEN = Path(__file__).parent.parent / "golden"


@dataclasses.dataclass(frozen=True)
class Patch:
    """`old` must occur exactly once in `file`; `item` is where the first difference must show."""

    file: str
    old: str
    new: str
    item: str


PATCHES = {
    "window off by one": Patch(
        "kernels/paged_attention/cpu.py",
        "max(at - window + 1, 0)",
        "max(at - window, 0)",
        "text.layer.0.attn",
    ),
    "bias shifted": Patch(
        "kernels/paged_attention/cpu.py",
        "array(exact.widen(proj_BE))[:, ::-1]",
        "np.roll(array(exact.widen(proj_BE))[:, ::-1], 1, 1)",
        "text.layer.0.attn",
    ),
    "conv residual doubled": Patch(
        "kernels/short_conv/cpu.py",
        "out[c] = total + own[c]",
        "out[c] = total + own[c] + own[c]",
        "text.layer.0.attn_sconv",
    ),
    "bias in router weights": Patch(
        "kernels/router/cpu.py",
        "raw[n, j] = logits[n, e]",
        "raw[n, j] = logits[n, e] + bias[e]",
        "text.layer.2.mlp",
    ),
    "muP applied twice": Patch(
        "model/decoder.py",
        "scale=self.logit_scale",
        "scale=self.logit_scale**2",
        "text.logits",
    ),
    "conv taps flipped": Patch(
        "kernels/short_conv/cpu.py",
        "w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]\n    for n in",
        "w3, w2, w1, w0 = weight[0], weight[1], weight[2], weight[3]\n    for n in",
        "text.layer.0.attn_sconv",
    ),
    "gate and up as halves": Patch(
        "kernels/loops.py",
        "gates, ups = gate_up[0::2], gate_up[1::2]",
        "gates, ups = gate_up[: y.size], gate_up[y.size :]",
        "text.layer.0.mlp",
    ),
    "draft position not shifted": Patch(
        "model/mtp.py",
        "position_offset=depth + 1",
        "position_offset=0",
        "mtp.normed.depth.1.hidden",
    ),
}


def trace(package_parent: Path) -> tuple[int, str]:
    """Exit code and last line of a trace of `base` by the package in that folder."""
    search = os.pathsep.join([str(package_parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search}
    words = [sys.executable, "-m", "suzuri.cli", "trace", str(GOLDEN / "base")]
    done = subprocess.run(
        words,
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=package_parent,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.strip(), done.stderr
    return done.returncode, done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHES)
def test_a_broken_build_fails_and_names_the_item(name: str, tmp_path: Path) -> None:
    patch = PATCHES[name]
    shutil.copytree(PACKAGE, tmp_path / "suzuri", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "suzuri" / patch.file
    source = file.read_text()
    assert source.count(patch.old) == 1, f"the patch no longer applies to {patch.file}"
    file.write_text(source.replace(patch.old, patch.new))
    code, last = trace(tmp_path)
    assert code == 1
    assert last.startswith("FAILED ")
    assert f"first {patch.item}:" in last


def test_an_unpatched_copy_passes(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "suzuri", ignore=shutil.ignore_patterns("__pycache__"))
    code, last = trace(tmp_path)
    assert (code, last[:4]) == (0, "OK: ")
