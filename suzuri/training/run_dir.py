"""The folder of a run: config.json, metrics.jsonl, states/step-N, weights.

What a kill leaves behind is put right when the run goes on: half-written folders go, and lines
after the state that it goes on from.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

from suzuri.log import get_logger
from suzuri.training.config import FREE_FIELDS

CONFIG, METRICS, STATES, WEIGHTS = "config.json", "metrics.jsonl", "states", "weights"
PUBLISHED, LOCK = "weights.json", "lock"
PREFIX = "step-"
FORMAT = 1

log = get_logger(__name__)


class RunDir:
    """A run's folder, held by this process while it is entered.

    Raises ValueError when another process holds it or it is something else's.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._metrics: TextIO | None = None
        self._lock: int | None = None

    def __enter__(self) -> "RunDir":
        made = not self.path.exists()
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
        if not made and not (self.path / CONFIG).exists():
            others = sorted({one.name for one in self.path.iterdir()} - {LOCK, CONFIG + ".new"})
            if others:
                raise ValueError(
                    f"run_dir {self.path} holds {', '.join(others[:3])} and no {CONFIG}: it is "
                    "not the folder of a run; give a new one"
                )
        with self._writing():
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(self._lock)
                raise ValueError(
                    f"run_dir {self.path} is in use by another process; end it or give another"
                ) from None
            log.warning("%s: this file system has no locks (%s)", self.path, error.strerror)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._lock is not None:
            os.close(self._lock)

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"run_dir {self.path}: no folder that can be written ({error.strerror}); give "
                "another"
            ) from error

    def compare(self, document: Mapping[str, Any]) -> None:
        """Raises ValueError naming the fields in which a run that is there differs. One that made
        no step is replaced: its settings may be what stopped it."""
        path = self.path / CONFIG
        if not path.exists():
            return
        try:
            read: Any = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON ({error}); give another run_dir") from error
        old = cast("dict[str, Any]", read if isinstance(read, dict) else {})
        if old.get("format") != FORMAT:
            raise ValueError(f"{path} is not that of a run of suzuri sft; give another run_dir")
        new = json.loads(json.dumps(document))
        differences = [
            *_differences("", old["config"], new["config"]),
            *(
                f"{name} (the data are not what they were)"
                for name in new["data"]
                if old["data"].get(name) != new["data"][name]
            ),
        ]
        if differences and (self.states() or self._has_metrics()):
            raise ValueError(
                f"run_dir {self.path} is of another run, which differs in "
                f"{', '.join(differences)}; give another run_dir, or the same settings to go on"
            )

    def _has_metrics(self) -> bool:
        path = self.path / METRICS
        return path.exists() and path.stat().st_size > 0

    def start(self, document: Mapping[str, Any]) -> int:
        """Writes the config, throws away what comes after the newest state, and returns the step
        of that state: 0 without one."""
        self._clean()
        new = self.path / (CONFIG + ".new")
        new.write_text(json.dumps({"format": FORMAT, **document}, indent=1) + "\n", "utf-8")
        new.replace(self.path / CONFIG)
        step = max(self.states(), default=0)
        # Without a state everything is done anew, what comes before the first step included.
        last = self._cut_metrics(step or -1)
        if last < step:
            log.warning("%s: lines of steps %d to %d are lost", METRICS, last + 1, step)
        self._metrics = (self.path / METRICS).open("a", encoding="utf-8", buffering=1)
        return step

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a line to the metrics; it is in the file when this returns."""
        assert self._metrics is not None, "start comes first"
        self._metrics.write(json.dumps(line) + "\n")

    def state(self, step: int) -> Path:
        return self.path / STATES / f"{PREFIX}{step}"

    def states(self) -> list[int]:
        """Steps whose states are on disk, rising."""
        names = [one.name for one in (self.path / STATES).glob(f"{PREFIX}*")]
        numbers = [name.removeprefix(PREFIX) for name in names]
        return sorted(int(number) for number in numbers if number.isdecimal())

    def prune(self, keep: int) -> None:
        """Removes all states but the newest."""
        for step in self.states()[:-keep]:
            shutil.rmtree(self.state(step))

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS

    @property
    def new_weights(self) -> Path:
        """Where weights are written before `publish`."""
        return self.path / (WEIGHTS + ".new")

    def publish(self, step: int, digest: str, sampler_digest: str) -> None:
        """Puts the new weights in the place of old ones. The hashes are of all of them, and of
        those that a sampler holds (without draft depths)."""
        old = self.path / (WEIGHTS + ".old")
        if self.weights.exists():
            self.weights.rename(old)
        self.new_weights.rename(self.weights)
        shutil.rmtree(old, ignore_errors=True)
        document = {"step": step, "content_hash": digest, "sampler_hash": sampler_digest}
        text = json.dumps(document) + "\n"
        (self.path / PUBLISHED).write_text(text, "utf-8")

    def has_weights_of(self, step: int) -> bool:
        try:
            found = json.loads((self.path / PUBLISHED).read_text("utf-8"))
            return self.weights.is_dir() and found["step"] == step
        except (OSError, ValueError, KeyError):
            return False

    def _clean(self) -> None:
        """Removes what a killed process was writing."""
        for pattern in (f"{STATES}/*.part*", f"{WEIGHTS}.new", f"{WEIGHTS}.old", ".*.partial-*"):
            for one in self.path.glob(pattern):
                shutil.rmtree(one)

    def _cut_metrics(self, step: int) -> int:
        """Keeps the lines up to a step; returns that of the last."""
        path = self.path / METRICS
        kept: list[bytes] = []
        last = 0
        if path.exists():
            with path.open("rb") as lines:
                for line in lines:
                    number = _step_of(line)
                    if number is None or number > step:
                        break
                    kept.append(line)
                    last = number
        new = path.with_name(METRICS + ".new")
        new.write_bytes(b"".join(kept))
        new.replace(path)
        return last


def _step_of(line: bytes) -> int | None:
    """None for what was not written to its end."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def read_metrics(path: str | Path, *, may_be_cut: bool = False) -> list[dict[str, Any]]:
    """The lines of a run's folder, or of its metrics file. Raises ValueError or OSError naming the
    file. `may_be_cut`: a last line that was not written to its end is left out, as a run that goes
    on may be writing it."""
    file = Path(path) / METRICS if Path(path).is_dir() else Path(path)
    found: list[dict[str, Any]] = []
    lines = file.read_text("utf-8").splitlines(keepends=True)
    for number, text in enumerate(lines, 1):
        try:
            line: Any = json.loads(text)
            int(line["step"])
        except (ValueError, KeyError, TypeError) as error:
            if may_be_cut and number == len(lines) and not text.endswith("\n"):
                break
            raise ValueError(f"{file}:{number}: not a line of metrics ({error})") from error
        found.append(cast("dict[str, Any]", line))
    return found


def _differences(where: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for name in sorted({*old, *new}):
        if not where and name in FREE_FIELDS:
            continue
        one, other = old.get(name), new.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            inner = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
            found += _differences(f"{where}{name}.", *inner)
        elif one != other:
            found.append(f"{where}{name} ({one!r} there, {other!r} here)")
    return found
