"""Which o200k ids a checkpoint has rows for, and how ids become rows.

A small checkpoint may keep a list of ids: all single-byte tokens, all special ids, and some others;
row = place in the list. Ids stay ordinary o200k ids everywhere. Text tokens outside the list are
replaced by their byte tokens before the model sees them, which spells the same bytes. A full
checkpoint has a `FullVocabulary` with the same methods, so no caller asks which one it has.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from suzuri.model.config import FIRST_SPECIAL, NUM_BYTE_TOKENS, NUM_IDS, lacking_ids
from suzuri.processing.tokenizer import check_ids, listed
from suzuri.types import Array


class KeptVocabulary:
    """`ids` ascending, with 0..255 (the single-byte tokens) and every special id among them."""

    def __init__(self, ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> None:
        check_ids(ids)
        disordered = [later for earlier, later in pairwise(ids) if later <= earlier]
        if disordered:
            raise ValueError(
                f"kept ids must ascend, each once; out of place or repeated: {listed(disordered)}"
            )
        missing = lacking_ids(ids)
        if missing:
            raise ValueError(
                "kept ids must include every single-byte token (0..255) and every special id "
                f"({FIRST_SPECIAL}..{NUM_IDS - 1}); missing: {listed(missing)}"
            )
        byte_ids = {token_bytes(id): id for id in range(NUM_BYTE_TOKENS)}
        if sorted(byte_ids) != [bytes([byte]) for byte in range(256)]:
            raise ValueError("this tokenizer's ids 0..255 are not the 256 single-byte tokens")
        self.ids = tuple(ids)
        self._row_of = {id: row for row, id in enumerate(ids)}
        self._rows_of_ids = np.full(NUM_IDS, -1, np.int64)
        self._rows_of_ids[list(ids)] = np.arange(len(ids))
        self._byte_ids = [byte_ids[bytes([byte])] for byte in range(256)]
        self._token_bytes = token_bytes

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    def expand(self, ids: Sequence[int]) -> list[int]:
        """Kept ids spelling the same bytes: each id that is not kept becomes its byte tokens."""
        check_ids(ids)
        expanded: list[int] = []
        for id in ids:
            if id in self._row_of:
                expanded.append(id)
            else:
                expanded.extend(self._byte_ids[byte] for byte in self._token_bytes(id))
        return expanded

    def to_rows(self, ids: Sequence[int]) -> list[int]:
        """The row of each id, all of which must be kept (see `expand`)."""
        unknown = sorted({id for id in ids if id not in self._row_of})
        if unknown:
            raise ValueError(
                f"ids without a row in this checkpoint's {self.num_rows}-token vocabulary, "
                f"expand them first: {listed(unknown)}"
            )
        return [self._row_of[id] for id in ids]

    def spelled_rows(self, ids: Sequence[int]) -> list[int]:
        """The rows of what `expand` makes of the ids."""
        return self.to_rows(self.expand(ids))

    def to_row_array(self, ids: Array) -> Array:
        """`to_rows` of an array of integers, int64 of its shape: quick for many ids."""
        is_id = (ids >= 0) & (ids < NUM_IDS)
        rows = np.where(is_id, self._rows_of_ids[np.where(is_id, ids, 0)], -1)
        if (rows < 0).any():
            self.to_rows(ids.reshape(-1).tolist())  # says which
        return rows

    def to_ids(self, rows: Sequence[int]) -> list[int]:
        _check_rows(rows, self.num_rows)
        return [self.ids[row] for row in rows]


class FullVocabulary:
    """Every id has a row, and the row is the id."""

    num_rows = NUM_IDS

    def expand(self, ids: Sequence[int]) -> list[int]:
        check_ids(ids)
        return list(ids)

    def to_rows(self, ids: Sequence[int]) -> list[int]:
        check_ids(ids)
        return list(ids)

    def spelled_rows(self, ids: Sequence[int]) -> list[int]:
        return self.to_rows(ids)  # checked once: of a long prompt each pass is felt

    def to_row_array(self, ids: Array) -> Array:
        check_ids(ids.reshape(-1).tolist())
        return ids.astype(np.int64)

    def to_ids(self, rows: Sequence[int]) -> list[int]:
        _check_rows(rows, self.num_rows)
        return list(rows)


Vocabulary = KeptVocabulary | FullVocabulary


class Speller:
    """Spells ids as `expand` does, each looked up once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, tuple[int, ...]] = {}

    def spelled(self, ids: Sequence[int]) -> tuple[list[int], Array]:
        """Ids that the vocabulary keeps, and where among them each of the given begins."""
        spellings = [self._spelling(id) for id in ids]
        ends = np.cumsum([len(spelling) for spelling in spellings], dtype=np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        return [id for spelling in spellings for id in spelling], starts

    def _spelling(self, id: int) -> tuple[int, ...]:
        found = self._known.get(id)
        if found is None:
            found = self._known[id] = tuple(self._vocabulary.expand([id]))
        return found


def vocabulary_of(
    kept_ids: Sequence[int] | None, token_bytes: Callable[[int], bytes]
) -> Vocabulary:
    """For a checkpoint that carries this list of kept ids, or none."""
    return FullVocabulary() if kept_ids is None else KeptVocabulary(kept_ids, token_bytes)


def _check_rows(rows: Sequence[int], num_rows: int) -> None:
    wrong = sorted({row for row in rows if not 0 <= row < num_rows})
    if wrong:
        raise ValueError(
            f"rows outside 0..{num_rows - 1}, so padding was sampled or the row counts of model "
            f"and vocabulary differ: {listed(wrong)}"
        )
