"""What every kind of task must hold, whatever it asks."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from suzuri.envs.generators import knowledge, pictures, small_talk, sounds
from suzuri.envs.generators.kinds import KINDS, VARIANTS
from suzuri.envs.generators.refusal_texts import REFUSALS
from suzuri.envs.generators.small_talk_texts import INTENTS, TOLD
from suzuri.envs.generators.tool_catalogue import TOOLS
from suzuri.envs.generators.wording import thought
from suzuri.envs.task import NO_THOUGHT, Message, Task, draw, split_of, thoughts
from suzuri.processing.chat import effort_level
from suzuri.processing.chat_blocks import to_blocks, tool_block

ALL = [(kind, variant) for kind in KINDS for variant in VARIANTS[kind]]


def tasks(kind: str, variant: str | None = None, count: int = 30) -> Iterator[Task]:
    """Tasks of all difficulties that a variant has."""
    for seed in range(count):
        rng = random.Random(f"{kind} {variant} {seed}")
        least = 0.0 if variant is None else VARIANTS[kind][variant]
        yield KINDS[kind](rng, rng.uniform(least, 1.0), variant)


def text_of(message: Message) -> str:
    content: Any = message["content"]
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if part["type"] == "text")


@pytest.mark.parametrize(("kind", "variant"), ALL)
def test_the_target_is_right_and_other_answers_are_wrong(kind: str, variant: str):
    found = list(tasks(kind, variant, 6 if kind == "sounds" else 16))
    for task in found:
        assert task.grade(task.target) == 1.0
        assert task.target[-1]["role"] == "assistant"
        assert task.kind == kind and VARIANTS[kind][variant] <= task.difficulty
        final = text_of(task.target[-1]) if task.target[-1]["content"] else ""
        for wrong in ("", "I do not know.", f"{final} {final}", f"{final}, or not", "yes or no"):
            assert task.grade({"role": "assistant", "content": wrong}) == 0.0
    # The answer to one question is mostly not that to another: no grader takes everything.
    taken = sum(task.grade(other.target) for task, other in pairwise(found))
    assert taken < 0.8 * len(found)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_make_equal_tasks(kind: str):
    first, again = list(tasks(kind, count=12)), list(tasks(kind, count=12))
    assert [(t.messages, t.target, t.key, t.tools, t.effort) for t in first] == [
        (t.messages, t.target, t.key, t.tools, t.effort) for t in again
    ]
    assert len({str(t.messages) for t in first}) > 8


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_prompts_are_never_trained_on(kind: str):
    count = 20 if kind == "sounds" else 120
    sides: dict[str, set[str]] = {}
    for split in ("train", "held_out"):
        rng = random.Random(f"{kind}{split}")
        drawn = [draw(KINDS[kind], rng, rng.random(), split) for _ in range(count)]
        assert {split_of(task.key) for task in drawn} == {split}
        sides[split] = {str(task.messages) for task in drawn}
        if split == "train":
            for task in drawn:
                assert {split_of(key) for key in task.earlier_keys} <= {"train"}
    assert not sides["train"] & sides["held_out"]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_targets_are_chats(kind: str):
    for task in tasks(kind, count=20):
        assert task.messages[-1]["role"] in ("user", "tool")
        plain = [{**m, "content": text_of(m) if m["content"] else None} for m in task.messages]
        assert to_blocks([*plain, *task.target], None)
        if task.tools:
            assert tool_block(list(task.tools)) is not None
        if task.effort is not None:
            assert effort_level(task.effort) == round(task.effort, 2)
            if task.effort <= NO_THOUGHT:
                assert not any(map(thoughts, task.target))
        assert not any(thoughts(message) for message in task.messages)


@pytest.mark.parametrize("kind", KINDS)
def test_every_effort_occurs_and_long_thoughts_need_a_high_one(kind: str):
    found = list(tasks(kind, count=40 if kind == "sounds" else 150))
    efforts = [task.effort for task in found]
    assert None in efforts and 0.0 in efforts and 0.2 in efforts and 0.9 in efforts
    spoken = [sum(len(thoughts(m)) for m in task.target) for task in found]
    high = [n for n, e in zip(spoken, efforts, strict=True) if e is None or e > 0.5]
    low = [n for n, e in zip(spoken, efforts, strict=True) if e is not None and e < 0.45]
    assert sum(high) / len(high) > sum(low) / len(low)


def test_thoughts_follow_the_effort():
    rng = random.Random(0)
    said = [thought(rng, effort, "short", "full") for effort in (0.0, 0.1, 0.11, 0.44, 0.45, 0.99)]
    assert said == ["", "", "short", "short", "full", "full"]
    open_ended = [thought(rng, None, "short", "full") for _ in range(300)]
    counts = [open_ended.count(words) for words in ("", "short", "full")]
    assert sum(counts) == 300 and counts[0] > counts[2] > counts[1] > 30


@pytest.mark.parametrize(("kind", "variant"), ALL)
def test_questions_come_in_many_wordings(kind: str, variant: str):
    """First words of the question differ at least eight ways, conversations aside."""
    if kind in ("conversations", "sounds", "json") or (kind, variant) == ("tools", "none"):
        return
    heads = {text_of(task.messages[-1])[:14] for task in tasks(kind, variant, 60)}
    assert len(heads) >= 8


def test_wordings_are_eight_or_more():
    tables: list[tuple[str, ...]] = [*pictures._WORDINGS.values(), *sounds._WORDINGS.values()]
    tables += [family[2] for family in knowledge._FAMILIES.values()]
    tables += [intent.asked for intent in (*INTENTS, *REFUSALS, TOLD)]
    tables += [tool.requests for tool in TOOLS]
    tables += [small_talk._ASK_MINE, small_talk._ASK_NAME, small_talk._PERSONAS]
    for table in tables:
        assert len(set(table)) == len(table) >= 8


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="no variant 'add9'; there are add1"):
        KINDS["arithmetic"](random.Random(0), 0.5, "add9")
