"""How the vocabulary is cut, so that the logits of a slice fit one buffer."""

from collections.abc import Iterator

CHUNK = 2048
"""Ids of a chunk of the log-softmax (docs/exactness.md rule 7); slices are whole chunks."""
BUFFER_BYTES = 32 << 20
"""Logits that exist at one time."""


def slice_columns(rows: int, itemsize: int = 4, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Ids of a slice for so many rows: as many chunks as fit, at least one."""
    return CHUNK * max(1, buffer_bytes // (max(1, rows) * CHUNK * itemsize))


def slices(rows: int, vocabulary: int, width: int | None = None) -> Iterator[tuple[int, int]]:
    """(first id, end) of each slice. All columns at once where they fit, though the last chunk be
    short."""
    if width is None:
        fits = rows * vocabulary * 4 <= BUFFER_BYTES
        width = vocabulary if fits else slice_columns(rows)
    for first in range(0, vocabulary, max(1, width)):
        yield first, min(first + width, vocabulary)
