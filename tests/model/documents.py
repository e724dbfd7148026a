"""config.json documents with something changed, for the tests of the config."""

import copy
from typing import Any

import pytest

from suzuri.model.config import PRESETS, ModelConfig


def document(name: str = "tiny", **text: Any) -> dict[str, Any]:
    """A preset's document with fields of its text block replaced."""
    values = copy.deepcopy(PRESETS[name].to_dict())
    values["text_config"] |= text
    return values


def without(values: dict[str, Any], *path: str) -> dict[str, Any]:
    block = values
    for key in path[:-1]:
        block = block[key]
    del block[path[-1]]
    return values


def with_value(values: dict[str, Any], value: Any, *path: str) -> dict[str, Any]:
    block = values
    for key in path[:-1]:
        block = block[key]
    block[path[-1]] = value
    return values


def refused(values: dict[str, Any], *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_dict(values)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
