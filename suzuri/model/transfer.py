"""Moves weights between what holds them: a checkpoint, a model, a random draw.

`copy` walks over regions of our parameters in pieces of bounded size; a source gives their values
or NVFP4 matrices, a sink takes them. Loading, saving, converting and drawing are this one loop.
Read next: checkpoint_io.py (files), model_io.py (a model).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from suzuri.kernels import dispatch, nvfp4
from suzuri.kernels.nvfp4 import Nvfp4
from suzuri.model.tensor_table import Entry

CHUNK_BYTES = 32 << 20
"""About what a piece takes, the matrices of one expert apart."""


class Source(Protocol):
    """Gives the weights of parameters, which count as [leads, rows, columns] (tensor_table.py)."""

    def is_nvfp4(self, parameter: str, lead: int) -> bool:
        """Whether this lead (an expert) is held in NVFP4."""
        ...

    def read(self, parameter: str, lead: int, start: int, stop: int) -> Tensor:
        """Values [stop - start, columns] of these rows, in the dtype in which they are held."""
        ...

    def read_nvfp4(self, parameter: str, lead: int) -> Nvfp4:
        """One whole NVFP4 matrix, leading dim 1."""
        ...

    def input_amax(self, parameter: str) -> Tensor | None:
        """Largest input seen when quantising, bf16 [1]; None when unknown."""
        ...


class Sink(Protocol):
    """Takes the weights of parameters."""

    def is_nvfp4(self, parameter: str, lead: int) -> bool:
        """Whether this lead has to be NVFP4."""
        ...

    def write(self, parameter: str, lead: int, start: int, values: Tensor) -> None:
        """Values [n, columns] of rows start .. start + n - 1."""
        ...

    def write_nvfp4(self, parameter: str, lead: int, matrix: Nvfp4) -> None:
        """One whole NVFP4 matrix, leading dim 1."""
        ...

    def write_input_amax(self, parameter: str, amax: Tensor | None) -> None:
        """Called once for each parameter with NVFP4 leads."""
        ...


@dataclasses.dataclass(frozen=True)
class Region:
    """Rows first..stop-1 of some leads of a parameter: what belongs to it moves together."""

    parameter: str
    leads: range
    first: int
    stop: int
    columns: int


def region_of(entry: Entry) -> Region:
    """The region that an entry is a part of; entries of one region share it exactly."""
    shape = entry.parameter_shape
    if len(shape) == 3:
        return Region(entry.parameter, entry.leads, 0, shape[1], shape[2])
    columns = shape[1] if len(shape) == 2 else 1
    return Region(entry.parameter, entry.leads, entry.start, entry.stop, columns)


def regions(entries: Iterable[Entry]) -> list[Region]:
    """The regions of the entries, each once, in their order."""
    return list(dict.fromkeys(map(region_of, entries)))


def copy(
    wanted: Iterable[Region],
    source: Source,
    sink: Sink,
    *,
    after: Callable[[], None] | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Move every region from source to sink, quantising or dequantising where they differ.

    `after` is called after each piece. `device` is where matrices are quantised (default: where
    they are). Raises what the two ends raise, and ValueError naming the parameter and expert whose
    values cannot be quantised.
    """
    for region in wanted:
        amax_done = False
        for lead in region.leads:
            if sink.is_nvfp4(region.parameter, lead) and not amax_done:
                sink.write_input_amax(region.parameter, source.input_amax(region.parameter))
                amax_done = True
            _copy_lead(region, lead, source, sink, after, device)


def _copy_lead(
    region: Region,
    lead: int,
    source: Source,
    sink: Sink,
    after: Callable[[], None] | None,
    device: torch.device | str | None,
) -> None:
    name = region.parameter
    if source.is_nvfp4(name, lead):
        matrix = source.read_nvfp4(name, lead)
        if sink.is_nvfp4(name, lead):
            sink.write_nvfp4(name, lead, matrix)
        else:
            with dispatch.force("reference"):
                sink.write(name, lead, 0, nvfp4.dequantize(matrix)[0])
    elif sink.is_nvfp4(name, lead):
        values = source.read(name, lead, region.first, region.stop)
        sink.write_nvfp4(name, lead, _quantize(values, f"{name}, expert {lead}", device))
    else:
        for first, stop in _pieces(region):
            sink.write(name, lead, first, source.read(name, lead, first, stop))
            if after is not None:
                after()
        return
    if after is not None:
        after()


def _quantize(values: Tensor, where: str, device: torch.device | str | None) -> Nvfp4:
    # Only bf16 values count as weights of a quantised model: what it dequantises to is bf16.
    values = values.to(device=device, dtype=torch.bfloat16).unsqueeze(0)
    try:
        with dispatch.force("reference"):
            return nvfp4.quantize(values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _pieces(region: Region) -> Iterator[tuple[int, int]]:
    """Row ranges of bounded size; an even number of rows, so that gate and up stay together."""
    rows = max(2, CHUNK_BYTES // (4 * max(region.columns, 1)) // 2 * 2)
    for first in range(region.first, region.stop, rows):
        yield first, min(first + rows, region.stop)
