"""Faults that other trainers of this family had, one test each; and what the docs show, run."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from suzuri.model.config import ModelConfig, preset
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.weights import load_weights
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import vocabulary_of
from suzuri.training.checkpoint import content_hash
from suzuri.training.losses import LOSSES, LossConfig, Rows, compute
from suzuri.training.trainer import LocalTrainer
from suzuri.types import AdamParams, MediaInput, Sample
from tests.training.samples import policy_samples, samples, trainer

TINY = preset("tiny")
STEP = AdamParams(learning_rate=1e-3)


def gradients(subject: LocalTrainer) -> dict[str, torch.Tensor]:
    return {
        n: p.grad.clone() for n, p in subject.optimizer.parameters.items() if p.grad is not None
    }


def changed(sample: Sample, place: int) -> Sample:
    tokens = list(sample.tokens)
    tokens[place] = (tokens[place] + 5) % 900
    return Sample(tokens=tokens, inputs=sample.inputs, media=sample.media)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c16_no_sample_sees_the_end_of_the_one_before(dtype: str) -> None:
    """C16: neither attention nor a short conv reaches over the border of two packed samples."""
    subject, (first, second) = trainer(dtype), samples((7, 9))
    (alone,) = subject.forward([second], "cross_entropy").logprobs
    for other in (first, changed(first, -1), changed(first, 3)):
        own, packed = subject.forward([other, second], "cross_entropy").logprobs
        assert packed.tolist() == alone.tolist()
    assert own.tolist() != subject.forward([first], "cross_entropy").logprobs[0].tolist()


def test_c17_gradients_of_a_batch_are_the_sums_of_those_alone() -> None:
    """C17: in fp64, every parameter, those of the convs among them."""
    given = samples((5, 9, 1, 7))
    together, alone = trainer("float64"), trainer("float64", token_budget=1)
    together.forward_backward(given, "cross_entropy")
    for one in given:
        alone.forward_backward([one], "cross_entropy")
    wanted = gradients(alone)
    assert any("conv" in name for name in wanted)
    for name, x in gradients(together).items():
        assert torch.allclose(x, wanted[name], rtol=1e-9, atol=1e-12), name


def media_trainer(dtype: str = "float32") -> LocalTrainer:
    """With rows for the placeholders."""
    plain, tokenizer = trainer(dtype), Tokenizer()
    kept = vocabulary_of(TINY.kept_vocabulary, tokenizer.token_bytes)
    return LocalTrainer(plain.model, plain.config, kept)


def picture(count: int, seed: int) -> MediaInput:
    inputs = np.random.default_rng(seed).normal(size=(count, 2, 40, 40, 3)).astype(np.float32)
    return MediaInput(kind="image", index=0, inputs=inputs)


def clip(count: int, seed: int) -> MediaInput:
    inputs = np.random.default_rng(seed).integers(0, 16, (count, 80))
    return MediaInput(kind="audio", index=0, inputs=inputs)


def with_media(length: int, seed: int, *items: MediaInput) -> Sample:
    """Text with the items in it, each after two more tokens."""
    (text,) = samples((length,), seed=seed)
    tokens = [token % 256 for token in text.tokens]
    targets = (np.asarray(text.inputs["target_tokens"]) % 256).tolist()
    weights, media, place = np.asarray(text.inputs["weights"]).tolist(), [], 2
    for item in items:
        count = len(item.inputs)
        slot = TINY.image_token_id if item.kind == "image" else TINY.audio_token_id
        tokens[place:place] = [slot] * count
        targets[place:place], weights[place:place] = [0] * count, [0.0] * count
        media.append(MediaInput(kind=item.kind, index=place, inputs=item.inputs))
        place += count + 2
    inputs = {"target_tokens": np.array(targets), "weights": np.array(weights, np.float32)}
    return Sample(tokens=tokens, inputs=inputs, media=tuple(media))


def test_m20_pictures_and_clips_stay_with_their_samples() -> None:
    """M20: none, one picture, none, three pictures, a clip and a picture, in any order."""
    given = [
        with_media(9, 1),
        with_media(8, 2, picture(4, 1)),
        with_media(5, 3),
        with_media(12, 4, picture(1, 2), picture(2, 3), picture(1, 4)),
        with_media(7, 5, clip(3, 5), picture(2, 6)),
    ]
    subject = media_trainer()
    alone = [subject.forward([one], "cross_entropy").logprobs[0].tolist() for one in given]
    for order in ((0, 1, 2, 3, 4), (4, 0, 3, 2, 1), (3, 1, 4)):
        found = subject.forward([given[i] for i in order], "cross_entropy").logprobs
        assert [x.tolist() for x in found] == [alone[i] for i in order]
    other = with_media(8, 2, picture(4, 9))
    assert subject.forward([other], "cross_entropy").logprobs[0].tolist() != alone[1]


def test_m19_text_learns_beside_a_picture_as_it_does_alone() -> None:
    """M19: the gradient of text embeddings does not stop at a batch with media. In fp64 it is the
    slope of the loss along one text row and along a weight of the tower."""
    subject = media_trainer("float64")
    given = [with_media(8, 2, picture(3, 1)), with_media(6, 3)]
    subject.forward_backward(given, "cross_entropy")
    found = gradients(subject)
    text_row = subject.vocabulary.to_rows([given[0].tokens[0]])[0]
    for name, where in (
        ("decoder.embed.weight", (text_row, 3)),
        ("vision.linears.0.weight", (0, 1)),
    ):
        parameter, losses = subject.optimizer.parameters[name], []
        slope = float(found[name][where])
        assert slope != 0
        for sign in (1, -1):
            with torch.no_grad():
                parameter[where] += sign * 1e-6
            losses.append(subject.forward(given, "cross_entropy").loss_sum)
            with torch.no_grad():
                parameter[where] -= sign * 1e-6
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_r05_weights_that_are_published_change_with_every_step(dtype: str, tmp_path: Path) -> None:
    """R05: the hash is of what a sampler loads, and never that of the step before."""
    subject, hashes = trainer(dtype), list[str]()
    for step in range(3):
        subject.forward_backward(samples(seed=step), "cross_entropy")
        subject.optim_step(STEP)
        hashes.append(subject.publish_weights(tmp_path / str(step)))
        shape = ModelConfig.from_file(tmp_path / str(step))
        sampler = Inkling(shape, dtype=getattr(torch, dtype))
        load_weights(sampler, tmp_path / str(step), want=PARTS)
        assert content_hash(sampler) == hashes[-1]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize("name", LOSSES)
def test_r11_a_packed_loss_is_the_sum_of_those_alone(name: str) -> None:
    """R11: no prediction over a border; counts are equal."""
    given = samples((5, 1, 8)) if name == "cross_entropy" else policy_samples((5, 1, 8))
    subject = trainer()
    together = subject.forward(given, name)
    alone = [subject.forward([one], name) for one in given]
    assert together.loss_sum == pytest.approx(sum(x.loss_sum for x in alone), rel=1e-6)
    assert together.weight_sum == sum(x.weight_sum for x in alone)
    assert [len(x) for x in together.logprobs] == [one.num_tokens for one in given]
    for x, y in zip(together.logprobs, alone, strict=True):
        assert x.tolist() == y.logprobs[0].tolist()


def test_r13_moments_are_part_of_a_state(tmp_path: Path) -> None:
    """R13: a step after loading is that of a run that was not stopped, and not that of an optimizer
    that begins anew."""
    subject = trainer()
    for seed in range(3):
        subject.forward_backward(samples(seed=seed), "cross_entropy")
        subject.optim_step(STEP)
    subject.save_state(tmp_path / "state")
    loaded, fresh = trainer(), trainer()
    loaded.load_state(tmp_path / "state")
    fresh.model.load_state_dict(subject.model.state_dict())
    for one in (subject, loaded, fresh):
        one.forward_backward(samples(seed=9), "cross_entropy")
        one.optim_step(STEP)
    assert content_hash(loaded.model) == content_hash(subject.model)
    assert content_hash(fresh.model) != content_hash(subject.model)


def test_r17_masks_are_by_token_whatever_the_text_would_be() -> None:
    """R17: a sampler may spell what a tokenizer never would; what counts are its tokens."""
    tokenizer = Tokenizer()
    text = "12345 \U0001f468\u200d\U0001f469\u200d\U0001f467 naïve"
    usual, spelled = tokenizer.encode(text), [i for b in text.encode() for i in _byte(tokenizer, b)]
    assert tokenizer.decode(spelled) == text
    assert usual != spelled
    fields = {
        "target_tokens": np.array(spelled[1:]),
        "logprobs": np.full(len(spelled) - 1, -6.0),
        "advantages": np.ones(len(spelled) - 1),
        "weights": np.arange(len(spelled) - 1) % 2,
    }
    subject = trainer()
    one = Sample(tokens=spelled[:-1], inputs=fields)
    output = subject.forward([one], "importance_sampling")
    (found,) = output.logprobs
    assert len(found) == len(spelled) - 1
    wanted = -float((fields["weights"] * np.exp(found.astype(np.float64) + 6.0)).sum())
    assert output.loss_sum == pytest.approx(wanted, rel=1e-5)


def _byte(tokenizer: Tokenizer, byte: int) -> list[int]:
    return [id for id in range(256) if tokenizer.token_bytes(id) == bytes([byte])]


@pytest.mark.parametrize("name", LOSSES)
def test_r01_r03_what_has_no_advantage_or_no_weight_is_no_trouble(name: str) -> None:
    """R01, R03: a sample of one token, advantages that are all 0 or huge: numbers, every time."""
    subject = trainer()
    for scale in (0.0, 1e6):
        given = []
        for one in policy_samples((1, 6)):
            fields: dict[str, Any] = dict(one.inputs)
            fields["advantages"] = np.asarray(fields["advantages"]) * scale
            if name == "cross_entropy":
                fields = {k: fields[k] for k in ("target_tokens", "weights")}
            given.append(Sample(tokens=one.tokens, inputs=fields))
        output = subject.forward_backward(given, name)
        assert math.isfinite(output.loss_sum)
        if not scale and name not in ("cross_entropy", "dro"):
            assert output.loss_sum == 0
            assert all(not bool(x.any()) for x in gradients(subject).values())
        assert math.isfinite(subject.optim_step(AdamParams(grad_clip_norm=1.0))["grad_norm"])


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_loss_is_that_of_its_log_probs(name: str) -> None:
    """On tiny in fp64, divergence and entropy aside: with the slopes by log-prob as weights (which
    are below 0 as well), cross_entropy has the gradient of any loss."""
    if name == "cross_entropy":
        given, settings = samples((6, 9)), {}
    else:
        given, settings = policy_samples((6, 9)), {"kl_coefficient": 0.2, "dual_clip": 1.5}
    subject = trainer("float64")
    output = subject.forward_backward(given, name, settings)
    found = gradients(subject)
    p = torch.cat([torch.as_tensor(x) for x in output.logprobs]).requires_grad_()
    fields = {
        key: torch.as_tensor(
            np.concatenate([np.asarray(one.inputs[key]) for one in given])
        ).double()
        for key in given[0].inputs
    }
    rows = Rows(p, fields, [one.num_tokens for one in given])
    compute(name, rows, LossConfig.of(name, settings)).loss.backward()
    assert p.grad is not None
    slopes = p.grad.split([one.num_tokens for one in given])
    weighted = [
        Sample(
            tokens=one.tokens,
            inputs={"target_tokens": one.inputs["target_tokens"], "weights": -slope.numpy()},
        )
        for one, slope in zip(given, slopes, strict=True)
    ]
    subject.optimizer.clear()
    subject.forward_backward(weighted, "cross_entropy")
    for key, x in gradients(subject).items():
        assert torch.allclose(x, found[key], rtol=1e-8, atol=1e-12), key


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "dro", "cross_entropy"])
def test_the_gradient_of_a_loss_on_tiny_is_its_slope(name: str) -> None:
    """With divergence and entropy, along the gradient, in fp64. (cispo and gspo hold a factor fixed
    that moves in a difference: see the test above.)"""
    subject, given = trainer("float64"), policy_samples((6, 9))
    settings: dict[str, float | str] = {"kl_coefficient": 0.2, "kl_kind": "k2"}
    settings["entropy_coefficient"] = 0.3
    if name == "cross_entropy":
        keys = ("target_tokens", "weights", "reference_logprobs")
        given = [Sample(tokens=s.tokens, inputs={k: s.inputs[k] for k in keys}) for s in given]
    subject.forward_backward(given, name, settings)
    found = gradients(subject)
    size = math.sqrt(sum(float((x**2).sum()) for x in found.values()))
    losses = []
    for way in (1e-6, -1e-6):
        with torch.no_grad():
            for key, x in found.items():
                subject.optimizer.parameters[key].add_(x, alpha=way / size)
        losses.append(subject.forward(given, name, settings).loss_sum)
        with torch.no_grad():
            for key, x in found.items():
                subject.optimizer.parameters[key].sub_(x, alpha=way / size)
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(size, rel=1e-4)


def test_the_program_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert re.fullmatch(r"[0-9a-f]{32}", capsys.readouterr().out.splitlines()[-1])
    assert (tmp_path / "states" / "1" / "trainer.json").exists()
    assert (tmp_path / "weights" / "1" / "config.json").exists()
