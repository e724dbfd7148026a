"""`suzuri chat` without a model: lines, commands, what is shown, and what the model is sent."""

import base64
import io
import re
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from suzuri.config import parse
from suzuri.engine.sampling_params import SamplingParams
from suzuri.processing.chat_blocks import to_blocks
from suzuri.processing.chat_output import Piece
from suzuri.processing.media import Kind
from suzuri.tools.chat.backend import AnswerFailed, Ask, Ended, Part
from suzuri.tools.chat.commands import COMMANDS, Command, parse_line, usage
from suzuri.tools.chat.config import ChatConfig, parse_effort
from suzuri.tools.chat.display import Display, clean
from suzuri.tools.chat.loop import ChatLoop
from suzuri.tools.chat.remote import DeltaReader

ROOT = Path(__file__).parents[2]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
HOSTILE = "[bold]x[/bold] \x1b[2J\x1b]0;t\x07 \r \x9b31m \u202e <|end_message|> \ud800"


def text(*parts: str) -> list[Piece]:
    return [Piece("content", part) for part in parts]


def call(index: int, name: str, arguments: str, *, complete: bool = True) -> list[Piece]:
    return [
        Piece("tool_start", index=index, name=name),
        Piece("tool_arguments", arguments, index),
        Piece("tool_end", index=index, complete=complete),
    ]


class Scripted:
    """Gives one answer after the other: pieces, or an exception in their place or after them."""

    name = "scripted"
    max_context: int | None = None

    def __init__(self, *answers: Sequence[Piece | BaseException]) -> None:
        self.answers = list(answers)
        self.asks: list[Ask] = []

    def check_media(self, kind: Kind, data: bytes) -> str:
        if data == b"bad":
            raise ValueError("it is no picture")
        return ""

    def answer(self, ask: Ask) -> Generator[Part]:
        self.asks.append(ask)
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield [piece]
        yield Ended(finish="stop", num_tokens=3, num_prompt=20, num_cached=16)


class Typed:
    """Lines that somebody typed; an exception is Ctrl-C."""

    def __init__(self, *lines: str | BaseException, is_terminal: bool = True) -> None:
        self.is_terminal = is_terminal
        self._lines = list(lines)
        self.prompts: list[str] = []

    def read(self, prompt: str) -> str | None:
        self.prompts.append(prompt)
        line = self._lines.pop(0) if self._lines else None
        if isinstance(line, BaseException):
            raise line
        return line


class Screen(io.StringIO):
    """A terminal, as far as a stream can tell."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def talk(
    backend: Scripted, lines: Typed, **fields: Any
) -> tuple[int, str, str, list[list[dict[str, Any]]]]:
    """(exit code, stdout, stderr, messages of each request)."""
    out, err = io.StringIO(), io.StringIO()
    settings: dict[str, Any] = {"params": SamplingParams(), "tools": [], "effort": "high"}
    loop = ChatLoop(backend, Display(out, err), lines, **{"system": None, **settings, **fields})
    code = loop.run()
    for ask in backend.asks:
        if not isinstance(ask.messages[0].get("content"), list):
            to_blocks(ask.messages, None)  # what is sent can be rendered
    return code, out.getvalue(), err.getvalue(), [ask.messages for ask in backend.asks]


# Turns


def test_thoughts_and_text_go_back_as_they_were_written() -> None:
    thoughts = [Piece("reasoning", "hm"), Piece("reasoning", "m\x1b")]
    backend = Scripted([*thoughts, *text("A", "\x1b[1m")], text("B"))
    code, out, err, sent = talk(backend, Typed("hi", "", "  ", "more"), system="be kind")
    system = {"role": "system", "content": "be kind"}
    first = [system, {"role": "user", "content": "hi"}]
    answer = {"role": "assistant", "content": "A\x1b[1m", "reasoning_content": "hmm\x1b"}
    assert code == 0
    assert sent == [first, [*first, answer, {"role": "user", "content": "more"}]]
    assert out == "A␛[1m\nB\n"
    assert err.startswith("hmm␛\n3 tokens, ")
    assert err.count("20 prompt tokens, 16 of them cached") == 2


def test_blocks_in_another_order_keep_it() -> None:
    blocks = [Piece("content", "a"), Piece("reasoning", "b"), Piece("content", "c", 1)]
    backend = Scripted([*blocks, *call(0, "f", "{}")], text(""))
    talk(backend, Typed("hi", "/skip", "on"))
    assert backend.asks[1].messages[1]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "thinking", "thinking": "b"},
        {"type": "text", "text": "c"},
    ]
    kinds = [block.kind for block in to_blocks(backend.asks[1].messages, None)]
    assert kinds == ["text", "text", "thinking", "text", "call", "end", "text"]


def test_results_of_tool_calls_are_typed() -> None:
    """p19: the call is in the history once, its arguments as they were written."""
    backend = Scripted([*call(0, "f", '{"b": 1,"a":2}'), *call(1, "g", "{}")], text("done"))
    lines = Typed("hi", "42", "")
    code, out, err, sent = talk(backend, lines, tools=TOOLS)
    assert code == 0
    assert lines.prompts == ["> ", "result of f> ", "result of g> ", "> "]
    assert out == 'call f {"b": 1,"a":2}\ncall g {}\ndone\n'
    assert "type the result on a line" in err
    user, assistant, first, second = sent[1]
    assert user["content"] == "hi"
    assert assistant["content"] is None
    calls = assistant["tool_calls"]
    assert [one["function"] for one in calls] == [
        {"name": "f", "arguments": '{"b": 1,"a":2}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert (first["content"], second["content"]) == ("42", "")
    assert [first["tool_call_id"], second["tool_call_id"]] == [one["id"] for one in calls]
    assert len({one["id"] for one in calls}) == 2
    assert backend.asks[0].tools == TOOLS


def test_calls_can_be_left_without_a_result() -> None:
    backend = Scripted([*call(0, "f", "{}"), *call(1, "g", "{}")], text("x"), call(0, "f", "{}"))
    talk(backend, Typed("hi", "/skip", "2", "/retry", "/skip", "/skip"))
    results = [message for message in backend.asks[1].messages if message["role"] == "tool"]
    assert [one["content"] for one in results] == ["2"]
    assert backend.asks[2].messages == backend.asks[1].messages


def test_calls_that_cannot_be_sent_back_are_not_kept() -> None:
    """p23: a history that the next request would be refused for is no history."""
    deep = '{"a":' + "[" * 80 + "]" * 80 + "}"
    wrong = [*call(0, "f", '{"a": "\\x"}'), *call(1, "f", '{"a"', complete=False)]
    backend = Scripted([*text("a"), *wrong, *call(2, "f", deep)], call(0, "f", "1"), text("b"))
    _, _, err, sent = talk(backend, Typed("hi", "two", "three"))
    assert err.count("the call of f is not kept: it is no JSON object") == 4
    assert sent[2] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "three"},
    ]


def test_a_failed_turn_leaves_everything_as_it_was() -> None:
    broken = [Piece("content", "half"), AnswerFailed("the engine died")]
    backend = Scripted(text("a"), broken, text("b"), [AnswerFailed("x")], text("c"))
    lines = Typed("one", "two", "three", "four", "/retry", is_terminal=False)
    code, out, err, sent = talk(backend, lines)
    assert code == 1
    assert out == "a\nhalf\nb\nc\n"
    assert "error: the engine died (the conversation is as before; /retry asks again)" in err
    said = [[message["content"] for message in messages] for messages in sent]
    assert said[2] == ["one", "a", "three"]
    assert said[4] == said[3] == ["one", "a", "three", "b", "four"]


def test_failed_results_are_asked_for_again() -> None:
    backend = Scripted(call(0, "f", "{}"), [AnswerFailed("x")], text("a"), [AnswerFailed("x")])
    lines = Typed("hi", "1", "2", "more")
    talk(backend, lines)
    assert lines.prompts == ["> ", "result of f> ", "result of f> ", "> ", "> "]
    assert [message["content"] for message in backend.asks[2].messages] == ["hi", None, "2"]


def test_ctrl_c_keeps_what_was_written_and_twice_leaves() -> None:
    stopped = [*text("ha", "lf"), *call(0, "f", "{")[:2], KeyboardInterrupt()]
    backend = Scripted(stopped, text("b"), [KeyboardInterrupt()], text("c"))
    lines = Typed("one", "two", KeyboardInterrupt(), "three", "four", *[KeyboardInterrupt()] * 2)
    code, out, err, sent = talk(backend, lines)
    assert code == 130
    assert out == "half\ncall f {\nb\nc\n"
    assert "stopped, about 4 tokens" in err
    assert "nothing was written; the conversation is as before" in err
    said = [[message["content"] for message in messages] for messages in sent]
    assert said[1] == ["one", "half", "two"]
    assert said[3] == ["one", "half", "two", "b", "four"]
    # Once in an answer and once at the prompt is twice, too; in a pipe once is enough.
    for terminal in (True, False):
        lines = Typed("one", KeyboardInterrupt(), "two", is_terminal=terminal)
        backend = Scripted([*text("a"), KeyboardInterrupt()])
        assert talk(backend, lines)[0] == 130
        assert len(backend.asks) == 1


# Commands


def test_retry_takes_the_next_seed() -> None:
    backend = Scripted(text("a"), text("b"), text("c"))
    lines = Typed("/retry", "hi", "/retry", "on")
    _, _, err, sent = talk(backend, lines, params=SamplingParams(seed=5))
    assert "/retry: nothing has been asked yet" in err
    assert sent[0] == sent[1]
    assert [message["content"] for message in sent[2]] == ["hi", "b", "on"]
    assert [ask.params.seed for ask in backend.asks] == [5, 6, 5]


def test_effort_and_system_last() -> None:
    """p17: an unknown effort is refused with the list, and the old one stays."""
    backend = Scripted(text("a"), text("b"), text("c"))
    first = ("/effort low", "1", "/effort HIGH", "/effort 1.0", "/effort nan", "/effort")
    then = ("/system x y", "2", "/effort 0.35", "/system -", "/system", "3")
    lines = Typed(*first, *then)
    code, _, err, sent = talk(backend, lines)
    assert code == 0
    assert [ask.effort for ask in backend.asks] == ["low", "low", 0.35]
    for name in ("'HIGH'", "1.0", "nan"):
        assert f"reasoning effort {name}: must be one of none, minimal, low" in err
    assert sent[1][0] == {"role": "system", "content": "x y"}
    assert sent[0][0]["role"] == sent[2][0]["role"] == "user"
    assert err.count("nothing is told first") == 2


def test_clear_forgets_messages_attachments_and_calls(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    backend = Scripted(call(0, "f", "{}"), text("b"))
    lines = Typed("hi", f"/image {tmp_path}/a.png", "/clear", "on", "/exit", "never")
    code, _, _, sent = talk(backend, lines)
    assert code == 0
    assert sent[1] == [{"role": "user", "content": "on"}]


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_files_go_with_the_next_message(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "my file.JPG"
    path.write_bytes(b"data")
    (tmp_path / "bad").write_bytes(b"bad")
    names = [str(path), f"'{path}'", str(path).replace(" ", "\\ ")]
    faulty = ["", str(tmp_path), f"{tmp_path}/none", f"{tmp_path}/bad", "/dev/zero"]
    backend = Scripted(text("a"), text("b"))
    lines = Typed(*[f"/{kind} {name}" for name in (*names, *faulty)], "look", "on")
    _, _, err, sent = talk(backend, lines)
    *parts, said = sent[0][0]["content"]
    assert said == {"type": "text", "text": "look"}
    assert len(parts) == 3
    encoded = base64.b64encode(b"data").decode()
    expected: dict[str, Any] = {"data": encoded, "format": "jpg"}
    if kind == "image":
        expected = {"url": f"data:image/jpeg;base64,{encoded}"}
    inner = "image_url" if kind == "image" else "input_audio"
    assert parts[0] == parts[2] == {"type": inner, inner: expected}
    assert sent[1][-1] == {"role": "user", "content": "on"}
    for words in ("give a file, /", "is a folder", "cannot be read (No such", "it is no picture"):
        assert words in err
    assert "/dev/zero: is no ordinary file" in err


def test_lines_with_a_slash() -> None:
    assert parse_line("/effort  0.5 ") == Command(name="effort", argument="0.5")
    assert parse_line("/quit") == Command(name="exit", argument="")
    assert parse_line("//effort") == "/effort"
    assert parse_line(" /effort") == " /effort"
    for line, words in (
        ("/efort low", "did you mean /effort?"),
        ("/home/me", "/help lists them"),
        ("/clear all", "write /clear alone"),
        ("/", "no such command"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_line(line)
    assert all(f"/{name}" in usage() for name in COMMANDS)


# What is shown


def test_nothing_hostile_reaches_a_terminal() -> None:
    shown = clean(HOSTILE)
    assert shown == ("[bold]x[/bold] ␛[2J␛]0;t␇ ␍ <9b>31m <202e> <|end_message|> \ufffd")
    screen = Screen()
    display = Display(screen, io.StringIO())
    with display.waiting(HOSTILE) as wait:
        wait.say(HOSTILE)
    spinner, start = screen.getvalue(), len(screen.getvalue())
    assert "[bold]x[/bold] ␛[2J" in spinner
    assert "\x1b[2J" not in spinner and "\x9b" not in spinner
    display.show([Piece("reasoning", HOSTILE), *text(HOSTILE), *call(0, HOSTILE, HOSTILE)])
    display.note(HOSTILE)
    display.error(HOSTILE)
    rest = screen.getvalue()[start:]
    for code in ("\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"):
        assert code in rest
        rest = rest.replace(code, "")
    assert all(char.isprintable() or char == "\n" for char in rest)
    assert rest.count(shown) == 6


def test_thoughts_are_dim_and_text_is_plain() -> None:
    screen = Screen()
    display = Display(screen, io.StringIO())
    display.show([Piece("reasoning", "hm"), *text("A", "B"), *call(0, "f", '{"a":1}')])
    display.end()
    dim, bold, plain = "\x1b[2m", "\x1b[1m", "\x1b[0m"
    expected = f'{dim}hm{plain}\n\nAB\n{bold}call f {plain}{{"a":1}}\n'
    assert screen.getvalue() == expected


def test_an_encoding_without_the_character() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    display = Display(out, io.StringIO())
    display.show(text("日\x1b"))
    assert out.buffer.getvalue() == b"??"


def test_deltas_become_pieces() -> None:
    reader = DeltaReader()
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "a"},
        {"reasoning_content": "b"},
        {"content": "c"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "function": {"name": "g", "arguments": "{}"}}]},
        {"content": ""},
        {},
    ]
    pieces = [piece for delta in deltas for piece in reader.push(delta)] + reader.finish()
    assert pieces == [
        Piece("reasoning", "a", 0),
        Piece("reasoning", "b", 0),
        Piece("content", "c", 1),
        *call(0, "f", "{}"),
        *call(1, "g", "{}"),
        Piece("content", "", 2),
    ]


# The command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--api-key", "x"], "--api-key goes with --url"),
        (["--url", "http://x", "--device", "cuda"], "--device is for a model in this process"),
        (["--url", "http://x", "--random-weights"], "--random-weights is for a model in this"),
        (["--url", "ftp://x"], "write it as http://127.0.0.1:8000"),
        (["--url", ""], "write it as http://127.0.0.1:8000"),
        (["--url", "http://x:99999999"], "write it as http://127.0.0.1:8000"),
        (["--url", "http://a:b@x"], "no name and password in it"),
        (["--url", "http://x", "--api-key", ""], "a key must be ASCII text and not empty"),
        (["--url", "x", "--api-key-file", "/none"], "--api-key-file /none: cannot be read"),
        (["--tools", "/none.json"], "--tools /none.json: cannot be read"),
        (["--tools", "/"], "--tools / is a folder"),
        (["--tools", "/dev/zero"], "--tools /dev/zero: cannot be read (it is larger than 64 MiB)"),
        (["--effort", "hihg"], "--effort: reasoning effort 'hihg': must be one of none"),
        (["--max-tokens", "0"], "max_tokens = 0: must be from 1"),
        (["--temperature", "nan"], "temperature = nan"),
        (["--seed", "-1"], "--seed -1: must be from 0"),
        (["--max-context", "1"], "max_context = 1"),
    ],
)
def test_wrong_flags_are_refused(words: list[str], message: str) -> None:
    config = parse(ChatConfig, prog="suzuri chat", args=words)
    with pytest.raises(ValueError, match=re.escape(message)):
        config.resolve()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "it must hold a list of tools"),
        (b"[1]", r"tools\[0\] = 1: must be an object"),
        (b'[{"type": "function"}]', r"tools\[0\].function"),
        (b"[", "it is no JSON"),
        (b"[" * 100_000, "it is no JSON"),
        (b"\xff", r"it is not UTF-8 \(byte 0\)"),
    ],
)
def test_faulty_tools(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tools.json"
    path.write_bytes(content)
    config = parse(ChatConfig, prog="suzuri chat", args=["--tools", str(path)])
    with pytest.raises(ValueError, match=f"--tools {path}: {message}"):
        config.resolve()


def test_urls_and_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n one \ntwo\n")
    for url in ("127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1/"):
        config = ChatConfig(url=url, api_key_file=str(keys)).resolve()
        assert config.server_url() == "http://127.0.0.1:8000"
        assert config.key() == "one"
    assert ChatConfig(url="https://x/base/v1").server_url() == "https://x/base"
    assert parse_effort("0.5") == 0.5


def test_a_client_needs_no_torch() -> None:
    lines = "import suzuri.tools.chat.run, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", lines], cwd=ROOT, check=False).returncode == 0
