"""config.json documents with something changed, for the tests of the config."""

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import strategies as st

from suzuri.model.config import PRESETS, ModelConfig, Quantization, Spelling

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def document(name: str = "tiny", spelling: Spelling = "released", /, **text: Any) -> dict[str, Any]:
    """A preset's document with fields of its text block replaced."""
    values = copy.deepcopy(PRESETS[name].to_dict(spelling))
    values["text_config"] |= text
    return values


def text_only(name: str = "tiny") -> ModelConfig:
    """A preset without towers."""
    return dataclasses.replace(PRESETS[name], audio=None, vision=None)


def quantised(
    names: str = "modelopt", layers: tuple[int, ...] = (3, 4, 5), config: ModelConfig | None = None
) -> ModelConfig:
    """A config, if not given that of tiny, with the experts of some layers as NVFP4."""
    quantization = Quantization(names=names, layers=layers)
    return dataclasses.replace(config or PRESETS["tiny"], quantization=quantization)


def paths(values: Any, *before: str) -> list[tuple[str, ...]]:
    """The path of every field of a document and of the objects in it."""
    if not isinstance(values, dict):
        return []
    found: list[tuple[str, ...]] = []
    for key, value in values.items():
        found += [(*before, key), *paths(value, *before, key)]
    return found


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
