"""`suzuri demo`: its questions, its tools, its pictures, and its verdict on what a model says."""

import io
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from suzuri.cli import main
from suzuri.envs.generators.tool_catalogue import TOOLS
from suzuri.processing.audio_files import load_waveform
from suzuri.processing.chat_output import Piece
from suzuri.tools.chat.backend import AnswerFailed, Ask, Ended, Part
from suzuri.tools.demo import run
from suzuri.tools.demo.config import DemoConfig
from suzuri.tools.demo.pixels import show_picture, show_sound
from suzuri.tools.demo.questions import questions, sum_for_the_calculator
from suzuri.tools.demo.tools import DECLARED, run_tool

ROOT = Path(__file__).parents[2]
NUMBERS = "count and sides must be from 1 to 1000"
COLOUR = r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m(▀+)"


def test_questions_are_held_out_and_depend_on_the_seed_alone() -> None:
    for seed in range(5):
        asked, again = questions(seed), questions(seed)
        assert [q.needs for q in asked] == [None, "vision", "audio"]
        for question, twin in zip(asked, again, strict=True):
            assert question.task.split == "held_out"
            assert (question.text, question.media) == (twin.text, twin.media)
            assert question.task.grade({"role": "assistant", "content": question.expected}) == 1.0
        assert all(question.media is not None for question in asked[1:])
        assert sum_for_the_calculator(seed) == sum_for_the_calculator(seed)
    texts = {(q.text, q.media) for seed in range(5) for q in questions(seed)}
    assert len(texts) == 15
    assert len({sum_for_the_calculator(seed).expression for seed in range(20)}) == 20


def test_tools_are_declared_as_they_were_learned() -> None:
    known = {tool.names[0]: tool for tool in TOOLS}
    for declared in DECLARED:
        function = declared["function"]
        tool = known[function["name"]]
        assert function["description"] == tool.text
        kinds = {argument.names[0]: {"type": argument.kind} for argument in tool.arguments}
        assert function["parameters"]["properties"] == kinds
        assert function["parameters"]["required"] == list(kinds)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculate", '{"expression":"583*23"}', '{"value":13409}'),
        ("calculate", '{"expression":" 5 - 23 "}', '{"value":-18}'),
        ("calculate", '{"expression":"84/12"}', '{"value":7}'),
        ("calculate", '{"expression":"1/4"}', '{"value":0.25}'),
        ("calculate", '{"expression":"1/0"}', '{"error":"division by zero"}'),
        ("calculate", '{"expression":"9**999999999"}', '{"error":"no number + - * / number"}'),
        ("calculate", '{"expression":7}', '{"error":"no number + - * / number"}'),
        ("calculate", '{"input":"1+1"}', '{"error":"wrong arguments"}'),
        ("calculate", "[1]", '{"error":"wrong arguments"}'),
        ("calculate", '{"expression', '{"error":"wrong arguments"}'),
        ("roll_dice", '{"count":4,"sides":1}', '{"total":4}'),
        (
            "roll_dice",
            '{"count":0,"sides":6}',
            '{"error":"count and sides must be from 1 to 1000"}',
        ),
        ("set_timer", '{"minutes":5}', '{"error":"not found"}'),
    ],
)
def test_what_tools_return(name: str, arguments: str, result: str) -> None:
    assert run_tool(name, arguments) == result


def drawn(show: Any, data: bytes, **fields: Any) -> list[list[tuple[int, ...]]]:
    """Rows of pixels, upper and lower halves apart."""
    file = io.StringIO()
    settings: dict[str, Any] = {"force_terminal": True, "color_system": "truecolor", "width": 100}
    show(Console(file=file, **{**settings, **fields}), data)
    rows: list[list[tuple[int, ...]]] = []
    for line in file.getvalue().splitlines():
        upper, lower = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for *numbers, blocks in re.findall(COLOUR, line):
            values = tuple(map(int, numbers))
            upper += [values[:3]] * len(blocks)
            lower += [values[3:]] * len(blocks)
        rows += [upper, lower]
    return rows


def test_a_picture_keeps_its_colours_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    picture = Image.new("RGB", (60, 30), (10, 20, 30))
    picture.paste((200, 0, 0), (0, 0, 30, 15))
    file = io.BytesIO()
    picture.save(file, "PNG")
    left, right = [(200, 0, 0)] * 10, [(10, 20, 30)] * 10
    assert drawn(show_picture, file.getvalue()) == [
        *[left + right] * 5,
        *[right + right] * 5,
    ]
    assert drawn(show_picture, file.getvalue(), color_system=None) == []


def test_a_rising_tone_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    seen: set[str] = set()
    for seed in range(12):
        question = questions(seed)[2]
        assert question.media is not None
        pixels = np.array(drawn(show_sound, question.media)).sum(axis=2)
        rows = pixels.argmax(axis=0)  # the loudest pitch of each column, from the top
        moved = int(rows[-5]) - int(rows[4])
        found = "rising" if moved < 0 else "falling" if moved > 0 else "steady"
        assert found == question.expected, seed
        seen.add(found)
    assert seen == {"rising", "falling", "steady"}


class Scripted:
    """A model that knows the answers, but for those to the questions in `wrong`."""

    load_seconds = warm_up_seconds = 0.5
    name = "scripted"
    wrong: frozenset[str] = frozenset()
    towers = ("vision", "audio")
    tool = "calculate"

    def __init__(self, config: Any, display: Any) -> None:
        self.asked: list[Ask] = []

    def has(self, tower: str) -> bool:
        return tower in self.towers

    def answer(self, ask: Ask) -> Generator[Part]:
        yield [*self.pieces(ask)]
        yield Ended(finish="stop", num_tokens=3)

    def pieces(self, ask: Ask) -> Generator[Piece]:
        if not ask.tools:
            (question,) = [q for q in questions(0) if list(q.task.messages) == ask.messages]
            if question.task.effort:
                yield Piece(kind="reasoning", text="thinking")
            yield Piece(
                kind="content",
                text="no" if question.title in self.wrong else question.expected,
            )
            return
        wanted = sum_for_the_calculator(0)
        if ask.messages[-1]["role"] == "user":
            yield Piece(kind="tool_start", name=self.tool)
            yield Piece(kind="tool_arguments", text=f'{{"expression":"{wanted.expression}"}}')
            yield Piece(kind="tool_end")
        else:
            result = ask.messages[-1]["content"]
            value = "nothing" if "tool" in self.wrong else result.strip('{}"').partition(":")[2]
            yield Piece(kind="content", text=f"{wanted.expression} is {value}.")


@pytest.mark.parametrize(
    ("fields", "right", "said"),
    [
        ({}, "4 of 4", "calculate ran: {"),
        ({"wrong": frozenset({"a sound"})}, "3 of 4", "wrong, expected: "),
        ({"wrong": frozenset({"tool"})}, "3 of 4", "wrong, expected: "),
        ({"tool": "roll_dice"}, "3 of 4", '{"error":"wrong arguments"}'),
        ({"towers": ("audio",)}, "3 of 3", "a picture: left out, scripted has no tower for it"),
    ],
)
def test_the_verdict(
    fields: dict[str, Any],
    right: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "LocalBackend", type("Model", (Scripted,), fields))
    code = run.run_demo(DemoConfig(out=str(tmp_path / "new")).resolve())
    out = capsys.readouterr().out
    assert f"{right} answers are right; " in out and said in out
    assert code == (0 if right in ("4 of 4", "3 of 3") else 1)
    files = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    asked = questions(0)
    assert files.get("picture.png", asked[1].media) == asked[1].media
    assert files["sound.wav"] == asked[2].media
    assert ("picture.png" in files) == ("towers" not in fields)
    assert "suzuri chat" in out and "/v1/chat/completions" in out


def test_an_answer_that_fails_is_no_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Scripted, ask: Ask) -> Generator[Part]:
        raise AnswerFailed("the context is full")
        yield []

    monkeypatch.setattr(run, "LocalBackend", type("Model", (Scripted,), {"answer": fail}))
    assert run.run_demo(DemoConfig(out=str(tmp_path))) == 1
    out = capsys.readouterr().out
    assert out.count("error: the context is full") == 4 and "0 of 4 answers are right" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed", "-1"], "--seed -1: must be from 0"),
        (["--out", __file__], "is a file; give a folder"),
        (["tiny-model-of-mine"], "no preset 'tiny-model-of-mine'"),
    ],
)
def test_wrong_flags(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo", *words])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_the_shipped_model_answers_from_any_folder(tmp_path: Path) -> None:
    command = "import sys; from suzuri.cli import main; main(sys.argv[1:])"
    found = subprocess.run(
        [sys.executable, "-c", command, "demo", "--out", "media"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    count = re.search(r"^(\d) of 4 answers are right; \d+ tokens/s", found.stdout, re.M)
    assert count is not None, found.stderr
    assert found.returncode == (0 if count[1] == "4" else 1)
    assert found.stdout.count("right\n") + found.stdout.count("wrong, expected: ") == 4
    picture = Image.open(tmp_path / "media" / "picture.png")
    assert np.asarray(picture.convert("RGB")).std() > 1
    assert len(load_waveform(str(tmp_path / "media" / "sound.wav"))) > 3000
