"""`suzuri bench startup`: from the weights to the first token, in fresh processes."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from suzuri.engine.devices import device_named
from suzuri.log import get_logger
from suzuri.model.locate import locate
from suzuri.tools.bench.config import StartupConfig
from suzuri.tools.bench.record import header, write
from suzuri.tools.bench.startup_run import Task

MODULE = "suzuri.tools.bench.startup_run"
TIMEOUT = 1800.0
TOLD = ("ready:", "not prepared", "compiled in both processes")
"""Lines of the engine's log that are shown."""
log = get_logger(__name__)


def run_startup(config: StartupConfig) -> int:
    """Measures, prints, and writes --out after each start. 1 when kernels came late. Raises
    ValueError for what cannot be run."""
    device = device_named(config.device, f"--device {config.device}")
    name = locate(config.model).name
    document = header("suzuri bench startup", device, dataclasses.asdict(config))
    document |= {"model": name, "starts": {}}
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("cold",) if config.cold else ("cold", "warm"):
            with console.status(f"{name}: {kind} start"):
                document["starts"][kind] = one_start(config, folder)
            write(config.out, document)
    show_starts(Console(), document)
    late = [name for start in document["starts"].values() for name in start["late"]]
    for kernel in dict.fromkeys(late):
        print(f"not there when the engine was ready: {kernel}")
    return 1 if late else 0


def one_start(config: StartupConfig, folder: str) -> dict[str, Any]:
    """A start in a process of its own, with what earlier ones left in `folder`. Raises ValueError
    with its last words when it fails."""
    task = Task(
        model=config.model,
        random_weights=config.random_weights,
        device=config.device,
        engine={
            "dtype": config.dtype,
            "max_context": config.max_context,
            "max_running": config.max_running,
            "token_budget": config.token_budget,
            "prepare": not config.no_prepare,
        },
        folder=folder,
        seed=config.seed,
    )
    with tempfile.TemporaryDirectory() as place:
        asked, answered = Path(place) / "task.json", Path(place) / "answer.json"
        asked.write_text(json.dumps(dataclasses.asdict(task)), "utf-8")
        words = [sys.executable, "-m", MODULE, str(asked), str(answered)]
        try:
            done = subprocess.run(
                words, stderr=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"the engine did not start within {TIMEOUT:.0f} s") from error
        for line in done.stderr.splitlines():
            if any(word in line for word in TOLD):
                log.info("%s", line)
        if done.returncode or not answered.is_file():
            lines = done.stderr.strip().splitlines() or ["it ended without a word"]
            raise ValueError(f"the engine did not start: {lines[-1]}")
        return json.loads(answered.read_text("utf-8"))


def show_starts(console: Console, document: dict[str, Any]) -> None:
    """A row per start."""
    table = Table(title=f"{document['model']}: seconds")
    for column in ("start", "weights", "to ready", "to first token", "late kernels"):
        table.add_column(column, justify="left" if column == "start" else "right")
    for kind, start in document["starts"].items():
        times = [f"{start[name]:.2f}" for name in ("weights_s", "ready_s", "first_token_s")]
        table.add_row(kind, *times, str(len(start["late"])))
    console.print(table)
    for kind, start in document["starts"].items():
        parts = ", ".join(f"{what} {seconds:.2f}" for what, seconds in start["parts_s"].items())
        if parts:
            console.print(f"{kind}: {parts}")
