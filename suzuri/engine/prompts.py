"""The forms in which a prompt may be given, as ids and media that an engine takes."""

import dataclasses
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from suzuri.engine.request import Media
from suzuri.processing.chat import Rendered
from suzuri.processing.media import Kind, MediaReader, PlacedMedia, match_places
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import Vocabulary

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, ids, {"prompt": text} or {"prompt_token_ids": ids}; a mapping may also have
"multi_modal_data" and "cache_salt"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prompt in the ids that the model has rows for. text: None unless text was given."""

    text: str | None
    token_ids: list[int]
    media: list[Media]
    salt: str | None = None


def is_one_prompt(prompts: object) -> bool:
    """Whether this is a prompt rather than a list of them."""
    if isinstance(prompts, str | Mapping):
        return True
    if not isinstance(prompts, Sequence):
        return False
    items = cast("Sequence[object]", prompts)
    return len(items) > 0 and all(_is_whole(item) for item in items)


def prepare(
    prompt: object, tokenizer: Tokenizer, vocabulary: Vocabulary, reader: MediaReader
) -> Prepared:
    """Raises ValueError that says what is wrong with the prompt."""
    if isinstance(prompt, str):
        return _prepared(prompt, tokenizer.encode(prompt), vocabulary)
    if isinstance(prompt, Mapping):
        return _from_mapping(cast("Mapping[Any, Any]", prompt), tokenizer, vocabulary, reader)
    return _prepared(None, _token_ids(prompt), vocabulary)


def prepare_chat(rendered: Rendered, vocabulary: Vocabulary, reader: MediaReader) -> Prepared:
    """A rendered conversation."""
    ids = vocabulary.expand(rendered.token_ids)
    return Prepared(text=None, token_ids=ids, media=_media(ids, rendered.media, reader))


def _from_mapping(
    prompt: Mapping[Any, Any], tokenizer: Tokenizer, vocabulary: Vocabulary, reader: MediaReader
) -> Prepared:
    known = ("prompt", "prompt_token_ids", "multi_modal_data", "cache_salt")
    for key, value in prompt.items():
        if key not in known and value is not None:
            raise ValueError(f"{key!r} is no part of a prompt; there are {', '.join(known)}")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt = {text!r}: must be a string; ids go into prompt_token_ids")
    if ids is None and text is None:
        raise ValueError("a prompt needs 'prompt' or 'prompt_token_ids'")
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise ValueError(f"cache_salt = {salt!r}: must be a string")
    # As in vLLM, ids that come with their text are taken as they are.
    plain = _token_ids(ids) if ids is not None else tokenizer.encode(text or "")
    prepared = _prepared(text, plain, vocabulary, salt)
    data = prompt.get("multi_modal_data")
    if not data:
        return prepared
    items = [reader.source(kind, value) for kind, value in _given(data)]
    counts: list[tuple[Kind, int]] = [(item.kind, reader.count(item)) for item in items]
    places = match_places(prepared.token_ids, counts, reader.slots)
    placed = [reader.place(item, *place) for item, place in zip(items, places, strict=True)]
    return dataclasses.replace(prepared, media=_media(prepared.token_ids, placed, reader))


def _prepared(
    text: str | None, ids: list[int], vocabulary: Vocabulary, salt: str | None = None
) -> Prepared:
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    return Prepared(text=text, token_ids=vocabulary.expand(ids), media=[], salt=salt)


_KINDS: dict[object, Kind] = {"image": "image", "audio": "audio"}


def _given(data: object) -> list[tuple[Kind, Any]]:
    """The items of multi_modal_data: under "image" and "audio" one each, or a list."""
    if not isinstance(data, Mapping):
        raise ValueError("multi_modal_data must be an object with 'image' and 'audio'")
    found: list[tuple[Kind, Any]] = []
    for key, value in cast("Mapping[object, Any]", data).items():
        kind = _KINDS.get(key)
        if kind is None:
            raise ValueError(f"multi_modal_data: there is no {key!r}; there are image and audio")
        items = cast("list[Any]", value) if isinstance(value, list) else [value]
        found.extend((kind, item) for item in items if item is not None)
    return found


def _media(ids: list[int], placed: Sequence[PlacedMedia], reader: MediaReader) -> list[Media]:
    """Media at their places among expanded ids, where text may have become longer."""
    if not placed:
        return []
    places = match_places(ids, [(item.kind, item.count) for item in placed], reader.slots)
    return [
        Media(index=index, count=count, kind=item.kind, digest=item.digest, inputs=item.inputs)
        for item, (index, count) in zip(placed, places, strict=True)
    ]


def _token_ids(ids: object) -> list[int]:
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        called = type(cast("object", ids)).__name__
        raise ValueError(f"a prompt of type {called}; give text or token ids")
    items = list(cast("Iterable[object]", ids))
    wrong = [item for item in items if not _is_whole(item)]
    if wrong:
        raise ValueError(f"prompt token {wrong[0]!r} is not an integer")
    return [int(cast("int", item)) for item in items]


def _is_whole(item: object) -> bool:
    return isinstance(item, numbers.Integral) and item is not True and item is not False
