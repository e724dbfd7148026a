"""Kept vocabularies: what may be kept, and that text survives the way to rows and back."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.model.config import FIRST_SPECIAL, NUM_IDS, preset
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import (
    FullVocabulary,
    KeptVocabulary,
    vocabulary_of,
)

CHATS = json.loads((Path(__file__).parents[1] / "golden" / "chat.json").read_text())
TOKENIZER = Tokenizer()


def tiny_kept_ids() -> list[int]:
    """The list of the preset `tiny`."""
    kept = preset("tiny").kept_vocabulary
    assert kept is not None
    return list(kept)


TINY = KeptVocabulary(tiny_kept_ids(), TOKENIZER.token_bytes)


def test_ids_0_to_255_are_exactly_the_single_byte_tokens() -> None:
    lengths = [len(TOKENIZER.token_bytes(id)) for id in range(FIRST_SPECIAL)]
    assert [id for id, length in enumerate(lengths) if length == 1] == list(range(256))
    assert len({TOKENIZER.token_bytes(id) for id in range(256)}) == 256


def test_the_tiny_list() -> None:
    ids = tiny_kept_ids()
    assert len(ids) == len(set(ids)) == TINY.num_rows == 1000
    assert ids[939:941] == [939, 199998]
    assert ids[-1] == 200057
    assert TINY.to_rows([0, 939, 199998, 200006, 200057]) == [0, 939, 940, 948, 999]


def test_an_id_that_is_not_kept_becomes_its_bytes() -> None:
    text = " extraordinary 日本"
    ids = TOKENIZER.encode(text)
    assert any(id not in TINY.ids for id in ids)
    expanded = TINY.expand([200000, *ids, 200010])
    assert expanded[0] == 200000
    assert expanded[-1] == 200010
    byte_ids = {TOKENIZER.token_bytes(id)[0]: id for id in range(256)}
    expected: list[int] = []
    for id in ids:
        expected += [id] if id < 940 else [byte_ids[byte] for byte in TOKENIZER.token_bytes(id)]
    assert expanded[1:-1] == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives_expansion_and_rows(text: str) -> None:
    expanded = TINY.expand(TOKENIZER.encode(text))
    assert TOKENIZER.decode_bytes(expanded) == text.encode()
    rows = TINY.to_rows(expanded)
    assert all(0 <= row < 1000 for row in rows)
    assert TINY.to_ids(rows) == expanded
    assert TINY.expand(expanded) == expanded


@settings(max_examples=100, deadline=None)
@given(
    extra=st.sets(st.integers(256, FIRST_SPECIAL - 1), max_size=40),
    ids=st.lists(st.integers(0, NUM_IDS - 1), max_size=40),
)
def test_any_kept_list_and_any_ids(extra: set[int], ids: list[int]) -> None:
    kept = [*range(256), *sorted(extra), *range(FIRST_SPECIAL, NUM_IDS)]
    vocabulary = KeptVocabulary(kept, TOKENIZER.token_bytes)
    assert vocabulary.num_rows == len(kept)
    assert vocabulary.to_ids(range(len(kept))) == kept
    expanded = vocabulary.expand([*ids, *extra])
    assert TOKENIZER.decode_bytes(expanded) == TOKENIZER.decode_bytes([*ids, *extra])
    assert expanded[len(expanded) - len(extra) :] == [*extra]
    assert vocabulary.to_ids(vocabulary.to_rows(expanded)) == expanded


@pytest.mark.parametrize("index", range(len(CHATS["render"])))
def test_recorded_chats_survive(index: int) -> None:
    ids = CHATS["render"][index]["token_ids"]
    expanded = TINY.expand(ids)
    assert TOKENIZER.decode(TINY.to_ids(TINY.to_rows(expanded))) == CHATS["render"][index]["text"]
    specials = [id for id in ids if id >= FIRST_SPECIAL]
    assert [id for id in expanded if id >= FIRST_SPECIAL] == specials


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: ids[::-1], "must ascend.*out of place or repeated: 200056, 200055"),
        (lambda ids: [*ids[:300], 299, *ids[300:]], "out of place or repeated: 299$"),
        (lambda ids: [*ids, 200058], r"not token ids \(0\.\.200057\): 200058$"),
        (lambda ids: [-3, *ids], "not token ids .*: -3$"),
        (lambda ids: [id for id in ids if id not in (17, 255)], "missing: 17, 255$"),
        (lambda ids: [id for id in ids if id != 200006], "missing: 200006$"),
        (lambda ids: ids[256:], "missing: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 246 more$"),
        (lambda ids: [], "missing: 0, 1"),
    ],
)
def test_a_list_that_cannot_work_is_refused_by_its_ids(change, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KeptVocabulary(change(tiny_kept_ids()), TOKENIZER.token_bytes)


def test_another_tokenizer_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"ids 0\.\.255 are not the 256 single-byte tokens"):
        KeptVocabulary(tiny_kept_ids(), lambda id: b"ab" if id == 9 else TOKENIZER.token_bytes(id))


def test_ids_and_rows_without_a_place_are_named() -> None:
    with pytest.raises(ValueError, match=r"1000-token vocabulary, expand them first: 940, 12194$"):
        TINY.to_rows([5, 12194, 940, 12194])
    with pytest.raises(ValueError, match=r"rows outside 0\.\.999, .*: -1, 1000$"):
        TINY.to_ids([999, 1000, -1])
    with pytest.raises(ValueError, match=r"not token ids .*: 200058$"):
        TINY.expand([200058])


def test_a_full_vocabulary_passes_everything_through() -> None:
    full = vocabulary_of(None, TOKENIZER.token_bytes)
    assert isinstance(full, FullVocabulary)
    assert isinstance(vocabulary_of(tiny_kept_ids(), TOKENIZER.token_bytes), KeptVocabulary)
    ids = [0, 255, 940, 12194, 199997, 200057]
    assert full.expand(ids) == full.to_rows(ids) == full.to_ids(ids) == ids
    assert full.num_rows == 200058
    for function in (full.expand, full.to_rows):
        with pytest.raises(ValueError, match=r"not token ids .*: 200058$"):
            function([1, 200058])
    with pytest.raises(ValueError, match=r"rows outside 0\.\.200057, so padding was sampled"):
        full.to_ids([201023])
