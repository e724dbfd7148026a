"""How a plan is shown: one table per GPU, a bar, state, limits, floors, and the verdict last."""

import dataclasses
import shlex
import sys
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from suzuri.kernels.gpu_support import gpu_support
from suzuri.model.sizes import MAX_CONCURRENCY
from suzuri.model.sizes_state import PAGE_SIZE
from suzuri.tools.plan.changes import Change
from suzuri.tools.plan.floors import Floor
from suzuri.tools.plan.hardware import Gpu
from suzuri.tools.plan.verdict import GIB, GROUPS, Plan, amount, gib

STYLES = {"weights": "blue", "state": "green", "workspace": "yellow", "reserve": "magenta"}
MARKS = {"weights": "█", "state": "▓", "workspace": "▒", "reserve": "░"}
PLAIN_MARKS = {"weights": "#", "state": "+", "workspace": "=", "reserve": "-"}
BAR_WIDTH = 60
NARROW = 48
"""Terminals with fewer columns get lines instead of tables, which would break inside words."""
TIGHT = 50
"""A plan that leaves less than one part in so many is called tight."""
EXPERTS = {
    "": "on one GPU",
    "hidden units": "hidden units of each over the GPUs (a)",
    "whole experts": "whole experts per GPU (b)",
    "groups": "whole experts per group of GPUs (a and b)",
}
SMALL = 1000
"""Lines below one part in so many of the memory are shown together."""


def show(plan: Plan, changes: list[Change], notes: list[str]) -> None:
    """Print the report. The last line is the verdict."""
    console = Console(highlight=False)
    for part in _parts(plan, notes, console.width):
        console.print(part)
    if not plan.fits:
        console.print(_changes(changes, console.width))
    # One plain line whatever the width, for people and for scripts.
    print(_printable(sentence(plan, changes)))


def sentence(plan: Plan, changes: list[Change]) -> str:
    """The verdict with the sum; on a no with the nearest change."""
    asked = plan.request
    what = f"{asked.concurrency} x {asked.context} tokens"
    if plan.fits:
        return f"YES: {what}: {plan.sum_in_words}"
    help_ = f"; nearest change: {changes[0].words}" if changes else "; no change helps that I know"
    return f"NO: {what}: {plan.sum_in_words}{help_}"


def command_line(
    plan: Plan, model: str, stored_as_planned: bool, random_weights: bool = False
) -> str:
    """The serve command of a plan that fits, with plan's own flags."""
    asked = plan.request
    words = ["suzuri", "serve", shlex.quote(model), f"--tp {asked.tp}"]
    if asked.ep > 1:
        words.append(f"--ep {asked.ep}")
    if asked.copies > 1:
        words.append(f"--copies {asked.copies}")
    if not stored_as_planned:
        words.append(f"--experts {'nvfp4' if asked.nvfp4 else 'bf16'}")
    if random_weights:
        words.append("--random-weights")
    words += [
        f"--context {asked.context}",
        f"--concurrency {asked.concurrency}",
        f"--kv-dtype {asked.kv_dtype}",
        f"--mtp {asked.drafts}",
        f"--resume-points {asked.resume_points}",
        f"--token-budget {asked.token_budget}",
    ]
    return " ".join(words)


def document(plan: Plan, changes: list[Change], notes: list[str]) -> dict[str, Any]:
    """The whole plan for --json. Bytes, seconds, tokens."""
    asked = plan.request
    return {
        "verdict": "yes" if plan.fits else "no",
        "sentence": sentence(plan, changes),
        "model": plan.model,
        "request": {
            **{k: v for k, v in dataclasses.asdict(asked).items() if k != "gpu"},
            "copies": asked.copies,
            "sequences_per_copy": asked.per_copy,
        },
        "gpu": dataclasses.asdict(asked.gpu),
        "family": dataclasses.asdict(asked.family),
        "per_gpu": {
            "memory_bytes": plan.memory,
            "total_bytes": plan.total,
            "free_bytes": plan.memory - plan.total,
            "groups": plan.groups,
            "lines": [dataclasses.asdict(line) for line in plan.lines],
        },
        "state": {
            **dataclasses.asdict(plan.state),
            "per_token": plan.state.per_token,
            "per_sequence": dataclasses.asdict(plan.sequence),
            "resume_point": plan.resume_point,
            "page_size": PAGE_SIZE,
        },
        "limits": {
            "largest_context": plan.largest_context,
            "largest_concurrency": plan.largest_concurrency,
            "largest_concurrency_or_more": plan.largest_concurrency == MAX_CONCURRENCY,
        },
        "floors": {
            "decode": _floor(plan.decode),
            "tokens_per_second": plan.tokens_per_second,
            "prefill": _floor(plan.prefill),
            "draft_and_verify": None if plan.draft is None else dataclasses.asdict(plan.draft),
        },
        "changes": [{"flags": change.flags, "words": change.words} for change in changes],
        "notes": notes,
    }


def _floor(floor: Floor) -> dict[str, Any]:
    return {
        **dataclasses.asdict(floor),
        "seconds": floor.seconds,
        "waiting_in_turn_s": floor.waiting_in_turn_s,
        "bound": floor.bound,
    }


def _parts(plan: Plan, notes: list[str], width: int) -> list[RenderableType]:
    return [
        Text(_printable(_title(plan)), style="bold"),
        _memory(plan) if width >= NARROW else _memory_lines(plan),
        _bar(plan, width),
        _facts("state of one GPU", _state_rows(plan), width),
        _facts("limits", _limit_rows(plan), width),
        _facts("floors (no step is faster)", _floor_rows(plan), width),
        Group(*(Text(f"note: {note}", style="dim") for note in notes)),
    ]


def _title(plan: Plan) -> str:
    asked = plan.request
    experts = "nvfp4" if asked.nvfp4 else "bf16"
    copies = f", {asked.copies} data-parallel copies" if asked.copies > 1 else ""
    ep = f" ep {asked.ep}" if asked.ep > 1 else ""
    return (
        f"{plan.model} ({experts} experts) on {asked.num_gpus} x {asked.gpu.name}: "
        f"tp {asked.tp}{ep}{copies}, KV {asked.kv_dtype}, {asked.drafts} draft depths"
    )


def _memory(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    # Folding, not cutting: the sign that rich cuts with is not in every encoding.
    table.add_column("per GPU", overflow="fold")
    table.add_column("part", overflow="fold")
    table.add_column("GiB", justify="right", overflow="fold")
    table.add_column("share", justify="right", overflow="fold")
    for group in GROUPS:
        for i, (name, num_bytes) in enumerate(_summands(plan, group)):
            heading = Text(group if i == 0 else "", style=STYLES[group])
            table.add_row(heading, name, _small_gib(num_bytes), _share(num_bytes, plan.memory))
    table.add_section()
    table.add_row(Text("sum", style="bold"), "", gib(plan.total), _share(plan.total, plan.memory))
    table.add_row("memory", plan.request.gpu.name, gib(plan.memory), "100.0 %")
    left = plan.memory - plan.total
    table.add_row("left" if left >= 0 else "lacking", "", gib(abs(left)), "")
    return table


def _memory_lines(plan: Plan) -> Group:
    """The same where a table has no room."""
    lines = [Text("\nGiB per GPU", style="bold")]
    for group in GROUPS:
        summands = _summands(plan, group)
        if summands:
            lines.append(Text(group, style=STYLES[group]))
        lines += [Text(f"  {name} {_small_gib(num_bytes)}") for name, num_bytes in summands]
    left = plan.memory - plan.total
    lines += [
        Text(f"sum {gib(plan.total)}", style="bold"),
        Text(f"memory of {plan.request.gpu.name} {gib(plan.memory)}"),
        Text(f"{'left' if left >= 0 else 'lacking'} {gib(abs(left))}\n"),
    ]
    return Group(*lines)


def _summands(plan: Plan, group: str) -> list[tuple[str, int]]:
    """Names and bytes of what a group adds up, small ones together at the end."""
    lines = [line for line in plan.lines if line.group == group]
    least = plan.memory // SMALL
    small = sum(line.num_bytes for line in lines if line.num_bytes < least)
    shown = [(line.name, line.num_bytes) for line in lines if line.num_bytes >= least]
    return [*shown, ("smaller ones", small)] if small else shown


def _small_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f}" if num_bytes < 0.1 * GIB else gib(num_bytes)


def _share(num_bytes: int, memory: int) -> str:
    return f"{100 * num_bytes / memory:.1f} %"


def _bar(plan: Plan, width: int) -> Text:
    """What fills the memory, drawn; past its end what does not fit."""
    asked = plan.request
    label = "rank 0" if asked.tp == 1 else f"ranks 0-{asked.tp - 1}"
    if width < NARROW:
        label = ""
    marks = MARKS if _can_print("█▓▒░·│") else PLAIN_MARKS
    room = max(min(width - len(label) - 4, BAR_WIDTH), 10)
    scale = room / max(plan.memory, plan.total)
    end = round(plan.memory * scale)
    drawn: list[tuple[str, str]] = []
    filled = 0.0
    for group, num_bytes in plan.groups.items():
        upto = filled + num_bytes * scale
        drawn += [(marks[group], STYLES[group])] * (round(upto) - round(filled))
        filled = upto
    free = "·" if marks is MARKS else "."
    drawn += [(free, "dim")] * (end - len(drawn))
    border = "│" if marks is MARKS else "|"
    text = Text(f"{label} {border}")
    for i, (mark, style) in enumerate(drawn):
        if i == end:
            text.append(border, style="bold red")
        text.append(mark, style="red" if i >= end else style)
    if len(drawn) <= end:
        text.append(border)
    gap = "\n  " if width < NARROW else "  "
    legend = gap.join(f"{marks[group]} {group}" for group in GROUPS)
    text.append(f"\n{' ' * len(label)}  {legend}\n")
    return text


def _facts(title: str, rows: list[tuple[str, str]], width: int) -> RenderableType:
    if width < NARROW:
        names = [(Text(f"  {name.strip()}:"), Padding(value, (0, 0, 0, 4))) for name, value in rows]
        return Group(Text(title, style="bold"), *(part for pair in names for part in pair))
    table = Table(box=None, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.show_header = False
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(f"  {name}", value)
    return table


def _state_rows(plan: Plan) -> list[tuple[str, str]]:
    state, sequence = plan.state, plan.sequence
    rows = [
        (
            "KV per token",
            f"{amount(state.global_per_token)} global layers (whole context), "
            f"{amount(state.local_per_token)} local layers (window of {state.window})",
        ),
        (
            "one sequence",
            f"{amount(sequence.total)} at {plan.request.context} tokens: "
            f"global KV {amount(sequence.global_kv)}, local KV {amount(sequence.local_kv)}, "
            f"conv {amount(sequence.conv)} ({state.conv_rows} rows)",
        ),
    ]
    if state.drafts:
        draft = sequence.draft_kv + sequence.draft_conv + sequence.draft_rows
        rows.append(
            (
                "  of it drafts",
                f"{amount(draft)}: KV {amount(sequence.draft_kv)}, "
                f"conv {amount(sequence.draft_conv)}, rows {amount(sequence.draft_rows)}",
            )
        )
    rows.append(
        ("a resume point", f"{amount(plan.resume_point)}, {state.resume_points} per sequence")
    )
    return rows


def _limit_rows(plan: Plan) -> list[tuple[str, str]]:
    asked = plan.request
    context, number = plan.largest_context, plan.largest_concurrency
    limit = " (the model's limit)" if context == plan.model_limit else ""
    more = " or more" if number == MAX_CONCURRENCY else ""
    longest = f"{context} tokens{limit}" if context else "none fits"
    return [
        (f"longest context of {asked.concurrency}", longest),
        (f"most sequences of {asked.context}", f"{number}{more}" if number else "none fits"),
    ]


def _floor_rows(plan: Plan) -> list[tuple[str, str]]:
    asked = plan.request
    decode, prefill = plan.decode, plan.prefill
    in_turn = f"{decode.waiting_in_turn_s * 1e3:.2f}"
    rows = [
        (
            "decode step",
            f"{decode.seconds * 1e3:.2f} ms for {asked.per_copy} x {asked.context} "
            f"({decode.bound}), {1 / decode.seconds:.0f} tok/s each, "
            f"{plan.tokens_per_second:.0f} tok/s in all",
        ),
        (
            "prefill",
            f"{prefill.seconds * 1e3:.0f} ms for 1 x {asked.context} ({prefill.bound}), "
            f"{asked.context / prefill.seconds:.0f} tok/s",
        ),
    ]
    if plan.draft is not None:
        rows.append(
            (
                "draft + verify",
                f"{plan.draft.seconds * 1e3:.2f} ms with {plan.draft.drafts} drafts; pays from "
                f"{plan.draft.break_even:.2f} tokens per step",
            )
        )
    if decode.exchanges:
        rows.append(
            (
                "  exchanges",
                f"{decode.exchanges} per step, each after the one before: "
                f"{decode.latency_s * 1e3:.2f} ms of waiting (decode {in_turn} ms if nothing else "
                f"goes on meanwhile); on the links {decode.links_s * 1e3:.2f} ms (decode), "
                f"{prefill.links_s * 1e3:.0f} ms (prefill) beside the rest",
            )
        )
    if decode.experts:
        lie = f"decode: {EXPERTS[decode.experts]}; prefill: {EXPERTS[prefill.experts]}"
        rows.append(("  experts", lie))
    return rows


def _changes(changes: list[Change], width: int) -> RenderableType:
    rows = [(str(i + 1), change.words) for i, change in enumerate(changes)]
    return _facts(
        "what would make it a yes (each one planned again)", rows or [("none", "")], width
    )


def _today(gpu: Gpu) -> str:
    """What Suzuri has for such a GPU now."""
    if gpu.capability == "cpu":
        return "runs on the CPU's kernels"
    if gpu.capability[0].isdigit():
        return gpu_support(f"sm_{gpu.capability.replace('.', '')}").reason
    if gpu.capability.startswith("gfx"):
        return gpu_support(gpu.capability).reason
    return "planned by arithmetic alone"


def notes_of(plan: Plan, stored_nvfp4: bool, random_weights: bool = False) -> list[str]:
    """What must be said beside the numbers."""
    request = plan.request
    gpu, family = request.gpu, request.family
    notes = [
        f"the verdict is about memory, the floors about speed at best; {gpu.name}: {_today(gpu)}",
        f"{gpu.name}: {family.name}; {gpu.source}",
    ]
    if request.nvfp4:
        units = (
            "has FP4 units, which exact bf16 products do not use"
            if family.fp4
            else ("has no FP4 units")
        )
        notes.append(
            "nvfp4 experts are weight-only: 4-bit values become bf16 inside the product; "
            f"{gpu.name} {units}"
        )
    if random_weights:
        notes.append("random weights: only the shape counts, so nothing here is different")
    if request.nvfp4 and not stored_nvfp4:
        notes.append("planned as the releases quantise: routed experts of sparse layers from 3 on")
    if stored_nvfp4 and not request.nvfp4:
        notes.append("the checkpoint is nvfp4; planned as dequantised to bf16")
    if request.tp > 1:
        notes.append("one copy over several GPUs is arithmetic: the engine runs on one GPU so far")
    if request.tp > gpu.link.joined:
        notes.append(
            f"tp {request.tp} goes beyond the {gpu.link.joined} GPUs that are linked directly: the "
            "network between machines carries the collectives"
        )
    if plan.decode.experts != plan.prefill.experts:
        notes.append(
            f"experts lie in one way for both phases: memory is counted for --ep {request.ep}; "
            f"--ep {request.tp} plans whole experts per GPU"
        )
    left = plan.memory - plan.total
    if plan.fits and TIGHT * left < plan.memory:
        notes.append(f"tight: {gib(left)} GiB per GPU are left beside the reserve")
    return notes


def _can_print(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _printable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return text.encode(encoding, "replace").decode(encoding, "replace")
