"""Orientation, transparency, odd modes and animations: one upright RGB picture for each file."""

import io
import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms

from suzuri.processing import images
from suzuri.processing.errors import MediaError
from suzuri.processing.images import image_size, load_rgb
from tests.processing.pictures import chunk, encode, exif, noise, png, stored

UPRIGHT = noise(7, 5)


def pixels(source: Any) -> NDArray[np.uint8]:
    picture = load_rgb(source)
    assert picture.mode == "RGB"
    return np.asarray(picture)


def on_white(colour: NDArray[Any], alpha: NDArray[Any]) -> NDArray[np.uint8]:
    alpha = alpha[..., None].astype(np.float64)
    return np.rint((colour * alpha + 255 * (255 - alpha)) / 255).astype(np.uint8)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_m02_every_exif_orientation_is_applied_in_pixels_and_in_size(orientation: int) -> None:
    picture = Image.fromarray(stored(UPRIGHT, orientation))
    tag = exif(orientation)
    late = png(np.asarray(picture), bits=8, colour_type=2, after=((b"eXIf", tag[6:]),))
    files = {
        "PNG": encode(picture, "PNG", exif=tag),
        "PNG, EXIF after the pixels": late,
        "WebP": encode(picture, "WEBP", lossless=True, exif=tag),
        "TIFF": encode(picture, "TIFF", exif=tag),
    }
    for name, data in files.items():
        assert image_size(data) == (7, 5), name
        assert np.array_equal(pixels(data), UPRIGHT), name
        opened = Image.open(io.BytesIO(data))
        assert np.array_equal(pixels(opened), UPRIGHT), f"{name}, opened by the caller"
        assert image_size(Image.open(io.BytesIO(data))) == (7, 5), name


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("container", ["JPEG", "AVIF"])
def test_m02_orientation_of_lossy_files(container: str, orientation: int) -> None:
    upright = np.kron(noise(3, 2, seed=4), np.ones((16, 16, 1), np.uint8))
    data = encode(
        Image.fromarray(stored(upright, orientation)),
        container,
        exif=exif(orientation),
        quality=95,
        subsampling="4:4:4",
    )
    assert image_size(data) == (48, 32)
    assert np.abs(pixels(data).astype(int) - upright).mean() < 4


@pytest.mark.parametrize("tag", [exif(0), exif(9), b"Exif\0\0MM\0*\0\0", b"Exif\0\0rubbish", b""])
def test_m02_an_orientation_that_means_nothing_is_ignored(tag: bytes) -> None:
    data = png(UPRIGHT, bits=8, colour_type=2, before=((b"eXIf", tag[6:]),))
    assert np.array_equal(pixels(data), UPRIGHT)


def test_m02_colours_hidden_under_a_transparent_colour_stay_hidden() -> None:
    """RGB with one transparent colour (tRNS), and text in that colour."""
    for bits in (8, 16):
        scale = 257 if bits == 16 else 1
        secret = np.array([200, 30, 40])
        samples = np.full((5, 7, 3), (90, 30, 40)) * scale
        samples[1:4, 2:5] = secret * scale
        key = struct.pack(">3H", *(secret * scale))
        data = png(samples, bits=bits, colour_type=2, before=((b"tRNS", key),))
        expected = np.full((5, 7, 3), (90, 30, 40))
        expected[1:4, 2:5] = 255
        assert np.array_equal(pixels(data), expected), bits
        assert np.array_equal(pixels(Image.open(io.BytesIO(data))), expected), bits


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_m02_a_transparent_grey_is_read_at_every_depth(bits: int) -> None:
    top = (1 << bits) - 1
    levels = np.array([0, top // 3, top // 2, top]) if bits > 1 else np.array([0, 0, 1, 1])
    for key in np.unique(levels):
        data = png(
            levels.reshape(1, 4, 1),
            bits=bits,
            colour_type=0,
            before=((b"tRNS", struct.pack(">H", key)),),
        )
        grey = levels >> 8 if bits == 16 else levels * 255 // top
        expected = np.where(levels == key, 255, grey)
        for source in (data, Image.open(io.BytesIO(data))):
            assert pixels(source)[0, :, 0].tolist() == expected.tolist(), key


def test_m03_alpha_is_composited_on_white_in_every_container() -> None:
    colour = noise(9, 6, seed=1)
    alpha = noise(9, 6, 1, seed=2)[..., 0]
    colour[0, :3], alpha[0, :3] = (255, 0, 0), (0, 128, 255)
    expected = on_white(colour, alpha)
    assert expected[0, :3].tolist() == [[255, 255, 255], [255, 127, 127], [255, 0, 0]]
    rgba = Image.fromarray(np.dstack([colour, alpha]))
    for data in (
        encode(rgba, "PNG"),
        encode(rgba, "WEBP", lossless=True, exact=True),
        encode(rgba, "TIFF"),
        rgba,
    ):
        assert np.array_equal(pixels(data), expected)


def test_m03_palettes_with_transparency_look_like_their_rgba_twins() -> None:
    indices = noise(9, 6, 1, seed=3)[..., 0]
    palette = noise(256, 1, seed=4)[0]
    alphas = noise(256, 1, 1, seed=5)[0, :, 0]
    expected = on_white(palette[indices], alphas[indices])
    picture = Image.fromarray(indices)
    picture.putpalette(palette.tobytes())
    assert picture.mode == "P"
    data = encode(picture, "PNG", transparency=alphas.tobytes())
    assert np.array_equal(pixels(data), expected)
    # PA: palette colours, alpha per pixel
    per_pixel = noise(9, 6, 1, seed=6)[..., 0]
    with_alpha = Image.merge("LA", (Image.fromarray(indices), Image.fromarray(per_pixel)))
    with_alpha.putpalette(palette.tobytes())
    assert with_alpha.mode == "PA"
    assert np.array_equal(pixels(with_alpha), on_white(palette[indices], per_pixel))
    # GIF: one transparent entry
    gif = encode(picture, "GIF", transparency=int(indices[2, 2]), optimize=False)
    on_off = np.where(indices == indices[2, 2], 0, 255)
    assert np.array_equal(pixels(gif), on_white(palette[indices], on_off))


def test_m03_grey_with_alpha() -> None:
    grey, alpha = noise(9, 6, 1, seed=7)[..., 0], noise(9, 6, 1, seed=8)[..., 0]
    picture = Image.merge("LA", (Image.fromarray(grey), Image.fromarray(alpha)))
    expected = on_white(np.dstack([grey] * 3), alpha)
    assert np.array_equal(pixels(picture), expected)
    assert np.array_equal(pixels(encode(picture, "PNG")), expected)
    premultiplied = pixels(picture.convert("La")).astype(int)
    assert np.abs(premultiplied - expected).max() <= 1  # it was rounded once before
    sixteen = np.dstack([grey, alpha]).astype(np.int64) * 257
    assert np.array_equal(pixels(png(sixteen, bits=16, colour_type=4)), expected)


@pytest.mark.parametrize("container", ["GIF", "WEBP", "PNG", "TIFF"])
def test_m08_animations_and_pages_give_the_first(container: str) -> None:
    frames = [Image.new("RGB", (12, 8), colour) for colour in ("#ff0000", "#00ff00", "#0000ff")]
    options = {"lossless": True} if container == "WEBP" else {}
    data = encode(frames[0], container, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 3  # pyright: ignore[reportAttributeAccessIssue]
    assert np.array_equal(pixels(data), np.full((8, 12, 3), (255, 0, 0)))


def test_m08_sixteen_bits_keep_their_high_byte() -> None:
    values = np.array([0, 255, 256, 0x7FFF, 0x8000, 65535]).reshape(1, 6, 1)
    grey = pixels(png(values, bits=16, colour_type=0))
    assert grey[0, :, 0].tolist() == [0, 0, 1, 127, 128, 255]
    colour = pixels(png(np.dstack([values] * 3), bits=16, colour_type=2))
    assert np.array_equal(colour, grey)
    tiff = encode(Image.fromarray(values[..., 0].astype(np.uint16)), "TIFF")
    assert np.array_equal(pixels(tiff), grey)


def test_m08_one_bit() -> None:
    mask = noise(17, 5, 1)[..., 0] > 127
    expected = np.dstack([mask * 255] * 3)
    for container in ("PNG", "TIFF", "BMP", "GIF"):
        data = encode(Image.fromarray(mask), container)
        assert np.array_equal(pixels(data), expected), container


def test_m08_cmyk_and_ycck_jpeg() -> None:
    ink = np.kron(noise(3, 2, 4, seed=9), np.ones((16, 16, 1), np.uint8))
    cmyk = Image.frombytes("CMYK", (48, 32), ink.tobytes())
    expected = np.asarray(cmyk.convert("RGB")).astype(int)
    data = encode(cmyk, "JPEG", quality=100)
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    assert np.abs(pixels(data) - expected).mean() < 3

    # The same numbers declared as YCCK: the Adobe marker's last byte is 2.
    marker = data.index(b"Adobe") + 11
    assert data[marker] == 0
    ycck = data[:marker] + b"\2" + data[marker + 1 :]
    y, cb, cr, k = (255.0 - np.asarray(Image.open(io.BytesIO(data)))).transpose(2, 0, 1)
    red = y + 1.402 * (cr - 128)
    green = y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128)
    blue = y + 1.772 * (cb - 128)
    # Adobe stores inks inverted, so red, green and blue come back as cyan, magenta and yellow.
    inks = np.dstack([red, green, blue, 255 - k]).clip(0, 255).round().astype(np.uint8)
    twin = Image.frombytes("CMYK", (48, 32), inks.tobytes()).convert("RGB")
    assert np.abs(pixels(ycck).astype(int) - np.asarray(twin)).max() <= 2


def test_m08_colour_profiles_are_ignored() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    picture = Image.fromarray(UPRIGHT)
    for profile in (lab, b"no profile at all"):
        assert np.array_equal(pixels(encode(picture, "PNG", icc_profile=profile)), UPRIGHT)


@pytest.mark.parametrize("mode", ["I", "F", "LAB"])
def test_m08_pixels_without_an_agreed_way_to_rgb_are_refused_by_name(mode: str) -> None:
    with pytest.raises(MediaError, match=f"'{mode}'.*convert the picture to 8-bit RGB"):
        load_rgb(encode(Image.new(mode, (3, 3)), "TIFF"))


def test_a_picture_that_belies_its_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def shrink(image: Image.Image) -> None:
        image.thumbnail((3, 3))

    monkeypatch.setattr(images, "decode", shrink)
    with pytest.raises(MediaError, match=r"header says \(7, 5\), the pixels are \(3, 2\)"):
        load_rgb(encode(Image.fromarray(UPRIGHT), "PNG"))


def test_chunks_the_tests_build_are_png() -> None:
    assert chunk(b"IEND", b"") == bytes.fromhex("0000000049454e44ae426082")
    assert np.array_equal(
        np.asarray(Image.open(io.BytesIO(png(UPRIGHT, bits=8, colour_type=2)))), UPRIGHT
    )
