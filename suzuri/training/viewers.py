"""Where metrics go besides metrics.jsonl: the terminal, TensorBoard, Weights & Biases."""

# torch and wandb leave these without types.
# pyright: reportUnknownMemberType=false

import contextlib
import hashlib
import importlib
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_EVERY = 5.0
"""Seconds between lines where there is no terminal."""


class Viewed(Protocol):
    """What a config says of viewers."""

    @property
    def tensorboard(self) -> bool: ...

    @property
    def wandb(self) -> str | None: ...

    def document(self) -> dict[str, Any]: ...


def check_viewers(config: Viewed) -> None:
    """Raises ValueError naming a package that is asked for and cannot be imported."""
    wanted = {"tensorboard": (config.tensorboard, _board), "wandb": (config.wandb, _wandb)}
    for name, (is_wanted, module) in wanted.items():
        if not is_wanted:
            continue
        try:
            module()
        except ImportError as error:
            raise ValueError(
                f"{name}: the package cannot be used ({error}): pip install {name}; metrics.jsonl "
                "is written in any case, and suzuri plot draws it"
            ) from error


def _board() -> Any:
    return importlib.import_module("torch.utils.tensorboard")


def _wandb() -> Any:
    return importlib.import_module("wandb")


class Viewers:
    """The optional writers. A run that goes on after `step` goes on in them, too."""

    def __init__(self, config: Viewed, folder: Path, step: int) -> None:
        self._board: Any = None
        self._wandb: Any = None
        if config.tensorboard:
            self._board = _board().SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        if config.wandb is not None:
            self._wandb = _wandb().init(
                project=config.wandb,
                dir=str(folder),
                config=config.document(),
                name=folder.name,
                id=hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest(),
                resume="allow",
            )

    def write(self, line: Mapping[str, float]) -> None:
        step = int(line["step"])
        values = {name: value for name, value in line.items() if name != "step"}
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


class Display:
    """Live bars on a terminal, plain lines now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._printed = 0.0

    @contextlib.contextmanager
    def bar(self, what: str, total: int, done: int = 0) -> Generator[None]:
        """A bar while the block runs; `show` moves it."""
        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        shown = self._console.is_terminal
        self._printed = time.monotonic()
        with Progress(*columns, console=self._console, disable=not shown) as progress:
            self._task = progress.add_task("", total=total, completed=done)
            self._progress, self._what, self._total = progress, what, total
            yield
            self._progress = None

    def show(self, done: int, text: str = "", *, always: bool = False) -> None:
        assert self._progress is not None
        if self._console.is_terminal:
            self._progress.update(self._task, completed=done, description=text)
            return
        now = time.monotonic()
        if always or now - self._printed >= PLAIN_EVERY:
            self._printed = now
            self.say(f"{self._what} {done}/{self._total} {text}".rstrip())

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
