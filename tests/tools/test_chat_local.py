"""`suzuri chat` with `tiny` in its own process: the same interface as a server's."""

import base64
import contextlib
import dataclasses
import io
import json
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from suzuri.engine.llm import LLM
from suzuri.engine.sampling_params import SamplingParams
from suzuri.processing.chat_output import ChatMessage, TextBlock, collect
from suzuri.processing.grammar import GrammarCompiler
from suzuri.processing.grammar_request import chat_grammar
from suzuri.processing.tokenizer import AUDIO_SLOT, IMAGE_SLOT
from suzuri.tools.chat.backend import AnswerFailed, Ask, Ended
from suzuri.tools.chat.config import ChatConfig
from suzuri.tools.chat.conversation import Conversation
from suzuri.tools.chat.display import Display
from suzuri.tools.chat.local import LocalBackend
from tests.tools.terminal import Terminal
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
SMALL = ("--dtype", "float32", "--max-context", "600")
SHAPE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "count", "parameters": SHAPE}}
]
PARAMS = SamplingParams(max_tokens=12, seed=3)


@pytest.fixture(scope="module")
def backend() -> LocalBackend:
    config = ChatConfig(model="tiny", dtype="float32", max_context=600)
    return LocalBackend(config, Display(io.StringIO(), io.StringIO()))


def answer(
    backend: LocalBackend, messages: list[dict[str, Any]], **fields: Any
) -> tuple[ChatMessage, Ended]:
    settings: dict[str, Any] = {"tools": [], "effort": "low", "params": PARAMS, **fields}
    *parts, ended = backend.answer(Ask(messages=messages, **settings))
    assert isinstance(ended, Ended)
    pieces = [piece for part in parts if isinstance(part, list) for piece in part]
    backend._engine.check()
    assert not backend._engine.has_work
    return collect(pieces), ended


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_answers_are_those_of_the_engine(backend: LocalBackend) -> None:
    llm = LLM("tiny", dtype="float32", max_context=600, max_running=1)
    (expected,) = llm.chat(user("hi"), PARAMS, reasoning_effort="low", show_progress=False)
    turn, ended = answer(backend, user("hi"))
    texts = [block.text for block in turn.blocks if isinstance(block, TextBlock)]
    assert "".join(texts) == expected.outputs[0].text
    assert ended.num_tokens == len(expected.outputs[0].token_ids)
    assert ended.num_prompt == len(expected.prompt_token_ids)
    assert ended.finish == expected.outputs[0].finish_reason == "length"


def test_stop_strings_end_the_answer(backend: LocalBackend) -> None:
    whole = answer(backend, user("hi"))[0].content or ""
    stop = whole[3:5]
    counters = backend._engine.scheduler.counters
    before = counters.computed_tokens
    params = dataclasses.replace(PARAMS, stop=[stop], max_tokens=500)
    turn, ended = answer(backend, user("hi"), params=params)
    assert counters.computed_tokens - before < 100  # and not on to the limit
    assert turn.content == whole[: whole.index(stop)]
    assert ended.finish == "stop"


def test_pictures_and_clips(backend: LocalBackend) -> None:
    file = io.BytesIO()
    Image.new("RGB", (200, 200), "red").save(file, "PNG")
    clip = io.BytesIO()
    with contextlib.closing(wave.open(clip, "wb")) as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes(bytes(3200))
    picture, sound = file.getvalue(), clip.getvalue()
    counts = [backend.check_media("image", picture), backend.check_media("audio", sound)]
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    audio = {"data": base64.b64encode(sound).decode(), "format": "wav"}
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_audio", "input_audio": audio},
    ]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "look"}]}
    ids = backend._renderer.render([message], None, "low").token_ids
    slots = [ids.count(IMAGE_SLOT), ids.count(AUDIO_SLOT)]
    assert counts == [f"{slot} tokens" for slot in slots]
    assert min(slots) > 1
    turn, ended = answer(backend, [message])
    assert ended.num_prompt is not None and ended.num_prompt >= len(ids)
    assert turn != answer(backend, user("look"))[0]
    for kind in ("image", "audio"):
        with pytest.raises(ValueError, match=r"picture|clip"):
            backend.check_media(kind, b"nothing")


def test_a_tool_call_comes_back_as_it_was_written(backend: LocalBackend) -> None:
    """p19: the second prompt is the first one, the turn, and the result; nothing twice."""
    spec = chat_grammar(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert spec is not None
    engine, tokenizer = backend._engine, backend._tokenizer
    compiler = GrammarCompiler(engine.vocabulary, tokenizer.token_bytes)
    backend._grammar = compiler.compile(spec)
    bias = {200008: -100.0}  # no thoughts, which need not end in time
    params = SamplingParams(max_tokens=200, seed=5, temperature=0.5, logit_bias=bias)
    talk = Conversation()
    try:
        talk.say("count it")
        first = talk.request(None)
        turn, ended = answer(backend, first, tools=TOOLS, params=params)
    finally:
        backend._grammar = None
    assert ended.finish == "stop"
    (call,) = turn.tool_calls
    assert call.name == "count" and isinstance(json.loads(call.arguments)["n"], int)
    assert talk.keep(turn) == []
    assert talk.answer_call("it is 7")
    renderer = backend._renderer
    texts = [
        tokenizer.decode(renderer.render(messages, TOOLS, "low").token_ids)
        for messages in (first, talk.request(None))
    ]
    written = f'count<|content_invoke_tool_json|>{{"name":"count","args":{call.arguments}}}'
    result = "<|message_tool|>count<|content_text|>it is 7<|end_message|><|message_model|>"
    end = "<|end_message|><|content_model_end_sampling|>"
    assert texts[1] == f"{texts[0]}{written}{end}{result}"
    assert answer(backend, talk.request(None), tools=TOOLS)[1].num_tokens == 12


def test_what_does_not_fit_is_refused_and_the_next_one_runs(backend: LocalBackend) -> None:
    with pytest.raises(AnswerFailed, match="at most 599 fit"):
        answer(backend, user("word " * 1000))
    assert answer(backend, user("hi"))[1].num_tokens == 12


def test_prefixes_are_found_again(backend: LocalBackend) -> None:
    long = "word " * 60
    first = answer(backend, user(long))[1]
    again = answer(backend, [*user(long), {"role": "assistant", "content": "a"}, *user("b")])[1]
    assert first.num_prompt is not None and again.num_cached is not None
    assert again.num_cached > 128


def test_a_stopped_answer_leaves_nothing_in_the_engine(backend: LocalBackend) -> None:
    asked = Ask(messages=user("hi"), tools=[], effort=0.2, params=SamplingParams(max_tokens=500))
    parts = backend.answer(asked)
    assert isinstance(next(parts), list)
    assert backend._engine.has_work
    before = backend._engine.scheduler.counters.computed_tokens
    parts.close()
    assert not backend._engine.has_work
    assert backend._engine.scheduler.counters.computed_tokens - before < 10
    backend._engine.check()


def chat(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "suzuri", "chat", *words],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_piped_turns(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    strict = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}
    path.write_text(json.dumps([strict]))
    words = ("tiny", *SMALL, "--max-tokens", "5", "--seed", "1", "--tools", str(path))
    found = chat("hi\n/clear\nhi\n", *words)
    assert found.returncode == 0, found.stderr
    half = len(found.stdout) // 2
    assert found.stdout and found.stdout[:half] == found.stdout[half:]
    assert found.stderr.count("5 tokens, ") == 2


def test_refusals_come_before_weights() -> None:
    """s07: exit code 2 and the fix in words."""
    found = chat("hi\n", "inkling", "--random-weights")
    assert found.returncode == 2
    assert "the model does not fit: weights" in found.stderr
    found = chat("hi\n", "inkling")
    assert found.returncode == 2
    assert "is a shape without weights" in found.stderr
    found = chat("hi\n", "--device", "gpu")
    assert found.returncode == 2
    assert "--device gpu" in found.stderr
    assert "Traceback" not in found.stderr


def test_ctrl_c_in_a_pipe_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "suzuri", "chat", "tiny", "--max-context", "4000"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("hi\nmore\n")
        process.stdin.flush()
        assert process.stdout.read(20)
        process.send_signal(2)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
    assert "stopped, about" in errors
    assert "Traceback" not in errors


def test_ctrl_c_at_a_terminal_stops_the_answer_alone() -> None:
    with Terminal("chat", "tiny", *SMALL[:2], "--max-context", "4000", "--seed", "1") as terminal:
        terminal.expect("tiny, context 4000 tokens")
        terminal.expect("> ")
        terminal.type("hi\n")
        terminal.expect("\x1b[?25h")  # the spinner has ended
        terminal.type("\x03")
        terminal.expect("stopped, about")
        terminal.expect("> ")
        terminal.type("/effort none\n")
        terminal.expect("effort none")
        terminal.expect("> ")
        terminal.press_until("\x03", "Ctrl-C again leaves")
        assert terminal.press_to_end("\x03") == 130
    assert "Traceback" not in terminal.screen
