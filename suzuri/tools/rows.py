"""One compared item of a trace, and the tolerances of golden items."""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Allowed |ours - expected|: atol + rtol * |expected|; both 0 means equal."""

    atol: float = 0.0
    rtol: float = 0.0

    def __str__(self) -> str:
        if not self.atol and not self.rtol:
            return "equal"
        return f"{self.atol:g}" + (f" + {self.rtol:g} |x|" if self.rtol else "")


EXACT = Tolerance()
LOGITS = Tolerance(atol=1e-4)
LAYERS = Tolerance(atol=1e-3, rtol=1e-5)
TOWERS = Tolerance(atol=1e-5)
DRAFTS = Tolerance(atol=1e-4)


def tolerance(name: str) -> Tolerance:
    """The tolerance of a golden item by its name (tests/golden/README.md)."""
    if name.endswith(("ids", "drafts")):
        return EXACT
    if name.startswith(("vision.", "audio.")):
        return TOWERS
    if name.startswith("mtp."):
        return DRAFTS
    if name.endswith("logits") and ".layer." not in name:
        return LOGITS
    return LAYERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One compared item. `problem` is empty when it is within tolerance."""

    name: str
    difference: float
    limit: str
    problem: str

    @property
    def ok(self) -> bool:
        return not self.problem


def compare(name: str, ours: Tensor | None, expected: Tensor, limit: Tolerance) -> Row:
    """Compares one item. Shapes may differ by leading ones only; NaN is never within tolerance."""
    if ours is None:
        return Row(
            name=name,
            difference=float("nan"),
            limit=str(limit),
            problem="expected, but nothing here computes it: the part or its input is absent",
        )
    if ours.numel() != expected.numel() or _trimmed(ours) != _trimmed(expected):
        return Row(
            name=name,
            difference=float("nan"),
            limit=str(limit),
            problem=f"shape {list(ours.shape)}, expected {list(expected.shape)}",
        )
    wide = expected.to(torch.float64).cpu()
    gap = (ours.reshape(expected.shape).to(torch.float64).cpu() - wide).abs()
    bad = ~(gap <= limit.atol + limit.rtol * wide.abs())
    problem = ""
    if bool(bad.any()):
        place = [int(i) for i in bad.nonzero()[0]]
        where = tuple(place)
        problem = (
            f"differs by {gap[where]:.3g} at {place}: ours "
            f"{ours.reshape(expected.shape)[where].item():.6g}, expected {wide[where].item():.6g}; "
            f"allowed {limit}; {int(bad.sum())} of {bad.numel()} values are out"
        )
    largest = float(gap.max()) if gap.numel() else 0.0
    return Row(name=name, difference=largest, limit=str(limit), problem=problem)


def _trimmed(x: Tensor) -> list[int]:
    """The shape without leading ones (golden items carry a batch dim of 1)."""
    shape = list(x.shape)
    while len(shape) > 1 and shape[0] == 1:
        shape.pop(0)
    return shape
