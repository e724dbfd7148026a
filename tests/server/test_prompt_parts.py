"""echo, prompt_logprobs and prompt ids in the shapes that clients know, streamed as whole: a01 a04.

The scripted engine gives the other samples' tokens before those of sample 0, which owes the
prompt's log-probs.
"""

from typing import Any

import httpx
import openai
import pytest

from suzuri.processing.tokenizer import CONTENT_MODEL_END_SAMPLING, CONTENT_TEXT, END_MESSAGE
from tests.server.asking import CHAT, COMPLETIONS, chat, events, ids, run
from tests.server.fakes import FakeEngine, logprobs, service

PROMPT = "aé🙂b"
ANSWER = "xñ!"


def engine(written: str = ANSWER) -> FakeEngine:
    return FakeEngine(ids(written), finish="length")


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 20, **fields}


def both(made: FakeEngine, path: str, body: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """The whole answer and the chunks of the streamed one."""

    async def scenario(client: httpx.AsyncClient) -> tuple[Any, list[dict[str, Any]]]:
        whole = await client.post(path, json=body)
        assert whole.status_code == 200, whole.text
        streamed = await client.post(path, json={**body, "stream": True})
        return whole.json(), events(streamed.text)

    return run(service(made), scenario)


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream, in the form of a whole answer."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for item in chunk["choices"]:
            known = made.setdefault(item["index"], {"index": item["index"], "text": ""})
            assert known.get("finish_reason") is None, "nothing comes after the end"
            known["text"] += item["text"]
            found = known.setdefault("logprobs", None)
            if item["logprobs"] is not None:
                before = found or {name: [] for name in item["logprobs"]}
                known["logprobs"] = {k: before[k] + item["logprobs"][k] for k in before}
            if "token_ids" in item:
                known["token_ids"] = known.get("token_ids", []) + item["token_ids"]
            for name in ("finish_reason", "stop_reason", "prompt_logprobs", "prompt_token_ids"):
                if item.get(name) is not None or name not in known:
                    assert known.get(name) is None, f"{name} comes once"
                    known[name] = item.get(name)
    return [made[index] for index in sorted(made)]


BODIES: list[dict[str, Any]] = [
    completion(echo=True),
    completion(echo=True, logprobs=0),
    completion(echo=True, logprobs=2),
    completion(echo=True, logprobs=2, n=3),
    completion(echo=True, logprobs=2, max_tokens=0),
    completion(echo=True, max_tokens=0),
    completion(max_tokens=0),
    completion(echo=True, logprobs=3, max_tokens=None),
    completion(echo=True, stop="!"),
    completion(prompt_logprobs=0),
    completion(prompt_logprobs=2, n=2),
    completion(prompt_logprobs=2, echo=True, logprobs=1, n=2, return_token_ids=True),
    completion(prompt_logprobs=1, prompt=["ab", "cd"], n=2, echo=True),
    completion(prompt=[[97, 98], [99]], n=2, echo=True, logprobs=1, max_tokens=1),
    completion(return_token_ids=True),
]


@pytest.mark.parametrize("body", BODIES)
def test_streamed_equals_whole(body: dict[str, Any]) -> None:
    whole, chunks = both(engine(), COMPLETIONS, body)
    expected = [{"prompt_logprobs": None, "prompt_token_ids": None} | c for c in whole["choices"]]
    found = joined(chunks)
    if not body.get("return_token_ids"):
        expected = [{k: v for k, v in c.items() if k != "token_ids"} for c in expected]
    assert found == expected
    first = {item["index"]: item for chunk in reversed(chunks) for item in chunk["choices"]}
    for item in first.values():
        assert ("prompt_logprobs" in item) == ("prompt_logprobs" in body)
        if body.get("echo"):
            prompt = body["prompt"]
            assert item["text"] == (
                PROMPT
                if prompt == PROMPT
                else ["ab", "cd" if prompt[0] == "ab" else "c"][item["index"] // body["n"]]
            )


def test_echo_with_logprobs_has_openai_shape() -> None:
    """a01: the first token has none; offsets are places in the text, also within a character."""
    whole, _ = both(engine(), COMPLETIONS, completion(echo=True, logprobs=1))
    (choice,) = whole["choices"]
    assert choice["text"] == PROMPT + ANSWER
    found = choice["logprobs"]
    given = ids(PROMPT + ANSWER)
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert all(len(part) == len(given) for part in found.values())
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == [logprobs(id, 1).raw for id in given[1:]]
    assert found["tokens"][0] == "a"
    assert found["top_logprobs"][-1] == {'"': -0.5, "!": -1.033}
    #                                 a  é     🙂          b  x  ñ     !
    assert found["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4, 5, 5, 6]
    for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
        assert "\ufffd" in token or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("most", [0, 1, None])
def test_echo_is_paid_for_by_nobody(most: int | None) -> None:
    """a01: tokens of the prompt are not tokens of the answer; none of these come with 0."""
    whole, chunks = both(
        engine("x"), COMPLETIONS, completion(echo=True, logprobs=1, max_tokens=most)
    )
    (choice,) = whole["choices"]
    assert choice["text"] == PROMPT + ("x" if most != 0 else "")
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == (most if most is not None else 1)
    assert whole["usage"]["prompt_tokens"] == len(ids(PROMPT))
    assert len(choice["logprobs"]["tokens"]) == len(ids(PROMPT)) + (most != 0)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_prompt_logprobs_have_vllm_shape() -> None:
    """a04: null, then a map from id to what is known of it, the prompt's own id always in it."""
    for count in (0, 1, 2):
        whole, _ = both(engine(), COMPLETIONS, completion(prompt="abc", prompt_logprobs=count))
        first, *entries = whole["choices"][0]["prompt_logprobs"]
        assert first is None
        own = {"logprob": -1.098, "rank": 2 if count > 1 else None, "decoded_token": "b"}
        likely = {"logprob": -0.5, "rank": 1, "decoded_token": "c"}
        assert entries[0] == ({"98": own, "99": likely} if count else {"98": own})
        assert len(entries) == 2
        assert whole["choices"][0]["logprobs"] is None


def test_a_prompt_of_one_token_has_one_entry() -> None:
    whole, chunks = both(engine(), COMPLETIONS, completion(prompt=[97], prompt_logprobs=1))
    assert whole["choices"][0]["prompt_logprobs"] == [None]
    assert chunks[0]["choices"][0]["prompt_logprobs"] == [None]


def test_echo_of_ids_spells_them() -> None:
    """Ids without text have none, as in an answer, unless they are asked for."""
    given = [97, CONTENT_TEXT, 98]
    for skip in (None, True, False):
        made = service(engine("x"))
        made.texts.token_bytes[CONTENT_TEXT] = b"<|content_text|>"
        body = completion(prompt=given, echo=True, logprobs=0, skip_special_tokens=skip)

        async def scenario(
            client: httpx.AsyncClient, body: dict[str, Any] = body
        ) -> dict[str, Any]:
            return (await client.post(COMPLETIONS, json=body)).json()["choices"][0]

        choice = run(made, scenario)
        middle = "<|content_text|>" if skip is False else ""
        assert choice["text"] == f"a{middle}bx"
        assert choice["logprobs"]["text_offset"] == [0, 1, 1 + len(middle), 2 + len(middle)]
        assert choice["logprobs"]["tokens"][1] == "token_id:200004"


TURN = [CONTENT_TEXT, *ids(ANSWER), END_MESSAGE, CONTENT_MODEL_END_SAMPLING]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("usage", [True, False])
def test_chats_have_it_beside_the_choices(n: int, usage: bool) -> None:
    """vLLM's place: the response, or the first chunk of a stream, and nowhere else."""
    body = chat(prompt_logprobs=1, return_token_ids=True, n=n)
    if usage:
        body["stream_options"] = {"include_usage": True}
        body["stream"] = True
    made = service(FakeEngine(TURN))

    async def scenario(client: httpx.AsyncClient) -> tuple[Any, list[dict[str, Any]]]:
        plain = {k: v for k, v in body.items() if not k.startswith("stream")}
        whole = (await client.post(CHAT, json=plain)).json()
        streamed = await client.post(CHAT, json={**body, "stream": True})
        return whole, events(streamed.text)

    whole, chunks = run(made, scenario)
    assert whole["prompt_token_ids"] == ids("hi")
    assert [None if e is None else list(e) for e in whole["prompt_logprobs"]] == [
        None,
        ["105", "106"],
    ]
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert chunks[0][name] == whole[name]
        assert not any(name in chunk for chunk in chunks[1:])
    assert ("usage" in chunks[0]) == usage
    written: dict[int, list[int]] = {index: [] for index in range(n)}
    for chunk in chunks:
        for item in chunk["choices"]:
            written[item["index"]] += item.get("token_ids", [])
    assert list(written.values()) == [TURN] * n
    assert [choice["token_ids"] for choice in whole["choices"]] == [TURN] * n


def test_the_sdk_reads_all_of_it() -> None:
    body: dict[str, Any] = completion(echo=True, logprobs=2)

    async def scenario(client: httpx.AsyncClient) -> None:
        http: Any = client
        sdk = openai.AsyncOpenAI(api_key="x", base_url="http://server/v1", http_client=http)
        whole = await sdk.completions.create(model="fake", **body)
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.top_logprobs is not None
        stream = await sdk.completions.create(model="fake", **body, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
        assert texts[0] == PROMPT
        assert "".join(texts) == whole.choices[0].text

    run(service(engine()), scenario)
