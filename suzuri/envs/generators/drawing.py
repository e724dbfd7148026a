"""Scenes of coloured shapes on a grid of 40-pixel cells, drawn with Pillow."""

import base64
import dataclasses
import functools
import io
import math
import random

from PIL import Image, ImageDraw

CELL = 40
"""Side of a cell in pixels: one patch, one token."""
MAX_TOKENS = 12
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 220, 50),
    "orange": (245, 140, 30),
    "purple": (140, 50, 170),
    "black": (20, 20, 20),
}
_BACKGROUNDS = ((255, 255, 255), (235, 235, 235), (250, 245, 225), (205, 215, 225), (160, 160, 160))
_ACROSS = {1: ("",), 2: ("left", "right"), 3: ("left", "middle", "right")}
_DOWN = {1: ("",), 2: ("top", "bottom"), 3: ("top", "middle", "bottom")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A shape in a cell (row, column); a big one fills two by two cells from there."""

    shape: str
    colour: str
    row: int
    column: int
    is_big: bool = False

    @property
    def words(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """Shapes from the top left on, on a grid of 1 to 3 rows and columns."""

    rows: int
    columns: int
    shapes: tuple[Placed, ...]

    @property
    def key(self) -> str:
        """Says all but what a drawing varies: sizes, shades, places within a cell."""
        shapes = (f"{s.words} {s.row} {s.column} {s.is_big}" for s in self.shapes)
        return f"{self.rows}x{self.columns}:{','.join(shapes)}"

    def where(self, shape: Placed) -> str:
        """The place of a shape: top left, middle, ...; empty where there is but one."""
        if shape.is_big:
            return ""
        down, across = _DOWN[self.rows][shape.row], _ACROSS[self.columns][shape.column]
        return "middle" if down == across else f"{down} {across}".strip()


def draw_scene(
    rng: random.Random, num_shapes: int, *, big: bool = False, apart: bool = False
) -> Scene:
    """A scene with so many shapes in cells of their own, no two alike. `apart`: on a grid of at
    least two cells even for one shape. `big`: that one fills two by two cells."""
    side = 2 if big else 1
    least = max(num_shapes, 2 if apart else 1)
    sizes = [(r, c) for r in range(side, 4) for c in range(side, 4) if r * c >= least]
    rows, columns = rng.choice(sizes)
    # Wherever a big one fits: in one place alone there would be so few scenes that a colour misses
    # a shape in training, and is then never said to have it.
    cells = [(r, c) for r in range(rows - side + 1) for c in range(columns - side + 1)]
    taken = rng.sample(cells, num_shapes)
    looks = rng.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], num_shapes)
    shapes = [
        Placed(
            shape=shape,
            colour=colour,
            row=row,
            column=column,
            is_big=big,
        )
        for (row, column), (shape, colour) in zip(taken, looks, strict=True)
    ]
    shapes.sort(key=lambda shape: (shape.row, shape.column))
    return Scene(rows=rows, columns=columns, shapes=tuple(shapes))


def png_url(scene: Scene, rng: random.Random) -> str:
    """The scene as a data: URL of a PNG of 1 to 12 tokens. Sizes, shades, places within a cell and
    the edge of the picture vary."""
    width, height = scene.columns * CELL, scene.rows * CELL
    # A width that is a multiple of the patch costs a column of padding.
    if rng.random() < 0.5:
        width -= rng.randint(1, 4)
    if rng.random() < 0.3:
        height -= rng.randint(1, 4)
    background = rng.choice(_BACKGROUNDS)
    image = Image.new("RGB", (width, height), background)
    canvas = ImageDraw.Draw(image)
    for placed in scene.shapes:
        _draw(canvas, placed, rng)
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _draw(canvas: ImageDraw.ImageDraw, placed: Placed, rng: random.Random) -> None:
    space = CELL * (2 if placed.is_big else 1)
    radius = rng.uniform(0.28, 0.44) * space
    slack = space / 2 - radius - 2
    x = placed.column * CELL + space / 2 + rng.uniform(-slack, slack)
    y = placed.row * CELL + space / 2 + rng.uniform(-slack, slack)
    r, g, b = (max(0, min(255, value + rng.randint(-14, 14))) for value in COLOURS[placed.colour])
    points = [(x + radius * px, y + radius * py) for px, py in _outline(placed.shape)]
    canvas.polygon(points, fill=(r, g, b))


@functools.cache
def _outline(shape: str) -> tuple[tuple[float, float], ...]:
    """Corners within a square from -1 to 1."""
    match shape:
        case "circle":
            turn = [2 * math.pi * i / 32 for i in range(32)]
            return tuple((math.cos(a), math.sin(a)) for a in turn)
        case "square":
            side = 0.86
            return ((-side, -side), (side, -side), (side, side), (-side, side))
        case "triangle":
            return ((0.0, -1.0), (1.0, 0.85), (-1.0, 0.85))
        case _:
            a, b = 0.33, 1.0
            upper = ((-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a))
            return (*upper, (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a))
