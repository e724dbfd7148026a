"""A server as RL's sampler: the bits of an engine in this process, and every way in which weights
may fail to arrive."""

import asyncio
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from suzuri.model.content_hash import content_hash
from suzuri.model.inkling import Inkling
from suzuri.rl import http_sampler, publication
from suzuri.rl.publication import PublicationError, write_weights
from suzuri.types import Answer, MediaInput, Prompt, SampleParams
from tests.model.models import random_model
from tests.rl.serving import (
    LONG,
    Raw,
    flipped,
    local_answers,
    same,
    sampler_of,
    scaled,
    server,
)
from tests.server.conftest import Running

__all__ = ["server"]

PROMPTS = [Prompt(tokens=tokens) for tokens in ([5, 6, 7], [200, 2, 7], list(range(5, 45)))]
PARAMS = [
    SampleParams(max_tokens=12, seed=3),
    SampleParams(max_tokens=9, seed=4, temperature=0.6, routing=True),
    SampleParams(max_tokens=5, temperature=0.0),
]


@pytest.fixture(scope="module")
def model() -> Inkling:
    return random_model("tiny", torch.bfloat16)


def hash_of(model: Inkling) -> str:
    """Of what the server has of it: drafts are not served."""
    named = model.named_parameters()
    return content_hash(pair for pair in named if not pair[0].startswith("draft."))


@pytest.fixture
def served(server: Running, model: Inkling, tmp_path: Path) -> Raw:
    """With the weights of `model`."""
    raw = Raw(server)
    write_weights(model, tmp_path / "served")
    status, reply = raw.update(tmp_path / "served", content_hash=hash_of(model))
    assert status == 200, reply
    return raw


# Answers


def test_answers_have_the_bits_of_an_engine_in_this_process(
    served: Raw, model: Inkling, tmp_path: Path
) -> None:
    other = scaled(model, 1.25)

    async def run() -> tuple[list[Answer], list[Answer]]:
        sampler = sampler_of(served.server, tmp_path / "handover", version=-1)
        assert await sampler.publish(other) == sampler.version == 0
        asked = [sampler.sample(*one) for one in zip(PROMPTS, PARAMS, strict=True)]
        found = list(await asyncio.gather(*asked))
        await sampler.close()
        return found, await local_answers(other, PROMPTS, PARAMS)

    found, expected = asyncio.run(run())
    for one, alone in zip(found, expected, strict=True):
        assert same(one, alone)
        assert set(one.versions) == {0}, "the trainer's numbers, whatever the server's are"
    assert found[0].routing is None
    assert found[1].routing is not None and expected[1].routing is not None
    assert np.array_equal(found[1].routing, expected[1].routing)


def with_media(model: Inkling) -> Prompt:
    """A picture and a clip of noise."""
    config, drawn = model.config, np.random.default_rng(0)
    vision, audio = config.vision, config.audio
    assert vision is not None and audio is not None
    shape = (3, vision.temporal_patch_size, vision.patch_size, vision.patch_size, 3)
    picture = drawn.standard_normal(shape).astype(np.float32)
    bins = drawn.integers(0, audio.mel_vocab_size, (2, audio.n_mel_bins)).astype(np.uint8)
    image, sound = config.image_token_id, config.audio_token_id
    return Prompt(
        tokens=[5, image, image, image, 6, sound, sound, 7],
        media=(
            MediaInput(kind="image", index=1, inputs=picture),
            MediaInput(kind="audio", index=5, inputs=bins),
        ),
    )


def test_pictures_and_clips_go_over_to_the_bit(served: Raw, model: Inkling, tmp_path: Path) -> None:
    prompt, params = with_media(model), SampleParams(max_tokens=8, seed=1)
    other = with_media(model).media[0].inputs.copy()
    other[0] += 1e-3
    near = Prompt(
        tokens=prompt.tokens,
        media=(MediaInput(kind="image", index=1, inputs=other), prompt.media[1]),
    )

    async def run() -> tuple[list[Answer], list[Answer]]:
        sampler = sampler_of(served.server, tmp_path / "handover")
        await sampler.publish(model)
        found = [await sampler.sample(one, params) for one in (prompt, near)]
        await sampler.close()
        return found, await local_answers(model, [prompt, near], [params] * 2)

    found, expected = asyncio.run(run())
    assert same(found[0], expected[0]) and same(found[1], expected[1])
    assert list(found[0].logprobs) != list(found[1].logprobs), "the picture is looked at"


def test_a_prompt_that_cannot_run_is_its_callers_fault_alone(served: Raw, tmp_path: Path) -> None:
    async def run() -> list[Any]:
        sampler = sampler_of(served.server, tmp_path)
        asked = [Prompt(tokens=[]), Prompt(tokens=[5]), Prompt(tokens=[5] * 400)]
        params = SampleParams(max_tokens=4, seed=0)
        found = await asyncio.gather(
            *(sampler.sample(one, params) for one in asked), return_exceptions=True
        )
        await sampler.close()
        return found

    empty, fine, long = asyncio.run(run())
    assert isinstance(empty, ValueError) and "the prompt is empty" in str(empty)
    assert len(fine.tokens) == 4
    assert isinstance(long, ValueError) and "the prompt has 400 tokens" in str(long)


# Weights


def test_every_token_after_a_publication_has_its_version_and_nothing_of_the_old_cache(
    served: Raw, model: Inkling, tmp_path: Path
) -> None:
    """R05, R07: the likeliest token is another, and none was cached."""
    before = served.generate(LONG)
    warm = served.generate(LONG)["meta_info"]
    assert warm["cached_tokens"] > 100

    async def run() -> int:
        sampler = sampler_of(served.server, tmp_path / "handover")
        found = await sampler.publish(flipped(model))
        await sampler.close()
        return found

    assert asyncio.run(run()) == 1
    after = served.generate(LONG)
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["output_ids"][0] != before["output_ids"][0]
    (expected,) = asyncio.run(
        local_answers(
            flipped(model),
            [Prompt(tokens=LONG)],
            [SampleParams(max_tokens=6, temperature=0.0)],
        )
    )
    assert after["output_ids"] == list(expected.tokens)
    version = before["meta_info"]["weight_version"] + 1
    assert after["meta_info"]["weight_versions"] == [[version, 6]]
    info = httpx.get(f"{served.server.url}/get_model_info").json()
    assert info["weight_version"] == version == served.version()
    assert info["content_hash"] == hash_of(flipped(model))
    assert not list((tmp_path / "handover").iterdir()), "nothing is left of what was handed over"


def damaged(folder: Path, change: Callable[[Path], None]) -> None:
    (file,) = folder.glob("model-*.safetensors")
    change(file)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def flip_a_bit(file: Path) -> None:
    with file.open("r+b") as data:
        data.seek(-3, os.SEEK_END)
        old = data.read(1)[0]
        data.seek(-3, os.SEEK_END)
        data.write(bytes([old ^ 1]))


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    index = next(file.parent.glob("*.index.json"))
    document = json.loads(index.read_text())
    kept = {name: of for name, of in document["weight_map"].items() if of != file.name}
    document["weight_map"] = kept | dict.fromkeys(tensors, file.name)
    index.write_text(json.dumps(document))


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[sorted(tensors)[-1]]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    name = sorted(tensors)[-1]
    tensors[name] = tensors[name].flatten()[:-1].clone()


def widen(tensors: dict[str, torch.Tensor]) -> None:
    name = sorted(tensors)[-1]
    tensors[name] = tensors[name].double()


DAMAGES: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "cut": (cut, 400, "cut off"),
    "bit": (flip_a_bit, 409, "were announced"),
    "dropped": (functools.partial(rewrite, change=drop), 400, "missing"),
    "reshaped": (functools.partial(rewrite, change=reshape), 400, "shape"),
    "widened": (functools.partial(rewrite, change=widen), 400, "F64"),
    "gone": (lambda file: file.unlink(), 400, "not there"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_weights_that_were_damaged_on_their_way_are_refused_and_the_old_ones_serve_on(
    served: Raw, model: Inkling, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R05."""
    change, status, said = DAMAGES[name]
    before, version = served.generate(LONG), served.version()
    other = scaled(model, 1.5)
    write_weights(other, tmp_path / "other")
    damaged(tmp_path / "other", change)
    found, message = served.update(tmp_path / "other", content_hash=hash_of(other))
    assert found == status and said in message
    after = served.generate(LONG)
    assert served.version() == version
    assert after["output_ids"] == before["output_ids"]
    one, two = (x["meta_info"]["output_token_logprobs"] for x in (before, after))
    assert one == two
    assert after["meta_info"]["cached_tokens"] > 100, "of the same weights it is still good"

    def write(sent: Any, folder: Path) -> None:
        write_weights(sent, folder)
        damaged(folder, change)

    monkeypatch.setattr(publication, "write_weights", write)
    with pytest.raises(PublicationError, match="refuses the weights"):
        asyncio.run(sampler_of(served.server, tmp_path / "handover").publish(other))


def test_what_is_no_folder_of_this_model_is_refused(
    served: Raw, model: Inkling, tmp_path: Path
) -> None:
    version = served.version()
    write_weights(model, tmp_path / "own")
    config = tmp_path / "own" / "config.json"
    document = json.loads(config.read_text())
    document["text_config"]["rms_norm_eps"] *= 2
    config.write_text(json.dumps(document))
    write_weights(random_model("tiny", torch.float32), tmp_path / "wide")
    for folder, said in (
        (tmp_path / "none", "no such folder"),
        ("relative", "must be absolute"),
        ("", "no name of a folder"),
        ("/a\0b", "no name of a folder"),
        (tmp_path / "own", "text.rms_norm_eps"),
        (tmp_path / "wide", "F32"),
    ):
        status, message = served.update(folder)
        assert status == 400 and said in message, (folder, message)
    assert served.version() == version


def test_a_version_that_cannot_come_next_is_refused(
    served: Raw, model: Inkling, tmp_path: Path
) -> None:
    other = scaled(model, 1.5)
    write_weights(other, tmp_path / "other")
    now, digest = served.version(), hash_of(other)
    for fields, said in (
        ({"replaces": now - 1}, f"the weights here are of version {now}"),
        ({"replaces": now + 1}, f"the weights here are of version {now}"),
        ({"weight_version": now}, f"must be above {now}"),
        ({"weight_version": 2**60}, f"must be above {now}"),
        ({"content_hash": "0" * 32}, "were announced"),
    ):
        status, message = served.update(tmp_path / "other", **fields)
        assert status == 409 and said in message, message
    assert served.version() == now
    fields = {"content_hash": digest, "weight_version": now + 3, "replaces": now}
    status, reply = served.update(tmp_path / "other", **fields)
    assert (status, reply["weight_version"], reply["content_hash"]) == (200, now + 3, digest)
    again = served.update(tmp_path / "other", **fields)
    assert again == (200, reply), "a reply that was lost can be asked for again"
    assert served.version() == now + 3


def test_of_two_publications_at_the_same_time_one_arrives_and_the_other_says_so(
    served: Raw, model: Inkling, tmp_path: Path
) -> None:
    models = [scaled(model, scale) for scale in (1.5, 0.75)]

    async def run() -> tuple[list[Any], list[Any]]:
        both = [sampler_of(served.server, tmp_path / name) for name in ("a", "b")]
        for one in both:  # so that both know the version that they replace
            await one.sample(PROMPTS[0], PARAMS[0])
        done = await asyncio.gather(
            *(one.publish(weights) for one, weights in zip(both, models, strict=True)),
            return_exceptions=True,
        )
        drawn = await asyncio.gather(
            *(one.sample(PROMPTS[0], PARAMS[0]) for one in both), return_exceptions=True
        )
        for one in both:
            await one.close()
        return done, drawn

    done, drawn = asyncio.run(run())
    (winner,) = [place for place, one in enumerate(done) if one == 1]
    lost = done[1 - winner]
    assert isinstance(lost, PublicationError) and "refuses the weights" in str(lost)
    assert str(drawn[1 - winner]) == str(lost), "and nothing more is sampled"
    (expected,) = asyncio.run(local_answers(models[winner], PROMPTS[:1], PARAMS[:1]))
    assert same(drawn[winner], expected)


def test_weights_of_somebody_else_are_noticed_on_the_next_token(
    served: Raw, model: Inkling, tmp_path: Path
) -> None:
    write_weights(scaled(model, 1.5), tmp_path / "other")

    async def run() -> None:
        sampler = sampler_of(served.server, tmp_path / "handover")
        await sampler.publish(model)
        await sampler.sample(PROMPTS[0], PARAMS[0])
        status, _ = await asyncio.to_thread(served.update, tmp_path / "other")
        assert status == 200
        with pytest.raises(PublicationError, match="somebody else publishes there"):
            await sampler.sample(PROMPTS[0], PARAMS[0])
        with pytest.raises(PublicationError, match="somebody else publishes there"):
            await sampler.publish(model)

    asyncio.run(run())


@pytest.mark.parametrize("name", ["dtypes", "kernels"])
def test_a_trainer_that_may_compute_other_bits_is_refused_before_anything_is_sent(
    served: Raw, model: Inkling, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = served.version()
    subject = model
    if name == "dtypes":
        subject = random_model("tiny", torch.float32)
    else:
        real = http_sampler.numerics_fingerprint
        monkeypatch.setattr(
            http_sampler,
            "numerics_fingerprint",
            lambda *args: {**real(*args), "kernels": "of another version"},
        )
    sampler = sampler_of(served.server, tmp_path / "handover")
    with pytest.raises(PublicationError, match=f"may compute other bits: its {name} is"):
        asyncio.run(sampler.publish(subject))
    assert served.version() == version and not (tmp_path / "handover").exists()


LIES: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "hash": ("/update", lambda x: x.update(content_hash="0" * 32), "were sent as version"),
    "version": ("/update", lambda x: x.update(weight_version=10**6), "were sent as version"),
    "server": ("/update", lambda x: x["fingerprint"].update(arch="sm_90"), "its arch is 'sm_90'"),
    "silent": ("/update", lambda x: x.pop("content_hash"), "has no 'content_hash'"),
    "older": (
        "/generate",
        lambda x: x["meta_info"].update(weight_versions=[[0, len(x["output_ids"])]]),
        "with weights of version 0 where",
    ),
    "fewer": (
        "/generate",
        lambda x: x["output_ids"].pop(),
        "log-probs or versions missing",
    ),
    "unsaid": ("/generate", lambda x: x["meta_info"].pop("weight_versions"), "weight_versions"),
    "other": (
        "/generate",
        lambda x: x["meta_info"]["fingerprint"].update(kernels="others"),
        "may compute other bits: its kernels is 'others'",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_server_that_says_something_else_is_not_sampled_from(
    served: Raw, model: Inkling, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, change, said = LIES[name]

    async def run() -> None:
        sampler = sampler_of(served.server, tmp_path / "handover")
        real = sampler.calls.ask

        async def ask(method: str, path: str, *rest: Any, **fields: Any) -> dict[str, Any]:
            reply = await real(method, path, *rest, **fields)
            if path.startswith(where):
                change(reply)
            return reply

        monkeypatch.setattr(sampler.calls, "ask", ask)
        with pytest.raises(PublicationError, match=said):
            await sampler.publish(model)
            await sampler.sample(PROMPTS[0], PARAMS[0])
        with pytest.raises(PublicationError, match=said):
            await sampler.sample(PROMPTS[0], PARAMS[0])
        with pytest.raises(PublicationError, match=said):
            await sampler.publish(model)

    asyncio.run(run())


def test_a_caller_that_goes_away_frees_what_it_held(served: Raw, tmp_path: Path) -> None:
    async def run() -> None:
        sampler = sampler_of(served.server, tmp_path)
        asked = asyncio.ensure_future(
            sampler.sample(Prompt(tokens=[5]), SampleParams(max_tokens=390, seed=0))
        )
        while not await asyncio.to_thread(served.server.metric, "num_requests_running"):
            assert not asked.done()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await sampler.close()

    asyncio.run(run())
    served.server.wait_idle(60)
