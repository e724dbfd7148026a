"""router against plain loops in fp64."""

import pytest
import torch
from torch import Tensor

from suzuri.kernels.router import cases, router
from tests.kernels.compare import (
    Arguments,
    assert_close,
    assert_same_bits,
    changed,
    check_gradients,
    check_low_precision_gradients,
    device_cases,
    each_dtype,
    each_low_dtype,
    generator,
    widened,
)

TRAINED = ["x_ND", "weight_ED", "global_scale_1"]


def plain(
    x_ND: Tensor,
    weight_ED: Tensor,
    bias_R: Tensor,
    global_scale_1: Tensor,
    num_experts_per_token: int,
    route_scale: float,
) -> tuple[list[list[int]], Tensor, Tensor, float]:
    """(experts, weights, logits, smallest gap between a chosen score and one left out)."""
    logits_NE = x_ND @ weight_ED.T
    routed, k = len(bias_R), num_experts_per_token
    experts: list[list[int]] = []
    weights: list[Tensor] = []
    gap = torch.inf
    for logits_E in logits_NE:
        score = (torch.sigmoid(logits_E[:routed]) + bias_R).tolist()
        order = sorted(range(routed), key=lambda e, score=score: (-score[e], e))
        chosen = sorted(order[:k])
        if k < routed:
            gap = min(gap, score[order[k - 1]] - score[order[k]])
        share = torch.sigmoid(torch.cat([logits_E[chosen], logits_E[routed:]]))
        experts.append(chosen)
        weights.append(share / share.sum() * route_scale * global_scale_1)
    return experts, torch.stack(weights), logits_NE, gap


def with_logits(logits_E: list[float], routed: int, k: int, device: str) -> Arguments:
    """One token whose logits are the given numbers."""
    return {
        "x_ND": torch.ones(1, 1, device=device),
        "weight_ED": torch.tensor(logits_E, device=device)[:, None],
        "bias_R": torch.zeros(routed, device=device),
        "global_scale_1": torch.tensor([1.3], device=device),
        "num_experts_per_token": k,
        "route_scale": 8.0,
    }


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_against_plain_loops(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    experts, weights, logits, gap = plain(**widened(arguments))
    assert gap > 1e-6  # no near tie: fp32 must choose the same experts
    experts_NK, weights_NJ, logits_NE = router(**arguments)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert weights_NJ.dtype == logits_NE.dtype == wide
    assert experts_NK.tolist() == experts
    assert_close(logits_NE, logits, magnitude=torch.full_like(logits, 30.0))
    # fp32: logits, logsigmoid, exp, the sum and the scale each round.
    assert_close(weights_NJ, weights, ulps=24)


@pytest.mark.parametrize("k", [1, 2, 6])
def test_a_large_bias_chooses_and_never_weighs(device: str, k: int):
    """N20: +100 on expert 3 of every token."""
    arguments: Arguments = cases.build("tiny", torch.bfloat16, generator(2, device))
    arguments["num_experts_per_token"] = k
    unbiased = router(**arguments)
    assert not (unbiased[0] == 3).any(1).all()
    arguments["bias_R"][3] += 100
    experts_NK, weights_NJ, logits_NE = router(**arguments)
    assert (experts_NK == 3).any(1).all()
    assert_same_bits(logits_NE, unbiased[2])
    raw = torch.cat([logits_NE.gather(1, experts_NK), logits_NE[:, 8:]], 1).double()
    share = torch.sigmoid(raw)
    expected = share / share.sum(1, keepdim=True) * 8.0 * 1.3
    assert_close(weights_NJ, expected, ulps=12, noise=1e-7, magnitude=torch.full_like(share, 10.4))


@pytest.mark.parametrize("logit", [-1000.0, -100.0, -50.0, 0.0, 100.0])
def test_equal_logits_far_out_share_equally(device: str, logit: float):
    """Six chosen and two shared experts at -100: sigmoid(-100) is 0 in fp32, 0 / 0 if divided."""
    weights_NJ = router(**with_logits([logit] * 12, routed=10, k=6, device=device))[1]
    assert_same_bits(weights_NJ, torch.full_like(weights_NJ, weights_NJ[0, 0].item()))
    assert weights_NJ.double().sum().item() == pytest.approx(8 * 1.3, rel=1e-6)


def test_unequal_logits_far_out_keep_their_ratio(device: str):
    arguments = with_logits([-100.0, -101.0, -102.0, -100.0], routed=2, k=2, device=device)
    weights_J = router(**arguments)[1][0].double()
    odds = torch.exp(torch.tensor([0.0, -1, -2, 0], dtype=torch.float64, device=device))
    assert_close(weights_J.float(), odds / odds.sum() * 8 * 1.3, ulps=12)


@pytest.mark.parametrize(
    ("logits", "k", "chosen"),
    [
        ([1.0] * 6, 3, [0, 1, 2]),
        ([0.0, 2.0, 1.0, 2.0, 1.0, 1.0], 3, [1, 2, 3]),
        ([-0.0, 0.0, 0.0, -0.0, 0.0, 0.0], 2, [0, 1]),
        ([90.0, 91.0, 92.0, 93.0, 94.0, 95.0], 4, [0, 1, 2, 3]),
        ([3.0, 1.0, 2.0, 5.0, 4.0, 0.0], 6, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_ties_go_to_the_lowest_ids(device: str, logits: list[float], k: int, chosen: list[int]):
    """The fourth row ties because its sigmoids are all 1 in fp32."""
    experts_NK = router(**with_logits(logits, routed=6, k=k, device=device))[0]
    assert experts_NK.tolist() == [chosen]


def weights_and_logits(**arguments: object) -> tuple[Tensor, Tensor]:
    _, weights_NJ, logits_NE = router(**arguments)  # pyright: ignore[reportArgumentType]
    return weights_NJ, logits_NE


def test_gradients_are_those_of_finite_differences():
    arguments: Arguments = cases.build("all_chosen", torch.float64, generator(3))
    arguments["weight_ED"] = torch.randn(5, 16, generator=generator(4), dtype=torch.float64)
    arguments["bias_R"] = torch.tensor([0.0, 3.0, 1.5, 0.0], dtype=torch.float64)
    arguments["num_experts_per_token"] = 2
    check_gradients(weights_and_logits, arguments, TRAINED)


def test_the_bias_has_no_gradient():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(5))
    for name in (*TRAINED, "bias_R"):
        arguments[name].requires_grad_()
    _, weights_NJ, logits_NE = router(**arguments)
    (weights_NJ[:, 0].sum() + logits_NE.sum()).backward()
    assert arguments["bias_R"].grad is None
    assert arguments["weight_ED"].grad.abs().sum() > 0


@each_low_dtype
@pytest.mark.parametrize("output", [0, 1], ids=["weights", "logits"])
def test_gradients_in_the_dtype_of_their_tensors(device: str, output: int, dtype: torch.dtype):
    arguments: Arguments = cases.build("odd", dtype, generator(6, device))
    names = TRAINED if output == 0 else TRAINED[:2]
    check_low_precision_gradients(
        lambda **rest: weights_and_logits(**rest)[output], arguments, names
    )


@pytest.mark.parametrize("k", [0, 9, 12])
def test_impossible_choices_are_refused(k: int):
    arguments: Arguments = cases.build("tiny", torch.float32, generator(7))
    with pytest.raises(ValueError, match=f"router: top {k} of 8"):
        router(**changed(arguments, num_experts_per_token=k))


def test_more_routed_experts_than_rows_are_refused():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(8))
    with pytest.raises(ValueError, match="router"):
        router(**changed(arguments, bias_R=torch.zeros(11)))
