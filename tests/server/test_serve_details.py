"""A real server on `tiny`: prompts' log-probs, stops, metrics, and what known faults were about."""

import concurrent.futures
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from suzuri.engine.llm import LLM
from suzuri.engine.sampling_params import SamplingParams
from tests.server.asking import CHAT, COMPLETIONS, USER, events
from tests.server.conftest import Running, children
from tests.server.test_prompt_parts import joined
from tests.waiting import until

HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", max_context=400, page_size=16, max_running=4)


def both(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a whole answer, which the streamed one has been compared with."""
    whole = client.post(COMPLETIONS, json=body)
    assert whole.status_code == 200, whole.text
    streamed = client.post(COMPLETIONS, json={**body, "stream": True})
    plain = {"prompt_logprobs": None, "prompt_token_ids": None}
    choices = [plain | choice for choice in whole.json()["choices"]]
    assert joined(events(streamed.text)) == choices
    return choices


@pytest.mark.parametrize("n", [1, 3])
def test_log_probs_of_prompts_are_those_of_the_engine(server: Running, llm: LLM, n: int) -> None:
    """a04: the prompt, whole or over several chunks and pages, cached before or not, to the bit."""
    prompt = "Inkstones, brushes and paper: " * 6
    params = SamplingParams(max_tokens=5, seed=2, n=n, prompt_logprobs=3)
    (expected,) = llm.generate([prompt], params, show_progress=False)
    assert expected.prompt_logprobs is not None
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 5, "seed": 2, "n": n}
    with server.client() as client:
        assert client.post(COMPLETIONS, json=body).status_code == 200  # now it is cached
        body |= {"prompt_logprobs": 3, "return_token_ids": True}
        choices = both(client, body)
        for choice, output in zip(choices, expected.outputs, strict=True):
            assert choice["token_ids"] == output.token_ids
            assert choice["prompt_token_ids"] == expected.prompt_token_ids
            for found, one in zip(choice["prompt_logprobs"], expected.prompt_logprobs, strict=True):
                if one is None:
                    assert found is None
                    continue
                assert {int(id): entry["logprob"] for id, entry in found.items()} == {
                    id: logprob.logprob for id, logprob in one.items()
                }
                assert sum(2.718281828 ** entry["logprob"] for entry in found.values()) < 1.0001
        body = {"prompt": prompt, "max_tokens": 5, "seed": 2, "n": n, "echo": True, "logprobs": 3}
        for choice, output in zip(both(client, body), expected.outputs, strict=True):
            assert choice["text"] == prompt + output.text
            own = [
                None if one is None else one[id].logprob
                for id, one in zip(expected.prompt_token_ids, expected.prompt_logprobs, strict=True)
            ]
            assert choice["logprobs"]["token_logprobs"][: len(own)] == own


def test_log_probs_of_a_chats_prompt(server: Running) -> None:
    body: dict[str, Any] = {"messages": USER, "max_tokens": 4, "seed": 1, "prompt_logprobs": 1}
    body |= {"return_token_ids": True, "n": 2}
    with server.client() as client:
        whole = client.post(CHAT, json=body).json()
        chunks = events(client.post(CHAT, json={**body, "stream": True}).text)
    assert chunks[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for id, entry in zip(whole["prompt_token_ids"][1:], whole["prompt_logprobs"][1:], strict=True):
        assert str(id) in entry
        assert entry[str(id)]["logprob"] <= 0


@pytest.mark.parametrize("seed", range(8))
def test_stop_strings_end_content_alone(server: Running, seed: int) -> None:
    """The ids with a stop string are the beginning of those without; thoughts stay whole."""
    body: dict[str, Any] = {"messages": USER, "seed": seed, "max_tokens": 60, "temperature": 1.5}
    body["logit_bias"] = {"200004": 5, "200008": 5, "200010": 4, "200006": -100}
    body["return_token_ids"] = True
    with server.client() as client:
        (free,) = client.post(CHAT, json=body).json()["choices"]
        content = free["message"]["content"] or ""
        stops = [content[place : place + 2] for place in (1, len(content) // 2)]
        stops = [stop for stop in dict.fromkeys(stops) if len(stop) == 2 and "\ufffd" not in stop]
        if not stops:
            pytest.skip("this seed writes no answer")
        bound = {**body, "stop": stops}
        (whole,) = client.post(CHAT, json=bound).json()["choices"]
        text = whole["message"]["content"] or ""
        assert content.startswith(text)
        assert whole["token_ids"] == free["token_ids"][: len(whole["token_ids"])]
        if isinstance(whole["stop_reason"], str):
            assert whole["stop_reason"] in stops
            assert content[len(text) :].startswith(whole["stop_reason"])
        thoughts = free["message"].get("reasoning_content") or ""
        assert thoughts.startswith(whole["message"].get("reasoning_content") or "")
        chunks = events(client.post(CHAT, json={**bound, "stream": True}).text)
    deltas = [item["delta"] for chunk in chunks for item in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert chunks[-1]["choices"][0]["stop_reason"] == whole["stop_reason"]


def test_metrics_of_a_real_load(server: Running) -> None:
    """Counts are those of what was asked; queue, prefill and decode are parts of the whole."""
    names = (
        *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total"),
        *("prefix_cache_hits_total", "request_success_total", "iteration_tokens_total_sum"),
        *("time_to_first_token_seconds_count", "inter_token_latency_seconds_count"),
        *("request_queue_time_seconds_sum", "request_inference_time_seconds_sum"),
        *("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
        *("e2e_request_latency_seconds_sum", "request_queue_time_seconds_count"),
    )
    server.wait_idle()
    before = {name: server.metric(name) for name in names}
    body: dict[str, Any] = {"prompt": "metrics " * 12, "max_tokens": 20, "ignore_eos": True}
    with server.client() as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(client.post, COMPLETIONS, json={**body, "n": 2}) for _ in range(6)]
        usages = [answer.result().json()["usage"] for answer in asked]
        again = client.post(COMPLETIONS, json=body).json()["usage"]
    server.wait_idle()
    done = {name: server.metric(name) - value for name, value in before.items()}
    prompt = usages[0]["prompt_tokens"]
    assert done["prompt_tokens_total"] == 7 * prompt
    assert done["generation_tokens_total"] == 13 * 20
    assert done["prefix_cache_queries_total"] == 13 * prompt
    assert again["prompt_tokens_details"]["cached_tokens"] > 0
    assert 0 < done["prefix_cache_hits_total"] < done["prefix_cache_queries_total"]
    assert done["request_success_total"] == 13
    assert done["time_to_first_token_seconds_count"] == 13
    assert done["request_queue_time_seconds_count"] == 13
    assert done["inter_token_latency_seconds_count"] == 13 * 19
    # Every token but the last of each answer is run once, and what of prompts is not cached.
    run = done["prefix_cache_queries_total"] - done["prefix_cache_hits_total"] + 13 * 19
    assert run <= done["iteration_tokens_total_sum"] <= run + 13
    parts = ("queue", "prefill", "decode")
    assert all(done[f"request_{name}_time_seconds_sum"] > 0 for name in parts)
    assert done["request_inference_time_seconds_sum"] == pytest.approx(
        sum(done[f"request_{name}_time_seconds_sum"] for name in parts[1:])
    )
    assert (
        done["request_queue_time_seconds_sum"] + done["request_inference_time_seconds_sum"]
        < done["e2e_request_latency_seconds_sum"]
    )


def test_extremes_in_one_batch_harm_no_neighbour(server: Running) -> None:
    """a14: each alone, all at one time, and the plain neighbour has the answer it has alone."""
    plain = {"prompt": "x", "max_tokens": 12, "seed": 5, "logprobs": 1, "return_token_ids": True}
    extremes: list[dict[str, Any]] = [
        *({"top_p": 0.0}, {"top_k": -1}, {"top_k": 0}, {"top_k": 1}, {"temperature": 0, "n": 3}),
        *({"presence_penalty": 2.0}, {"frequency_penalty": -2.0}, {"min_p": 1.0}),
        *({"repetition_penalty": 0.01}, {"temperature": 100.0}, {"temperature": 1e-300}),
        *({"logit_bias": {"5": 100}}, {"logit_bias": {"5": -100}}, {"seed": 2**63 - 1}),
    ]
    with server.client() as client, concurrent.futures.ThreadPoolExecutor(20) as pool:
        alone = client.post(COMPLETIONS, json=plain).json()["choices"]
        singles = [client.post(COMPLETIONS, json={**plain, **more}).json() for more in extremes]
        mixed = [pool.submit(client.post, COMPLETIONS, json={**plain, **m}) for m in extremes]
        beside = [pool.submit(client.post, COMPLETIONS, json=plain) for _ in range(4)]
        for future, single in zip(mixed, singles, strict=True):
            assert future.result().json()["choices"] == single["choices"]
        for future in beside:
            assert future.result().json()["choices"] == alone
        same = singles[4]["choices"]
        assert len({choice["text"] for choice in same}) == 1
        assert "NaN" not in json.dumps([alone, singles])


def test_histories_with_broken_arguments(server: Running) -> None:
    """p23: what a model once wrote, or a client made of it, is read or refused by its place."""
    with server.client() as client:
        for arguments in (r'{"path":"C:\Users"}', "", "not JSON", "{}", "[1]", "null", '{"a":1}}'):
            call = {"id": "c", "type": "function"}
            call |= {"function": {"name": "f", "arguments": arguments}}
            messages = [
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "done"},
            ]
            answer = client.post(CHAT, json={"messages": messages, "max_tokens": 1})
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                assert "messages[1]" in answer.json()["error"]["message"]
                assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("skip", [True, False])
def test_p06_skip_special_tokens_changes_nothing_in_a_chat(server: Running, skip: bool) -> None:
    body: dict[str, Any] = {"messages": USER, "seed": 3, "max_tokens": 60, "temperature": 1.5}
    body["logit_bias"] = {"200004": 5, "200008": 5, "200010": 4}
    with server.client() as client:
        plain = client.post(CHAT, json=body).json()["choices"]
        found = client.post(CHAT, json={**body, "skip_special_tokens": skip}).json()["choices"]
    assert found == plain


def test_halves_of_characters_anywhere(server: Running) -> None:
    """s09: in every text that goes to another process."""
    bad = "\ud800"
    call = {"id": bad, "type": "function", "function": {"name": "f", "arguments": bad}}
    bodies: list[dict[str, Any]] = [
        {"messages": USER, "reasoning_effort": bad},
        {"messages": [{"role": bad, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": bad}]}]},
        {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": USER, "tools": [{"type": "function", "function": {"name": bad}}]},
        {"messages": USER, "stop": bad},
        {"messages": USER, "cache_salt": bad},
        {"messages": USER, "regex": bad},
        {"messages": USER, "grammar": bad},
        {"messages": USER, "choice": [bad]},
        {"messages": USER, "response_format": {"type": bad}},
        {"messages": USER, "model": bad},
        {"messages": USER, "tool_choice": bad},
    ]
    with server.client() as client:
        for body in bodies:
            content = json.dumps({"max_tokens": 1, **body})
            answer = client.post(CHAT, content=content, headers=HEADERS)
            assert answer.status_code in (400, 404), (body, answer.text)
            assert answer.json()["error"]["message"]
        for path in ("/tokenize", COMPLETIONS):
            answer = client.post(path, content=json.dumps({"prompt": bad}), headers=HEADERS)
            assert answer.status_code == 400


def test_a_text_process_that_dies_is_replaced(server: Running) -> None:
    """Nothing is taken until another is there, which nobody has to ask for."""
    found = [
        pid
        for pid in children(server.process.pid)
        if b"text_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    (pid,) = found
    os.kill(pid, signal.SIGKILL)
    with server.client() as client:
        until(lambda: client.get("/health/ready").status_code == 503)
        until(lambda: client.get("/health/ready").status_code == 200)
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200


def test_readers_of_one_byte_a_second_cost_little(server: Running) -> None:
    """s11: 20 of them, and others beside them have their answers as ever."""
    host, port = server.url.removeprefix("http://").split(":")
    body = {"prompt": "x", "stream": True, "max_tokens": 300, "ignore_eos": True, "seed": 1}
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    before = memory(server.process.pid)
    slow: list[socket.socket] = []
    for _ in range(20):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(sent)
        slow.append(connection)
    with server.client() as client:
        other = {"prompt": "y", "max_tokens": 5, "seed": 1}
        assert client.post(COMPLETIONS, json=other).status_code == 200
    for connection in slow:
        assert connection.recv(1)
    server.wait_idle()
    assert memory(server.process.pid) - before < 40e6
    for connection in slow:
        connection.close()
    server.wait_idle()


def memory(pid: int) -> int:
    """Bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_thousands_of_refusals_leave_no_trace(server: Running) -> None:
    """Memory does not grow with requests: wrong ones, small ones, texts that are only encoded."""
    with server.client() as client:

        def some(count: int) -> None:
            for number in range(count):
                client.post(COMPLETIONS, json={"prompt": "x", f"unknown_{number}": 1})
                client.post("/tokenize", json={"prompt": f"text {number}"})
                client.get(f"/v1/models/{number}")
                if number % 10 == 0:
                    client.post(COMPLETIONS, json={"prompt": f"{number}", "max_tokens": 1})

        some(100)
        pids = [server.process.pid, *children(server.process.pid)]
        before = sum(map(memory, pids))
        some(300)
        assert sum(map(memory, pids)) - before < 20e6


def test_the_sdk_knows_every_error_by_its_class(server: Running) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.completions.create(model="tiny", prompt="x", max_tokens=-1)
    assert bad.value.param == "max_tokens"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
