"""`suzuri generate`: lines in, JSON lines out, in order, with faults in their own lines only."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from suzuri.config import parse
from suzuri.engine.llm import LLM, Job
from suzuri.engine.sampling_params import SamplingParams
from suzuri.tools.generate import config as config_file
from suzuri.tools.generate import run as run_file
from suzuri.tools.generate import source
from suzuri.tools.generate.config import GenerateConfig
from suzuri.tools.generate.lines import LineParser
from suzuri.tools.generate.run import run_generate
from suzuri.tools.generate.source import LineSource

ROOT = Path(__file__).parents[2]
SMALL = ("--dtype", "float32", "--max-running", "4", "--max-context", "200", "--temperature", "0")
COMMAND = """
import sys
from suzuri.config import parse
from suzuri.tools.generate.config import GenerateConfig
config = parse(GenerateConfig, prog="suzuri generate", args=sys.argv[1:]).resolve()
from suzuri.tools.generate.run import run_generate
try:
    sys.exit(run_generate(config))
except KeyboardInterrupt:
    sys.exit(130)
"""


def generate(*words: str) -> int:
    config = parse(GenerateConfig, prog="suzuri generate", args=["tiny", *words, *SMALL])
    return run_generate(config.resolve())


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", max_running=4, max_context=200)


def test_lines_come_back_in_order_with_faults_in_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], llm: LLM
) -> None:
    lines = [
        '\ufeff{"prompt": "Hello", "max_tokens": 12, "id": "first"}',
        "",
        '{"prompt_token_ids": [5, 6, 7], "n": 2, "temperature": 1, "seed": 5, "max_tokens": 3}',
        '{"prompt": "x", "temprature": 1}',
        "no JSON",
        '{"messages": [{"role": "user", "content": "日"}], "logprobs": 1, "reasoning_effort": 0.2}',
        '{"id": 7, "messages": [{"role": "bot"}]}',
        '{"prompt": "", "id": "empty"}',
        '{"prompt": "x", "max_tokens": 0}',
        '{"prompt": "x", "temperature": NaN}',
        '{"prompt": "x", "stop": 5}',
        '{"prompt": "x", "prompt_logprobs": 0, "max_tokens": 1, "logit_bias": {"65": 100}}',
    ]
    given, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    given.write_text("\r\n".join(lines), "utf-8")
    code = generate(
        "--input", str(given), "--output", str(out), "--max-tokens", "4", "--prompt", "a"
    )
    assert code == 1
    found = records(out.read_text("utf-8"))
    assert [one["id"] for one in found] == [0, "first", 2, 3, 4, 5, 7, "empty", 8, 9, 10, 11]
    errors = {one["id"]: one["error"] for one in found if "error" in one}
    words = {
        3: "temprature: no such key",
        4: "no JSON",
        7: "messages[0].role = 'bot'",
        "empty": "the prompt is empty",
        8: "max_tokens = 0: must be",
        9: "temperature = nan: must be",
        10: "stop = 5: must be a list",
    }
    assert errors.keys() == words.keys()
    assert all(words[id] in text for id, text in errors.items()), errors
    expected = llm.generate(
        ["a", "Hello", [5, 6, 7]],
        [
            SamplingParams(temperature=0, max_tokens=4),
            SamplingParams(temperature=0, max_tokens=12),
            SamplingParams(temperature=1, max_tokens=3, seed=5, n=2),
        ],
    )
    for got, output in zip(found, expected, strict=False):
        assert [one["token_ids"] for one in got["outputs"]] == [o.token_ids for o in output.outputs]
        assert [one["text"] for one in got["outputs"]] == [o.text for o in output.outputs]
        assert got["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
        assert got["usage"]["completion_tokens"] == sum(len(o.token_ids) for o in output.outputs)
    chat = found[5]
    messages = [{"role": "user", "content": "日"}]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    (wanted,) = llm.chat(messages, params, reasoning_effort="low")
    assert chat["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
    first = wanted.outputs[0]
    assert first.logprobs is not None
    assert [[e["id"] for e in entry] for entry in chat["outputs"][0]["logprobs"]] == [
        list(entry) for entry in first.logprobs
    ]
    assert found[-1]["outputs"][0]["text"] == "b" and found[-1]["prompt_logprobs"] == [None]
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("12 prompts, 7 failed: ") and last.endswith(" tokens/s")


def test_plain_text_is_a_prompt_per_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], llm: LLM
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('Hello\n\n {x} \n\xff\n{"prompt": 1}'.encode("latin-1"))
    assert generate("--input", str(path), "--max-tokens", "3") == 1
    found = records(capsys.readouterr().out)
    texts = ["Hello", " {x} ", None, '{"prompt": 1}']
    for number, (text, one) in enumerate(zip(texts, found, strict=True)):
        assert one["id"] == number
        if text is None:
            assert one["error"] == "the line is not UTF-8; convert the file"
        else:
            (output,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=3))
            assert one["outputs"][0]["token_ids"] == output.outputs[0].token_ids
    path.write_text("{x}", "utf-8")
    assert generate("--input", str(path), "--format", "text", "--max-tokens", "1") == 0
    assert len(records(capsys.readouterr().out)[0]["outputs"]) == 1
    assert generate("--input", str(path), "--max-tokens", "1") == 1
    assert "the line is no JSON" in records(capsys.readouterr().out)[0]["error"]
    assert generate("--prompt", "Hi", "--chat", "--max-tokens", "1") == 0
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1))
    usage = records(capsys.readouterr().out)[0]["usage"]
    assert usage["prompt_tokens"] == len(output.prompt_token_ids)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "the line is no JSON"),
        ('{"id": [1], "prompt": "x"}', "id must be a string or an integer"),
        ('{"id": true, "prompt": "x"}', "id must be a string or an integer"),
        ("{}", "give one of prompt, prompt_token_ids, messages"),
        ('{"prompt": "x", "messages": []}', "give one of prompt, prompt_token_ids, messages"),
        ('{"prompt": "x", "tools": [1]}', "tools goes with messages"),
        ('{"messages": [1], "cache_salt": "x"}', "cache_salt goes with a prompt"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias key"),
        ('{"prompt": "x", "top_p": 2}', "top_p = 2"),
        ("{" * 100_000, "the line is no JSON"),
        ('{"prompt": ' + "[" * 100_000, "the line is no JSON"),
    ],
)
def test_faulty_lines_say_what_is_wrong(line: str, words: str) -> None:
    parsed = LineParser(SamplingParams(), format="jsonl").from_line(line.encode())
    assert parsed is not None
    id, job = parsed
    assert id == 0 and job.error is not None and words in job.error


def test_parameters_of_a_line_replace_those_of_the_command() -> None:
    common = SamplingParams(max_tokens=5, stop=("a",), seed=3, temperature=0.5)
    parser = LineParser(common)
    line = b'{"prompt": "x", "max_tokens": null, "stop": null, "temperature": null, "priority": 2}'
    parsed = parser.from_line(line)
    assert parsed is not None
    expected = SamplingParams(max_tokens=None, seed=3, temperature=0.5)
    assert parsed[1] == Job(prompt={"prompt": "x"}, params=expected, priority=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", "none.txt"], "--input none.txt: there is no such file"),
        (["--input", "/"], "--input / is a folder"),
        (["--prompt", "x", "--output", "/"], "--output / is a folder"),
        (["--prompt", "x", "--output", "/no/such/a"], "there is no folder /no/such"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens = 0: must be from 1"),
        (["--prompt", "x", "--top-p", "nan"], "top_p = nan"),
        (["--prompt", "x", "--seed", "-1"], "--seed -1: must be from 0"),
        (["--prompt", "x", "--max-running", "0"], "max_running = 0"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_loaded(words: list[str], message: str) -> None:
    config = parse(GenerateConfig, prog="suzuri generate", args=words)
    with pytest.raises(ValueError, match=message):
        config.resolve()


def test_without_prompts_stdin_is_read_unless_it_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse(GenerateConfig, prog="suzuri generate", args=["--max-tokens", "3"])
    reading, writing = os.pipe()
    leader, terminal = os.openpty()
    monkeypatch.setattr(config_file, "STDIN", reading)
    assert config.resolve() == dataclasses.replace(config, input="-")
    with_prompt = dataclasses.replace(config, prompt=("x",))
    assert with_prompt.resolve() == with_prompt
    nothing = "nothing to complete; give --prompt TEXT or --input FILE"
    monkeypatch.setattr(config_file, "STDIN", terminal)
    with pytest.raises(ValueError, match=nothing):
        config.resolve()
    for descriptor in (reading, writing, leader, terminal):
        os.close(descriptor)
    with pytest.raises(ValueError, match=nothing):  # closed
        config.resolve()


def test_piped_prompts_need_no_flag() -> None:
    with start("--max-tokens", "2") as process:
        out, _ = process.communicate("Hello\n\nthere\n", timeout=100)
        assert process.returncode == 0
    assert [one["id"] for one in records(out)] == [0, 1]
    assert all(len(one["outputs"][0]["token_ids"]) == 2 for one in records(out))


def test_text_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tower that is not there takes no pictures; the text is the same."""
    given = tmp_path / "in.jsonl"
    url = "data:image/png;base64,AAAA"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    lines: list[dict[str, Any]] = [
        {"prompt": "Hello", "max_tokens": 3},
        {"messages": [{"role": "user", "content": content}]},
    ]
    given.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    answers: list[Any] = []
    for words in ((), ("--text-only",)):
        assert generate("--input", str(given), *words) == 1
        answers.append(records(capsys.readouterr().out))
    assert answers[0][0] == answers[1][0]
    assert "this model has no vision tower" in answers[1][1]["error"] != answers[0][1]["error"]


def test_the_input_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("Hello", "utf-8")
    config = parse(GenerateConfig, prog="x", args=["--input", str(path), "--output", str(path)])
    with pytest.raises(ValueError, match="is the input itself"):
        config.resolve()


def test_an_endless_input_is_read_as_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(source, "STDIN", reading)
    monkeypatch.setattr(sys, "stdout", stdout := io.StringIO())
    written = 0

    def write() -> None:
        nonlocal written
        line = b'{"prompt": "' + b"x" * 100 + b'", "max_tokens": 1}\n'
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            for _ in range(100_000):
                try:
                    pipe.write(line)
                except BrokenPipeError:
                    return
                written += 1

    outputs = 0
    ahead: list[int] = []
    write_line = run_file.output_line

    def count(*args: Any) -> str:
        nonlocal outputs
        outputs += 1
        ahead.append(written - outputs)
        if outputs == 60:
            raise ValueError("that is enough")
        return write_line(*args)

    monkeypatch.setattr(run_file, "output_line", count)
    thread = threading.Thread(target=write)
    thread.start()
    try:
        with pytest.raises(ValueError, match="that is enough"):
            generate("--input", "-")
    finally:
        os.close(reading)
        thread.join()
    # A window of 4 x 4 prompts, and what fits into one read and the pipe.
    assert max(ahead) < 16 + 2 * (1 << 16) // 128 + 200
    assert len(records(stdout.getvalue())) == 59


def lines_of(data: bytes, read_bytes: int, monkeypatch: pytest.MonkeyPatch) -> list[bytes | None]:
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    monkeypatch.setattr(source, "STDIN", reading)
    monkeypatch.setattr(source, "READ_BYTES", read_bytes)
    try:
        return list(LineSource("-").lines(lambda: True))
    finally:
        os.close(reading)


@pytest.mark.parametrize("read_bytes", [1, 3, 1 << 16])
def test_lines_do_not_depend_on_how_they_are_read(
    read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = "a\n\nbé\nlast".encode()
    assert lines_of(data, read_bytes, monkeypatch) == [b"a", b"", "bé".encode(), b"last"]
    assert lines_of(b"a\n", read_bytes, monkeypatch) == [b"a"]
    assert lines_of(b"", read_bytes, monkeypatch) == []
    monkeypatch.setattr(source, "MAX_LINE_BYTES", 5)
    with pytest.raises(ValueError, match="stdin: a line is longer than"):
        lines_of(b"123456789", read_bytes, monkeypatch)


def start(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "tiny", *words, *SMALL],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_answer_comes_while_the_input_is_still_open() -> None:
    with start("--input", "-", "--max-tokens", "2") as process:
        assert process.stdin is not None and process.stdout is not None
        for line in ('{"prompt": "Hello", "id": 1}', '{"prompt": "", "id": 2}', '{"prompt": "x"}'):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            found = json.loads(process.stdout.readline())
            assert found["id"] == json.loads(line).get("id", 2)
            assert ("error" in found) == ('""' in line)
        process.stdin.close()
        assert process.wait() == 1


def test_ctrl_c_keeps_what_is_finished() -> None:
    with start("--input", "-", "--max-tokens", "180") as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stderr is not None
        process.stdin.write('{"prompt": "Hello", "max_tokens": 1}\n' + '{"prompt": "x"}\n' * 5000)
        process.stdin.flush()
        assert len(json.loads(process.stdout.readline())["outputs"]) == 1
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()
        assert process.wait() == 130
    assert all("outputs" in one for one in records(rest))
    assert "Traceback" not in errors
