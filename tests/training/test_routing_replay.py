"""Experts that samples bring along: R09. They are taken as given, and weighed by the model as it
is; the same ones that it would choose change no bit."""

import contextlib
import copy
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from suzuri.model.moe import Router
from suzuri.training.packing import SampleError
from suzuri.training.trainer import LocalTrainer
from suzuri.types import Array, ForwardOutput, Sample
from tests.engine.routing import whole
from tests.training.samples import policy_samples, samples, trainer

EXPERTS = 8
Taken = list[tuple[Tensor, Tensor, Tensor]]


def shape_of(subject: LocalTrainer) -> tuple[int, int, int]:
    text = subject.model.config.text
    return text.num_moe_layers, text.n_routed_experts, text.num_experts_per_tok


def live(subject: LocalTrainer, given: Sequence[Sample]) -> list[Sample]:
    """With the experts that the model itself chooses."""
    return [
        dataclasses.replace(one, routing=whole(subject.model, one.tokens).experts_TLK)
        for one in given
    ]


def drawn(subject: LocalTrainer, given: Sequence[Sample], seed: int = 0) -> list[Sample]:
    """With experts drawn at random."""
    chance = np.random.default_rng(seed)
    layers, experts, chosen = shape_of(subject)

    def routing(count: int) -> Array:
        order = chance.random((count, layers, experts)).argsort(-1)[..., :chosen]
        return np.sort(order, -1).astype(np.uint8)

    return [dataclasses.replace(one, routing=routing(one.num_tokens)) for one in given]


def routing_of(sample: Sample) -> Array:
    assert sample.routing is not None
    return sample.routing


def gradients(subject: LocalTrainer) -> dict[str, Tensor]:
    found = subject.optimizer.parameters.items()
    return {name: weight.grad.clone() for name, weight in found if weight.grad is not None}


def assert_same(found: ForwardOutput, expected: ForwardOutput) -> None:
    assert found.loss_sum == expected.loss_sum
    assert_same_logprobs(found, expected)


def assert_same_logprobs(found: ForwardOutput, expected: ForwardOutput) -> None:
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.tobytes() == other.tobytes()


@contextlib.contextmanager
def taken(subject: LocalTrainer) -> Generator[dict[str, Taken]]:
    """By router, its calls: experts, weights and logits."""
    found: dict[str, Taken] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            experts_NK, weights_NJ, logits_NE = (x.detach() for x in output)
            found.setdefault(name, []).append((experts_NK, weights_NJ, logits_NE))

        return hook

    handles = [
        module.register_forward_hook(keep(name))
        for name, module in subject.model.named_modules()
        if isinstance(module, Router)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("token_budget", [1, 30, 8192])
def test_what_the_model_would_choose_changes_no_bit(
    dtype: str, recompute: bool, token_budget: int
) -> None:
    options: dict[str, Any] = {"recompute": recompute, "token_budget": token_budget}
    plain, subject = (trainer(dtype, **options) for _ in range(2))
    given = policy_samples()
    replayed = live(subject, given)
    replayed[1] = given[1]  # one without stands beside those with
    assert_same(subject.forward(replayed, "ppo"), plain.forward(given, "ppo"))
    expected = plain.forward_backward(given, "ppo")
    found = subject.forward_backward(replayed, "ppo")
    assert_same(found, expected)
    assert found.metrics == expected.metrics
    ours, theirs = gradients(subject), gradients(plain)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert torch.equal(ours[name], gradient), name
    assert any(theirs[name].any() for name in theirs if name.endswith("router.weight"))
    for name, counts in plain.loads.counts.items():
        assert torch.equal(subject.loads.counts[name], counts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_on_a_gpu(dtype: str, recompute: bool) -> None:
    plain, subject = (trainer(dtype, device="cuda", recompute=recompute) for _ in range(2))
    given = policy_samples()
    replayed = live(subject, given)
    assert_same(subject.forward_backward(replayed, "ppo"), plain.forward_backward(given, "ppo"))
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradients(subject)[name], gradient), name
    others = drawn(subject, given)
    with taken(subject) as calls:
        subject.forward_backward(others, "ppo")
    packed = np.concatenate([routing_of(one) for one in others])
    for layer, found in enumerate(calls.values()):
        for experts_NK, _, _ in found:
            assert np.array_equal(experts_NK.cpu().numpy(), packed[:, layer])


@pytest.mark.parametrize("recompute", [False, True])
def test_given_experts_are_taken_in_every_layer_and_counted(recompute: bool) -> None:
    """R09: the experts as replayed, weights from the logits as they are."""
    subject = trainer(recompute=recompute)
    given = drawn(subject, samples())
    with taken(subject) as calls:
        output = subject.forward_backward(given, "cross_entropy")
    packed = np.concatenate([routing_of(one) for one in given])
    assert len(calls) == packed.shape[1] == shape_of(subject)[0]
    differs = 0
    for layer, (name, found) in enumerate(calls.items()):
        assert len(found) == 1 + recompute
        router = subject.model.get_submodule(name)
        assert isinstance(router, Router)
        for experts_NK, weights_NJ, logits_NE in found:
            assert np.array_equal(experts_NK.numpy(), packed[:, layer])
            logits = logits_NE.double()
            share = torch.sigmoid(torch.cat([logits.gather(1, experts_NK), logits[:, 8:]], 1))
            scale = router.route_scale * router.global_scale.detach().double()
            expected = share / share.sum(1, keepdim=True) * scale
            assert torch.allclose(weights_NJ.double(), expected, rtol=1e-5, atol=0)
            score = torch.sigmoid(logits[:, :8]) + router.bias.double()
            differs += int((score.topk(2).indices.sort().values != experts_NK).any(1).sum())
        expected = np.bincount(packed[:, layer].ravel(), minlength=EXPERTS)
        assert subject.loads.counts[name].tolist() == expected.tolist()
    assert differs > len(packed)
    without = [dataclasses.replace(one, routing=None) for one in given]
    assert output.loss_sum != subject.forward(without, "cross_entropy").loss_sum


def test_packing_and_single_samples_agree() -> None:
    """R11's kin: nobody takes a neighbour's experts."""
    packed, single = trainer(), trainer(token_budget=1)
    given = drawn(packed, samples())
    together, apart = (one.forward(given, "cross_entropy") for one in (packed, single))
    assert_same_logprobs(together, apart)
    others = packed.forward(drawn(packed, samples(), seed=1), "cross_entropy")
    assert all((a != b).any() for a, b in zip(together.logprobs, others.logprobs, strict=True))


def test_the_gradient_of_a_router_is_that_of_finite_differences_and_not_zero() -> None:
    """R09: experts differ from those that the model would choose, and every one of them moves its
    row of the router."""
    subject = trainer("float64")
    given = drawn(subject, samples((9, 5)))
    subject.forward_backward(given, "cross_entropy")
    found = gradients(subject)
    names = [name for name in found if name.endswith("router.weight")]
    assert len(names) == shape_of(subject)[0]
    model = subject.model
    step = 1e-5
    for layer, name in enumerate(names):
        weight, gradient_ED = model.get_parameter(name), found[name]
        used = np.unique(np.concatenate([routing_of(one)[:, layer] for one in given]))
        rows = [*used.tolist(), EXPERTS]
        assert all(gradient_ED[row].abs().max() > 0 for row in rows)
        row = rows[layer % len(rows)]
        place = int(gradient_ED[row].abs().argmax())
        before = float(weight.detach()[row, place])
        losses: list[float] = []
        for nudged in (before + step, before - step):
            with torch.no_grad():
                weight[row, place] = nudged
            losses.append(subject.forward(given, "cross_entropy").loss_sum)
        with torch.no_grad():
            weight[row, place] = before
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx(float(gradient_ED[row, place]), rel=1e-4)


def test_tokens_without_a_record_choose_for_themselves() -> None:
    subject = trainer()
    (bare,) = samples((30,))
    (given,) = drawn(subject, [bare])
    routing = routing_of(given)
    mask_T = np.random.default_rng(1).random(30) < 0.5
    hidden = routing.copy()
    hidden[~mask_T] = 255  # means nothing there
    masked = dataclasses.replace(given, routing=hidden, routing_mask=mask_T)
    with taken(subject) as calls:
        subject.forward([masked], "cross_entropy")
    for layer, (name, ((experts_NK, _, logits_NE),)) in enumerate(calls.items()):
        router = subject.model.get_submodule(name)
        assert isinstance(router, Router)
        score = torch.sigmoid(logits_NE[:, :8]) + router.bias
        own = score.topk(2).indices.sort().values.numpy()
        expected = np.where(mask_T[:, None], routing[:, layer], own)
        assert np.array_equal(experts_NK.numpy(), expected)
    nothing = dataclasses.replace(masked, routing_mask=np.zeros(30, np.bool_))
    plain = subject.forward([bare], "cross_entropy")
    assert_same(subject.forward([nothing], "cross_entropy"), plain)


def test_experts_of_other_weights_are_replayed_on_these() -> None:
    """What R3 is for: a sample of older weights goes through the experts that it was drawn with."""
    old, new = trainer(), trainer()
    with torch.no_grad():
        for name, weight in new.model.named_parameters():
            if "router" in name:
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.manual_seed(3)))
    given = samples((30,))
    recorded = live(old, given)
    own = whole(new.model, given[0].tokens).experts_TLK
    assert (own != routing_of(recorded[0])).any(), "the new weights choose otherwise"
    with taken(new) as calls:
        new.forward(recorded, "cross_entropy")
    found = np.stack([call[0][0].numpy() for call in calls.values()], 1)
    assert np.array_equal(found, routing_of(recorded[0]))


def changed(sample: Sample, **fields: Any) -> Sample:
    return dataclasses.replace(sample, **fields)


def test_what_cannot_be_replayed_is_refused_by_name() -> None:
    subject = trainer()
    (sample,) = drawn(subject, samples((9,)))
    routing = routing_of(sample)
    twice = routing.copy()
    twice[3, 1] = [4, 4]
    falling = routing.copy()
    falling[3, 1] = [4, 2]
    beyond = routing.copy()
    beyond[3, 1] = [4, 8]
    faults = {
        r"routing is uint8 \[8, .*need uint8 \[9, .*2 experts": changed(
            sample, routing=routing[1:]
        ),
        r"routing is uint8 \[9, \d+, 1\]": changed(sample, routing=routing[..., :1]),
        r"routing is int64": changed(sample, routing=routing.astype(np.int64)),
        r"experts of a token must rise": changed(sample, routing=twice),
        r"must rise, none given twice": changed(sample, routing=falling),
        r"routing: expert 8, and there are 8": changed(sample, routing=beyond),
        r"routing_mask is bool \[8\]; need bool \[9\]": changed(
            sample, routing_mask=np.ones(8, np.bool_)
        ),
        r"routing_mask is float64": changed(sample, routing_mask=np.ones(9)),
        r"routing_mask without routing": changed(
            sample, routing=None, routing_mask=np.ones(9, np.bool_)
        ),
    }
    for message, bad in faults.items():
        with pytest.raises(SampleError, match=f"sample 1: .*{message}"):
            subject.forward_backward([sample, bad], "cross_entropy")
    assert not gradients(subject)
    hidden = np.arange(9) != 3
    subject.forward([changed(sample, routing=falling, routing_mask=hidden)], "cross_entropy")


def test_a_model_without_experts_has_nothing_to_replay() -> None:
    subject = trainer()
    text = dataclasses.replace(subject.model.config.text, dense_mlp_idx=99)
    subject.model = copy.copy(subject.model)
    subject.model.config = dataclasses.replace(subject.model.config, text=text)
    (sample,) = samples((9,))
    given = changed(sample, routing=np.zeros((9, 0, 2), np.uint8))
    with pytest.raises(SampleError, match="routing: this model has no routed experts"):
        subject.forward([given], "cross_entropy")
