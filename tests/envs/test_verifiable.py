"""Prompts of files: how they are played, their pictures and clips, and refused lines."""

import asyncio
import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from suzuri.envs.rollout import Limits, rollout
from suzuri.envs.verifiable import JsonlProblems, extracted, read_prompts
from suzuri.processing.chat import ChatRenderer
from tests.envs.test_rollout import NANO, PROMPTS, TOKENIZER, VOCABULARY, Scripted


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
        ({"prompt": " ", "answer": 1}, "prompt must be a text that is not empty"),
        ({"prompt": ["a"], "answer": 1}, "prompt must be a text that is not empty"),
        ({"messages": [], "answer": 1}, "messages must be a list"),
        ({"messages": "a", "answer": 1}, "messages must be a list"),
        ({"prompt": "a", "answer": 1, "tools": {}}, "tools must be a list"),
        ({"prompt": "a", "answer": "forty two", "grader": "math"}, "no mathematical expression"),
        ({"prompt": "a", "answer": {}, "grader": "json_schema"}, "allows everything"),
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


# Pictures and clips

PIXELS = Image.new("RGB", (40, 40), (220, 40, 40))


def image_bytes(kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    PIXELS.save(file, kind)
    return file.getvalue()


def clip_bytes() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(bytes(2 * 4000))
    return file.getvalue()


def asked(*parts: Any, **fields: Any) -> dict[str, Any]:
    """A line that shows the parts and asks for the colour."""
    text = {"type": "text", "text": "Which colour?"}
    return {"messages": [{"role": "user", "content": [*parts, text]}], "answer": "red"} | fields


def data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_pictures_and_clips_lie_beside_the_file_or_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    (folder / "media").mkdir(parents=True)
    (folder / "media" / "red.png").write_bytes(image_bytes())
    (folder / "beep.wav").write_bytes(clip_bytes())
    inline = data_url(image_bytes("JPEG"), "image/jpeg")
    path = write(
        folder / "p.jsonl",
        asked({"type": "image_url", "image_url": {"url": "media/red.png"}}),
        asked({"type": "image_url", "image_url": {"url": inline}}),
        asked({"type": "image", "image": str(folder / "media" / "red.png")}),
        asked({"type": "audio_url", "audio_url": {"url": "beep.wav"}}),
        asked({"type": "image_url", "image_url": "media/red.png"},
              {"type": "audio_url", "audio_url": "beep.wav"}),
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)  # so that paths are not those of this folder
    problems = JsonlProblems([path], PROMPTS)
    kinds = []
    for index in range(5):
        (env,) = problems.group(index).envs(1)
        prompt = asyncio.run(env.initial())
        kinds.append([one.kind for one in prompt.media])
    assert kinds == [["image"], ["image"], ["image"], ["audio"], ["image", "audio"]]


def test_a_picture_is_seen_and_the_answer_on_it_graded(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(image_bytes())
    line = asked({"type": "image_url", "image_url": {"url": "red.png"}}, reasoning_effort=0)
    problems = JsonlProblems([write(tmp_path / "p.jsonl", line)], PROMPTS)
    renderer = ChatRenderer(TOKENIZER, NANO, local_files=True)
    part = {"type": "image_url", "image_url": {"url": str(tmp_path / "red.png")}}
    messages = asked(part)["messages"]
    given = renderer.render(messages, None, 0.0)
    for said, reward in (("red", 1.0), ("blue", 0.0)):
        whole = renderer.render(
            [*messages, {"role": "assistant", "content": said}], None, 0.0,
            add_generation_prompt=False,
        )  # fmt: skip
        sampler = Scripted(VOCABULARY.expand(whole.token_ids[len(given.token_ids) :]))
        (env,) = problems.group(0).envs(1)
        found = asyncio.run(rollout(env, sampler, Limits(), seed=0))
        assert (found.reward, found.status) == (reward, "over")
        (picture,) = sampler.asked[0][0].media
        assert np.array_equal(picture.inputs, given.media[0].inputs)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "absent.png"}},
        {"type": "image_url", "image_url": {"url": "text.png"}},
        {"type": "image_url", "image_url": {"url": "cut.png"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/red.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": ""}},
        {"type": "image_url"},
        {"type": "audio_url", "audio_url": {"url": "text.png"}},
        {"type": "video", "video": "red.png"},
    ],
)
def test_what_cannot_be_seen_or_heard_is_refused_by_its_line(tmp_path: Path, part: Any) -> None:
    """Before anything else is loaded: the prompts know the model's shape alone."""
    (tmp_path / "red.png").write_bytes(image_bytes())
    (tmp_path / "cut.png").write_bytes(image_bytes()[:60])
    (tmp_path / "text.png").write_text("a picture")
    good = asked({"type": "image_url", "image_url": {"url": "red.png"}})
    path = write(tmp_path / "p.jsonl", good, asked(part), good)
    with pytest.raises(ValueError) as error:
        JsonlProblems([path], PROMPTS)
    lines = [line for line in str(error.value).splitlines() if f"{path}:" in line]
    assert len(lines) == 1 and f"{path}:2: " in lines[0]


def test_a_message_that_cannot_be_shown_is_refused_by_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": 3, "answer": 1},
        {"messages": [{"role": "nobody", "content": "a"}], "answer": 1},
        {"prompt": "a", "answer": 1, "tools": [{"type": "function"}]},
        {"prompt": "a", "answer": 1},
    )
    with pytest.raises(ValueError) as error:
        JsonlProblems([path], PROMPTS)
    assert [f"{path}:{place}: " in str(error.value) for place in range(1, 5)] == [True] * 3 + [
        False
    ]
