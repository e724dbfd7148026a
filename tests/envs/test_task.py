"""A task grades an exchange only if the environment said what it is claimed to have said."""

import pickle
import random
from functools import partial
from typing import Any

import pytest

from suzuri.envs.generators import arithmetic, tool_use
from suzuri.envs.graders import is_exchange, is_text
from suzuri.envs.task import (
    UNKNOWN_CALL,
    Message,
    Task,
    call_key,
    canonical_json,
    draw,
    split_of,
    strict_json,
)
from tests.architecture.source import ROOT, module_name, read_tree
from tests.architecture.without_torch import failed_imports


def asked(effort: float | None = None, **fields: Any) -> Task:
    given: dict[str, Any] = {
        "kind": "sums",
        "variant": "one",
        "difficulty": 0.0,
        "key": "2+2",
        "messages": ({"role": "user", "content": "2+2?"},),
        "target": ({"role": "assistant", "content": "4"},),
        "grader": partial(is_text, accepted=("4",)),
        "effort": effort,
    }
    return Task(**{**given, **fields})


def called(city: str, id: str = "a") -> Message:
    function = {"name": "get_time", "arguments": canonical_json({"city": city})}
    call = {"id": id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def told(content: str, id: str = "a") -> Message:
    return {"role": "tool", "tool_call_id": id, "name": "get_time", "content": content}


SAID: Message = {"role": "assistant", "content": "It is 9:15 in Rome."}


def with_tool() -> Task:
    key = call_key("get_time", {"city": "Rome"})
    return asked(
        target=(called("Rome"), told('{"time":"9:15"}'), SAID),
        grader=partial(is_exchange, rounds=((key,),), accepted=("It is 9:15 in Rome",)),
        replies={key: '{"time":"9:15"}'},
    )


def test_one_message_and_a_list_of_one_are_the_same():
    task = asked()
    assert task.grade({"role": "assistant", "content": "4"}) == 1.0
    assert task.grade([{"role": "assistant", "content": "4"}]) == 1.0
    assert task.grade({"role": "assistant", "content": "5"}) == 0.0


@pytest.mark.parametrize("broken", [[], {}, ["4"], [None], {"role": "user", "content": "4"}])
def test_what_is_no_answer_scores_nothing(broken: Any):
    assert asked().grade(broken) == 0.0


@pytest.mark.parametrize(("effort", "score"), [(0.0, 0.0), (0.1, 0.0), (0.2, 1.0), (None, 1.0)])
def test_thoughts_are_refused_where_none_are_wanted(effort: float | None, score: float):
    for name in ("reasoning_content", "reasoning"):
        assert asked(effort).grade({"role": "assistant", "content": "4", name: "2+2"}) == score


def test_an_exchange_goes_through_the_replies():
    task = with_tool()
    answer = called("Rome", "x7")
    reply = task.reply(answer)
    assert reply == (told('{"time":"9:15"}', "x7"),)
    assert task.reply(SAID) == ()
    assert task.grade([answer, *reply, SAID]) == 1.0
    assert task.grade(task.target) == 1.0


def test_forged_and_missing_results_score_nothing():
    task = with_tool()
    good = called("Rome")
    assert task.grade([good, told('{"time":"8:00"}'), SAID]) == 0.0
    assert task.grade([good, told('{"time":"9:15"}', "other"), SAID]) == 0.0
    assert task.grade([good, SAID]) == 0.0
    assert task.grade([SAID]) == 0.0
    assert task.grade([good]) == 0.0
    assert task.grade([good, told('{"time":"9:15"}')]) == 0.0
    assert task.grade([good, told('{"time":"9:15"}'), {"role": "user", "content": "ok"}]) == 0.0


def test_a_call_nobody_expects_is_told_so():
    task = with_tool()
    wrong = called("Oslo")
    assert [message["content"] for message in task.reply(wrong)] == [UNKNOWN_CALL]
    assert task.grade([wrong, told(UNKNOWN_CALL), SAID]) == 0.0
    retried = [wrong, told(UNKNOWN_CALL), called("Rome"), told('{"time":"9:15"}'), SAID]
    assert task.grade(retried) == 0.0


def test_a_conversation_is_for_training_only_if_all_of_it_is():
    train, held = "b", "g"
    assert (split_of(train), split_of(held)) == ("train", "held_out")
    assert asked(key=train).split == "train"
    assert asked(key=train, earlier_keys=(train, held)).split is None
    assert asked(key=held, earlier_keys=(train,)).split == "held_out"


def test_the_split_is_one_in_ten_and_never_changes():
    sides = [split_of(f"key {i}") for i in range(10_000)]
    assert sides.count("held_out") == 986
    assert [i for i in range(40) if sides[i] == "held_out"] == [5, 24]


def test_draw_keeps_to_its_side_and_says_when_there_is_nothing():
    for split in ("train", "held_out"):
        tasks = [draw(arithmetic.make, random.Random(i), 0.4, split) for i in range(50)]
        assert {split_of(task.key) for task in tasks} == {split}

    def stubborn(rng: random.Random, difficulty: float, variant: str | None = None) -> Task:
        return asked(key="b")

    with pytest.raises(ValueError, match="no held_out task in 2000 draws"):
        draw(stubborn, random.Random(0), 0.0, "held_out")


def test_a_task_survives_pickling():
    task = tool_use.make(random.Random(3), 0.5, "exchange")
    again = pickle.loads(pickle.dumps(task))
    assert (again.messages, again.target, again.key) == (task.messages, task.target, task.key)
    assert again.grade(again.target) == 1.0


def test_strict_json_takes_json_and_nothing_else():
    assert strict_json('{"a":[1,true,null]}') == {"a": [1, True, None]}
    for text in ('{"a":1,"a":2}', "NaN", "[Infinity]", "{'a':1}", "", "[" * 100_000, "1 2"):
        assert strict_json(text) is NotImplemented
    spellings = {call_key("f", {"n": value}) for value in (1, 1.0, True, "1")}
    assert len(spellings) == 4


def test_the_room_needs_no_torch():
    paths = [path for path in read_tree() if path.startswith("suzuri/envs/")]
    assert len(paths) > 15
    assert failed_imports([module_name(path) for path in paths], ROOT) == {}
