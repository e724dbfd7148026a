"""Patches, sizes and counts of pictures, against recorded values and the rule written out."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

from suzuri.processing.images import (
    PIXEL_MEAN,
    PIXEL_STD,
    image_patches,
    image_size,
    num_image_tokens,
    rescaled_size,
)
from tests.processing.pictures import encode, exif, noise

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "media" / "media.safetensors")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_patches_are_bit_equal_to_the_released_preprocessing(index: int) -> None:
    patches = image_patches(Image.fromarray(GOLDEN[f"image.{index}.rgb_u8"]))
    frame = GOLDEN[f"image.{index}.plain.pixel_values_frame0"]
    assert patches.dtype == np.float32
    assert np.array_equal(patches, np.stack([frame, frame], axis=1))


def test_rescaled_patches_differ_from_torchvisions_lanczos_by_single_steps() -> None:
    source = Image.fromarray(GOLDEN["image.1.rgb_u8"])
    patches = image_patches(source, rescale_frac=1.7)
    difference = np.abs(patches[:, 0] - GOLDEN["image.1.x1.7.pixel_values_frame0"])
    assert patches.shape == (8, 2, 40, 40, 3)
    assert difference.max() < 1.001 / 255 / min(PIXEL_STD)
    assert (difference > 1e-6).mean() < 0.01


def test_rescaling_is_pillows_lanczos() -> None:
    source = Image.fromarray(noise(31, 17))
    by_hand = source.resize((62, 34), Image.Resampling.LANCZOS)
    expected = image_patches(by_hand, patch_size=8)
    assert np.array_equal(image_patches(source, patch_size=8, rescale_frac=2.0), expected)
    assert np.array_equal(
        image_patches(by_hand, patch_size=8, rescale_frac=1.0), expected
    )  # unchanged size: no filter


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 30),
    height=st.integers(1, 30),
    patch=st.sampled_from([1, 3, 5, 8, 40]),
    frames=st.integers(1, 3),
)
def test_every_patch_value_by_the_written_rule(
    width: int, height: int, patch: int, frames: int
) -> None:
    pixels = noise(width, height, seed=width * 31 + height)
    patches = image_patches(Image.fromarray(pixels), patch_size=patch, temporal_patch_size=frames)
    num_columns = width // patch + 1
    assert patches.shape == (math.ceil(height / patch) * num_columns, frames, patch, patch, 3)
    for index in range(len(patches)):
        expected = np.full((patch, patch, 3), -1.0)
        top, left = index // num_columns * patch, index % num_columns * patch
        piece = pixels[top : top + patch, left : left + patch]
        expected[: piece.shape[0], : piece.shape[1]] = piece
        expected = (expected / 255 - PIXEL_MEAN) / PIXEL_STD
        for frame in range(frames):
            np.testing.assert_allclose(patches[index, frame], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ((1, 1), 1),
        ((39, 40), 1),
        ((40, 40), 2),
        ((41, 40), 2),
        ((40, 41), 4),
        ((80, 40), 3),
        ((512, 512), 169),
        ((2048, 2048), 2704),
    ],
)
def test_token_counts(size: tuple[int, int], count: int) -> None:
    assert num_image_tokens(size) == count
    assert num_image_tokens(Image.new("RGB", size)) == count


@pytest.mark.parametrize(
    ("size", "frac", "cap", "expected"),
    [
        ((1000, 500), 2.0, 2048, (2000, 1000)),
        ((1500, 750), 2.0, 2048, (2048, 1024)),
        ((750, 1500), 2.0, 2048, (1024, 2048)),
        ((3000, 1000), 2.0, 2048, (3000, 1000)),  # the cap never shrinks
        ((3000, 11), 0.5, 2048, (1500, 6)),  # 5.5 rounds up
        ((3, 1), 1.5, 2048, (5, 2)),
        ((300, 1), 0.1, 2048, (30, 1)),  # never less than one pixel
        ((100, 50), 3.0, 120, (120, 60)),
        ((100, 50), None, 10, (100, 50)),
    ],
)
def test_rescaled_sizes(
    size: tuple[int, int], frac: float | None, cap: int, expected: tuple[int, int]
) -> None:
    assert rescaled_size(size, frac, cap) == expected


@pytest.mark.parametrize("frac", [0.0, -1.0, math.inf, math.nan])
def test_a_rescale_factor_that_is_no_factor_is_refused(frac: float) -> None:
    with pytest.raises(ValueError, match="rescale_frac must be a positive number"):
        num_image_tokens((10, 10), rescale_frac=frac)


@pytest.mark.parametrize("container", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF", "GIF", "BMP"])
def test_the_count_from_the_header_is_the_count_after_decoding(container: str) -> None:
    turns = ({}, {"exif": exif(3)}, {"exif": exif(6)}) if container not in ("GIF", "BMP") else ({},)
    for options in turns:
        for width, height in [(1, 1), (7, 8), (8, 7), (16, 24), (33, 5)]:
            data = encode(Image.fromarray(noise(width, height)), container, **options)
            for frac in (None, 0.4, 1.3):
                patches = image_patches(data, patch_size=8, rescale_frac=frac, rescale_cap=40)
                counted = num_image_tokens(data, patch_size=8, rescale_frac=frac, rescale_cap=40)
                assert counted == len(patches)
            turned = options == {"exif": exif(6)}
            assert image_size(data) == ((height, width) if turned else (width, height))


def test_paths_bytes_and_pictures_give_the_same(tmp_path: Path) -> None:
    picture = Image.fromarray(noise(50, 20))
    data = encode(picture, "PNG")
    path = tmp_path / "picture.of.no.known.suffix"
    path.write_bytes(data)
    expected = image_patches(picture)
    for source in (data, bytearray(data), path, str(path)):
        assert np.array_equal(image_patches(source), expected)
        assert image_size(source) == (50, 20)
        assert num_image_tokens(source) == len(expected) == 2
