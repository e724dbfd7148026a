"""Every loss against numbers worked out by hand, and its gradient against finite differences."""

import math

import pytest
import torch
from torch import Tensor

from suzuri.training.losses import (
    KL_KINDS,
    LOSSES,
    LossConfig,
    Rows,
    check_fields,
    compute,
    divergence,
)

P = [-1.0, -0.5, -2.0, -0.1]
Q = [-1.2, -0.9, -1.0, -0.1]
A = [1.0, -2.0, 0.5, -1.0]
W = [1.0, 0.5, 2.0, 0.0]


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows(p: Tensor, **fields: Tensor) -> Rows:
    found = {"logprobs": tensor(Q), "advantages": tensor(A), "weights": tensor(W)} | fields
    return Rows(p, found, (3, 1))


def value(name: str, p: Tensor | None = None, **settings: float | str) -> float:
    given = tensor(P) if p is None else p
    return float(compute(name, rows(given), LossConfig.of(name, settings)).loss)


def test_cross_entropy() -> None:
    assert value("cross_entropy") == pytest.approx(1.0 + 0.25 + 4.0)
    two = Rows(
        tensor([-1.0, -2.0, -3.0, -4.0]).view(2, 2),
        {"weights": tensor([0.25, 0.75, 1.0, 0.0]).view(2, 2)},
        (2,),
    )
    found = compute("cross_entropy", two, LossConfig())
    assert float(found.loss) == pytest.approx(0.25 + 1.5 + 3.0)
    assert float(found.weight) == 2.0


def test_importance_sampling() -> None:
    r = [math.exp(p - q) for p, q in zip(P, Q, strict=True)]
    wanted = -(r[0] * 1.0 + 0.5 * r[1] * -2.0 + 2.0 * r[2] * 0.5)
    assert value("importance_sampling") == pytest.approx(wanted)


def test_ppo_clips_what_would_go_too_far() -> None:
    # Ratios 1.2214, 1.4918, 0.3679, 1: the first is cut to 1.2; the second has a negative
    # advantage, where min takes the unbounded side; the third has a positive one, likewise.
    wanted = -(1.2 * 1.0 + 0.5 * math.exp(0.4) * -2.0 + 2.0 * math.exp(-1.0) * 0.5)
    assert value("ppo") == pytest.approx(wanted)
    found = compute("ppo", rows(tensor(P)), LossConfig())
    total, weight = found.means["clip_fraction"]
    assert float(total / weight) == pytest.approx(1.0 / 3.5)
    higher = -(math.exp(0.2) * 1.0 + 0.5 * math.exp(0.4) * -2.0 + 2.0 * math.exp(-1.0) * 0.5)
    assert value("ppo", clip_high_threshold=1.28) == pytest.approx(higher)


def test_ppo_dual_clip_bounds_negative_advantages() -> None:
    # r A = -2.98 of the second token, bounded below by 1.3 * -2 = -2.6.
    wanted = -(1.2 * 1.0 + 0.5 * -2.6 + 2.0 * math.exp(-1.0) * 0.5)
    assert value("ppo", dual_clip=1.3) == pytest.approx(wanted)
    p = tensor(P).requires_grad_()
    compute("ppo", rows(p), LossConfig(dual_clip=1.3)).loss.backward()
    assert p.grad is not None
    assert p.grad[1] == 0, "beyond the bound no gradient is left"


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    p = tensor(P).requires_grad_()
    compute("cispo", rows(p), LossConfig()).loss.backward()
    assert p.grad is not None
    wanted = [-1.2 * 1.0, -0.5 * 1.2 * -2.0, -2.0 * 0.8 * 0.5, 0.0]
    assert p.grad.tolist() == pytest.approx(wanted)


def test_dro() -> None:
    squares = [(p - q) ** 2 for p, q in zip(P, Q, strict=True)]
    terms = [0.5 * 0.1 * s - p * a for s, p, a in zip(squares, P, A, strict=True)]
    wanted = sum(w * t for w, t in zip(W, terms, strict=True))
    assert value("dro", beta=0.1) == pytest.approx(wanted)


def test_gspo_has_one_ratio_per_sample() -> None:
    mask = tensor([1.0, 1.0, 0.0, 1.0])
    s = math.exp((0.2 + 0.4) / 2)  # of the first sample; of the second 1
    p = tensor(P).requires_grad_()
    found = compute("gspo", rows(p, sequence_ratio_mask=mask), LossConfig(clip_high_threshold=2.0))
    wanted = -(s * 1.0 + 0.5 * s * -2.0 + 2.0 * s * 0.5)
    assert found.loss.item() == pytest.approx(wanted)
    found.loss.backward()
    assert p.grad is not None
    # Its own log-prob's gradient, times the sample's ratio.
    assert p.grad.tolist() == pytest.approx([-s, s, -s, 0.0])


def test_estimates_of_the_divergence() -> None:
    p, r = tensor([-1.0, -2.0]), tensor([-1.5, -1.0])
    assert divergence(p - r, "k1").tolist() == pytest.approx([0.5, -1.0])
    assert divergence(p - r, "k2").tolist() == pytest.approx([0.125, 0.5])
    assert divergence(p - r, "k3").tolist() == pytest.approx(
        [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    )


def test_divergence_and_entropy_join_the_loss() -> None:
    reference, entropy = tensor([-1.0, -1.0, -1.0, -1.0]), tensor([0.1, 0.2, 0.3, 0.4])
    config = LossConfig(kl_coefficient=0.5, kl_kind="k1", entropy_coefficient=0.25)
    given = rows(tensor(P), reference_logprobs=reference)._replace(entropy_N=entropy)
    found = compute("importance_sampling", given, config)
    kl = 1.0 * 0.0 + 0.5 * 0.5 + 2.0 * -1.0
    bonus = 0.1 + 0.1 + 0.6
    plain = value("importance_sampling")
    assert float(found.loss) == pytest.approx(plain + 0.5 * kl - 0.25 * bonus)
    assert float(found.means["kl_reference"][0]) == pytest.approx(kl)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    p = -torch.rand(4, generator=generator, dtype=torch.float64) - 0.1
    config = LossConfig(kl_coefficient=0.3, kl_kind="k2", clip_low_threshold=0, dual_clip=3.0)
    reference = tensor([-1.0, -0.3, -0.7, -0.2])

    def loss(x: Tensor) -> Tensor:
        return compute(name, rows(x, reference_logprobs=reference), config).loss

    x = p.clone().requires_grad_()
    loss(x).backward()
    assert x.grad is not None
    step = 1e-6
    for i in range(4):
        if name in ("cispo", "gspo"):
            continue  # what is held fixed there moves in a difference; see their tests above
        up, down = p.clone(), p.clone()
        up[i] += step
        down[i] -= step
        slope = float(loss(up) - loss(down)) / (2 * step)
        assert float(x.grad[i]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_rows_of_weight_zero_count_nowhere() -> None:
    wild = tensor([-1.0, -0.5, -2.0, -90.0])
    for name in LOSSES:
        found = compute(name, rows(wild), LossConfig())
        calm = compute(name, rows(tensor(P)), LossConfig())
        assert float(found.loss) == pytest.approx(float(calm.loss))
        assert {k: float(v) for k, v in found.peaks.items()} == {
            k: float(v) for k, v in calm.peaks.items()
        }


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_row_of_weight_zero_may_be_as_far_off_as_it_likes(name: str, kind: str) -> None:
    """exp(p - q) is infinite there, and infinity times a weight of 0 is no number."""
    config = LossConfig(kl_coefficient=0.5, kl_kind=kind, dual_clip=2.0)
    found: list[tuple[float, list[float], dict[str, float]]] = []
    for far in (0.0, 1e5, -1e5):
        away = tensor([0.0, 0.0, 0.0, far])
        p = tensor(P).requires_grad_()
        given = rows(p, logprobs=tensor(Q) - away, reference_logprobs=tensor([-1.0] * 4) + away)
        loss = compute(name, given, config)
        loss.loss.backward()
        assert p.grad is not None
        metrics = {key: float(value) for key, (value, _) in loss.means.items()}
        metrics |= {key: float(value) for key, value in loss.peaks.items()}
        found.append((loss.loss.item(), p.grad.tolist(), metrics))
    assert found[0] == found[1] == found[2]
    assert all(math.isfinite(x) for x in found[0][1])


def test_gspo_takes_the_ratio_where_the_weight_is_not_0() -> None:
    """A prompt's rows, whose log-probs of sampling are 0 by custom, are not among them."""
    lengths, weights = (4,), tensor([0.0, 0.0, 1.0, 1.0])
    fields = {
        "logprobs": tensor([0.0, 0.0, -1.0, -2.0]),
        "advantages": tensor([0.0, 0.0, 1.0, 1.0]),
        "weights": weights,
    }
    p = tensor([-5.0, -6.0, -1.2, -1.9])
    wide = LossConfig(clip_low_threshold=0.0, clip_high_threshold=9.0)
    loss = float(compute("gspo", Rows(p, fields, lengths), wide).loss)
    assert loss == pytest.approx(-2 * math.exp((-0.2 + 0.1) / 2))
    masked = fields | {"sequence_ratio_mask": weights}
    assert float(compute("gspo", Rows(p, masked, lengths), wide).loss) == loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": "x"}, "beta = 'x'"),
        ({"beta": None}, "beta = None"),
        ({"kl_coefficient": True}, "kl_coefficient = True"),
        ({"entropy_coefficient": math.inf}, "entropy_coefficient = inf"),
        ({"clip": 0.2}, "unknown setting clip"),
        ({"clip_low_threshold": 1.2}, "these are ratios"),
        ({"clip_high_threshold": 0.2}, "these are ratios"),
        ({"dual_clip": 0.5}, "dual_clip = 0.5"),
        ({"kl_kind": "k4"}, "kl_kind = 'k4'"),
        ({"beta": math.nan}, "beta = nan"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, float | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig.of("ppo", settings)


def test_bad_fields_are_named() -> None:
    config = LossConfig()
    one = {"target_tokens": (4,), "logprobs": (4,), "advantages": (4,)}
    check_fields("ppo", one, config)
    with pytest.raises(ValueError, match="there are cross_entropy"):
        check_fields("pppo", one, config)
    with pytest.raises(ValueError, match="ppo: needs advantages"):
        check_fields("ppo", {"target_tokens": (4,), "logprobs": (4,)}, config)
    with pytest.raises(ValueError, match="needs reference_logprobs"):
        check_fields("ppo", one, LossConfig(kl_coefficient=1.0))
    with pytest.raises(ValueError, match="does not take mask"):
        check_fields("ppo", {**one, "mask": (4,)}, config)
    with pytest.raises(ValueError, match=r"advantages is \[3\]; need \[4\]"):
        check_fields("ppo", {**one, "advantages": (3,)}, config)
    with pytest.raises(ValueError, match="need one per token"):
        check_fields("ppo", {**one, "target_tokens": (4, 2)}, config)
