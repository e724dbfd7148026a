"""Our image and audio preprocessing against a folder with media.safetensors.

Item names are those of tests/golden/README.md: `image.{i}.{tag}.pixel_values_frame0` from
`image.{i}.rgb_u8`, where a tag such as x1.7 is the rescale factor; `audio.{i}.log_mel` and `.bins`
from `audio.{i}.waveform`; and the constant mel filters and bin centers.
"""

import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from suzuri.processing.audio import bin_centers, dmel_bins, log_mel, mel_filters
from suzuri.processing.images import image_patches
from suzuri.tools.loading import read_records
from suzuri.tools.rows import EXACT, TOWERS, Row, Tolerance, compare

RESCALED = Tolerance(atol=0.02)
"""The folder was rescaled by another library, one 1/255 step off in some values."""
LOG_MEL = Tolerance(atol=1e-4)
FRAME = ".pixel_values_frame0"


def trace_media(folder: Path) -> list[Row]:
    """One row per expected item. Raises ValueError for a name this file cannot compute."""
    expected = read_records(folder / "media.safetensors")
    rows: list[Row] = []
    for name in sorted(expected):
        if name.endswith((".rgb_u8", ".waveform")):
            continue
        try:
            ours, limit = _compute(name, expected)
        except KeyError as error:
            raise ValueError(
                f"{folder / 'media.safetensors'}: {name} has no source {error} in the file"
            ) from None
        rows.append(compare(name, ours, expected[name], limit))
    return rows


def _tensor(values: NDArray[np.float32] | NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(values)  # pyright: ignore[reportUnknownMemberType]


def _compute(name: str, expected: dict[str, Tensor]) -> tuple[Tensor, Tolerance]:
    if name == "audio.mel_filters":
        return _tensor(mel_filters(expected[name].shape[0])), TOWERS
    if name == "audio.bin_centers":
        return _tensor(bin_centers(expected[name].shape[0])), EXACT
    kind, index, rest = [*name.split(".", 2), "", ""][:3]
    if kind == "audio" and rest in ("log_mel", "bins"):
        waveform = expected[f"audio.{index}.waveform"].numpy()
        if rest == "log_mel":
            return _tensor(log_mel(waveform)), LOG_MEL
        return _tensor(dmel_bins(waveform)), EXACT
    if kind == "image" and rest.endswith(FRAME):
        tag = rest.removesuffix(FRAME)
        rescaled = re.fullmatch(r"x(\d+\.?\d*)", tag)
        fraction = float(rescaled[1]) if rescaled else None
        if not rescaled and tag != "plain":
            raise ValueError(f"{name}: the tag {tag!r} is neither plain nor x and a factor")
        pixels = expected[f"image.{index}.rgb_u8"]
        if pixels.dtype != torch.uint8 or pixels.dim() != 3 or pixels.shape[-1] != 3:
            raise ValueError(f"image.{index}.rgb_u8 must be uint8 [height, width, 3]")
        picture = Image.fromarray(pixels.numpy())
        patches = image_patches(picture, rescale_frac=fraction)
        # Both temporal frames are equal; comparing the last one checks that as well.
        return _tensor(patches[:, -1]), RESCALED if fraction else TOWERS
    raise ValueError(f"media.safetensors holds {name!r}, which this version cannot compute")
