"""Whether a run went as such runs do: every number of every step within a band.

`python -m suzuri.rl.history RUN BANDS.json` checks a run against what was written with `--record`.
A recorded run is a test of everything at once: what makes learning slower, or better than it can
be, leaves the band. No torch here.
"""

# pyright: strict

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from suzuri.config import parse
from suzuri.training.run_dir import read_metrics
from suzuri.types import is_number

FORMAT = 1

Line = Mapping[str, Any]
Bands = dict[int, dict[str, tuple[float, float]]]
"""By step and name: the least and the greatest value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Width:
    """How far from what was recorded a number may be, on both sides."""

    absolute: float = 0.0
    relative: float = 0.0

    def __post_init__(self) -> None:
        for name in ("absolute", "relative"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 or more")


WIDTHS = {
    "kl/sampler_trainer_max": Width(),
    "sample/reward": Width(absolute=0.2),
    "eval/reward": Width(absolute=0.2),
    "answers/tokens:mean": Width(relative=0.5),
    "train/loss": Width(absolute=1.0),
    "optim/grad_norm": Width(relative=0.75),
}
"""What is watched, if nothing else is asked for."""


def bands_of(runs: Sequence[Sequence[Line]], widths: Mapping[str, Width] | None = None) -> Bands:
    """Around the lines of one or several runs of equal steps: from the least of them less its
    width to the greatest with it. ValueError where there is no number that could be watched."""
    widths = WIDTHS if widths is None else widths
    found: Bands = {}
    for lines in runs:
        if [line["step"] for line in lines] != [line["step"] for line in runs[0]]:
            raise ValueError("the runs have other steps than each other")
        for line in lines:
            bands = found.setdefault(line["step"], {})
            for name in widths:
                if name not in line:
                    continue
                value, width = _number(line[name]), widths[name]
                if value is None:
                    raise ValueError(f"step {line['step']}: {name} is {line[name]!r}, no number")
                away = width.absolute + width.relative * abs(value)
                low, high = bands.get(name, (math.inf, -math.inf))
                bands[name] = min(low, value - away), max(high, value + away)
    if not any(found.values()):
        raise ValueError(f"none of {', '.join(widths)} is in the lines")
    return found


def check(lines: Sequence[Line], bands: Bands) -> list[str]:
    """What is wrong with a run, in words; empty where nothing is. Every step with a band must be
    there once, in order and with every number; more steps are no fault."""
    faults: list[str] = []
    steps = [line.get("step") for line in lines]
    wanted = [step for step in steps if step in bands]
    if wanted != sorted(bands):
        missing = sorted(set(bands) - set(wanted))
        faults.append(
            f"steps {', '.join(map(str, missing[:5]))} of {max(bands)} are missing"
            if missing
            else "steps come twice or out of order"
        )
    for line in lines:
        for name, (low, high) in bands.get(line.get("step", -1), {}).items():
            where = f"step {line['step']}: {name}"
            if name not in line:
                faults.append(f"{where} is missing")
            elif (value := _number(line[name])) is None:
                faults.append(f"{where} is {line[name]!r}, no number")
            elif not low <= value <= high:
                faults.append(f"{where} = {value:.6g}, outside of {low:.6g} to {high:.6g}")
    return faults


def write_bands(path: str | Path, bands: Bands) -> None:
    """As JSON."""
    lines = {str(step): bands[step] for step in sorted(bands)}
    text = json.dumps({"format": FORMAT, "bands": lines}, indent=1, sort_keys=False)
    Path(path).write_text(text + "\n", "utf-8")


def read_bands(path: str | Path) -> Bands:
    """Raises ValueError naming the file, OSError."""
    try:
        document: Any = json.loads(Path(path).read_text("utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, not {FORMAT}")
        return {
            int(step): {name: (float(low), float(high)) for name, (low, high) in own.items()}
            for step, own in document["bands"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no bands: {error}") from error


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryConfig:
    """Check a run against bands, or record them. Exit code 0 where all numbers are within, 1 where
    not, 2 when the input cannot be used."""

    run: Annotated[str, Positional]
    """A run's folder, or its metrics."""

    bands: Annotated[str, Positional]
    """File of bands."""

    record: bool = False
    """Write the bands around this run, in place of checking it."""


def main(args: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    config = parse(HistoryConfig, prog="python -m suzuri.rl.history", args=args)
    try:
        lines = read_metrics(config.run)
        if config.record:
            write_bands(config.bands, bands_of([lines]))
            return 0
        bands = read_bands(config.bands)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    faults = check(lines, bands)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
