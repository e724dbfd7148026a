"""Everything that is no usable picture: a `MediaError` in words, before decoding if possible."""

import io
import random
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image, ImageFile, WebPImagePlugin

from suzuri.processing import image_header
from suzuri.processing.errors import MediaError
from suzuri.processing.image_header import MAX_PIXELS
from suzuri.processing.images import image_patches, image_size, num_image_tokens
from tests.processing.pictures import chunk, encode, exif, noise, png

SVG = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
SMALL = Image.fromarray(noise(23, 17))


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ImageFile.ImageFile) -> None:
        raise AssertionError(f"a {self.format} picture was decoded")

    for kind in (ImageFile.ImageFile, WebPImagePlugin.WebPImageFile):
        monkeypatch.setattr(kind, "load", fail)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the picture is empty .0 bytes."),
        (b"hello there", "this is text .*hello there.* not a picture"),
        (b"\xef\xbb\xbf{}", "this is text"),
        (SVG, "SVG is a drawing.*render it first"),
        (b"<!doctype html><html>", "this is text"),
        (b"%PDF-1.7\n%\xe2\xe3", "a PDF is not a picture"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC pictures are not supported"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "this is text"),  # Pillow would run Ghostscript
        (b"8BPS\0\1" + bytes(20), "unknown picture format .first bytes b'8BPS"),
        (bytes(100), "unknown picture format"),
        (b"\x89PNG\r\n\x1a\n", "header is damaged"),
        (png(noise(3, 3), bits=8, colour_type=2)[:40], "header is damaged"),
    ],
)
def test_m01_what_is_no_picture_is_named(data: bytes, words: str) -> None:
    for function in (image_patches, image_size, num_image_tokens):
        with pytest.raises(MediaError, match=words):
            function(data)


@pytest.mark.parametrize("container", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_m01_a_picture_cut_short_is_refused(container: str) -> None:
    data = encode(Image.fromarray(noise(64, 64)), container)
    with pytest.raises(MediaError, match="damaged"):
        image_patches(data[: len(data) // 2])


def test_m01_a_picture_without_pixels_is_refused() -> None:
    with pytest.raises(MediaError, match=r"no pixels \(0 x 5\)"):
        image_patches(Image.new("RGB", (0, 5)))


def test_m10_m11_strings_are_local_paths_and_never_addresses(tmp_path: Path) -> None:
    """Data and web addresses are the server's business; here they are refused, not opened."""
    for address in ("http://127.0.0.1/a.png", "file:///etc/hosts", "data:image/png;base64,AAAA"):
        with pytest.raises(MediaError, match="is a URL, not a file"):
            image_patches(address)
    for missing in (tmp_path / "none.png", tmp_path, "with\0zero"):
        with pytest.raises(MediaError, match="cannot read the picture"):
            image_size(missing)


def one_colour_png(width: int, height: int) -> bytes:
    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in chunks)


@pytest.mark.usefixtures("no_decoding")
def test_m06_m18_a_decompression_bomb_is_refused_from_its_header_with_both_numbers() -> None:
    bomb = one_colour_png(20_000, 20_000)
    assert 40_000 < len(bomb) < 60_000
    for function in (image_patches, image_size, num_image_tokens):
        with pytest.raises(MediaError, match=f"400000000 pixels, the limit is {MAX_PIXELS}"):
            function(bomb)
    opened = Image.open(io.BytesIO(one_colour_png(8192, 8193)))
    with pytest.raises(MediaError, match=f"67117056 pixels, the limit is {MAX_PIXELS}"):
        image_patches(opened)


@pytest.mark.usefixtures("no_decoding")
def test_m06_what_pillow_itself_refuses_also_gives_both_numbers() -> None:
    """A GIF of one pixel whose first frame is larger than its canvas."""
    screen, frame = (
        struct.pack("<HHBBB", 1, 1, 0, 0, 0),
        struct.pack("<HHHHB", 0, 0, 65535, 65535, 0),
    )
    gif = b"GIF89a" + screen + b"," + frame + b"\x02\x02\x44\x01\x00;"
    with pytest.raises(MediaError, match=f"4294836225 pixels.*the limit here is {MAX_PIXELS}"):
        image_size(gif)


def test_m06_the_limit_is_an_argument_and_counts_pixels_exactly() -> None:
    data = encode(SMALL, "PNG")
    assert len(image_patches(data, max_pixels=391)) == 1
    with pytest.raises(MediaError, match="23 x 17 = 391 pixels, the limit is 390"):
        image_patches(data, max_pixels=390)
    with pytest.raises(MediaError, match="the limit is 390"):
        num_image_tokens(SMALL, max_pixels=390)


@pytest.mark.usefixtures("no_decoding")
@pytest.mark.parametrize("container", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_sizes_and_counts_decode_nothing(container: str) -> None:
    data = encode(SMALL, container)
    assert image_size(data) == (23, 17)
    assert num_image_tokens(data, patch_size=8) == 3 * 3
    with pytest.raises(MediaError, match=f"a {container} picture was decoded"):
        image_patches(data)  # so the fixture sees decoding


def test_m21_a_format_this_pillow_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_header.WebPImagePlugin, "SUPPORTED", False)
    with pytest.raises(MediaError, match="built without WebP"):
        image_size(encode(SMALL, "WEBP"))


def test_an_avif_that_names_itself_second_is_read() -> None:
    data = encode(SMALL, "AVIF")
    assert data[4:12] == b"ftypavif"
    assert b"avif" in data[16:32]
    assert image_size(data[:8] + b"mif1" + data[12:]) == (23, 17)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's remarks about odd TIFF tags
def test_m01_damaged_files_are_read_or_refused_but_nothing_else() -> None:
    picker = random.Random(7)
    seeds = [encode(SMALL, name) for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")]
    seeds.append(encode(SMALL, "PNG", exif=exif(6)))
    seeds.append(encode(SMALL.convert("1"), "TIFF", compression="group4"))
    num_read = num_refused = 0
    for _ in range(1500):
        data = bytearray(picker.choice(seeds))
        for _ in range(picker.choice((1, 1, 4))):
            data[picker.randrange(min(len(data), picker.choice((64, 300))))] = picker.randrange(256)
        try:
            count = num_image_tokens(bytes(data), patch_size=8, max_pixels=1 << 20)
            assert len(image_patches(bytes(data), patch_size=8, max_pixels=1 << 20)) == count
            num_read += 1
        except MediaError:
            num_refused += 1
    assert num_read > 200
    assert num_refused > 200
