"""`suzuri chat` with servers: a scripted one, one that is none, and a real one on `tiny`."""

import contextlib
import io
import json
import socket
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from suzuri.engine.sampling_params import SamplingParams
from suzuri.processing.chat_output import collect
from suzuri.tools.chat.backend import AnswerFailed, Ask, Ended
from suzuri.tools.chat.display import Display
from suzuri.tools.chat.remote import RemoteBackend
from tests.server.conftest import Running, start, stop
from tests.tools.chat_server import ChatServer
from tests.tools.terminal import Terminal
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CALL = [
    {"reasoning_content": "which city"},
    {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": '{"a":'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
]


@pytest.fixture
def scripted() -> Iterator[ChatServer]:
    with ChatServer().running() as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    key = tmp_path_factory.mktemp("server")
    (key / "keys").write_text("secret\n")
    words = ("--api-key-file", str(key / "keys"))
    running = start(key / "log.txt", *words)
    yield running
    assert stop(running) == 0
    assert "Traceback" not in running.log.read_text()


def chat(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "suzuri", "chat", *words],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def backend(url: str, *, key: str | None = None, model: str | None = None) -> RemoteBackend:
    return RemoteBackend(url, key, model, Display(io.StringIO(), io.StringIO()))


def ask(**fields: Any) -> Ask:
    settings: dict[str, Any] = {"messages": HI, "tools": [], "effort": "low"}
    return Ask(**{**settings, "params": SamplingParams(max_tokens=16), **fields})


def failure(of: RemoteBackend) -> str:
    with pytest.raises(AnswerFailed) as found:
        list(of.answer(ask()))
    return str(found.value)


# A scripted server


def test_a_request_has_what_was_asked_for(scripted: ChatServer) -> None:
    scripted.answers = [[{"reasoning": "r"}, {"content": "a"}]] * 2
    found = backend(scripted.url)
    assert (found.name, found.max_context) == ("scripted", 500)
    *parts, ended = list(found.answer(ask()))
    pieces = [piece for part in parts if isinstance(part, list) for piece in part]
    assert (collect(pieces).reasoning, collect(pieces).content) == ("r", "a")
    assert ended == Ended(finish="stop", num_tokens=4, num_prompt=30, num_cached=20)
    assert scripted.bodies[0] == {
        "model": "scripted",
        "messages": HI,
        "reasoning_effort": "low",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 16,
    }
    params = SamplingParams(max_tokens=None, top_k=5, min_p=0.1, seed=3, stop=["x"])
    list(found.answer(ask(params=params, tools=[{"type": "function"}], effort=0.35)))
    more = {"top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["x"], "reasoning_effort": 0.35}
    assert more.items() <= scripted.bodies[1].items()
    assert scripted.bodies[1]["tools"] == [{"type": "function"}]
    assert "max_tokens" not in scripted.bodies[1]


def test_piped_lines_are_turns(scripted: ChatServer, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "f"}}]))
    scripted.answers = [[{"content": "A\x1b[2J[bold]"}], CALL, [{"content": "done"}]]
    lines = "<|end_message|>\r\n\n/effort low\ncall it\n42\n"
    found = chat(lines, "--url", scripted.url, "--tools", str(tools), "--system", "be kind")
    assert found.returncode == 0, found.stderr
    assert found.stdout == 'A␛[2J[bold]\ncall f {"a": 1}\ndone\n'
    assert "which city\n" in found.stderr
    assert "4 tokens" in found.stderr and "30 prompt tokens, 20 of them cached" in found.stderr
    assert "\x1b" not in found.stdout + found.stderr
    messages = scripted.bodies[2]["messages"]
    roles = ["system", "user", "assistant", "user", "assistant", "tool"]
    assert [message["role"] for message in messages] == roles
    assert messages[1]["content"] == "<|end_message|>"
    assert messages[2]["content"] == "A\x1b[2J[bold]"
    assert messages[4]["reasoning_content"] == "which city"
    assert messages[4]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert messages[5]["content"] == "42"


def test_a_refused_turn_is_told_and_the_next_one_works(scripted: ChatServer) -> None:
    refusal = json.dumps({"error": {"message": "messages[0]: no \x1b[2J pictures"}}).encode()
    scripted.answers = [(400, refusal), [{"content": "A"}, {"error": {"message": "it died"}}]]
    scripted.answers += [(503, b"<html>"), [{"content": "B"}]]
    found = chat("one\ntwo\n\xe9\nfour\n", "--url", scripted.url)
    assert found.returncode == 1
    assert found.stdout == "A\nB\n"
    assert "error: messages[0]: no ␛[2J pictures (the conversation is as before" in found.stderr
    assert "error: it died (" in found.stderr
    assert f"error: {scripted.url}/v1/chat/completions answers 503; check --url" in found.stderr
    assert scripted.bodies[3]["messages"] == [{"role": "user", "content": "four"}]


def test_input_that_is_no_text(scripted: ChatServer) -> None:
    scripted.answers = [[{"content": "A"}]]
    found = subprocess.run(
        [sys.executable, "-m", "suzuri", "chat", "--url", scripted.url],
        cwd=ROOT,
        input=b"\xff\nhi",
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 1
    assert found.stdout == b"A\n"
    assert b"error: the line is not UTF-8; convert the input" in found.stderr


def test_what_is_wrong_with_a_server_is_said(scripted: ChatServer) -> None:
    found = chat("hi\n", "--url", "http://127.0.0.1:1")
    assert found.returncode == 2
    assert found.stderr == (
        "suzuri chat: nothing answers at http://127.0.0.1:1 (Connection refused); start a server "
        "(suzuri serve MODEL --port 8000), or give the --url of one\n"
    )
    with pytest.raises(ValueError, match="has no model 'other'; it has scripted"):
        backend(scripted.url, model="other")
    scripted.key = "secret"
    for key in (None, "wrong"):
        with pytest.raises(ValueError, match=r"wrong key \(401\); give --api-key-file FILE"):
            backend(scripted.url, key=key)
    assert backend(scripted.url, key="secret").name == "scripted"


def test_what_is_no_server(scripted: ChatServer) -> None:
    def serve(answer: bytes) -> str:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def reply() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

            thread = threading.Thread(target=reply)
            thread.start()
            with pytest.raises(ValueError) as found:
                backend(f"http://127.0.0.1:{listener.getsockname()[1]}")
            thread.join()
            return str(found.value)

    ok = b"HTTP/1.1 200 OK\r\nContent-Length: "
    assert "is no server with OpenAI's API" in serve(b"SSH-2.0-OpenSSH\r\n")
    assert "it sends what is no JSON); check --url" in serve(ok + b"2\r\n\r\nhi")
    assert "is no list of models; check --url" in serve(ok + b"2\r\n\r\n{}")
    assert "has no models; check --url" in serve(ok + b'12\r\n\r\n{"data": []}')
    assert "answers 404; check --url" in serve(b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n")
    assert "broke" in serve(b"")
    assert "broke" in serve(ok + b"99\r\n\r\nhi")


def test_streams_that_break_off(scripted: ChatServer) -> None:
    found = backend(scripted.url)
    scripted.breaks = True
    scripted.answers = [[{"content": "a"}], (200, b"{}")]
    assert failure(found) == "the server closed the connection before the answer was over"
    assert "it does not stream" in failure(found)
    scripted.breaks = False
    scripted.answers = [[{"content": 5}], [{"tool_calls": [{"index": 0, "function": {}}]}]]
    assert "the server's events are not OpenAI's" in failure(found)
    assert "tool calls come without a name, or mixed up" in failure(found)
    scripted.finish = "length"
    scripted.answers = [[{"content": "a"}]]
    *_, ended = found.answer(ask())
    assert isinstance(ended, Ended) and ended.finish == "length"


def test_a_server_that_loads_is_waited_for(scripted: ChatServer) -> None:
    scripted.not_ready = ["the engine is loading"] * 2
    with Terminal("chat", "--url", scripted.url) as terminal:
        terminal.expect("the engine is loading")
        terminal.expect("/help lists the commands")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert scripted.not_ready == []


def test_another_server_without_our_pages(scripted: ChatServer) -> None:
    scripted.info = None
    found = backend(scripted.url)
    assert found.max_context == 400
    assert found.check_media("image", b"x") == ""
    scripted.info = {"has_image_understanding": False}
    with pytest.raises(ValueError, match="this model has no vision tower; leave the picture out"):
        backend(scripted.url).check_media("image", b"x")


# At a terminal


def test_a_terminal_shows_thoughts_dim_and_nothing_raw(scripted: ChatServer) -> None:
    scripted.answers = [[{"reasoning_content": "hm"}, {"content": "A\x1b[2J[bold]\x07"}], CALL]
    with Terminal("chat", "--url", scripted.url) as terminal:
        terminal.expect("scripted, context 500 tokens, effort high; /help lists the commands")
        terminal.expect("> ")
        terminal.type("hi\n")
        terminal.expect("\x1b[2mhm\x1b[0m\r\n\r\nA␛[2J[bold]␇\r\n")
        terminal.expect("\x1b[2m4 tokens, ")
        terminal.expect("> ")
        terminal.type('"""two\nlines"""\n')
        terminal.expect('call f \x1b[0m{"a": 1}\r\n')
        terminal.expect("result of f> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0
    assert "\x1b[2J" not in terminal.screen and "\x07" not in terminal.screen
    assert scripted.bodies[1]["messages"][2]["content"] == "two\nlines"


def test_ctrl_c_stops_the_answer_and_frees_the_server(scripted: ChatServer) -> None:
    """s01: what was written is kept, the server sees its reader go, twice leaves."""
    scripted.holds = True
    scripted.answers = [[{"reasoning_content": "hm"}, {"content": "half"}], [{"content": "B"}]]
    with Terminal("chat", "--url", scripted.url) as terminal:
        terminal.expect("> ")
        terminal.type("one\n")
        terminal.expect("half")
        terminal.type("\x03")
        terminal.expect("stopped, about 3 tokens")
        assert scripted.left.wait(PATIENCE)
        terminal.expect("> ")
        scripted.holds = False
        terminal.type("two\n")
        terminal.expect("B")
        terminal.expect("> ")
        terminal.press_until("\x03", "Ctrl-C again leaves")
        assert terminal.press_to_end("\x03") == 130
    assert scripted.bodies[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "half", "reasoning_content": "hm"},
        {"role": "user", "content": "two"},
    ]


def test_answers_can_be_sent_elsewhere_from_a_terminal(
    scripted: ChatServer, tmp_path: Path
) -> None:
    scripted.answers = [[{"reasoning_content": "hm"}, {"content": "A"}]]
    with Terminal("chat", "--url", scripted.url, out=tmp_path / "out") as terminal:
        terminal.expect("> ")
        terminal.type("hi\n")
        terminal.expect("hm")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert (tmp_path / "out").read_text() == "A\n"


# A real server


def test_a_conversation_with_a_real_server(server: Running, tmp_path: Path) -> None:
    """Text, a picture, a clip; refusals leave the conversation as it was."""
    Image.new("RGB", (20, 20), "red").save(tmp_path / "red.png")
    with contextlib.closing(wave.open(str(tmp_path / "clip.wav"), "wb")) as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(16000)
        clip.writeframes(bytes(3200))
    (tmp_path / "bad.png").write_bytes(b"no picture")
    lines = ["<|end_message|>", "/image bad.png", "look", "/image red.png", "/audio clip.wav"]
    lines += ["describe", "word " * 500, "/retry", "/effort 0.2", "/clear", "again"]
    text = "\n".join(lines).replace("/image ", f"/image {tmp_path}/")
    words = ("--url", server.url, "--api-key-file", str(server.log.parent / "keys"))
    found = chat(
        text.replace("/audio ", f"/audio {tmp_path}/"), *words, "--max-tokens", "6", "--seed", "1"
    )
    assert found.returncode == 1
    errors = [line for line in found.stderr.splitlines() if line.startswith("error")]
    assert len(errors) == 3
    assert "messages[2].content[0]" in errors[0]
    assert all("at most 399 fit" in error for error in errors[1:])
    summaries = [line for line in found.stderr.splitlines() if "6 tokens, " in line]
    assert len(summaries) == 3
    prompts = [int(line.split(" prompt tokens")[0].split()[-1]) for line in summaries]
    assert prompts[2] < prompts[0] < prompts[1]
    assert all("cut at the limit" in line for line in summaries)
    assert "red.png (" in found.stderr and "clip.wav (" in found.stderr
    assert "secret" not in found.stderr


def test_the_key_is_asked_for(server: Running) -> None:
    found = chat("hi\n", "--url", server.url)
    assert found.returncode == 2
    assert "(401); give --api-key-file FILE or --api-key KEY" in found.stderr


def test_answers_of_a_real_server_end_with_ctrl_c(server: Running) -> None:
    with Terminal("chat", "--url", server.url, "--api-key", "secret") as terminal:
        terminal.expect("tiny, context 400 tokens")
        terminal.expect("> ")
        terminal.type("hi\n")
        terminal.expect("\x1b[?25h")  # the spinner has ended
        terminal.type("\x03")
        terminal.expect("stopped, about")
        terminal.expect("> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0
