"""How the vocabulary is cut, so that the logits of a slice fit one buffer."""

from collections.abc import Iterator

CHUNK = 2048
"""Ids of a chunk of the log-softmax (docs/exactness.md rule 7); slices are whole chunks."""
BUFFER_BYTES = 32 << 20
"""fp32 logits that exist at one time."""


def slices(rows: int, vocabulary: int, width: int | None = None) -> Iterator[tuple[int, int]]:
    """(first id, end) of each slice: all ids where their logits fit the buffer, else as many chunks
    as fit, at least one. `width` ids each where it is given."""
    room = BUFFER_BYTES // (4 * max(1, rows))
    if width is None:
        width = vocabulary if vocabulary <= room else CHUNK * max(1, room // CHUNK)
    for first in range(0, vocabulary, max(1, width)):
        yield first, min(first + width, vocabulary)
