"""Every row that an engine's decoder computes, as digests keyed by sequence and position.

The engine's runner shows it what every step fed to the decoder and what came out.
"""

from collections.abc import Generator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch import Tensor

from suzuri.engine.engine import Engine
from suzuri.engine.plan import Work
from suzuri.engine.request import Sequence
from suzuri.tools.verify.reference import Reference, listed, watched


class Row(NamedTuple):
    """One computed row: the step it ran in, where it stands, the token fed, and what came out."""

    step: int
    position: int
    token: int
    hidden: int
    logits: int


class Place(NamedTuple):
    """A row to look into: the number of the serving run, its step, the sequence, the position."""

    serving: int
    step: int
    request: str
    sample: int
    position: int


class Recorder:
    """Rows of one engine, in the order in which they were computed."""

    def __init__(self, engine: Engine, reference: Reference, number: int) -> None:
        self.engine, self.reference, self.number = engine, reference, number
        self.step = 0
        self.rows: dict[Sequence, list[Row]] = {}
        self.counts: list[list[int]] = []
        """Of each step the number of rows of each sequence in it."""
        self.probed: dict[str, int] | None = None

    @contextmanager
    def watch(self, probe: Place | None) -> Generator[None]:
        """Records the step that runs inside the block; the parts of the row at `probe` too."""
        self.step += 1
        decoder = self.engine.model.decoder
        with ExitStack() as stack:
            is_probed = probe is not None and (probe.serving, probe.step) == (
                self.number,
                self.step,
            )
            parts = stack.enter_context(watched(decoder, self.reference.digest, is_probed))
            found: list[int] = []

            def keep(works: Many[Work], token_ids_N: Tensor, hidden_ND: Tensor) -> None:
                seen = self._keep(works, token_ids_N, hidden_ND, probe if is_probed else None)
                found.extend(seen)

            runner = self.engine.runner
            # Hooks see nothing of a recorded step.
            runner.observer, runner.replays = keep, not is_probed
            try:
                yield
            finally:
                runner.observer, runner.replays = None, True
        if found:
            self.probed = {name: int(digests_N[found[0]]) for name, digests_N in parts.items()}

    def _keep(
        self, works: Many[Work], token_ids_N: Tensor, hidden_ND: Tensor, probe: Place | None
    ) -> list[int]:
        """Records the rows of a step; the index of the probed one, if it is among them."""
        columns = (
            token_ids_N,
            self.reference.digest(hidden_ND),
            self.reference.logits_digest(hidden_ND),
        )
        places = [(work.sequence, work.start + i) for work in works for i in range(work.count)]
        found: list[int] = []
        for i, ((sequence, position), token, hidden, logits) in enumerate(
            zip(places, *map(listed, columns), strict=True)
        ):
            row = Row(self.step, position, token, hidden, logits)
            self.rows.setdefault(sequence, []).append(row)
            where = (sequence.request.id, sequence.index, position)
            if probe is not None and where == (probe.request, probe.sample, probe.position):
                found.append(i)
        self.counts.append([work.count for work in works])
        return found
