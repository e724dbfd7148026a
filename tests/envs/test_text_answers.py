"""The answers of text tasks, worked out here in another way."""

import random
import re
from typing import Any

import pytest

from suzuri.envs.generators import arithmetic, conversations, json_answers, stories, strings
from suzuri.envs.generators.digit_steps import (
    add_steps,
    divide_steps,
    multiply_steps,
    subtract_steps,
)
from suzuri.envs.task import Task, strict_json

EQUATION = re.compile(r"(\d+(?:[-+*/]\d+)+)=(\d+)")


def drawn(make: Any, variant: str, count: int = 60) -> list[Task]:
    return [make(random.Random(seed), 1.0, variant) for seed in range(count)]


def prompt(task: Task) -> str:
    return task.messages[-1]["content"]


def answer(task: Task) -> str:
    return task.target[-1]["content"]


def worked_out(formula: str) -> int:
    """Products and quotients first, then from the left."""
    terms = [re.split(r"([*/])", part) for part in re.split(r"(?=[-+])", formula)]
    total = 0
    for part in terms:
        value = int(part[0])
        for sign, factor in zip(part[1::2], part[2::2], strict=True):
            value = value * int(factor) if sign == "*" else value // int(factor)
        total += value
    return total


def test_steps_as_on_paper():
    assert add_steps(47, 38) == "47+38: 7+8=15, write 5, carry 1. 4+3+1=8, write 8. So 85."
    assert add_steps(95, 7) == "95+7: 5+7=12, write 2, carry 1. 9+0+1=10, write 10. So 102."
    assert add_steps(3, 4) == "3+4=7."
    assert subtract_steps(52, 38) == "52-38: 2-8, borrow, 12-8=4. 5-1-3=1. So 14."
    assert subtract_steps(300, 1) == (
        "300-1: 0-1, borrow, 10-1=9. 0-1-0, borrow, 10-1-0=9. 3-1-0=2. So 299."
    )
    assert subtract_steps(3, 5) == "3 is less than 5, so minus. 5-3=2. So -2."
    assert multiply_steps(7, 46) == "46*7: 40*7=280, 6*7=42, 280+42=322. So 322."
    assert multiply_steps(12, 34) == "34*12: 34*10=340, 34*2=68, 340+68=408. So 408."
    assert multiply_steps(20, 10) == "20*10: 20*10=200, 20*0=0, 200+0=200. So 200."
    assert divide_steps(56, 7) == "56/7: 8*7=56. So 8."


@pytest.mark.parametrize("variant", arithmetic.VARIANTS)
def test_every_equation_in_the_thoughts_holds(variant: str):
    equations = 0
    for task in drawn(arithmetic.make, variant):
        thinking = task.target[0].get("reasoning_content", "")
        for formula, value in EQUATION.findall(thinking):
            assert worked_out(formula) == int(value)
            equations += 1
        if thinking:
            assert re.findall(r"-?\d+", thinking)[-1].lstrip("-") == answer(task).lstrip("-")
    assert equations > 20


def test_sums_are_right_and_of_their_size():
    seen = 0
    for variant in arithmetic.VARIANTS:
        for task in drawn(arithmetic.make, variant):
            found = re.search(r"\d+(?: ?[-+*/x:] ?\d+)+", prompt(task))
            if found is None:
                continue
            formula = found[0].replace(" ", "").replace("x", "*").replace(":", "/")
            assert worked_out(formula) == int(answer(task))
            digits = max(len(number) for number in re.findall(r"\d+", formula))
            if variant[-1].isdigit() and variant.startswith(("add", "subtract")):
                assert digits == int(variant[-1])
            seen += 1
    assert seen > 300


def test_word_problems_are_right():
    signs = {"add2": int.__add__, "subtract2": int.__sub__, "multiply2": int.__mul__}
    for variant, act in signs.items():
        for task in drawn(arithmetic.make, variant, 100):
            numbers = [int(number) for number in re.findall(r"\d+", prompt(task))]
            if variant == "subtract2":
                numbers.sort(reverse=True)
            assert act(*numbers) == int(answer(task))


def items_of(task: Task) -> list[str]:
    items = task.key.split(":")[-1].replace(", ", ",").split(",")
    assert ", ".join(items) in prompt(task)
    return items


def test_lists_are_sorted_reversed_and_counted():
    for task in drawn(strings.make, "sort_words"):
        given, said = items_of(task), answer(task).split(", ")
        assert said == sorted(given, key=str.lower)
    for task in drawn(strings.make, "reverse_list"):
        assert answer(task).split(", ") == items_of(task)[::-1]
    for task in drawn(strings.make, "count_list"):
        assert int(answer(task)) == len(items_of(task))
    for task in drawn(strings.make, "sort_numbers"):
        numbers = [int(item) for item in items_of(task)]
        falling = re.search(
            "large to small|falling|desc|largest (to|first)|high to|backw", prompt(task)
        )
        falling = falling or "largest first" in prompt(task)
        assert [int(n) for n in answer(task).split(", ")] == sorted(numbers, reverse=bool(falling))
    for task in drawn(strings.make, "extreme"):
        numbers = [int(number) for number in re.findall(r"\d+", prompt(task))]
        largest = re.search("largest|biggest", prompt(task))
        assert int(answer(task)) == (max(numbers) if largest else min(numbers))


def test_letters_are_counted_and_turned():
    for task in drawn(strings.make, "reverse_word"):
        assert answer(task)[::-1] in prompt(task)
    for task in drawn(strings.make, "spell"):
        assert answer(task).replace("-", "") in prompt(task)
    for task in drawn(strings.make, "capitals"):
        assert answer(task).isupper() and answer(task).lower() in prompt(task)
    for task in drawn(strings.make, "copy"):
        assert f'"{answer(task)}"' in prompt(task)
    for task in drawn(strings.make, "count_letter"):
        letter, word = task.key.split(":")[2:]
        assert word in prompt(task) and word.count(letter) == int(answer(task))
    for task in drawn(strings.make, "nth_letter"):
        place, word = task.key.split(":")[2:]
        ordinal = {-1: "last", 0: "first", 1: "second", 2: "third", 3: "fourth", 4: "fifth"}
        assert ordinal[int(place)] in prompt(task) and word[int(place)] == answer(task)


GIVES = (r"(\w+) (?:gives|hands|passes) the (\w+) to (\w+)\.", r"(\w+) gives (\w+) the (\w+)\.")


def told(story: str) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Owners of things, places of people, colours of things, read sentence by sentence."""
    owner: dict[str, str] = {}
    place: dict[str, str] = {}
    colour: dict[str, str] = {}
    last = ""
    for sentence in re.findall(r"[A-Z][^.?\n]*\.", story):
        if m := re.fullmatch(
            r"(\w+) and (\w+) swap: \w+ gets the (\w+) and \w+ gets the (\w+)\.", sentence
        ):
            owner[m[3]], owner[m[4]] = m[1], m[2]
        elif m := re.fullmatch(r"(\w+) (?:takes|gets) the (\w+) from \w+\.", sentence):
            owner[m[2]] = m[1]
        elif m := re.fullmatch(r"(\w+) (?:takes|picks up|finds|has) the (\w+)\.", sentence):
            owner[m[2]], last = m[1], m[2]
        elif m := re.fullmatch(GIVES[0], sentence):
            owner[m[2]] = m[3]
        elif m := re.fullmatch(GIVES[1], sentence):
            owner[m[3]] = m[2]
        elif m := re.fullmatch(
            r"(\w+) (?:goes|walks|runs|moves|is) (?:to|in) the (\w+)\.", sentence
        ):
            place[m[1]] = m[2]
        elif sentence in ("The sky is grey.", "The wind is cold.", "It is a sunny day."):
            continue
        elif m := re.fullmatch(
            r"The (?:colour is|\w+ is|\w+ looks) (\w+)\.|It is an? (\w+) \w+\.", sentence
        ):
            colour[last] = m[1] or m[2]
    return owner, place, colour


@pytest.mark.parametrize("variant", stories.VARIANTS)
def test_stories_answer_their_questions(variant: str):
    for task in drawn(stories.make, variant):
        owner, place, colour = told(task.key.split(":", 3)[3] if variant != "has_it" else task.key)
        about = task.key.split(":")[2]
        expected: str
        match variant:
            case "who_has":
                expected = owner[about]
            case "where_person":
                expected = place[about]
            case "where_thing":
                expected = place[owner[about]]
            case "colour":
                expected = colour[task.key.split(":")[3]]
            case "how_many":
                expected = str(list(owner.values()).count(about))
            case "what_has":
                held = [thing for thing, who in owner.items() if who == about]
                expected = held[0] if held else "nothing"
            case "has_it":
                person, thing = task.key.split(":")[2:4]
                owner, _, _ = told(task.key.split(":", 4)[4])
                expected = "yes" if owner[thing] == person else "no"
            case _:
                thing, taker = task.key.split(":")[2:4]
                gave = rf"(\w+) (?:\w+ the {thing} to {taker}|gives {taker} the {thing})\."
                givers = re.findall(gave, task.key)
                assert len(givers) == 1
                expected = givers[0]
        assert task.grade({"role": "assistant", "content": expected}) == 1.0
        assert expected in answer(task).lower() or expected in answer(task)


def test_long_stories_pass_the_floor_of_the_log_scaling():
    lengths = [len(prompt(task).split()) for task in drawn(stories.make, "who_has", 200)]
    assert max(lengths) > 500 and sorted(lengths)[100] < 150


@pytest.mark.parametrize("variant", json_answers.VARIANTS)
def test_json_answers_fit_their_forms(variant: str):
    for task in drawn(json_answers.make, variant):
        text = prompt(task)
        forms = [
            strict_json(text[i:j])
            for i in [text.index("{")]
            for j in range(len(text), i, -1)
            if text[j - 1] == "}"
        ]
        form: Any = next(form for form in forms if form is not NotImplemented)
        value: Any = strict_json(answer(task))
        keys = list(form["properties"]) if form.get("type") == "object" else list(form)
        assert list(value) == keys
        for item in leaves(value):
            if not isinstance(item, bool):
                assert str(item) in text


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_conversations_have_turns_and_a_memory():
    turns = {"two": 2, "three": 3, "five": 5, "recall": 4}
    for variant, count in turns.items():
        for task in drawn(conversations.make, variant, 20):
            roles = [message["role"] for message in task.messages]
            assert roles.count("user") == count and roles.count("assistant") == count - 1
            assert len(task.earlier_keys) == count - 1
    for task in drawn(conversations.make, "recall", 20):
        who = answer(task).removeprefix("Your name is ").removesuffix(".")
        first = next(m["content"] for m in task.messages if m["role"] == "user")
        assert who in first and who not in prompt(task)
