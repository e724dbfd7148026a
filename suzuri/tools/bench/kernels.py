"""`suzuri bench kernels`: every op at the true shapes, beside the limit and its free version."""

import dataclasses
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from suzuri.engine.devices import device_named
from suzuri.tools.bench.card import card_for, limits
from suzuri.tools.bench.config import KernelsConfig
from suzuri.tools.bench.kernels_attention import attention_cells
from suzuri.tools.bench.kernels_matmul import product_cells
from suzuri.tools.bench.op_tests import UNTESTED, Verdict, run_tests
from suzuri.tools.bench.ops import Op, folder, ops_named
from suzuri.tools.bench.record import gpu_name, header, write
from suzuri.tools.bench.timing import sets_of, time_calls
from suzuri.tools.plan.hardware import Gpu

WIDTH = 140
SEED = 0


def run_kernels(config: KernelsConfig) -> int:
    """Tests, times, prints, writes --out after each op. Returns 0, or 1 when tests failed or an op
    could not be timed. Raises ValueError for what cannot be run."""
    ops = ops_named(config.ops)
    for case in config.cases:
        if not any(case in op.shapes for op in ops):
            known = ", ".join(dict.fromkeys(name for op in ops for name in op.shapes))
            raise ValueError(f"--cases {case}: there are {known}")
    device = device_named(config.device, f"--device {config.device}")
    on_gpu = device.type == "cuda"
    card = card_for(config.card, gpu_name(device)) if on_gpu or config.card else None
    document = header("suzuri bench kernels", device, dataclasses.asdict(config))
    document |= {"limits": limits(card) if card else None, "tests": {}, "rows": [], "refused": []}
    console = Console(stderr=True)
    names = list(dict.fromkeys(folder(op) for op in ops))
    verdicts: dict[str, Verdict] = {}
    if not config.no_test:
        with console.status(f"running the tests of {len(names)} ops"):
            verdicts = run_tests(names, on_gpu=on_gpu)
    document["tests"] = {
        name: dataclasses.asdict(verdicts[name]) if name in verdicts else UNTESTED for name in names
    }
    with console.status("") as status:
        for op in ops:
            status.update(op.name)
            verdict = verdicts.get(folder(op))
            if verdict is not None and verdict.problem:
                _refuse(document, op.name, f"not reported: {verdict.problem}")
                continue
            _measure(config, op, device, card, document)
            write(config.out, document)
    write(config.out, document)
    show(_console(), document)
    refused = len(document["refused"])
    place = f"; written to {config.out}" if config.out else ""
    note = f" ({UNTESTED})" if config.no_test else ""
    print(f"{len(document['rows'])} cases of {len(ops)} ops timed{note}, {refused} refused{place}")
    return 1 if refused or not document["rows"] else 0


def _refuse(document: dict[str, Any], op: str, why: str) -> None:
    document["refused"].append({"op": op, "reason": why})


def _measure(
    config: KernelsConfig,
    op: Op,
    device: torch.device,
    card: Gpu | None,
    document: dict[str, Any],
) -> None:
    """Its cases, and on a GPU the wider sweeps of attention and of the products."""
    names = [name for name in config.cases if name in op.shapes] or (
        [] if config.cases else op.true_cases
    )
    try:
        with torch.inference_mode():
            for name in names:
                row = time_case(op, name, device, card, config.repeats)
                document["rows"].append(row)
            if device.type == "cuda" and not config.cases:
                for row in (*attention_cells(op.name), *product_cells(op.name)):
                    document["rows"].append(_judged({"op": op.name, **row}, card))
    except RuntimeError as error:  # also NotImplementedError and OutOfMemoryError
        _refuse(document, op.name, str(error).splitlines()[0])


def time_case(
    op: Op, name: str, device: torch.device, card: Gpu | None, repeats: int
) -> dict[str, Any]:
    """One row of the table: microseconds, bytes and FLOPs, and against what they are held."""
    generator = torch.Generator(device).manual_seed(SEED)
    given = op.build(name, op.dtype, generator)
    out = op.run(given)
    num_bytes, flops = op.moved(given, out), op.flops(given)
    del out
    sets = sets_of(given, device)
    timed = time_calls([lambda one=one: op.run(one) for one in sets], device, repeats)
    free_us = None
    # A GPU's vendor library is the price's other side; on a CPU there is no such pair.
    if op.free is not None and device.type == "cuda":
        free = op.free
        free_us = time_calls([lambda one=one: free(one) for one in sets], device, repeats).us
    return _judged(
        {
            "op": op.name,
            "case": name,
            "dtype": str(op.dtype).removeprefix("torch."),
            "us": timed.us,
            "timing": timed.how,
            "free_us": free_us,
            "bytes": num_bytes,
            "flops": flops,
        },
        card,
    )


def _judged(row: dict[str, Any], card: Gpu | None) -> dict[str, Any]:
    """A row with rates, the share of the limit, and the price of exactness."""
    us, num_bytes, flops = row["us"], row["bytes"], row["flops"]
    row["terabytes_per_second"] = num_bytes / us / 1e6
    row["teraflops"] = flops / us / 1e6
    if card is not None:
        limit = 1e6 * max(num_bytes / card.floor_bandwidth, flops / card.floor_bf16)
        row["limit_us"], row["share_of_limit"] = limit, limit / us
    free = row.get("free_us")
    row["price"] = None if free is None else us / free - 1
    return row


def show(console: Console, document: dict[str, Any]) -> None:
    """The table, then what was refused and why."""
    where = document["hardware"]["gpu"] or "CPU: compare with each other only"
    table = Table(box=box.SIMPLE_HEAD, title=escape(f"kernels on {where}"), title_justify="left")
    for name in ("op", "case", "us", "TB/s", "TFLOP/s", "share", "free us", "price", "timing"):
        table.add_column(name, justify="left" if name in ("op", "case", "timing") else "right")
    for row in document["rows"]:
        share, price, free = (row.get(name) for name in ("share_of_limit", "price", "free_us"))
        table.add_row(
            escape(row["op"]),
            escape(row["case"]),
            f"{row['us']:,.1f}",
            f"{row['terabytes_per_second']:.3f}",
            f"{row['teraflops']:.1f}" if row["flops"] else "",
            "" if share is None else f"{100 * share:.0f} %",
            "" if free is None else f"{free:,.1f}",
            "" if price is None else f"{100 * price:+.1f} %",
            row["timing"],
        )
    console.print(table)
    for row in document["refused"]:
        console.print(f"{row['op']}: {row['reason']}", markup=False)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
