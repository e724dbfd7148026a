"""One file from the hub to the disk: resumed, retried, checked by its hash, put in its place.

huggingface_hub's own download (2.4) starts a file from zero after an interruption, and hashes
nothing that came over plain HTTP; so the bytes are streamed here, through its session.
"""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

from suzuri.log import get_logger
from suzuri.model.hub import HubFile, file_url, hub_errors, request_headers
from suzuri.model.hub_errors import HubError, is_transient, retry_after, status_of
from suzuri.tools.pull.places import Place, Stopped, has_digest, size_of

MAX_FAULTS = 5
"""Requests in a row that brought not one byte, before a file is given up."""
WAIT_SECONDS = 1.0
"""Before the first retry; doubles with each one in a row."""
MAX_WAIT_SECONDS = 60.0
PIECE = 1 << 18
LARGEST_REQUEST = 40_000_000_000
"""Bytes asked for at once: networks that carry the files end a single answer at 50 GB."""
LOCK_POLL_SECONDS = 0.5

log = get_logger(__name__)


class FileFault(HubError):
    """One file cannot be had as the hub lists it; others may be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where the files come from, and how a worker tells and is told things.

    `progress(name, have)` is called with the bytes of a file that are on disk.
    """

    repo: str
    commit: str
    stop: threading.Event
    progress: Callable[[str, int], None]


def obtain(
    source: Source, place: Place, file: HubFile, *, verify: bool, replace: bool = False
) -> None:
    """Fetch what is missing of a file, check it against its hash, and put it in place.

    `replace`: what is in its place already is damaged and does not count.
    Several processes may do so at once: one fetches, the others wait and take its result. Raises
    FileFault for this file's own trouble, HubError for the hub's, Stopped, or OSError of the disk.
    """
    unfinished = place.unfinished(file)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    with _locked(place.lock(file), file, source.stop):
        held = place.held(file)
        if held is not None and not replace and (not verify or place.proven(file)):
            place.put(file, held, proven=place.proven(file))
            source.progress(file.name, file.size)
            return
        for attempt in (1, 2):
            _fetch(source, file, unfinished)
            if not verify or has_digest(unfinished, file, source.stop.is_set):
                place.put(file, unfinished, proven=verify)
                return
            unfinished.unlink()
            source.progress(file.name, 0)
            if attempt == 1:
                log.warning("%s arrived damaged; fetching it again", file.name)
    raise FileFault(
        f"{file.name} arrived damaged twice: its contents have not the hash {file.digest[:12]}... "
        "that the hub lists"
    )


@contextlib.contextmanager
def _locked(path: Path, file: HubFile, stop: threading.Event) -> Generator[None]:
    from huggingface_hub.utils import WeakFileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    told = False
    with contextlib.ExitStack() as held:
        while True:
            if stop.is_set():
                raise Stopped
            try:
                held.enter_context(WeakFileLock(path, timeout=LOCK_POLL_SECONDS))
                break
            except TimeoutError:
                if not told:
                    log.info("another process fetches %s; waiting for it", file.name)
                told = True
        yield


def _fetch(source: Source, file: HubFile, path: Path) -> None:
    """Append to `path` until it has all bytes of the file, over as many requests as it takes."""
    faults = restarts = 0
    while True:
        have = size_of(path)
        if have > file.size:
            path.unlink()
            have = 0
        source.progress(file.name, have)
        if have == file.size:
            _settle(path)
            return
        try:
            with hub_errors(source.repo, source.commit):
                _stream(source, file, path, have)
            reason: HubError | None = None
        except HubError as error:
            cause = error.__cause__
            if cause is not None and status_of(cause) == 416 and restarts == 0:
                path.unlink()  # what is here cannot be a beginning of the file
                restarts += 1
                continue
            if cause is None or not is_transient(cause):
                raise
            reason = error
        if size_of(path) > have:
            faults = 0
        elif reason is None:
            raise FileFault(
                f"{file.name}: the hub lists {file.size} bytes and sends no more than {have}"
            )
        else:
            faults += 1
            if faults > MAX_FAULTS:
                raise reason
        if reason is not None:
            _wait(reason, faults, file, source.stop)


def _wait(reason: HubError, faults: int, file: HubFile, stop: threading.Event) -> None:
    asked = retry_after(reason.__cause__) if reason.__cause__ else None
    seconds = min(MAX_WAIT_SECONDS, WAIT_SECONDS * 2 ** max(0, faults - 1))
    if asked is not None:
        seconds = min(MAX_WAIT_SECONDS, float(asked))
    log.info("%s: %s; going on in %g s", file.name, reason, seconds)
    if stop.wait(seconds):
        raise Stopped


def _stream(source: Source, file: HubFile, path: Path, have: int) -> None:
    """One request for the bytes from `have` on, written as they come."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import hf_raise_for_status

    headers = request_headers() | {"Accept-Encoding": "identity"}
    end = min(file.size, have + LARGEST_REQUEST)
    if have or end < file.size:
        headers["Range"] = f"bytes={have}-{end - 1}"
    url = file_url(source.repo, file.name, source.commit)
    session = cast(Any, get_session())
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with session.stream("GET", url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        if have and response.status_code != 206:
            path.unlink()  # a server that knows no ranges sends the whole file
            have = 0
        elif not str(response.headers.get("Content-Range", f"bytes {have}-")).startswith(
            f"bytes {have}-"
        ):
            raise FileFault(f"{file.name}: the hub sends another part of it than asked for")
        _check_announced(response, file, have, end)
        with path.open("ab", buffering=0) as output:
            for piece in response.iter_bytes(PIECE):
                if source.stop.is_set():
                    raise Stopped
                have += len(piece)
                if have > file.size:
                    raise FileFault(
                        f"{file.name}: the hub sends more than the {file.size} bytes that it lists"
                    )
                output.write(piece)
                source.progress(file.name, have)


def _settle(path: Path) -> None:
    """Bytes on the disk itself, so that a power cut leaves no file full of zeros."""
    with path.open("ab") as file:
        os.fsync(file.fileno())


def _check_announced(response: Any, file: HubFile, have: int, end: int) -> None:
    announced = str(response.headers.get("Content-Length", ""))
    if response.headers.get("Content-Encoding") or not announced.isdigit():
        return
    if have + int(announced) != (end if response.status_code == 206 else file.size):
        raise FileFault(
            f"{file.name}: the hub lists {file.size} bytes and sends {have + int(announced)}"
        )
