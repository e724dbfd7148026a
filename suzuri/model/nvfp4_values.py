"""Checks the values of the small tensors that go with NVFP4 codes: global scales, shapes, amax.

They take some kB of a checkpoint, and one wrong number among them spoils a whole expert. Loading
checks them before it reads anything else, `suzuri inspect` in the same words. No torch here.
"""

# pyright: strict

import contextlib
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from suzuri.model.checkpoint_files import CheckpointError, TensorEntry
from suzuri.model.tensor_table import Entry

CHECKED = (
    "global_scales",
    "global_divisors",
    "input_amax",
    "input_divisor",
    "original_shape",
)
LARGEST_CODE = 6.0 * 448.0
"""Of a code times a block scale."""
BF16_LIMIT = 2.0**128 * (1 - 2.0**-9)
"""From here on fp32 numbers become infinite in bf16."""


def value_faults(folder: Path, reads: Iterable[tuple[Entry, TensorEntry]]) -> list[str]:
    """What is wrong with values, as sentences that name file and tensor, one for each tensor.

    A global scale, or the inverse of a divisor, must be positive and such that the largest value
    under it is finite in bf16; an activation scale must be positive and finite; an original shape
    must be that of the codes. Raises CheckpointError when a file cannot be read.
    """
    faults: list[str] = []
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for entry, tensor in reads:
            if entry.field not in CHECKED:
                continue
            path = folder / tensor.file
            where = f"{path}: {tensor.stored_name}"
            try:
                if tensor.file not in files:
                    files[tensor.file] = stack.enter_context(path.open("rb"))
                files[tensor.file].seek(tensor.start)
                data = files[tensor.file].read(tensor.nbytes)
            except OSError as error:
                raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error
            if len(data) < tensor.nbytes:
                raise CheckpointError(f"{where}: the file became shorter while it was read")
            fault = _fault(entry, tensor.dtype, data)
            if fault:
                faults.append(f"{where} {fault}")
    return faults


def _fault(entry: Entry, dtype: str, data: bytes) -> str | None:
    if entry.field == "original_shape":
        shape = list(struct.unpack(f"<{len(data) // 8}q", data))
        wanted = [entry.stop - entry.start, *entry.parameter_shape[1:]]
        if shape == wanted:
            return None
        return f"holds {shape}; the codes beside it are for {wanted}"
    numbers = _numbers(dtype, data)
    if entry.field in ("input_amax", "input_divisor"):
        return _amax_fault(numbers[0], is_divisor=entry.field == "input_divisor")
    for expert, number in enumerate(numbers):
        fault = _scale_fault(number, is_divisor=entry.field == "global_divisors")
        if fault:
            return f"is {number!r} for expert {expert}; {fault}"
    return None


def _scale_fault(number: float, *, is_divisor: bool) -> str | None:
    if not 0 < number < math.inf:
        return "must be finite and above 0"
    scale = _fp32(1 / number) if is_divisor else number
    if _fp32(scale * LARGEST_CODE) < BF16_LIMIT:
        return None
    limit = BF16_LIMIT / LARGEST_CODE
    must = f"above {1 / limit:.3g}" if is_divisor else f"below {limit:.3g}"
    return f"must be {must}, or the largest values are infinite in bf16"


def _amax_fault(number: float, *, is_divisor: bool) -> str | None:
    if 0 < number < math.inf:
        # A divisor is 448 * 6 / amax, and amax is kept in bf16.
        amax = _fp32(LARGEST_CODE / number) if is_divisor else number
        if amax < BF16_LIMIT:
            return None
    return (
        f"is {number!r}; the scale of activations must be positive and finite. Leave these tensors "
        "of all experts out where no calibration was run: then it loads as weight-only"
    )


def _numbers(dtype: str, data: bytes) -> tuple[float, ...]:
    if dtype == "BF16":  # the upper half of an fp32 number
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    return struct.unpack(f"<{len(data) // 4}f", data)


def _fp32(x: float) -> float:
    """Rounded to fp32."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.inf
