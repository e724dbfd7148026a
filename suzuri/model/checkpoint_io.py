"""Checkpoint files as a source and a sink of weights (transfer.py).

Both ends go by the rows that an entry's segments name, so any layout can be read into any other.
"""

import collections
import contextlib
import math
import os
import sys
from collections.abc import Generator, Iterable, Iterator
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from suzuri.kernels.nvfp4 import BLOCK, Nvfp4
from suzuri.model.checkpoint_files import (
    Checkpoint,
    CheckpointError,
    TensorEntry,
    encode_header,
    listing,
)
from suzuri.model.nvfp4_scales import divisor_of, multiplier_of
from suzuri.model.nvfp4_values import value_faults
from suzuri.model.tensor_table import BYTES_PER_VALUE, Entry, Field

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
}
Part = tuple[Entry, TensorEntry]


class CheckpointReader:
    """The tensors of a scanned checkpoint that a load plan wants, as a source.

    `num_bytes` counts what was read. Close it, or use it as a context manager.
    """

    def __init__(self, checkpoint: Checkpoint, reads: Iterable[Part]) -> None:
        assert sys.byteorder == "little", "safetensors files are little-endian"
        self._folder = checkpoint.directory
        self._parts: dict[str, list[Part]] = collections.defaultdict(list)
        for entry, tensor in reads:
            self._parts[entry.parameter].append((entry, tensor))
        self._files: dict[str, FileIO] = {}
        self._scales: dict[str, Tensor] = {}
        self._amax: dict[str, Tensor] = {}
        self.num_bytes = 0

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def check_small(self) -> None:
        """Check the values of the small NVFP4 tensors and read them, before any other is read.

        Raises CheckpointError listing file and tensor of every fault (nvfp4_values.py).
        """
        reads = [part for parts in self._parts.values() for part in parts]
        faults = value_faults(self._folder, reads)
        if faults:
            raise CheckpointError(listing(f"{self._folder} holds values that cannot be", faults))
        for name, parts in self._parts.items():
            for entry, tensor in parts:
                if entry.field == "original_shape":
                    self.num_bytes += tensor.nbytes
                elif entry.field in ("global_scales", "global_divisors"):
                    self._scales[name] = self._global_scales(entry, tensor)
                elif entry.field == "input_amax":
                    self._amax[name] = self._all(tensor)
                elif entry.field == "input_divisor":
                    # Its activation scale is amax / (448 * 6), kept as a divisor.
                    self._amax[name] = (448 * 6 / self._all(tensor)).to(torch.bfloat16)

    def check_divisors(self) -> None:
        """Raise ValueError for a global scale that no divisor gives (check_small comes first)."""
        for name, scales in self._scales.items():
            for expert, scale in enumerate(scales):
                divisor_of(scale.reshape(1), f"{name}, expert {expert}")

    def is_nvfp4(self, parameter: str, lead: int) -> bool:
        return _holds_codes((entry for entry, _ in self._parts[parameter]), lead)

    def read(self, parameter: str, lead: int, start: int, stop: int) -> Tensor:
        return self._rows(parameter, "values", lead, start, stop)

    def read_nvfp4(self, parameter: str, lead: int) -> Nvfp4:
        entry, tensor = self._part(parameter, "block_scales", lead)
        rows = entry.parameter_shape[1]
        scales = self._rows(parameter, "block_scales", lead, 0, rows)
        scale_bytes = scales.view(torch.uint8)
        if bool(((scale_bytes & 0x7F) == 0x7F).any()):
            raise CheckpointError(f"{self._where(tensor)} holds NaN, in expert {lead}")
        if bool((scale_bytes > 0x80).any()):  # 0x80 is a zero
            raise CheckpointError(
                f"{self._where(tensor)} holds a negative scale, in expert {lead}; readers differ "
                "about its sign"
            )
        return Nvfp4(
            codes=self._rows(parameter, "codes", lead, 0, rows).unsqueeze(0),
            block_scales=scales.unsqueeze(0),
            global_scales=self._scales[parameter][lead - entry.start].reshape(1),
        )

    def input_amax(self, parameter: str) -> Tensor | None:
        return self._amax.get(parameter)

    def _part(self, parameter: str, field: Field, lead: int) -> Part:
        for entry, tensor in self._parts[parameter]:
            if entry.field == field and lead in entry.leads:
                return entry, tensor
        raise AssertionError(f"{parameter}: no {field}")

    def _rows(self, parameter: str, field: Field, lead: int, start: int, stop: int) -> Tensor:
        found: Tensor | None = None
        for entry, tensor in self._parts[parameter]:
            if entry.field != field or lead not in entry.leads:
                continue
            for row, place, step, count in overlaps(entry, start, stop):
                offset, width = row_bytes(entry, lead, row)
                data = self._bytes(tensor, offset, count * width)
                rows = data.view(TORCH_DTYPES[entry.dtype]).view(count, -1)
                if count == stop - start:
                    return rows
                if found is None:
                    found = torch.empty(stop - start, rows.shape[1], dtype=rows.dtype)
                # By bytes: not every operation knows 8-bit floats.
                found.view(torch.uint8)[place::step][:count] = rows.view(torch.uint8)
        assert found is not None, f"{parameter}: rows {start} to {stop} are in no tensor"
        return found

    def _all(self, tensor: TensorEntry) -> Tensor:
        """All values in one dim."""
        return self._bytes(tensor, 0, tensor.nbytes).view(TORCH_DTYPES[tensor.dtype])

    def _bytes(self, tensor: TensorEntry, offset: int, count: int) -> Tensor:
        if tensor.file not in self._files:
            self._files[tensor.file] = (self._folder / tensor.file).open("rb", buffering=0)
        file = self._files[tensor.file]
        buffer = torch.empty(count, dtype=torch.uint8)
        view = buffer.numpy().data
        while view:
            try:
                done = os.preadv(file.fileno(), [view], tensor.start + offset + count - len(view))
            except OSError as error:
                raise CheckpointError(
                    f"{self._where(tensor)} cannot be read: {error.strerror}"
                ) from error
            if not done:
                raise CheckpointError(
                    f"{self._where(tensor)}: the file became shorter while it was read"
                )
            view = view[done:]
        self.num_bytes += count
        return buffer

    def _global_scales(self, entry: Entry, tensor: TensorEntry) -> Tensor:
        scales = self._all(tensor).expand(entry.stop - entry.start)
        return multiplier_of(scales) if entry.field == "global_divisors" else scales

    def _where(self, tensor: TensorEntry) -> str:
        return f"{self._folder / tensor.file}: {tensor.stored_name}"


class ShardWriter:
    """One safetensors file of known entries, as a sink. Made at full size, then filled in place."""

    def __init__(self, path: Path, entries: list[Entry], *, may_round: bool) -> None:
        self._may_round = may_round
        self._path = path
        self._parts: dict[str, list[tuple[Entry, int]]] = collections.defaultdict(list)
        header = encode_header((entry.name, entry.dtype, entry.shape) for entry in entries)
        at = len(header)
        for entry in entries:
            self._parts[entry.parameter].append((entry, at))
            at += entry.num_bytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._left = at - len(header)
        self.num_bytes = 0
        self._write(0, header)
        with self._named_errors():
            os.truncate(self._file, at)
        for entry in entries:
            if entry.field == "original_shape":
                shape = [entry.stop - entry.start, *entry.parameter_shape[1:]]
                self._put(entry, torch.tensor(shape))

    def close(self) -> None:
        """Flush to disk; every byte must have been written."""
        assert self._left == 0, f"{self._path}: {self._left} bytes were never written"
        with self._named_errors():
            os.fsync(
                self._file
            )  # network file systems tell only here, or on closing, of a full disk
            file, self._file = self._file, -1
            os.close(file)

    def abandon(self) -> None:
        """Let go of the file as it is."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def is_nvfp4(self, parameter: str, lead: int) -> bool:
        return _holds_codes((entry for entry, _ in self._parts[parameter]), lead)

    def write(self, parameter: str, lead: int, start: int, values: Tensor) -> None:
        self._write_rows(parameter, "values", lead, start, values)

    def write_nvfp4(self, parameter: str, lead: int, matrix: Nvfp4) -> None:
        self._write_rows(parameter, "codes", lead, 0, matrix.codes[0])
        self._write_rows(parameter, "block_scales", lead, 0, matrix.block_scales[0])
        for entry, at in self._parts[parameter]:
            if entry.field not in ("global_scales", "global_divisors") or lead not in entry.leads:
                continue
            scale = matrix.global_scales.cpu()
            if entry.field == "global_divisors":
                scale = divisor_of(scale, f"{entry.name}, expert {lead}")
            self._count(self._write(at + 4 * (lead - entry.start), _raw(scale)))

    def write_input_amax(self, parameter: str, amax: Tensor | None) -> None:
        for entry, _ in self._parts[parameter]:
            if entry.field not in ("input_amax", "input_divisor"):
                continue
            assert amax is not None, f"{entry.name}: nothing to write"
            wide = amax.float()
            value = amax if entry.field == "input_amax" else 448 * 6 / wide
            self._put(entry, value.to(TORCH_DTYPES[entry.dtype]))

    def _write_rows(
        self, parameter: str, field: Field, lead: int, start: int, values: Tensor
    ) -> None:
        stop = start + values.shape[0]
        for entry, at in self._parts[parameter]:
            if entry.field != field or lead not in entry.leads:
                continue
            for row, place, step, count in overlaps(entry, start, stop):
                stored = self._stored(values[place::step][:count], entry)
                offset, _ = row_bytes(entry, lead, row)
                self._count(self._write(at + offset, _raw(stored)))

    def _stored(self, values: Tensor, entry: Entry) -> Tensor:
        dtype = TORCH_DTYPES[entry.dtype]
        stored = values.to(dtype)
        if stored.dtype != values.dtype and not self._may_round:
            is_same = (stored.to(values.dtype) == values) | values.isnan()
            if not bool(is_same.all()):
                raise ValueError(
                    f"{entry.parameter} holds {values[~is_same][0].item()!r}, which {entry.dtype} "
                    f"cannot store exactly (for {entry.name}); give dtype='bfloat16' or 'float32' "
                    "to round to nearest even"
                )
        return stored.cpu()

    def _put(self, entry: Entry, values: Tensor) -> None:
        for other, at in self._parts[entry.parameter]:
            if other.name == entry.name:
                self._count(self._write(at, _raw(values.cpu())))

    def _count(self, written: int) -> None:
        self._left -= written
        self.num_bytes += written

    def _write(self, at: int, data: bytes | memoryview) -> int:
        view, count = memoryview(data), len(data)
        with self._named_errors():
            while view:
                done = os.pwrite(self._file, view, at)
                view, at = view[done:], at + done
        return count

    @contextlib.contextmanager
    def _named_errors(self) -> Generator[None]:
        """An error on a descriptor does not know its file."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def _holds_codes(entries: Iterable[Entry], lead: int) -> bool:
    """Whether one of a parameter's entries has the lead's NVFP4 codes."""
    return any(entry.field == "codes" and lead in entry.leads for entry in entries)


def overlaps(entry: Entry, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """What an entry has of parameter rows start..stop-1 (within a lead).

    Yields (first row in the tensor, place of that row after `start`, step between places, count).
    """
    for segment in entry.segments():
        low = max(0, math.ceil((start - segment.first) / segment.step))
        high = min(segment.count, math.ceil((stop - segment.first) / segment.step))
        if low < high:
            place = segment.first + low * segment.step - start
            yield segment.row + low, place, segment.step, high - low


def row_bytes(entry: Entry, lead: int, row: int) -> tuple[int, int]:
    """Where a row of a lead begins within the tensor's data, and how long a row is, in bytes."""
    rows = sum(segment.count for segment in entry.segments())
    columns = entry.parameter_shape[-1] if len(entry.parameter_shape) > 1 else 1
    per_column = {"codes": 2, "block_scales": BLOCK}.get(entry.field, 1)
    width = columns // per_column * BYTES_PER_VALUE[entry.dtype]
    return ((lead - entry.leads.start) * rows + row) * width, width


def _raw(values: Tensor) -> memoryview:
    """The bytes of a tensor."""
    return values.contiguous().view(-1).view(torch.uint8).numpy().data
