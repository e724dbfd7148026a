"""From a MODEL argument to an engine: found, checked against memory, loaded, in this order."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from suzuri.engine.capacity import capacity
from suzuri.engine.config import EngineConfig
from suzuri.engine.devices import device_named
from suzuri.engine.engine import Engine
from suzuri.engine.memory import available_memory
from suzuri.log import get_logger
from suzuri.model.checkpoint_files import Checkpoint
from suzuri.model.config import MtpConfig
from suzuri.model.inkling import Inkling
from suzuri.model.locate import Located, locate, without_weights
from suzuri.model.presets import TOY_MODEL
from suzuri.model.random_weights import initialize
from suzuri.model.reconcile import reconcile
from suzuri.model.weights import LoadReport, load_weights
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import vocabulary_of

Show = Callable[[str, int, int], None]
"""(what, done, total)."""
TOWERS = frozenset({"vision", "audio"})
GB = 10**9

log = get_logger(__name__)


def load_engine(
    model: str,
    config: EngineConfig,
    tokenizer: Tokenizer,
    *,
    random_weights: bool = False,
    seed: int = 0,
    device: str = "cpu",
    text_only: bool = False,
    console: Console | None = None,
    progress: Callable[[int, int], None] | None = None,
    preparing: Show | None = None,
) -> Engine:
    """An engine for the model meant by `model` (see model/locate.py), ready to serve.

    `random_weights` takes the shape only and draws the weights from `seed`. `text_only` takes no
    tower, whatever there is. What does not fit into memory is refused before a weight is read.
    Raises ValueError with the fix. A `console` shows progress where it is a terminal;
    `progress(done, total)` is called in bytes read, `preparing(what, done, total)` after that
    (preparation.py).
    """
    place = device_named(device, f"device = {device!r}")
    located = _locate(model, random_weights)
    drawn = located.folder is None or random_weights
    shape = located.config
    want = frozenset[str]() if text_only else TOWERS
    checkpoint = None if drawn else located.checkpoint()
    if checkpoint is not None:
        shape = reconcile(shape, checkpoint, want).config
    elif text_only:
        shape = dataclasses.replace(shape, vision=None, audio=None)
    shape = dataclasses.replace(shape, mtp=MtpConfig())  # nothing drafts yet
    memory = memory_for(config, place)
    try:
        capacity(shape, config, memory, on_gpu=place.type == "cuda")
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error
    with contextlib.ExitStack() as stack:
        preparation = None
        if config.prepare and place.type == "cuda":
            from suzuri.engine.preparation import Preparation  # loads Triton

            preparation = stack.enter_context(contextlib.closing(Preparation()))
        start = time.monotonic()
        loaded = Inkling(shape, dtype=getattr(torch, config.dtype), device=place, parts=want)
        if checkpoint is None:
            initialize(loaded, seed)
            log.info("%s: random weights (seed %d); its text means nothing", located.name, seed)
        else:
            for note in read_weights(loaded, checkpoint, want, console, progress).notes:
                if not note.startswith("mtp:"):  # that nothing drafts yet is no news of this load
                    log.info("%s", note)
        loaded.requires_grad_(False)
        log.info("weights are there after %.1f s", time.monotonic() - start)
        engine = Engine(
            loaded,
            config,
            memory_bytes=memory,
            vocabulary=vocabulary_of(shape.kept_vocabulary, tokenizer.token_bytes),
            token_bytes=tokenizer.token_bytes,
        )
        if preparation is not None:
            with _shown(console, preparing) as show:
                preparation.prepare(engine, show)
        return engine


def prepare_engine(engine: Engine, *, has_weights: bool = True) -> None:
    """Compiles, tests and records what the engine will need, if its config wants it, on a GPU."""
    if engine.config.prepare and engine.runner.device.type == "cuda":
        from suzuri.engine.preparation import Preparation  # loads Triton

        with contextlib.closing(Preparation()) as preparation:
            preparation.prepare(engine, has_weights=has_weights)


@contextlib.contextmanager
def _shown(console: Console | None, report: Show | None) -> Generator[Show]:
    """How far a preparation is: a bar where the console is a terminal, and to `report`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    shown = console is not None and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("preparing", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)
            if report is not None:
                report(what, done, total)

        yield show


def free_memory(device: torch.device | str) -> int:
    """Bytes that can be had on a device now; on the CPU without swapping, within the limits of the
    control groups."""
    place = torch.device(device)
    if place.type == "cuda":
        return torch.cuda.mem_get_info(place)[0]
    free = available_memory()
    if free is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return free


def _locate(model: str, random_weights: bool) -> Located:
    if random_weights or model == TOY_MODEL:
        return locate(model)
    located = locate(model, weights="/" in model and not Path(model).expanduser().exists())
    if located.folder is None:
        raise ValueError(without_weights(model))
    return located


def memory_for(config: EngineConfig, device: torch.device) -> int:
    """What the engine may take: memory_gb, which must be there, or all that is free."""
    free = free_memory(device)
    if config.memory_gb is None:
        return free
    if not 0 < config.memory_gb < math.inf:
        raise ValueError(f"memory_gb = {config.memory_gb!r}: must be a positive number")
    wanted = int(config.memory_gb * GB)
    if wanted > free:
        raise ValueError(
            f"memory_gb = {config.memory_gb:g}: only {free / GB:.2f} GB are free on {device}"
        )
    return wanted


def read_weights(
    model: Inkling,
    checkpoint: Checkpoint,
    want: frozenset[str],
    console: Console | None,
    report: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """`load_weights`, with a bar where the console is a terminal; `report(done, total)` as well."""
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    shown = console is not None and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            if report is not None:
                report(done, total)

        return load_weights(model, checkpoint, want=want, progress=show)
