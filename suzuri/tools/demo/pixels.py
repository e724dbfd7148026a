"""Pictures in a terminal: two pixels per character, as half blocks in two colours."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.style import Style
from rich.text import Text

from suzuri.processing.audio import audio_bins

UPPER_HALF = "\u2580"
PIXELS_ACROSS = 60
SHRINK = 3
BAND_ROWS = 20


def show_picture(console: Console, data: bytes) -> None:
    """A picture, shrunk to a third; nothing where the output shows no colours."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    width = min(image.width // SHRINK, PIXELS_ACROSS, console.width)
    height = max(image.height * width // image.width, 1)
    _show(console, np.asarray(image.resize((width, height), Image.Resampling.BOX)))


def show_sound(console: Console, data: bytes) -> None:
    """What the model hears: a column per frame of 50 ms, high pitches on top, loud ones bright."""
    bins = audio_bins(data).astype(np.float64)  # [frames, bands], levels 0 to 15
    rows = bins.reshape(len(bins), BAND_ROWS, -1).max(axis=2).T[::-1]
    rows = rows[:, : console.width // 2 - 1].repeat(2, axis=1)  # two characters are a square
    light = (rows - rows.min()) / max(rows.max() - rows.min(), 1.0)
    colours = np.stack([light**2, light**2, 0.2 + 0.8 * light], axis=2)
    _show(console, np.rint(colours * 255).astype(np.uint8))


def _show(console: Console, pixels: NDArray[np.uint8]) -> None:
    """Colours [height, width, 3], line by line."""
    if console.color_system is None or not console.encoding.lower().startswith("utf"):
        return
    if len(pixels) % 2:
        pixels = np.concatenate([pixels, pixels[-1:]])
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        line = Text("  ")
        for above, below in zip(upper.tolist(), lower.tolist(), strict=True):
            line.append(UPPER_HALF, Style(color=_name(above), bgcolor=_name(below)))
        console.print(line)


def _name(colour: list[int]) -> str:
    red, green, blue = colour
    return f"#{red:02x}{green:02x}{blue:02x}"
