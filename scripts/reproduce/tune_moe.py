"""Finds the tiles of the experts' products on this GPU, and writes the table that the kernel reads.

    python scripts/reproduce/tune_moe.py STATE.json [--seconds 240] [--only E66-6144 ...]
        [--tokens 512 1024 ...] [--out suzuri/kernels/grouped_gemm/tiles.json]

Gate and up with SwiGLU (of sorted rows, and for few of rows where the tokens are) and down, over 64
and 256 routed experts and two shared ones, at the widths of both models, for 1 to 8192 tokens with
random routing. Every candidate's bits are held against those of the first; one that differs, or
does not run, is refused and named. Times are medians of graph replays, the candidates by turns in
three rounds, there and back, on a GPU under load; the weights of a call are larger than the L2. The
sizes that matter most come first; at the end of `--seconds` what was found is written. STATE.json
keeps it: a later run goes on there. In --out it takes the place of what the shipped table has for
the same sizes; the rest stays.
"""

import argparse
import json
import statistics
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from suzuri.kernels.grouped_gemm import kernel as grouped
from suzuri.kernels.grouped_gemm.tiles import TABLE, Kind, Schedule, candidates
from suzuri.kernels.moe_permute import kernel as permute
from suzuri.tools.bench.record import header
from suzuri.tools.bench.timing import graph_us, needed_gpu

SHAPES = {
    # name: (routed experts, D, F)
    "E66-6144": (64, 6144, 3072),
    "E258-6144": (256, 6144, 3072),
    "E258-4096": (256, 4096, 2048),
    "E66-4096": (64, 4096, 2048),
}
TOKENS = (1, 8, 64, 8192, 1024, 256, 32, 2048, 4096, 16, 512, 128, 2, 4)
CHOSEN, SHARED = 6, 2
MOST_GATHERED = 128
"""Tokens up to which rows that are not sorted are tried."""
BF16 = torch.bfloat16
DEVICE = torch.device("cuda")
LARGE_ROWS = 16384
ROUNDS = 3
SETTLING = 0.4
"""Seconds of load before a size is measured: a GPU that comes from rest keeps a higher clock for a
while, and whoever is first would win."""


MARKS = {"s": "swapped", "d": "descriptors", "p": "persistent", "h": "halved", "e": "spread"}
"""Letters behind a printed tile."""


class Cell(NamedTuple):
    kind: Kind
    tokens: int

    def name(self, shape: str) -> str:
        return f"{shape} {self.kind} {self.tokens}"


def cells(sizes: Collection[int]) -> Iterator[Cell]:
    for tokens in (tokens for tokens in TOKENS if tokens in sizes):
        yield Cell("gate_up", tokens)
        yield Cell("down", tokens)
        if tokens <= MOST_GATHERED:
            yield Cell("gathered", tokens)


class Layer:
    """Weights of one shape, and its routing."""

    def __init__(self, shape: str) -> None:
        self.routed, self.hidden, self.width = SHAPES[shape]
        self.experts = self.routed + SHARED
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.gate_up = self._weight(2 * self.width, self.hidden)
        self.down = self._weight(self.hidden, self.width)

    def _weight(self, f: int, k: int) -> Tensor:
        weight = torch.empty(self.experts, f, k, device=DEVICE, dtype=BF16)
        for expert in weight:
            expert.normal_(0, k**-0.5, generator=self.generator)
        return weight

    def arguments(self, cell: Cell) -> dict[str, Any]:
        """Of the kernel, without its schedule; `experts` of the sort are added by `sorts`."""
        g, tokens = self.generator, cell.tokens
        scores = torch.rand(tokens, self.routed, generator=g, device=DEVICE)
        chosen = scores.argsort(-1)[:, :CHOSEN].sort(-1).values
        slots = CHOSEN + SHARED
        _, order, _, offsets = permute.moe_permute(None, chosen, self.experts, num_slots=slots)
        is_down = cell.kind == "down"
        k = self.width if is_down else self.hidden
        rows = tokens if cell.kind == "gathered" else tokens * slots
        given: dict[str, Any] = {
            "x_MK": torch.randn(rows, k, device=DEVICE, dtype=BF16, generator=g),
            "weight_EFK": self.down if is_down else self.gate_up,
            "offsets_E1": offsets,
            "out_dtype": BF16,
            "swiglu": not is_down,
            "num_shared": SHARED,
        }
        return given | ({"order_M": order, "num_slots": slots} if cell.kind == "gathered" else {})

    def mean(self, cell: Cell) -> float:
        return cell.tokens * (CHOSEN + SHARED) / self.experts


def compile_all(layer: Layer, todo: list[Cell], until: float) -> None:
    """Every kernel of these cells once, on few rows, by all cores: most of the time is ptxas."""
    jobs: dict[tuple[Kind, Schedule], Cell] = {}
    for cell in todo:
        for schedule in candidates(layer.mean(cell), cell.kind):
            jobs.setdefault((cell.kind, schedule), cell)
    few = {cell.kind: layer.arguments(Cell(cell.kind, 8)) for cell in todo}
    for given in few.values():
        grouped.grouped_gemm(**given)  # what threads share is made by one

    def run(job: tuple[Kind, Schedule]) -> None:
        if time.monotonic() < until:
            try:
                grouped.grouped_gemm(**few[job[0]], tile=job[1])
            except Exception as error:  # named again, and for good, where it is measured
                print("does not compile:", *job, type(error).__name__, flush=True)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, jobs))
    torch.cuda.synchronize()


def measure(layer: Layer, cell: Cell) -> dict[str, Any]:
    """The candidates' times, fastest first, and who was refused."""
    given = layer.arguments(cell)
    sound: list[Schedule] = []
    refused: dict[str, str] = {}
    expected: Tensor | None = None
    for schedule in candidates(layer.mean(cell), cell.kind):
        try:
            found = grouped.grouped_gemm(**given, tile=schedule)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            refused[str(schedule)] = f"{type(error).__name__}: {error}"[:200]
            continue
        expected = found if expected is None else expected
        if torch.equal(found, expected):
            sound.append(schedule)
        else:
            refused[str(schedule)] = "other bits"
    rows = int(given["offsets_E1"][-1])
    large = rows >= LARGE_ROWS

    def once(schedule: Schedule) -> float:
        call = partial(grouped.grouped_gemm, **given, tile=schedule)
        return graph_us([call] * (2 if large else 4), DEVICE, 5 if large else 7)

    settled = time.monotonic() + SETTLING
    while time.monotonic() < settled:
        once(sound[0])
    found_us: dict[Schedule, list[float]] = {schedule: [] for schedule in sound}
    for turn in range(ROUNDS):
        for schedule in reversed(sound) if turn % 2 else sound:
            found_us[schedule].append(once(schedule))
    times = {schedule: statistics.median(found) for schedule, found in found_us.items()}
    ranked = sorted(sound, key=times.__getitem__)
    used = int((given["offsets_E1"].diff() > 0).sum())
    f, k = given["weight_EFK"].shape[1:]
    return {
        "kind": cell.kind,
        "experts": layer.experts,
        "k": k,
        "n": f,
        "tokens": cell.tokens,
        "mean": layer.mean(cell),
        "bytes": 2 * used * f * k,
        "flops": 2 * rows * f * k,
        "rule_us": times[sound[0]],
        "us": times[ranked[0]],
        "schedule": ranked[0].as_json(),
        "all": [{"us": round(times[s], 2), **s.as_json()} for s in ranked],
        "refused": refused,
    }


def line(name: str, row: dict[str, Any]) -> str:
    best, us = row["schedule"], row["us"]
    tile = "x".join(str(best[part]) for part in ("rows", "columns", "depth", "warps", "stages"))
    marks = "".join(letter for letter, part in MARKS.items() if best[part])
    speed = f"{row['flops'] / us / 1e6:5.0f} TFLOP/s {row['bytes'] / us / 1e6:5.2f} TB/s"
    refused = f" refused {len(row['refused'])}" if row["refused"] else ""
    gain = f"rule {row['rule_us']:8.1f} best {us:8.1f} us"
    return f"{name:26} {gain} {speed} {tile}{marks} g{best['group']}{refused}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--only", action="append", choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="+", choices=sorted(TOKENS), default=TOKENS)
    args = parser.parse_args()
    needed_gpu()
    until = time.monotonic() + args.seconds
    rows = measured(args.state)
    for shape in args.only or SHAPES:
        todo = [cell for cell in cells(args.tokens) if cell.name(shape) not in rows]
        if not todo or time.monotonic() > until:
            continue
        layer = Layer(shape)
        compile_all(layer, todo, until)
        print(f"{shape}: compiled, {until - time.monotonic():.0f} s left", flush=True)
        for cell in todo:
            if time.monotonic() > until:
                break
            rows[cell.name(shape)] = row = measure(layer, cell)
            print(line(cell.name(shape), row), flush=True)
            for schedule, why in row["refused"].items():
                print("   refused:", schedule, why, flush=True)
            state = {**header("tiles of grouped products", DEVICE, {}), "cells": rows}
            args.state.write_text(json.dumps(state, indent=1) + "\n", "utf-8")
        del layer
        torch.cuda.empty_cache()
    if args.out:
        kept = ("kind", "experts", "k", "mean", "us", "schedule")
        found = [{name: row[name] for name in kept} for row in rows.values()]
        entries = merged(json.loads(TABLE.read_text("utf-8"))["entries"], found)
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
        args.out.write_text(f'{{\n "entries": [\n{lines}\n ]\n}}\n', "utf-8")


def measured(state: Path) -> dict[str, Any]:
    """The sizes of a state by name. SystemExit for one that an older version wrote."""
    rows = json.loads(state.read_text("utf-8"))["cells"] if state.exists() else {}
    for row in rows.values():
        try:
            Schedule.of_json(row["schedule"])
        except KeyError as error:
            raise SystemExit(
                f"{state}: its schedules lack {error}, they are of another version; name a new file"
            ) from None
    return rows


def merged(before: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of a table; those that were found replace those of the same size."""

    def size(entry: dict[str, Any]) -> tuple[Any, ...]:
        return entry["kind"], entry["experts"], entry["k"], entry["mean"]

    new = {size(entry): entry for entry in found}
    return [new.pop(size(entry), entry) for entry in before] + [*new.values()]


if __name__ == "__main__":
    main()
