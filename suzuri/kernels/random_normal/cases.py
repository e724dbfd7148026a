"""Arguments for random_normal."""

SHAPES = {
    # name: (seed, stream, first, count)
    "tiny": (0, 1, 0, 40),
    "odd": (7, 0xFFFFFFFF, 13, 21),
    "one": (2**63 - 1, 3, 9, 1),
    "none": (1, 2, 8, 0),
    "far": (5, 6, 2**40 + 3, 64),
    "large": (0, 0, 0, 1 << 22),
}


def build(name: str) -> dict[str, int]:
    """Keyword arguments of case `name`, without the device."""
    return dict(zip(("seed", "stream", "first", "count"), SHAPES[name], strict=True))
