"""`suzuri verify`: the exactness matrix of one model as a table, the verdict on the last line."""

import dataclasses
import sys
import time
from collections.abc import Sequence

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from suzuri.engine.devices import device_named
from suzuri.engine.pages import OutOfPages
from suzuri.model.inkling import Inkling, randomize
from suzuri.model.locate import locate
from suzuri.model.random_weights import initialize
from suzuri.model.tensor_table import Storage, table
from suzuri.tools.loading import load_model, refuse_too_big
from suzuri.tools.verify.checks_hits import ROOM
from suzuri.tools.verify.config import VerifyConfig
from suzuri.tools.verify.lab import Lab, Mismatch, NotTested
from suzuri.tools.verify.matrix import FAR, LARGE, Check, checks
from suzuri.tools.verify.record import Place
from suzuri.tools.verify.reference import Reference

FAULTS = (AssertionError, ArithmeticError, LookupError, OutOfPages, RuntimeError, TypeError)
"""How an engine with a fault may end a check, besides wrong numbers."""
PROOF_WEIGHTS = 300_000_000
"""Up to so many parameters, weights are drawn so that no tensor has a value that hides a mistake;
beyond, as quickly as the device can."""
ONE_THREAD_WEIGHTS = 20_000_000
"""Models below this are quickest on one thread; bits do not depend on it, as a check proves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One line of the table. `problem` is empty when all bits are equal."""

    name: str
    rows: int
    problem: str
    seconds: float = 0.0


def run_verify(config: VerifyConfig) -> int:
    """Runs the matrix and prints it. Returns the exit code: 0, or 1 when some bits differ.

    Raises ValueError or OSError where the model cannot be used, naming the flag and the fix.
    """
    console = Console()
    model = load(config, console)
    threads = torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.parameters()) < ONE_THREAD_WEIGHTS:
        torch.set_num_threads(1)
    try:
        return show(console, config, verify(model, config, console))
    finally:
        torch.set_num_threads(threads)


def load(config: VerifyConfig, console: Console) -> Inkling:
    """The model on its device, from a checkpoint or with random weights."""
    device = device_named(config.device, f"--device {config.device}")
    if not config.random_weights:
        located = locate(config.model, weights=True)
        model, _ = load_model(located.checkpoint(), config.dtype, console)
        return model.to(device).requires_grad_(False)
    shape = locate(config.model).config
    refuse_too_big(shape, config.dtype, config.model)
    num_parameters = sum(entry.num_values for entry in table(shape, Storage()))
    model = Inkling(shape, dtype=getattr(torch, config.dtype), device=device)
    with console.status("drawing weights"):
        if shape.quantization is not None or num_parameters > PROOF_WEIGHTS:
            initialize(model, config.seed)
        else:
            randomize(model, config.seed)
    console.print(f"{num_parameters:,} random parameters as {config.dtype}")
    return model.requires_grad_(False)


def verify(
    model: Inkling, config: VerifyConfig, console: Console, *, keep_going: bool = True
) -> list[Outcome]:
    """Runs the checks of the matrix, all or up to the first that fails.

    Raises ValueError naming --tokens when the model's context is too short.
    """
    reference = Reference(model)
    lab = Lab(model, config, reference)
    _refuse_long(lab)
    outcomes: list[Outcome] = []
    todo = checks(lab)
    with console.status("") as status:
        for i, check in enumerate(todo):
            status.update(f"{i + 1} of {len(todo)}: {escape(check.name)}")
            outcome = _outcome(check, model, config, reference)
            outcomes.append(outcome)
            if not console.is_terminal:
                # Where no status line moves, whoever waits still sees how far it is.
                words = f"{outcome.problem or 'equal bits'} ({outcome.seconds:.1f} s)"
                print(f"{i + 1}/{len(todo)} {check.name}: {words}", file=sys.stderr, flush=True)
            if outcomes[-1].problem and not keep_going:
                break
    return outcomes


def _refuse_long(lab: Lab) -> None:
    most = lab.model.config.text.model_max_length
    needed = max(2 * lab.long, lab.long + ROOM, FAR + 3, 2 * LARGE + ROOM)
    if needed > most:
        raise ValueError(
            f"--tokens {lab.long}: the checks need sequences of {needed} tokens, the model's "
            f"model_max_length is {most}"
        )


def _outcome(check: Check, model: Inkling, config: VerifyConfig, reference: Reference) -> Outcome:
    lab = Lab(model, config, reference, long=check.long)
    problem, start = "", time.monotonic()
    try:
        check.run(lab)
    except Mismatch as mismatch:
        problem = str(mismatch)
        if mismatch.place is not None:
            problem += f": {_first_part(check, lab, mismatch, mismatch.place)}"
    except NotTested as reason:
        problem = f"not tested: {reason}"
    except FAULTS as fault:
        problem = f"{type(fault).__name__}: {fault}"
    if not problem and not lab.rows:
        problem = "not tested: no rows were compared"
    return Outcome(
        name=check.name,
        rows=lab.rows,
        problem=" ".join(problem.split()),
        seconds=time.monotonic() - start,
    )


def _first_part(check: Check, lab: Lab, mismatch: Mismatch, place: Place) -> str:
    """The first part of the first layer whose output differs, from running the check again."""
    again = Lab(lab.model, lab.config, lab.reference, long=check.long, probe=place)
    try:
        check.run(again)
    except (Mismatch, NotTested, *FAULTS):
        pass
    if again.probed is None:
        return "it did not happen again, so this build is not deterministic"
    media = [(item.index, item.features) for item in mismatch.items]
    wanted = lab.reference.layers(mismatch.tokens, media, place.position)
    for name, digest in again.probed.items():
        if digest != wanted[name]:
            return f"first differs in {name}"
    return "no layer differs, the logits do"


def show(console: Console, config: VerifyConfig, outcomes: Sequence[Outcome]) -> int:
    """Prints the table and the verdict; returns the exit code."""
    title = escape(f"{config.model} as {config.dtype} on {config.device}, against one forward")
    shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    shown.add_column("check", no_wrap=True)
    shown.add_column("rows", justify="right", no_wrap=True)
    shown.add_column("seconds", justify="right", no_wrap=True)
    shown.add_column("")
    for outcome in outcomes:
        mark = f"[bold red]{escape(outcome.problem)}[/]" if outcome.problem else "equal bits"
        shown.add_row(escape(outcome.name), f"{outcome.rows:,}", f"{outcome.seconds:.1f}", mark)
    console.print(shown)
    failed = [outcome for outcome in outcomes if outcome.problem]
    rows = sum(outcome.rows for outcome in outcomes)
    # Plain lines: scripts read them, and wrapping or markup would get in their way.
    if failed:
        first = failed[0]
        print(
            f"FAILED {len(failed)} of {len(outcomes)} checks: first {first.name}: {first.problem}"
        )
        return 1
    print(f"OK: {len(outcomes)} checks, {rows} rows, all equal bits")
    return 0
