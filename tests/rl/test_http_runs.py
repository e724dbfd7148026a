"""A server as RL's sampler while answers are under way, in whole runs, and when it ends."""

import asyncio
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from suzuri.engine.messages import OnPublish
from suzuri.model.inkling import Inkling
from suzuri.rl.publication import Handover, PublicationError
from suzuri.rl.run import run_rl
from suzuri.types import Answer, Prompt, SampleParams
from tests.model.models import random_model
from tests.rl.serving import (
    ON_PUBLISH,
    Raw,
    local_answers,
    same,
    sampler_of,
    scaled,
    server,
    serving,
)
from tests.rl.test_run import EvenGroup, EvenProblems, metrics, small
from tests.server.conftest import Running, stop

__all__ = ["server"]

NUM_ANSWERS, NUM_TOKENS = 50, 60
PROMPTS = [Prompt(tokens=[5 + i, 6, 7]) for i in range(NUM_ANSWERS)]
PARAMS = [SampleParams(max_tokens=NUM_TOKENS, seed=i) for i in range(NUM_ANSWERS)]


@pytest.fixture(scope="module")
def model() -> Inkling:
    return random_model("tiny", torch.bfloat16)


@pytest.fixture(scope="module")
def other(model: Inkling) -> Inkling:
    return scaled(model, 1.5)


@pytest.fixture(scope="module")
def old_and_new(model: Inkling, other: Inkling) -> list[list[Answer]]:
    """What either draws alone."""
    return [asyncio.run(local_answers(one, PROMPTS, PARAMS)) for one in (model, other)]


@pytest.mark.parametrize("on_publish", ON_PUBLISH)
def test_answers_that_are_under_way(
    server: Running,
    model: Inkling,
    other: Inkling,
    old_and_new: list[list[Answer]],
    tmp_path: Path,
    on_publish: OnPublish,
) -> None:
    async def run() -> tuple[list[Answer], int]:
        sampler = sampler_of(server, tmp_path / "handover", on_publish=on_publish)
        first = await sampler.publish(model)
        drawn = server.metric("generation_tokens_total")
        asked = [
            asyncio.ensure_future(sampler.sample(*one)) for one in zip(PROMPTS, PARAMS, strict=True)
        ]
        while await asyncio.to_thread(server.metric, "generation_tokens_total") == drawn:
            await asyncio.sleep(0)
        assert await sampler.publish(other) == first + 1
        found = await asyncio.gather(*asked)
        await sampler.close()
        return list(found), first

    found, first = asyncio.run(run())
    kept = [list(answer.versions).count(first) for answer in found]
    assert all(list(answer.versions) == sorted(answer.versions) for answer in found)
    assert {v for answer in found for v in answer.versions} <= {first, first + 1}
    if on_publish == "continue":
        check_cut(found, kept, old_and_new[0], other)
        return
    for place, answer in enumerate(found):
        assert kept[place] in (0, len(answer.tokens)), "each is of one version"
        assert same(answer, old_and_new[0 if kept[place] else 1][place])
    if on_publish == "finish":
        assert all(kept), "the weights waited for all of them"
    else:
        assert not all(kept), "what had not ended began anew"


def check_cut(found: list[Answer], kept: list[int], old: list[Answer], other: Inkling) -> None:
    """Up to `kept` tokens as the old weights draw them, from there as the new ones do."""
    for answer, alone, count in zip(found, old, kept, strict=True):
        assert list(answer.tokens[:count]) == list(alone.tokens[:count])
        assert list(answer.logprobs[:count]) == list(alone.logprobs[:count])
    rest = [i for i, answer in enumerate(found) if kept[i] < len(answer.tokens)]
    assert any(kept[i] for i in rest), "some were cut"
    prompts = [Prompt(tokens=[*PROMPTS[i].tokens, *found[i].tokens[: kept[i]]]) for i in rest]
    params = [SampleParams(max_tokens=NUM_TOKENS - kept[i], seed=i) for i in rest]
    went_on = asyncio.run(local_answers(other, prompts, params))
    for i, alone in zip(rest, went_on, strict=True):
        assert list(found[i].tokens[kept[i] :]) == list(alone.tokens)
        assert list(found[i].logprobs[kept[i] :]) == list(alone.logprobs)


def test_a_run_over_http_has_the_metrics_of_one_in_a_process(
    server: Running, tmp_path: Path
) -> None:
    assert run_rl(small(tmp_path / "local", steps=3)) == 0
    assert run_rl(small(tmp_path / "remote", steps=3, sampler=server.url)) == 0
    found, expected = (metrics(tmp_path / name) for name in ("remote", "local"))
    assert [line["kl/sampler_trainer_max"] for line in found[1:]] == [0.0, 0.0, 0.0]
    assert [line["sampler/version"] for line in found[1:]] == [1, 2, 3]
    assert without_speeds(found) == without_speeds(expected)


DOOMED: list[Running] = []


class Doomed(EvenProblems):
    """In the fourth step the servers above are killed."""

    def group(self, index: int) -> EvenGroup:
        while index == 6 and DOOMED:
            kill(DOOMED.pop())
        return super().group(index)


def kill(server: Running) -> None:
    os.kill(server.engine_pid, signal.SIGKILL)
    server.process.kill()
    server.process.wait()


def test_a_run_whose_server_was_killed_says_so_and_goes_on_with_another_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = functools.partial(Doomed, 0)
    assert run_rl(small(tmp_path / "local", problems=problems)) == 0
    first = serving(tmp_path)
    DOOMED.append(first)
    config = small(tmp_path / "remote", problems=problems, sampler=first.url)
    assert run_rl(config) == 1
    error = capsys.readouterr().err
    assert f"{first.url}/generate: " in error and "(asked 6 times)" in error
    assert "The last state is" in error
    second = serving(tmp_path, "--port", first.url.rsplit(":", maxsplit=1)[1])
    try:
        assert second.url == first.url
        assert run_rl(config) == 0
    finally:
        stop(second)
    found, expected = (without_speeds(metrics(tmp_path / name)) for name in ("remote", "local"))
    assert found == expected and len(found) == 7


def without_speeds(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("publish/")} for line in lines]


def test_with_a_lag_the_divergence_shows_and_versions_are_the_steps(
    server: Running, tmp_path: Path
) -> None:
    config = small(tmp_path / "run", steps=3, sampler=server.url, lag=1, on_publish="continue")
    assert run_rl(config) == 0
    lines = metrics(tmp_path / "run")[1:]
    assert max(line["kl/sampler_trainer_max"] for line in lines) > 0
    assert all(line["lag/tokens:max"] <= 1 for line in lines)


def test_a_run_without_its_server_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no server answers there"):
        run_rl(small(tmp_path / "run", sampler="http://127.0.0.1:9"))


def test_a_server_that_is_too_small_is_refused(server: Running, tmp_path: Path) -> None:
    limits = small(tmp_path / "run").limits.__class__(max_tokens=6, max_context=401)
    with pytest.raises(ValueError, match="start it with --max-context 401"):
        run_rl(small(tmp_path / "run", sampler=server.url, limits=limits))


def test_an_engine_that_was_killed_and_started_again_is_noticed_on_the_next_token(
    model: Inkling, tmp_path: Path
) -> None:
    server = serving(tmp_path)
    try:
        killed(server, model, tmp_path / "handover")
    finally:
        if server.process.poll() is None:
            stop(server)


def killed(server: Running, model: Inkling, folder: Path) -> None:
    async def run() -> None:
        sampler = sampler_of(server, folder, tries=3)
        await sampler.publish(model)
        await sampler.sample(PROMPTS[0], PARAMS[0])
        restarts = server.metric("engine_restarts")
        os.kill(server.engine_pid, signal.SIGKILL)
        while server.metric("engine_restarts") == restarts or not server.metric("engine_ready"):
            time.sleep(0.05)
        assert Raw(server).version() == 0, "it has the weights of its start"
        with pytest.raises(PublicationError, match=r"version 0 where version 1 should have"):
            await sampler.sample(PROMPTS[0], PARAMS[0])

        other = sampler_of(server, folder, tries=3)
        await other.publish(model)  # which puts it right
        await other.sample(PROMPTS[0], PARAMS[0])
        asked = asyncio.ensure_future(
            other.sample(Prompt(tokens=[5]), SampleParams(max_tokens=390, seed=0))
        )
        while not await asyncio.to_thread(server.metric, "num_requests_running"):
            assert not asked.done()
        os.killpg(os.getpgid(server.engine_pid), signal.SIGKILL)
        os.kill(server.process.pid, signal.SIGKILL)
        with pytest.raises(PublicationError, match="asked 3 times"):
            await asked
        with pytest.raises(PublicationError, match="asked 3 times"):
            await other.publish(model)

    asyncio.run(run())


def test_what_a_killed_run_left_in_memory_goes_when_it_goes_on(tmp_path: Path) -> None:
    handover = Handover(tmp_path, "127.0.0.1")
    left = handover.folder(3, 10)
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"x")
    again = Handover(tmp_path, "localhost")
    assert again.folder(4, 10).parent == left.parent and not left.exists()
    again.clear()
    assert not left.parent.exists()
    assert Handover(tmp_path, "10.0.0.7").folder(1, 10) == tmp_path / "publication" / "version-1"
    huge = Handover(tmp_path, "127.0.0.1").folder(1, 2**60)
    assert huge == tmp_path / "publication" / "version-1", "where memory has no room"
