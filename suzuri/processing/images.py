"""A picture to the patches the vision tower reads, one token each. Opening: `image_header.py`.

The rules, the same for every container:
- Orientation: the EXIF orientation (JPEG, PNG, WebP, AVIF, TIFF) is applied. XMP is not read.
- Transparency: alpha channels, transparent palette entries and transparent colours are composited
  on white, so colours hidden under full transparency never show.
- Animations and multi-page files: the first frame or page.
- 16 bits per channel: the high byte is kept. CMYK and YCCK: Pillow's plain conversion.
- Colour profiles are ignored: values are taken as sRGB, so the result is the same on every machine.

The picture is cut row by row into squares of `patch_size`. There are ceil(height / size) rows and
floor(width / size) + 1 columns: when the size divides the width, a whole column of padding follows,
because the models were trained so. Missing pixels are -1 on the 0..255 scale, one step below black.
"""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from suzuri.processing.errors import MediaError
from suzuri.processing.image_header import (
    MAX_PIXELS,
    SIXTEEN_BIT_GREY,
    UPRIGHT,
    ImageSource,
    decode,
    opened,
)

BACKGROUND = (255, 255, 255)
PATCH_SIZE = 40
TEMPORAL_PATCH_SIZE = 2
RESCALE_CAP = 2048
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)

_MISSING = -1
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")


def image_patches(
    source: ImageSource,
    *,
    patch_size: int = PATCH_SIZE,
    temporal_patch_size: int = TEMPORAL_PATCH_SIZE,
    rescale_frac: float | None = None,
    rescale_cap: int = RESCALE_CAP,
    max_pixels: int = MAX_PIXELS,
) -> NDArray[np.float32]:
    """Normalised patches [num_tokens, temporal_patch_size, patch_size, patch_size, 3]; all
    temporal frames are the same patch. A `str` is a local path, so never pass what a client sent.

    `rescale_frac` multiplies both sides first; growth stops where the long side is `rescale_cap`.
    Raises `MediaError` for what is not a usable picture, before decoding it where the header tells.
    """
    rgb = load_rgb(source, max_pixels=max_pixels)
    size = rescaled_size(rgb.size, rescale_frac, rescale_cap)
    if size != rgb.size:
        rgb = rgb.resize(size, Image.Resampling.LANCZOS)
    num_rows, num_columns = _grid(size, patch_size)
    canvas = np.full((num_rows * patch_size, num_columns * patch_size, 3), _MISSING, np.int16)
    canvas[: size[1], : size[0]] = np.asarray(rgb)
    patches = (
        canvas.reshape(num_rows, patch_size, num_columns, patch_size, 3)
        .swapaxes(1, 2)
        .reshape(num_rows * num_columns, patch_size, patch_size, 3)
    )
    out = np.empty((len(patches), temporal_patch_size, patch_size, patch_size, 3), np.float32)
    # Mean and deviation are scaled, not the pixels: bit for bit the released preprocessing.
    np.subtract(patches, np.float32(255) * np.array(PIXEL_MEAN, np.float32), out=out[:, 0])
    out[:, 0] /= np.float32(255) * np.array(PIXEL_STD, np.float32)
    out[:, 1:] = out[:, :1]
    return out


def load_rgb(source: ImageSource, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture upright and in mode RGB, by the rules at the top of this file."""
    with opened(source, max_pixels) as picture:
        decode(picture.image)
        rgb = _flatten(picture.image, picture.transparent_colour)
        if picture.orientation in UPRIGHT:
            rgb = rgb.transpose(UPRIGHT[picture.orientation])
        if rgb.size != picture.size:
            raise MediaError(f"the header says {picture.size}, the pixels are {rgb.size}")
    return rgb


def image_size(source: ImageSource, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(width, height) of the upright picture. Of a file, only the header is read."""
    with opened(source, max_pixels) as picture:
        return picture.size


def num_image_tokens(
    source: ImageSource | tuple[int, int],
    *,
    patch_size: int = PATCH_SIZE,
    rescale_frac: float | None = None,
    rescale_cap: int = RESCALE_CAP,
    max_pixels: int = MAX_PIXELS,
) -> int:
    """The length of `image_patches` with the same options, from the header or (width, height)."""
    size = source if isinstance(source, tuple) else image_size(source, max_pixels=max_pixels)
    num_rows, num_columns = _grid(rescaled_size(size, rescale_frac, rescale_cap), patch_size)
    return num_rows * num_columns


def rescaled_size(
    size: tuple[int, int], frac: float | None, cap: int = RESCALE_CAP
) -> tuple[int, int]:
    """(width, height) after rescaling. `cap` limits growth only: a longer picture never shrinks
    because of it."""
    if frac is None:
        return size
    if not 0 < frac < math.inf:
        raise ValueError(
            f"rescale_frac must be a positive number, got {frac}; None leaves the size"
        )
    long_side = max(size)
    ratio = min(long_side * frac, max(cap, long_side)) / long_side
    width, height = (max(1, math.floor(side * ratio + 0.5)) for side in size)
    return width, height


def _grid(size: tuple[int, int], patch_size: int) -> tuple[int, int]:
    width, height = size
    if width < 1 or height < 1 or patch_size < 1:
        raise ValueError(f"cannot cut {width} x {height} pixels into patches of {patch_size}")
    return -(-height // patch_size), width // patch_size + 1


def _flatten(image: Image.Image, transparent_colour: tuple[int, ...] | None) -> Image.Image:
    """RGB, with whatever is transparent composited on the background."""
    if image.mode not in (*_MODES, *SIXTEEN_BIT_GREY):
        raise MediaError(
            f"pixels of mode {image.mode!r} (32-bit or Lab values, say) have no agreed way to RGB; "
            "convert the picture to 8-bit RGB first"
        )
    alpha: Image.Image | None = None
    if transparent_colour is not None:
        values = np.asarray(image.convert("L") if image.mode == "1" else image)
        hit = values.reshape(*values.shape[:2], -1) == np.array(transparent_colour)
        alpha = Image.fromarray(np.where(hit.all(axis=2), 0, 255).astype(np.uint8))
    if image.mode in SIXTEEN_BIT_GREY:
        rgb = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    elif transparent_colour is None and image.has_transparency_data:
        layered = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        rgb, alpha = layered.convert("RGB"), layered.getchannel("A")
    else:
        rgb = image.convert("RGB")
    if alpha is None:
        return rgb
    flat = Image.new("RGB", rgb.size, BACKGROUND)
    flat.paste(rgb, mask=alpha)
    return flat
