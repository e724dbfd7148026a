"""New weights on their way into an engine's process: read beside the requests, and written when
`on_publish` lets them. Read `Updates.look`.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import msgspec

from suzuri.engine.engine import Engine
from suzuri.engine.messages import UpdateRefused, UpdateWeights, WeightsUpdated
from suzuri.engine.new_weights import NewWeights, WeightsLost, WeightsRefused
from suzuri.log import get_logger

_Kind = Literal["invalid", "conflict", "lost"]
MOST_VERSION = 2**53
"""Beyond it JavaScript and others round."""

log = get_logger(__name__)


@dataclasses.dataclass
class _Coming:
    """`ids`: of those who asked for the same."""

    asked: UpdateWeights
    ids: list[int]
    version: int
    weights: Future[NewWeights]
    began: float
    read: float = 0.0
    """When they had been read."""


class Updates:
    """At most one at a time. `report` tells those who asked."""

    def __init__(self, report: Callable[[WeightsUpdated | UpdateRefused], None]) -> None:
        self._report = report
        self._coming: _Coming | None = None
        self._thread = ThreadPoolExecutor(1, "weights")
        self._latest: WeightsUpdated | None = None

    @property
    def is_under_way(self) -> bool:
        return self._coming is not None

    @property
    def holds_requests(self) -> bool:
        """Whether new requests wait for the weights, which wait for the old ones."""
        coming = self._coming
        return coming is not None and bool(coming.read) and coming.asked.on_publish == "finish"

    def begin(self, engine: Engine, asked: UpdateWeights) -> None:
        """Refuse it, or begin to read. The same once more, under way or just done, is one."""
        coming, latest = self._coming, self._latest
        if coming is not None:
            if _same(coming.asked, asked):
                coming.ids.append(asked.id)
            else:
                self._refuse([asked.id], "other weights are on their way; send these again later")
            return
        told = (asked.version, asked.content_hash)
        if latest is not None and told == (latest.version, latest.content_hash):
            self._report(msgspec.structs.replace(latest, id=asked.id))
            return
        now = engine.weight_version
        version = now + 1 if asked.version is None else asked.version
        if asked.replaces is not None and asked.replaces != now:
            why = f"replaces = {asked.replaces}: the weights here are of version {now}"
            self._refuse([asked.id], why)
        elif not now < version <= MOST_VERSION:
            why = f"weight_version = {version}: must be above {now}, that of the weights here"
            self._refuse([asked.id], why)
        else:
            weights = self._thread.submit(
                NewWeights, engine.model, asked.folder, asked.content_hash
            )
            self._coming = _Coming(asked, [asked.id], version, weights, time.monotonic())

    def look(self, engine: Engine, set_back: Callable[[], None]) -> bool:
        """Write the weights if they have been read and nothing has to end before; whether that was
        done. `set_back` ends what is to begin anew.

        Raises WeightsLost where the engine must not go on.
        """
        coming = self._coming
        if coming is None or not coming.weights.done():
            return False
        error = coming.weights.exception()
        if isinstance(error, WeightsRefused):
            self._coming = None
            self._refuse(coming.ids, str(error), "conflict" if error.is_conflict else "invalid")
            return False
        weights = coming.weights.result()
        coming.read = coming.read or time.monotonic()
        if coming.asked.on_publish == "finish" and engine.has_work:
            return False
        self._write(engine, coming, weights, set_back)
        return True

    def _write(
        self,
        engine: Engine,
        coming: _Coming,
        weights: NewWeights,
        set_back: Callable[[], None],
    ) -> None:
        began = time.monotonic()
        if coming.asked.on_publish == "restart":
            set_back()
        self._coming = None
        try:
            engine.update_weights(weights.write, coming.version)
        except WeightsLost as error:
            self._refuse(coming.ids, str(error), "lost")
            raise
        finally:
            weights.close()
        now = time.monotonic()
        log.info(
            "weights %s of %s serve as version %d after %.2f s without a token",
            *(weights.content_hash, coming.asked.folder, coming.version, now - began),
        )
        self._latest = WeightsUpdated(
            id=0,
            version=coming.version,
            content_hash=weights.content_hash,
            num_bytes=weights.num_bytes,
            read_seconds=coming.read - coming.began,
            wait_seconds=began - coming.read,
            pause_seconds=now - began,
        )
        for id in coming.ids:
            self._report(msgspec.structs.replace(self._latest, id=id))

    def _refuse(self, ids: Sequence[int], why: str, kind: _Kind = "conflict") -> None:
        for id in ids:
            self._report(UpdateRefused(id, why, kind))


def _same(one: UpdateWeights, other: UpdateWeights) -> bool:
    return msgspec.structs.replace(one, id=other.id) == other
