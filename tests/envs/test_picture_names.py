"""Pictures to be described: the stream, its split, and what is right."""

from typing import Any

import pytest

from suzuri.envs.generators import pictures
from suzuri.envs.picture_names import WORDINGS, PictureNames
from suzuri.envs.task import split_of


def test_places_are_tasks_of_their_own_in_other_words() -> None:
    stream = PictureNames(seed=3)
    tasks = [stream.task(place) for place in range(40)]
    assert stream.size is None
    assert tasks[7].messages == PictureNames(seed=3).task(7).messages
    assert tasks[7].messages != PictureNames(seed=4).task(7).messages
    said = [part["text"] for t in tasks for part in t.messages[-1]["content"] if "text" in part]
    assert said[: len(WORDINGS)] == list(WORDINGS)
    taught = {wording for family in pictures._WORDINGS.values() for wording in family}
    assert not set(WORDINGS) & taught
    for task in tasks:
        kinds = sorted(part["type"] for part in task.messages[-1]["content"])
        assert kinds == ["image_url", "text"] and task.effort == 0.0


def test_training_and_held_out_scenes_are_apart() -> None:
    for split in ("train", "held_out"):
        stream = PictureNames(split=split)
        assert {split_of(stream.task(place).key) for place in range(30)} == {split}


def test_each_shape_with_its_colour_is_right_and_less_or_more_is_not() -> None:
    task = PictureNames().task(0)
    right = str(task.target[0]["content"])

    def grade(text: str) -> float:
        return task.grade([{"role": "assistant", "content": text}])

    assert grade(right) == grade(right.capitalize() + ".") == 1.0
    without_colours = " and ".join(f"a {one.split()[-1]}" for one in right.split(" and "))
    for wrong in (without_colours, f"{right} {right}", f"{right} and a cat", "", "1"):
        assert grade(wrong) == 0.0


@pytest.mark.parametrize(("field", "value"), [("wordings", ()), ("split", "test")])
def test_fields_name_what_is_wrong(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        PictureNames(**{field: value})
