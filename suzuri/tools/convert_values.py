"""The values that `suzuri convert` moves, looked at on their way: what is no number is refused."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from suzuri.kernels.nvfp4 import Nvfp4
from suzuri.model.checkpoint_files import CheckpointError, TensorEntry
from suzuri.model.checkpoint_io import CheckpointReader, overlaps
from suzuri.model.tensor_table import Entry


class FiniteSource:
    """A checkpoint as a source, whose weights must be finite. NVFP4 matrices are checked by the
    reader; they have no codes for anything else.

    Looking takes a fraction of what reading does: the smallest and the largest value tell, and NaN
    is both.
    """

    def __init__(
        self, reader: CheckpointReader, folder: Path, reads: Iterable[tuple[Entry, TensorEntry]]
    ) -> None:
        self._reader, self._folder = reader, folder
        self._parts: dict[str, list[tuple[Entry, TensorEntry]]] = {}
        for entry, tensor in reads:
            self._parts.setdefault(entry.parameter, []).append((entry, tensor))

    def is_nvfp4(self, parameter: str, lead: int) -> bool:
        return self._reader.is_nvfp4(parameter, lead)

    def read(self, parameter: str, lead: int, start: int, stop: int) -> Tensor:
        """Raises CheckpointError naming file and tensor for a value that is NaN or infinite."""
        values = self._reader.read(parameter, lead, start, stop)
        ends = torch.stack(torch.aminmax(values))
        if not bool(torch.isfinite(ends).all()):
            self._refuse(parameter, lead, start, values)
        return values

    def read_nvfp4(self, parameter: str, lead: int) -> Nvfp4:
        return self._reader.read_nvfp4(parameter, lead)

    def input_amax(self, parameter: str) -> Tensor | None:
        return self._reader.input_amax(parameter)

    def _refuse(self, parameter: str, lead: int, start: int, values: Tensor) -> None:
        is_bad_NM = ~torch.isfinite(values)
        row = int(is_bad_NM.any(1).nonzero()[0, 0])
        value = values[row][is_bad_NM[row]][0].item()
        place = start + row
        for entry, tensor in self._parts[parameter]:
            is_there = entry.field == "values" and lead in entry.leads
            if is_there and any(True for _ in overlaps(entry, place, place + 1)):
                expert = f", in expert {lead}" if len(entry.leads) > 1 else ""
                raise CheckpointError(
                    f"{self._folder / tensor.file}: {tensor.stored_name} holds {value}{expert}; no "
                    "model computes with that. Fetch the file again, or mend whatever wrote it"
                )
        raise AssertionError(f"{parameter}: row {place} is in no tensor")
