"""A server that takes weights, and other weights to give to it, for tests of the sampler that asks
one."""

import asyncio
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from suzuri.model.inkling import Inkling
from suzuri.rl.http_sampler import HttpSampler
from suzuri.rl.local_sampler import LocalSampler, OnPublish
from suzuri.rl.publication import Handover
from suzuri.types import Answer, Prompt, SampleParams
from tests.rl.test_local_sampler import engine_of
from tests.server.conftest import Running, start, stop

LONG = list(range(1, 120))
"""A prompt of which a cache has much."""


def serving(folder: Path, *args: str) -> Running:
    """`suzuri serve` on tiny."""
    return start(folder / "log.txt", "--allow-weight-updates", *args)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = serving(tmp_path_factory.mktemp("server"))
    yield running
    assert stop(running) == 0
    assert "Traceback" not in running.log.read_text()


def sampler_of(server: Running, folder: Path, **fields: Any) -> HttpSampler:
    """A new one, that hands its weights over in `folder`."""
    return HttpSampler(server.url, Handover(folder, "127.0.0.1", str(folder)), **fields)


def scaled(model: Inkling, scale: float) -> Inkling:
    """Other weights of the same shape: at 0 the norm behind the last layer, every logit is."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.decoder.norm.weight.mul_(scale)
    return other


def flipped(model: Inkling) -> Inkling:
    """The same with every logit's sign turned: what was likeliest is least likely."""
    return scaled(model, -1.0)


async def local_answers(
    model: Inkling, prompts: Sequence[Prompt], params: Sequence[SampleParams]
) -> list[Answer]:
    """What an engine in this process draws with these weights."""
    sampler = LocalSampler(engine_of(model))
    asked = (sampler.sample(*one) for one in zip(prompts, params, strict=True))
    return list(await asyncio.gather(*asked))


def same(one: Answer, other: Answer) -> bool:
    """To the bit, versions aside."""
    return (list(one.tokens), list(one.logprobs), one.finish) == (
        list(other.tokens),
        list(other.logprobs),
        other.finish,
    )


@dataclasses.dataclass
class Raw:
    """Routes of a server as anybody asks them."""

    server: Running

    def generate(self, prompt: Sequence[int], tokens: int = 6) -> dict[str, Any]:
        """Greedily."""
        params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": params, "return_logprob": True}
        response = httpx.post(f"{self.server.url}/generate", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def update(self, folder: Path | str, **fields: Any) -> tuple[int, Any]:
        """(status, reply or error's message)"""
        body = {"model_path": str(folder), **fields}
        url = f"{self.server.url}/update_weights_from_disk"
        response = httpx.post(url, json=body, timeout=60)
        found = response.json()
        return response.status_code, found["error"]["message"] if "error" in found else found

    def version(self) -> int:
        return httpx.get(f"{self.server.url}/get_weight_version").json()["weight_version"]


ON_PUBLISH: tuple[OnPublish, ...] = ("finish", "continue", "restart")
