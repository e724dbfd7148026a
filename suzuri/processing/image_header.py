"""Opening a picture: from bytes to its format, size and orientation, without decoding a pixel."""

import io
import struct
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from PIL.ImageFile import ImageFile

from suzuri.processing.errors import MediaError
from suzuri.processing.sources import MediaBytes, is_text, open_source

ImageSource = Image.Image | MediaBytes

# 8192 x 8192. Decoded and cut into patches such a picture takes 1.6 GB.
MAX_PIXELS = 1 << 26

_ORIENTATION_TAG = 0x0112
UPRIGHT: dict[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIXTEEN_BIT_GREY = ("I;16", "I;16L", "I;16B", "I;16N")
_FORMATS = "PNG, JPEG, WebP, GIF, BMP, TIFF or AVIF"
# What Pillow's readers are known to raise on damaged bytes.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    LookupError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A picture of which only the header has been read. `size` is that of the upright picture."""

    image: Image.Image
    size: tuple[int, int]
    orientation: int
    transparent_colour: tuple[int, ...] | None


@contextmanager
def opened(source: ImageSource, max_pixels: int) -> Generator[Opened]:
    if isinstance(source, Image.Image):
        _check_size(source.size, max_pixels)
        colour = _transparent_colour(source)
        decode(source)
        yield _opened(source, _orientation(source, None), colour)
        return
    with open_source(source, "picture") as file:
        image = _open_header(file, max_pixels)
        _check_size(image.size, max_pixels)
        yield _opened(image, _orientation(image, file), _transparent_colour(image))


def _opened(image: Image.Image, orientation: int, colour: tuple[int, ...] | None) -> Opened:
    width, height = image.size
    return Opened(
        image=image,
        size=(height, width) if orientation >= 5 else (width, height),
        orientation=orientation,
        transparent_colour=colour,
    )


def _open_header(file: IO[bytes], max_pixels: int) -> ImageFile:
    start = file.read(1024)
    file.seek(0)
    reader = _reader(start)
    try:
        return reader(file)
    except Image.DecompressionBombError as error:
        raise MediaError(
            f"the picture is far too large ({error}); the limit here is {max_pixels} pixels"
        ) from error
    except _DAMAGED as error:
        raise MediaError(
            f"the picture's header is damaged ({error}); send it again whole"
        ) from error


def _reader(start: bytes) -> Callable[[IO[bytes]], ImageFile]:
    """The reader for a file that starts like this. Pillow would try every format it knows,
    some of which run other programs, so the choice is made here from a short list."""
    if start.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImagePlugin.PngImageFile
    if start.startswith(b"\xff\xd8\xff"):
        return JpegImagePlugin.JpegImageFile
    if start.startswith((b"GIF87a", b"GIF89a")):
        return GifImagePlugin.GifImageFile
    if start.startswith(b"BM"):
        return BmpImagePlugin.BmpImageFile
    if start.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return TiffImagePlugin.TiffImageFile
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return _if_built(WebPImagePlugin.SUPPORTED, WebPImagePlugin.WebPImageFile, "WebP")
    if start[4:8] == b"ftyp" and not {b"avif", b"avis"}.isdisjoint(_brands(start)):
        return _if_built(AvifImagePlugin.SUPPORTED, AvifImagePlugin.AvifImageFile, "AVIF")
    raise MediaError(_why_unknown(start))


def _if_built(
    built: bool, reader: Callable[[IO[bytes]], ImageFile], name: str
) -> Callable[[IO[bytes]], ImageFile]:
    if not built:
        raise MediaError(f"the installed Pillow was built without {name}; send PNG or JPEG")
    return reader


def _brands(start: bytes) -> list[bytes]:
    """What an ISO media file declares to be, its main brand first."""
    end = min(int.from_bytes(start[:4], "big"), len(start))
    return [start[place : place + 4] for place in (8, *range(16, end, 4))]


def _why_unknown(start: bytes) -> str:
    if not start:
        return f"the picture is empty (0 bytes); send {_FORMATS}"
    if b"<svg" in start and is_text(start):
        return f"SVG is a drawing, not a picture of pixels; render it first and send {_FORMATS}"
    if start[4:8] == b"ftyp" and not {b"heic", b"heix", b"mif1"}.isdisjoint(_brands(start)):
        return f"HEIC pictures are not supported; convert to {_FORMATS}"
    if start.startswith(b"%PDF"):
        return f"a PDF is not a picture; render its pages and send {_FORMATS}"
    if is_text(start):
        return f"this is text ({start[:40]!r}), not a picture; send the bytes of {_FORMATS}"
    return f"unknown picture format (first bytes {start[:8]!r}); send {_FORMATS}"


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"the picture has no pixels ({width} x {height})")
    if width * height > max_pixels:
        raise MediaError(
            f"the picture has {width} x {height} = {width * height} pixels, the limit is "
            f"{max_pixels}; scale it down and send it again"
        )


def _orientation(image: Image.Image, file: IO[bytes] | None) -> int:
    # Pillow turns TIFF itself, its header size included, and leaves nothing to find here.
    exif: bytes | None = image.info.get("exif")
    if exif is None and image.format == "PNG" and file is not None:
        exif = _late_png_exif(file)
    if exif is None:
        return 1
    tags = Image.Exif()
    try:
        tags.load(exif)
        orientation: Any = tags.get(_ORIENTATION_TAG, 1)
    except _DAMAGED:
        return 1  # camera notes that cannot be read say nothing about a picture that can
    return int(orientation) if orientation in UPRIGHT else 1


def _late_png_exif(file: IO[bytes]) -> bytes | None:
    """PNG allows EXIF after the pixels, where Pillow sees it only once they are decoded."""
    place = file.tell()
    file.seek(8)
    exif: bytes | None = None
    while exif is None and len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"eXIf":
            exif = file.read(length)
        file.seek(length + 4, io.SEEK_CUR)
    file.seek(place)
    return exif


def _transparent_colour(image: Image.Image) -> tuple[int, ...] | None:
    """The one colour that is transparent, on the scale of the decoded pixels. Read before decoding:
    Pillow leaves it on the scale of the file, and forgets that scale when it decodes."""
    key: int | tuple[int, ...] | bytes | None = image.info.get("transparency")
    if not isinstance(key, int | tuple) or image.mode not in ("1", "L", "RGB", *SIXTEEN_BIT_GREY):
        return None
    colour = key if isinstance(key, tuple) else (key,)
    tiles = image.tile if isinstance(image, ImageFile) else []
    match tiles[0].args if tiles else None:
        case "L;2":
            return tuple(value * 85 for value in colour)
        case "L;4":
            return tuple(value * 17 for value in colour)
        case "RGB;16B":
            return tuple(value >> 8 for value in colour)
        case _:
            return colour


def decode(image: Image.Image) -> None:
    try:
        image.load()
    except _DAMAGED as error:
        raise MediaError(
            f"the {image.format} picture is damaged or cut short ({error}); send it again whole"
        ) from error
