"""Several files at once, with one progress display, that Ctrl-C ends within moments.

Threads, because the work is waiting for the network, the disk and the hash (which lets the others
run). They are daemons: what they write only grows at its end, so the process may leave them behind.
No torch here.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from suzuri.model.hub import HubFile, Listing
from suzuri.model.hub_errors import in_words
from suzuri.tools.pull.choice import amount, have_of, total
from suzuri.tools.pull.fetch import FileFault, Source, obtain
from suzuri.tools.pull.places import Place, Stopped, has_digest

REFRESH_SECONDS = 0.2
PLAIN_SECONDS = 30.0
"""Between two lines where no terminal shows a bar."""
PATIENCE_SECONDS = 3.0
"""How long the workers have to notice that they should stop."""

Outcome = tuple[HubFile, BaseException | None]


def fetch_all(
    listing: Listing,
    place: Place,
    files: Sequence[HubFile],
    damaged: Sequence[HubFile],
    verify: bool,
    num_workers: int,
    console: Console,
) -> None:
    """Fetch files side by side. ValueError names those that the hub cannot give as it lists them;
    trouble with the hub itself or the disk ends the work at once."""
    stop = threading.Event()
    have = {file.name: 0 if file in damaged else have_of(place, file) for file in files}
    source = Source(repo=listing.repo, commit=listing.commit, stop=stop, progress=have.__setitem__)

    def work(file: HubFile) -> None:
        obtain(source, place, file, verify=verify, replace=file in damaged)

    faults: list[str] = []
    for _, error in _run(work, files, have, "fetching", num_workers, stop, console):
        if isinstance(error, FileFault):
            faults.append(str(error))
        elif isinstance(error, OSError):
            raise in_words(error, repo=listing.repo)
        elif error is not None:
            raise error
    if faults:
        raise ValueError(
            f"{listing.repo}: {len(faults)} of {len(files)} files cannot be had. "
            + ". ".join(faults)
        )


def check_held(
    place: Place, files: Sequence[HubFile], num_workers: int, console: Console
) -> list[HubFile]:
    """Hash files that are here already; returns those whose contents are not what the hub lists."""
    stop = threading.Event()
    have = {file.name: 0 for file in files}
    bad: list[HubFile] = []

    def work(file: HubFile) -> None:
        path = place.held(file)
        if path is None or not has_digest(path, file, stop.is_set):
            bad.append(file)
        have[file.name] = file.size

    for file, error in _run(work, files, have, "hashing", num_workers, stop, console):
        if isinstance(error, OSError):
            raise in_words(error, repo=file.name)
        if error is not None:
            raise error
    return bad


def _run(
    work: Callable[[HubFile], None],
    files: Sequence[HubFile],
    have: dict[str, int],
    title: str,
    num_workers: int,
    stop: threading.Event,
    console: Console,
) -> list[Outcome]:
    """Every file with what became of it; after an error that is no FileFault, only until then."""
    if not files:
        return []
    waiting: queue.SimpleQueue[HubFile] = queue.SimpleQueue()
    ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)

    def serve() -> None:
        while not stop.is_set():
            try:
                file = waiting.get_nowait()
            except queue.Empty:
                return
            error: BaseException | None = RuntimeError("a worker broke off")
            try:
                work(file)
                error = None
            except (ValueError, OSError, Stopped) as reason:
                error = reason
            finally:
                ended.put((file, error))

    threads = [
        threading.Thread(target=serve, daemon=True, name=f"pull-{i}")
        for i in range(min(num_workers, len(files)))
    ]
    try:
        for thread in threads:
            thread.start()
        return _watch(ended, files, have, title, console)
    finally:
        stop.set()
        until = time.monotonic() + PATIENCE_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def _watch(
    ended: "queue.SimpleQueue[Outcome]",
    files: Sequence[HubFile],
    have: dict[str, int],
    title: str,
    console: Console,
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    size = total(files)
    next_line = time.monotonic() + PLAIN_SECONDS
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=size, completed=sum(have.values()))
        while len(outcomes) < len(files):
            try:
                outcome = ended.get(timeout=REFRESH_SECONDS)
            except queue.Empty:
                pass
            else:
                outcomes.append(outcome)
                if outcome[1] is not None and not isinstance(outcome[1], FileFault):
                    break
            done = sum(list(have.values()))
            text = f"{title}, {len(outcomes)} of {len(files)} files"
            progress.update(task, completed=done, description=text)
            if not console.is_terminal and time.monotonic() >= next_line:
                next_line += PLAIN_SECONDS
                print(f"{text}, {amount(done)} of {amount(size)}", flush=True)
    return outcomes
