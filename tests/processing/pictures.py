"""Pictures for the tests: a few ways to encode one, and PNG files built chunk by chunk."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, channels), dtype=np.uint8)


def encode(image: Image.Image, container: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, container, **options)
    return file.getvalue()


def png(
    samples: NDArray[np.integer],
    *,
    bits: int,
    colour_type: int,
    before: tuple[tuple[bytes, bytes], ...] = (),
    after: tuple[tuple[bytes, bytes], ...] = (),
) -> bytes:
    """[height, width, channels] raw samples as a PNG; extra chunks before and after the pixels."""
    height, width, _ = samples.shape
    rows = samples.reshape(height, -1).astype(np.int64)
    if bits == 16:
        packed = rows.astype(">u2").view(np.uint8).reshape(height, -1)
    else:
        single_bits = (rows[..., None] >> np.arange(bits - 1, -1, -1)) & 1
        packed = np.packbits(single_bits.reshape(height, -1).astype(np.uint8), axis=1)
    data = b"".join(b"\0" + row.tobytes() for row in packed)
    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    chunks = [
        (b"IHDR", header),
        *before,
        (b"IDAT", zlib.compress(data)),
        *after,
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in chunks)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def exif(orientation: int) -> bytes:
    """A minimal EXIF block: one tag, 274."""
    return b"Exif\0\0MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 274, 3, 1, orientation, 0, 0)


def stored(upright: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The pixels a camera writes so that a viewer obeying `orientation` shows `upright`."""
    turned = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }
    return np.ascontiguousarray(turned[orientation])
