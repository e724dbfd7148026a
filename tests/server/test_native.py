"""POST /generate: ids, log-probs and versions as the engine has them, and what is refused."""

import asyncio
import base64
import dataclasses
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from suzuri.engine.messages import Event, Logprobs
from suzuri.model.config import preset
from suzuri.server.app import create_app
from suzuri.server.errors import ApiError
from suzuri.server.native import whole_generate
from suzuri.server.native_media import media_inputs
from suzuri.server.native_schema import GenerateMedia, GenerateRequest
from suzuri.server.service import Service
from tests.server.conftest import Running
from tests.server.fakes import FakeEngine, FakeTexts

TINY = preset("tiny")


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    with server.client() as client:
        response = client.post("/generate", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(server: Running, **fields: Any) -> tuple[int, str]:
    with server.client() as client:
        response = client.post("/generate", json=fields)
    return response.status_code, response.json()["error"]["message"]


def test_the_same_seed_draws_the_same_with_the_log_probs_of_what_was_drawn(server: Running) -> None:
    params = {"max_new_tokens": 9, "seed": 4, "temperature": 0.7, "ignore_eos": True}
    asked = {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True}
    one, other = ask(server, **asked), ask(server, **asked)
    meta = one["meta_info"]
    assert one["output_ids"] == other["output_ids"] and len(one["output_ids"]) == 9
    assert [id for _, id, _ in meta["output_token_logprobs"]] == one["output_ids"]
    drawn = [value for value, _, _ in meta["output_token_logprobs"]]
    assert drawn == [value for value, _, _ in other["meta_info"]["output_token_logprobs"]]
    assert all(float(np.float32(value)) == value < 0 for value in drawn), "fp32, to the bit"
    assert meta["finish_reason"] == {"type": "length", "matched": None}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 9)
    assert meta["weight_versions"] == [[0, 9]] and meta["weight_version"] == 0
    info = httpx.get(f"{server.url}/get_model_info").json()
    assert meta["fingerprint"] == info["fingerprint"]
    assert httpx.get(f"{server.url}/get_weight_version").json() == {
        "weight_version": 0,
        "content_hash": None,
    }


def test_a_completion_of_the_same_prompt_has_the_same_ids(server: Running) -> None:
    params = {"max_new_tokens": 6, "seed": 1}
    found = ask(server, text="hello", sampling_params=params)
    with server.client() as client:
        body = {"prompt": "hello", "max_tokens": 6, "seed": 1, "return_token_ids": True}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert found["output_ids"] == choice["token_ids"]
    assert found["text"] == choice["text"]
    assert "output_token_logprobs" not in found["meta_info"]


def test_what_was_read_before_is_cached_but_not_under_another_salt(server: Running) -> None:
    prompt = list(range(1, 60))
    params = {"max_new_tokens": 1, "temperature": 0.0}
    first, second, third = (
        ask(server, input_ids=prompt, sampling_params=params, cache_salt=salt)
        for salt in ("native", "native", "other")
    )
    cached = [one["meta_info"]["cached_tokens"] for one in (first, second, third)]
    assert cached[0] == cached[2] == 0 < cached[1]


def test_the_experts_of_every_token_but_the_last_come_when_asked_for(server: Running) -> None:
    params = {"max_new_tokens": 4, "ignore_eos": True}
    asked = {"input_ids": [5, 6, 7], "sampling_params": params, "return_routed_experts": True}
    routed = ask(server, **asked)["meta_info"]["routed_experts"]
    ids = np.frombuffer(base64.b64decode(routed["data"]), routed["dtype"]).reshape(routed["shape"])
    assert ids.shape[0] == 3 + 4 - 1 and ids.shape[2] == TINY.text.num_experts_per_tok
    assert (np.diff(ids.astype(int), axis=-1) > 0).all(), "rising, so each once"
    assert ids.max() < TINY.text.n_routed_experts


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "input_ids: give either input_ids or text"),
        ({"input_ids": [5], "text": "a"}, "input_ids: give either input_ids or text"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": [10**9]}, "1000000000"),
        ({"input_ids": [2**70]}, "more than 64 bits"),
        ({"input_ids": [5], "tempature": 1}, "tempature: there is no such parameter"),
        (
            {"input_ids": [5], "sampling_params": {"max_tokens": 3}},
            "sampling_params.max_tokens: there is no such parameter; did you mean max_new_tokens",
        ),
        ({"input_ids": [5], "sampling_params": {"n": 2}}, "sampling_params.n: there is no such"),
        ({"input_ids": [5], "sampling_params": {"top_p": 3.0}}, "top_p = 3.0: must be from 0"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens = 0"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 999}}, "max_context = 400"),
        ({"input_ids": [5], "sampling_params": {"stop": [""]}}, "stop: '' must not be empty"),
        ({"input_ids": [5], "stream": True}, "stream: input should be False"),
        ({"input_ids": [5], "priority": 10**7}, "priority = 10000000"),
        ({"text": "a", "media": [{}]}, "media.0.kind: is missing"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(
    server: Running, fields: dict[str, Any], said: str
) -> None:
    status, message = refusal(server, **fields)
    assert status == 400 and said in message


def clip(**changed: Any) -> GenerateMedia:
    assert TINY.audio is not None
    bins = np.zeros((2, TINY.audio.n_mel_bins), np.uint8)
    fields = {
        "kind": "audio",
        "index": 1,
        "dtype": "uint8",
        "shape": list(bins.shape),
        "data": base64.b64encode(bins.tobytes()).decode(),
    }
    return GenerateMedia(**fields | changed)


AUDIO = TINY.audio_token_id


def test_media_are_what_the_tower_reads() -> None:
    (found,) = media_inputs([clip()], [5, AUDIO, AUDIO, 6], TINY)
    assert (found.index, found.count, found.kind) == (1, 2, "audio")
    other = base64.b64encode(bytes([1]) + found.data[1:]).decode()
    (changed,) = media_inputs([clip(data=other)], [5, AUDIO, AUDIO, 6], TINY)
    assert changed.digest != found.digest


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "image"}, r"media\[0\]: uint8 .*must be float32"),
        ({"dtype": "float32"}, "must be uint8"),
        ({"shape": [2, 3]}, "must be uint8"),
        ({"shape": []}, "must be uint8"),
        ({"shape": [0, 80]}, "must be uint8"),
        ({"data": "AAAA"}, "has 3 bytes"),
        ({"data": "*"}, "no base64"),
        ({"data": base64.b64encode(bytes([255]) * 160).decode()}, "bins are from 0 to"),
        ({"index": 0}, "not all of its 2 tokens have the id"),
        ({"index": -1}, "must be in the prompt"),
        ({"index": 3}, "must be in the prompt"),
    ],
)
def test_media_that_no_tower_can_read_are_refused(changed: dict[str, Any], said: str) -> None:
    assert TINY.audio is not None and TINY.audio.n_mel_bins == 80
    with pytest.raises(ApiError, match=said) as error:
        media_inputs([clip(**changed)], [5, AUDIO, AUDIO, 6], TINY)
    assert (error.value.status, error.value.param) == (400, "media")


def test_media_of_a_model_without_their_tower_are_refused() -> None:
    with pytest.raises(ApiError, match="no tower for audio"):
        media_inputs([clip()], [5, AUDIO, AUDIO, 6], dataclasses.replace(TINY, audio=None))


class Scripted:
    """A request whose events are given."""

    id = "gen-1"
    num_prompt = 3

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self.service = Service(engine=FakeEngine(), texts=FakeTexts(), names=("fake",))

    @property
    def is_done(self) -> bool:
        return not self._events

    async def next(self) -> tuple[int, list[Event]]:
        return 0, [self._events.pop(0)]


def event(token: int, version: int, finish: str | None = None, cached: int = 0) -> Event:
    found = Logprobs(None, -0.5 - token, ())
    return Event(
        *(1, 0, token, "x", finish, None, found),
        cached=cached,
        version=version,
    )


async def answer(events: list[Event]) -> dict[str, Any]:
    work: Any = Scripted(events)
    return await whole_generate(work, GenerateRequest(input_ids=[1], return_logprob=True))


def test_every_token_has_its_version_and_what_was_begun_anew_is_forgotten() -> None:
    went_on = [event(3, 4, cached=2), event(4, 4), event(5, 6, "length")]
    found = asyncio.run(answer(went_on))
    assert found["output_ids"] == [3, 4, 5]
    assert found["meta_info"]["weight_versions"] == [[4, 2], [6, 1]]
    assert found["meta_info"]["cached_tokens"] == 2

    again = Event(1, 0, None, "", restarted=True)
    found = asyncio.run(answer([event(3, 4, cached=2), again, event(9, 5), event(8, 5, "stop")]))
    assert found["output_ids"] == [9, 8] and found["text"] == "xx"
    assert found["meta_info"]["weight_versions"] == [[5, 2]]
    assert found["meta_info"]["cached_tokens"] == 0
    assert [x for x, _, _ in found["meta_info"]["output_token_logprobs"]] == [-9.5, -8.5]


def test_weights_stay_unless_the_server_was_told_otherwise() -> None:
    service = Service(engine=FakeEngine(), texts=FakeTexts(), names=("fake",))
    app = create_app(service, keys=("secret",))
    with TestClient(app) as client:
        path = "/update_weights_from_disk"
        assert client.post(path, json={"model_path": "/x"}).status_code == 401
        key = {"Authorization": "Bearer secret"}
        response = client.post(path, json={"model_path": "/x"}, headers=key)
        assert response.status_code == 403
        assert "--allow-weight-updates" in response.json()["error"]["message"]
        assert client.get("/get_weight_version").status_code == 401
