"""What a sample may hold: the rest is refused by its index, with everything pending as it was."""

from typing import Any

import numpy as np
import pytest
import torch

from suzuri.model.config import preset
from suzuri.training.packing import SampleError
from suzuri.training.trainer import LocalTrainer
from suzuri.types import MediaInput, Sample
from tests.training.samples import policy_samples, samples, trainer

TINY = preset("tiny")
PATCH = (2, 40, 40, 3)
LEFT_OUT = (("weights",), ("reference_logprobs",), ("weights", "reference_logprobs"))


def pending(subject: LocalTrainer) -> tuple[float, float, list[float]]:
    """The weight sum, a fingerprint of the gradients, and the expert counts."""
    gradients = [p.grad for p in subject.optimizer.parameters.values() if p.grad is not None]
    counts = [float(x) for layer in subject.loads.counts.values() for x in layer]
    return subject.weight_sum, sum(float(x.double().abs().sum()) for x in gradients), counts


def with_media(kind: str, inputs: Any, index: int = 1, slots: int = 2) -> Sample:
    """Five tokens, of which those from 1 on are placeholders."""
    slot = TINY.image_token_id if kind == "image" else TINY.audio_token_id
    tokens = [7, *[slot] * slots, *[9] * (4 - slots)]
    return Sample(
        tokens=tokens,
        inputs={"target_tokens": np.full(5, 9), "weights": np.ones(5)},
        media=(MediaInput(kind=kind, index=index, inputs=inputs),),
    )


BAD_MEDIA: dict[str, tuple[Sample, str]] = {
    "kind": (with_media("video", np.zeros((2, 3))), "media of kind 'video'"),
    "empty": (with_media("image", np.zeros((0, *PATCH))), r"image inputs are \[0, 2"),
    "no patches": (with_media("image", np.zeros((2, 6, 6))), r"need \[M, 2, 40, 40, 3\]"),
    "scalar": (with_media("image", np.array(1.0)), r"image inputs are \[\]"),
    "not finite": (with_media("image", np.full((2, *PATCH), np.inf)), "must be finite"),
    "words": (with_media("image", np.full((2, *PATCH), "a")), "must be finite"),
    "bands": (with_media("audio", np.zeros((2, 8), np.int64)), r"need \[M, 80\]"),
    "level": (with_media("audio", np.full((2, 80), 16)), "integers from 0 to 15"),
    "no level": (with_media("audio", np.full((2, 80), -1)), "integers from 0 to 15"),
    "fraction": (with_media("audio", np.full((2, 80), 0.5)), "integers from 0 to 15"),
    "before": (with_media("image", np.zeros((2, *PATCH)), index=-1), "outside of the 5 tokens"),
    "behind": (with_media("image", np.zeros((2, *PATCH)), index=4), "outside of the 5 tokens"),
    "shifted": (with_media("image", np.zeros((2, *PATCH)), index=2), "2 tokens at 2: must stand"),
    "longer": (with_media("image", np.zeros((3, *PATCH))), "3 tokens at 1: must stand on"),
}


@pytest.mark.parametrize("name", BAD_MEDIA)
def test_media_that_the_tower_does_not_take_are_refused_before_anything(name: str) -> None:
    """M20: on their placeholders, in the tower's shape and values."""
    bad, message = BAD_MEDIA[name]
    subject = trainer(token_budget=8)
    subject.forward_backward(samples((6,)), "cross_entropy")
    before = pending(subject)
    with pytest.raises(SampleError, match=f"sample 1: .*{message}"):
        subject.forward_backward([*samples((7,)), bad], "cross_entropy")
    assert pending(subject) == before


def plain(**change: Any) -> Sample:
    fields: dict[str, Any] = {
        "target_tokens": np.array([1, 2, 3]),
        "weights": np.ones(3),
        "logprobs": -np.ones(3),
        "advantages": np.ones(3),
    }
    tokens = change.pop("tokens", [1, 2, 3])
    return Sample(tokens=tokens, inputs={k: v for k, v in (fields | change).items() if len(k)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1.0, 2.0, 3.0]}, "tokens are float64; need integers"),
        ({"tokens": [True, False, True]}, "tokens are bool; need integers"),
        ({"tokens": ["a", "b", "c"]}, "tokens are <U1; need integers"),
        ({"tokens": [2**70, 1, 1]}, "tokens are object; need integers"),
        ({"tokens": [[1], [2], [3]]}, r"tokens are \[3, 1\]; need \[T\]"),
        ({"tokens": [[1], [2, 3]]}, "tokens: no array"),
        ({"tokens": [1, 2, 2000]}, "tokens: 2000, and the model has 1000 rows"),
        ({"target_tokens": np.array([1, 2, 2000])}, "target_tokens: 2000, and the model has 1000"),
        ({"target_tokens": np.array(3), "weights": np.array(1.0)}, r"target_tokens are \[\]"),
        ({"target_tokens": np.zeros((3, 2), int), "weights": np.ones((3, 2))}, "one per token"),
        ({"weights": torch.ones(3, dtype=torch.bfloat16)}, "weights: no array of numbers"),
        ({"weights": np.array(["a"] * 3)}, "weights are <U1; need numbers"),
        ({"weights": np.array([1.0, np.inf, 0.0])}, "weights: must be finite numbers"),
        ({"advantages": np.array([1.0, np.nan, 0.0])}, "advantages: must be finite numbers where"),
    ],
)
def test_fields_that_are_no_numbers_are_named(change: dict[str, Any], message: str) -> None:
    subject = trainer()
    with pytest.raises(SampleError, match=f"sample 1: .*{message}"):
        subject.forward_backward([plain(), plain(**change)], "ppo")
    assert pending(subject)[1] == 0


@pytest.mark.parametrize(
    ("shape", "message"), [((3, 0), r"target_tokens are \[3, 0\]"), ((3, 1, 1), r"need \[T\], or")]
)
def test_targets_have_one_or_two_dims(shape: tuple[int, ...], message: str) -> None:
    fields = {"target_tokens": np.zeros(shape, np.int64), "weights": np.zeros(shape)}
    with pytest.raises(SampleError, match=message):
        trainer().forward([Sample(tokens=[1, 2, 3], inputs=fields)], "cross_entropy")


def test_what_stands_where_the_weight_is_0_may_be_no_number() -> None:
    """Log-probs that `forward` left out (skip_unweighted) can be given back as they are."""
    given = policy_samples()
    subject = trainer(skip_unweighted=True)
    outputs = subject.forward(
        [
            Sample(tokens=s.tokens, inputs={k: s.inputs[k] for k in ("target_tokens", "weights")})
            for s in given
        ],
        "cross_entropy",
    )
    assert any(np.isnan(x).any() for x in outputs.logprobs)
    back = [
        Sample(
            tokens=one.tokens,
            inputs={**one.inputs, "logprobs": found, "reference_logprobs": found},
        )
        for one, found in zip(given, outputs.logprobs, strict=True)
    ]
    output = subject.forward_backward(back, "ppo", {"kl_coefficient": 0.5})
    assert output.metrics["ratio:mean"] == 1.0
    assert output.metrics["kl_reference:mean"] == output.metrics["kl_sampler_trainer:max"] == 0.0


def test_samples_of_one_call_may_differ_in_what_they_give() -> None:
    """With and without weights, a mask, and reference log-probs that nobody asked for; several and
    single targets; in any order the loss is that of each alone."""
    subject = trainer(token_budget=16)
    policy = policy_samples((5, 7, 6))
    mixed = [
        Sample(
            tokens=one.tokens,
            inputs={k: v for k, v in one.inputs.items() if k not in left_out},
        )
        for one, left_out in zip(policy, LEFT_OUT, strict=True)
    ]
    full = [
        Sample(
            tokens=one.tokens, inputs={"weights": np.ones(one.num_tokens, np.float32), **one.inputs}
        )
        for one in mixed
    ]
    several = []
    for count, one in zip((2, 3, 2), samples((4, 9, 6)), strict=True):
        targets = np.stack([np.asarray(one.inputs["target_tokens"])] * count, 1)
        weights = np.full(targets.shape, 1 / count)
        fields = {"target_tokens": targets, "weights": weights}
        several.append(Sample(tokens=one.tokens, inputs=fields))
    cases = [("ppo", mixed), ("gspo", mixed), ("cross_entropy", [*several, *samples((8, 3))])]
    for loss, given in cases:
        for order in (given, given[::-1]):
            together = subject.forward(order, loss)
            alone = [subject.forward([one], loss) for one in order]
            assert together.loss_sum == pytest.approx(sum(o.loss_sum for o in alone), rel=1e-5)
            assert together.weight_sum == pytest.approx(sum(o.weight_sum for o in alone))
            for found, output in zip(together.logprobs, alone, strict=True):
                assert found.tolist() == output.logprobs[0].tolist()
    assert subject.forward(mixed, "ppo").loss_sum == subject.forward(full, "ppo").loss_sum
    assert subject.forward(mixed, "ppo").weight_sum > subject.forward(policy, "ppo").weight_sum


def test_draft_depths_take_one_target_per_token() -> None:
    subject = trainer(draft_loss_weight=0.1)
    fields = {"target_tokens": np.zeros((3, 2), np.int64), "weights": np.ones((3, 2))}
    with pytest.raises(ValueError, match="draft depths need one target per token"):
        subject.forward_backward(
            [*samples(), Sample(tokens=[1, 2, 3], inputs=fields)], "cross_entropy"
        )
    assert pending(subject)[1] == 0
    model = subject.model
    model.draft = None
    with pytest.raises(ValueError, match=r"draft_loss_weight = 0\.1: this model has no draft"):
        LocalTrainer(model, subject.config, subject.vocabulary)
