"""reasoning-gym in a process of its own (workers.py): what gym.py asks for. No torch here.

There its items are the same every time, for some depend on the order of sets, which depends on the
process; and there a generator or scorer that hangs can be ended.
"""

# pyright: strict

import dataclasses
import difflib
import functools
import importlib
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from suzuri.envs.task import Split, split_of

MOST_DRAWS = 500
"""Items of a place that are looked at for one of the right side of the split."""
MOST_TIMES, MOST_MORE = 4, 100
"""Characters of a text: so many times those of the item's own answer, and so many more."""
ROUNDING = 1e-6
"""A score may be off by: spell_backward has said 1.0000000000000002."""
REFUSED = {
    "composite": "give several families and their weights instead",
    "game_of_life_halting": 'its scorer takes any text for "no"',
}


def check(families: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What is wrong with the names or settings, or None."""
    known = [name for name in _registry() if name not in REFUSED]
    for name, settings in families.items():
        if name in REFUSED:
            return f"family {name!r} is not used: {REFUSED[name]}"
        if name not in known:
            near = difflib.get_close_matches(name, known, 5, 0.4) or known
            return f"no family {name!r}; near it: {', '.join(near)}"
        if own := sorted({"seed", "size"} & set(settings)):
            return f"settings of {name}: {', '.join(own)} cannot be set; give Gym a seed"
        fields = [field.name for field in dataclasses.fields(_registry()[name][1])]
        for setting in settings:
            if setting not in fields:
                near = difflib.get_close_matches(setting, fields, 5, 0.4) or fields
                return f"settings of {name}: no {setting!r}; near it: {', '.join(near)}"
        try:
            _dataset(name, json.dumps(settings), 0)
        except (TypeError, ValueError, AssertionError) as error:
            return f"settings of {name}: {error or type(error).__name__}"
    return None


def item(family: str, settings: str, seed: int, split: Split) -> dict[str, Any]:
    """{"index", "question", "key"} of the first item of that seed that is on that side of the
    split, and whose own answer, where it has one, its scorer takes."""
    for index in range(MOST_DRAWS):
        entry = entry_of(family, settings, seed, index)
        question = str(entry["question"])
        key = f"{family}:{question}"
        if split_of(key) != split:
            continue
        answer: object = entry["answer"]
        if answer is None or score(family, settings, seed, index, str(answer)) == 1.0:
            return {"index": index, "question": question, "key": key}
    raise ValueError(f"no {split} item of {family} in {MOST_DRAWS} draws")


def score(family: str, settings: str, seed: int, index: int, text: str) -> float:
    """What the family's own scorer says of the text; 0 of one that is far longer than the answer,
    for some look for it within the text. Raises what it raises, ValueError for what is no number
    from 0 to 1."""
    entry = entry_of(family, settings, seed, index)
    _seed(seed)
    own: object = entry["answer"]
    if own is not None and len(text) > MOST_TIMES * len(str(own)) + MOST_MORE:
        return 0.0
    found = float(_dataset(family, settings, seed).score_answer(text, dict(entry)))
    if not -ROUNDING <= found <= 1 + ROUNDING:
        raise ValueError(f"the scorer of {family} said {found}")
    return 1.0 if found > 1 - ROUNDING else max(found, 0.0)


def _library() -> Any:
    return importlib.import_module("reasoning_gym")  # an extra, so it may not be there


def _registry() -> Mapping[str, Any]:
    return _library().factory.DATASETS


@functools.lru_cache(maxsize=16)
def _dataset(family: str, settings: str, seed: int) -> Any:
    _seed(seed)
    fields = json.loads(settings)
    return _library().create_dataset(family, **fields, seed=seed, size=MOST_DRAWS)


@functools.lru_cache(maxsize=256)
def entry_of(family: str, settings: str, seed: int, index: int) -> dict[str, Any]:
    """The item as the library has it."""
    _seed(seed + index)
    return _dataset(family, settings, seed)[index]


def _seed(seed: int) -> None:
    """For what draws from the generators of the process instead of its own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
