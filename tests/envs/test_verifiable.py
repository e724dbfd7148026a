"""Prompts of files: what graders accept, what they must not be fooled by, and refused lines."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from suzuri.envs.rollout import Limits, rollout
from suzuri.envs.verifiable import CHECKS, Checkable, JsonlProblems, extracted, read_prompts
from suzuri.processing.chat import ChatRenderer
from tests.envs.test_rollout import NANO, PROMPTS, TOKENIZER, VOCABULARY, Scripted


@pytest.mark.parametrize(
    ("grader", "expected", "right", "wrong"),
    [
        ("exact", "Oslo", ["Oslo", " Oslo\n"], ["oslo", "Oslo Oslo", "", "Osl\u043e"]),
        (
            "number", 1200,
            ["1200", "1,200", "1200.0", "+1200.", "$1,200", "1.2e3", "2400/2", "120000%"],
            ["12,00", "1200 1200", "1201", "one", "", "1200/0", "1,200,", "\u0661200", "0x4b0"],
        ),
        ("number", "-1/2", ["-0.5", "\u22120.5", "-50%", "-2/4"], ["0.5", "-1/2 or 1/2", "--0.5"]),
        ("regex", "[a-c]{2,3}", ["abc", "ab "], ["abcd", "xab", ""]),
        ("json", {"a": [1, True]}, ['{"a":[1,true]}', ' {"a": [1, true]}\n'],
         ['{"a":[1.0,true]}', '{"a":[1,1]}', '{"a":[1,true]} x', '{"a":1,"a":[1,true]}', "{"]),
    ],
)  # fmt: skip
def test_graders(grader: str, expected: Any, right: list[str], wrong: list[str]) -> None:
    check = CHECKS[grader]
    assert [text for text in right if not check(text, expected)] == []
    assert [text for text in wrong if check(text, expected)] == []


@pytest.mark.parametrize(
    ("text", "extract", "found"),
    [
        ("a\nb\n\n", "last_line", "b"),
        ("\n", "last_line", None),
        (r"so \boxed{\frac{1}{2}} it is", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "boxed", None),
        (r"\boxed{1", "boxed", None),
        ("none", "boxed", None),
        ("all\nof it", "all", "all\nof it"),
    ],
)
def test_where_the_answer_stands(text: str, extract: str, found: str | None) -> None:
    assert extracted(text, extract) == found


def test_a_grader_is_not_fooled() -> None:
    """Answers repeated, hidden, huge, or beside calls earn nothing."""
    task = Checkable(messages=({"role": "user", "content": "?"},), answer="7", grader="number")
    said = {"role": "assistant", "content": "7"}
    assert task.grade([said]) == 1.0
    for fooling in (
        [said, said],
        [said | {"tool_calls": [{"id": "x"}]}],
        [said | {"content": "7 7"}],
        [said | {"content": "7" + " " * 30_000}],
        [said | {"content": None}],
        [said | {"content": "", "reasoning_content": "7"}],
    ):
        assert task.grade(fooling) == 0.0


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return str(path)


def test_problems_of_a_file_are_played(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "2+3?", "answer": 5, "grader": "number", "reasoning_effort": "none"},
        {"messages": [{"role": "user", "content": "hi"}], "answer": "hi"},
    )
    problems = JsonlProblems([path], PROMPTS)
    assert problems.size == 2
    for said, reward in (("5.", 1.0), ("6", 0.0)):
        (env,) = problems.group(0).envs(1)
        before = [{"role": "user", "content": "2+3?"}]
        renderer = ChatRenderer(TOKENIZER, NANO)
        given = renderer.render(before, None, 0.0).token_ids
        whole = renderer.render(
            [*before, {"role": "assistant", "content": said}], None, 0.0,
            add_generation_prompt=False,
        ).token_ids  # fmt: skip
        sampler = Scripted(VOCABULARY.expand(whole[len(given) :]))
        found = asyncio.run(rollout(env, sampler, Limits(), seed=0))
        assert (found.reward, found.status) == (reward, "over")
        assert list(sampler.asked[0][0].tokens) == VOCABULARY.expand(given)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "must be an object"),
        ({"answer": 1}, "give either messages or prompt"),
        ({"prompt": "a", "messages": [], "answer": 1}, "give either messages or prompt"),
        ({"prompt": "a"}, "no answer"),
        ({"messages": [], "answer": 1}, "messages must be a list"),
        ({"prompt": "a", "answer": "x", "grader": "number"}, "'x' is no number"),
        ({"prompt": "a", "answer": "(", "grader": "regex"}, "no regular expression"),
        ({"prompt": "a", "answer": " "}, "answer is empty"),
        ({"prompt": "a", "answer": 1, "grader": "best"}, "grader 'best': there are exact, number"),
        ({"prompt": "a", "answer": 1, "extract": "first"}, "extract 'first'"),
        ({"prompt": "a", "answer": 1, "label": 2}, "unknown key label"),
        ({"prompt": "a", "answer": 1, "reasoning_effort": "hard"}, "reasoning effort 'hard'"),
    ],
)
def test_bad_lines_are_refused_by_their_number(tmp_path: Path, line: Any, said: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "answer": 1}, line)
    with pytest.raises(ValueError) as error:
        read_prompts([path])
    assert f"{path}:2: " in str(error.value) and said in str(error.value)
    assert f"{path}:1: " not in str(error.value)


def test_files_without_lines_or_json_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    with pytest.raises(ValueError, match="nothing to practise"):
        read_prompts([str(empty)])
    empty.write_bytes(b'{"prompt": "a", "answer": 1}\n{\n\xff\n')
    with pytest.raises(ValueError, match=r":2: .*\n.*:3: no UTF-8"):
        read_prompts([str(empty)])
