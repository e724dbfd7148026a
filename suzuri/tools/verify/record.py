"""Every row that an engine's decoder computes, as digests keyed by sequence and position.

It looks at the decoder's output and at the batch alone; the engine knows nothing of it.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from suzuri.engine.engine import Engine
from suzuri.engine.request import Sequence
from suzuri.model.batch import Batch
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

            def keep(_: nn.Module, inputs: tuple[Batch], output: Tensor) -> None:
                found.extend(self._keep(inputs[0], output, probe if is_probed else None))

            handle = decoder.register_forward_hook(keep)
            stack.callback(handle.remove)
            yield
        if found:
            self.probed = {name: int(digests_N[found[0]]) for name, digests_N in parts.items()}

    def _keep(self, batch: Batch, hidden_ND: Tensor, probe: Place | None) -> list[int]:
        """Records the rows of a batch; the index of the probed one, if it is among them."""
        assert batch.cache is not None, "the engine ran the decoder without a cache"
        in_slot = {sequence.slot: sequence for sequence in self.engine.scheduler.running}
        slots: list[int] = listed(batch.cache.conv_slots_S)
        columns = (
            batch.seq_ids_N,
            batch.positions_N,
            batch.token_ids_N,
            self.reference.digest(hidden_ND),
            self.reference.logits_digest(hidden_ND),
        )
        counts = [0] * len(slots)
        found: list[int] = []
        for i, (seq_id, position, token, hidden, logits) in enumerate(
            zip(*map(listed, columns), strict=True)
        ):
            if slots[seq_id] == 0:
                continue  # padding
            sequence = in_slot[slots[seq_id]]
            counts[seq_id] += 1
            row = Row(self.step, position, token, hidden, logits)
            self.rows.setdefault(sequence, []).append(row)
            where = (sequence.request.id, sequence.index, position)
            if probe is not None and where == (probe.request, probe.sample, probe.position):
                found.append(i)
        self.counts.append([count for count in counts if count])
        return found
