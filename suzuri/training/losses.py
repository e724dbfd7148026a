"""Losses as pure functions of log-probs and what the samples say. Read `LOSSES` first.

Every loss is a sum over tokens, each times its weight; the sum of the weights is given beside it,
so that whoever adds up several batches can divide once. p: log-probs of the targets under the
model, q: those under which they were sampled. Gradients flow through p (and the entropy) alone. A
row of weight 0 counts nowhere, however far apart its p and q are: no exp is taken of them, whose
infinity times 0 would be no number.
"""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from suzuri.types import is_number

KL_KINDS = ("k1", "k2", "k3")


class Rows(NamedTuple):
    """The rows of a micro-batch that a loss looks at.

    logprobs_N [N] or, for several targets per row, [N, K]; `fields` by name, each [N] (those of
    targets [N, K]); `lengths` of the samples, in order, together N; entropy_N [N] of the model's
    distributions where a loss asked for it.
    """

    logprobs_N: Tensor
    fields: Mapping[str, Tensor]
    lengths: Sequence[int]
    entropy_N: Tensor | None = None


class Loss(NamedTuple):
    """`loss` and `weight`: scalars, summed over the rows. `means`: by name (sum, weight);
    `peaks`: by name the largest value."""

    loss: Tensor
    weight: Tensor
    means: dict[str, tuple[Tensor, Tensor]]
    peaks: dict[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What a loss may be told. Thresholds are ratios, not distances from 1."""

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    dual_clip: float = 0.0
    """ppo: with a negative advantage the loss of a token is at most so many times that of ratio 1
    (Ye et al., 2020); 0: no such bound, else above 1."""
    beta: float = 0.05
    """dro: weight of the squared log-ratio."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from "reference_logprobs"."""
    kl_kind: str = "k3"
    """Its estimator (Schulman, "Approximating KL divergence", 2020): k1 log(p / r); k2 its square,
    halved; k3 r / p - 1 - log(r / p)."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy, which is subtracted from the loss."""
    temperature: float = 1.0
    """Of the distribution that p and the entropy are of: that at which tokens were sampled."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "kl_kind":
                if value not in KL_KINDS:
                    raise ValueError(f"kl_kind = {value!r}: must be one of {', '.join(KL_KINDS)}")
            elif not is_number(value):
                raise ValueError(f"{field.name} = {value!r}: must be a number")
        if not 0 <= self.clip_low_threshold <= 1 <= self.clip_high_threshold:
            raise ValueError(
                f"clip_low_threshold = {self.clip_low_threshold}, clip_high_threshold = "
                f"{self.clip_high_threshold}: these are ratios; need 0 <= low <= 1 <= high"
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature = {self.temperature!r}: must be above 0")
        if self.dual_clip != 0 and self.dual_clip <= 1:
            raise ValueError(f"dual_clip = {self.dual_clip}: must be 0 (off) or above 1")

    @classmethod
    def of(cls, loss: str, values: Mapping[str, float | str]) -> "LossConfig":
        """The config from named values. ValueError names what the loss does not know."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"loss {loss}: unknown setting {', '.join(unknown)}; there are "
                f"{', '.join(sorted(known))}"
            )
        return cls(**values)  # pyright: ignore[reportArgumentType]


def cross_entropy(rows: Rows, config: LossConfig) -> Loss:
    """-sum w p. With targets [N, K] and weights [N, K]: the cross-entropy against a distribution
    over K of the ids."""
    del config
    weights = rows.fields["weights"]
    return Loss(-(rows.logprobs_N * weights).sum(), weights.sum(), {}, {})


def importance_sampling(rows: Rows, config: LossConfig) -> Loss:
    """-sum w exp(p - q) A: the policy gradient, corrected for where the tokens came from."""
    del config
    ratio_N = _ratio(rows)
    return _policy(rows, -ratio_N * rows.fields["advantages"], ratio_N, None)


def ppo(rows: Rows, config: LossConfig) -> Loss:
    """-sum w min(r A, clip(r) A), r = exp(p - q) (Schulman et al., 2017); thresholds apart on both
    sides (clip-higher, Yu et al., 2025)."""
    return _clipped(rows, _ratio(rows), config)


def gspo(rows: Rows, config: LossConfig) -> Loss:
    """As ppo with one ratio per sample, s = exp(mean of p - q over "sequence_ratio_mask", which is
    by default where the weight is not 0); a token's ratio is s p / sg(p), so that its gradient is
    that of its own log-prob (Zheng et al., "Group Sequence Policy Optimization", 2025)."""
    p_N, is_used_N = rows.logprobs_N, _weights(rows) != 0
    mask_N = rows.fields.get("sequence_ratio_mask", is_used_N).to(p_N.dtype)
    log_ratio_N = torch.where(mask_N != 0, (p_N - rows.fields["logprobs"]) * mask_N, 0).detach()
    means = [
        (log_ratio.sum() / mask.sum().clamp(min=1)).expand(log_ratio.shape[0])
        for log_ratio, mask in zip(
            log_ratio_N.split(list(rows.lengths)), mask_N.split(list(rows.lengths)), strict=True
        )
    ]
    sequence_N = torch.exp(torch.cat(means)) if means else p_N.detach()
    sequence_N = torch.where(is_used_N, sequence_N, 1)
    return _clipped(rows, sequence_N * torch.exp(p_N - p_N.detach()), config)


def cispo(rows: Rows, config: LossConfig) -> Loss:
    """-sum w sg(clip(r)) p A: the ratio is clipped and no token loses its gradient (MiniMax-M1,
    2025)."""
    ratio_N = _ratio(rows).detach()
    clipped_N = ratio_N.clamp(config.clip_low_threshold, config.clip_high_threshold)
    loss_N = -clipped_N * rows.logprobs_N * rows.fields["advantages"]
    return _policy(rows, loss_N, ratio_N, clipped_N != ratio_N)


def dro(rows: Rows, config: LossConfig) -> Loss:
    """-sum w (p A - beta / 2 (p - q)^2) (Richemond et al., "Offline regularised reinforcement
    learning", 2024)."""
    log_ratio_N = _log_ratio(rows, "logprobs")
    loss_N = 0.5 * config.beta * log_ratio_N**2 - rows.logprobs_N * rows.fields["advantages"]
    return _policy(rows, loss_N, log_ratio_N.exp(), None)


def divergence(log_ratio_N: Tensor, kind: str) -> Tensor:
    """Estimates [N] of the divergence of the model from a reference, from tokens drawn from it and
    log(p / reference) of each."""
    if kind == "k1":
        return log_ratio_N
    if kind == "k2":
        return 0.5 * log_ratio_N**2
    return torch.exp(-log_ratio_N) - 1 + log_ratio_N


def _log_ratio(rows: Rows, other: str) -> Tensor:
    """log(p / the field `other`), 0 in rows of weight 0."""
    return torch.where(_weights(rows) != 0, rows.logprobs_N - rows.fields[other], 0)


def _ratio(rows: Rows) -> Tensor:
    return torch.exp(_log_ratio(rows, "logprobs"))


def _clipped(rows: Rows, ratio_N: Tensor, config: LossConfig) -> Loss:
    advantages_N = rows.fields["advantages"]
    bounded_N = ratio_N.clamp(config.clip_low_threshold, config.clip_high_threshold)
    plain_N, bound_N = ratio_N * advantages_N, bounded_N * advantages_N
    gain_N = torch.minimum(plain_N, bound_N)
    is_clipped_N = bound_N < plain_N
    if config.dual_clip:
        floor_N = config.dual_clip * advantages_N
        is_low_N = (advantages_N < 0) & (gain_N < floor_N)
        gain_N = torch.where(is_low_N, floor_N, gain_N)
        is_clipped_N = is_clipped_N | is_low_N
    return _policy(rows, -gain_N, ratio_N, is_clipped_N)


def _policy(rows: Rows, loss_N: Tensor, ratio_N: Tensor, is_clipped_N: Tensor | None) -> Loss:
    """The weighted sum, and how far the model has moved from where the tokens came from."""
    weights_N = _weights(rows)
    q_less_p_N = -_log_ratio(rows, "logprobs").detach()
    weight = weights_N.sum()

    def mean(x_N: Tensor) -> tuple[Tensor, Tensor]:
        return (x_N.detach().to(weights_N.dtype) * weights_N).sum(), weight

    means = {
        "ratio": mean(ratio_N),
        "kl_sampler_trainer": mean(q_less_p_N),
        "kl_sampler_trainer_k3": mean(torch.exp(-q_less_p_N) - 1 + q_less_p_N),
    }
    if is_clipped_N is not None:
        means["clip_fraction"] = mean(is_clipped_N)
    is_used_N = weights_N != 0
    peaks = {
        "ratio": torch.where(is_used_N, ratio_N.detach(), 0).amax(),
        "kl_sampler_trainer": torch.where(is_used_N, q_less_p_N.abs(), 0).amax(),
    }
    return Loss((loss_N * weights_N).sum(), weight, means, peaks)


def _weights(rows: Rows) -> Tensor:
    weights_N = rows.fields.get("weights")
    return torch.ones_like(rows.logprobs_N).detach() if weights_N is None else weights_N


class Kind(NamedTuple):
    """A loss: its function, the fields it needs, and those it may have."""

    run: Callable[[Rows, LossConfig], Loss]
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()


_SAMPLED = ("target_tokens", "logprobs", "advantages")
_MAY = ("weights", "reference_logprobs")
LOSSES = {
    "cross_entropy": Kind(cross_entropy, ("target_tokens", "weights"), ("reference_logprobs",)),
    "importance_sampling": Kind(importance_sampling, _SAMPLED, _MAY),
    "ppo": Kind(ppo, _SAMPLED, _MAY),
    "gspo": Kind(gspo, _SAMPLED, (*_MAY, "sequence_ratio_mask")),
    "cispo": Kind(cispo, _SAMPLED, _MAY),
    "dro": Kind(dro, _SAMPLED, _MAY),
}


def compute(name: str, rows: Rows, config: LossConfig) -> Loss:
    """The named loss, with the divergence from a reference and the entropy bonus where asked."""
    found = LOSSES[name].run(rows, config)
    loss, weights_N = found.loss, _weights(rows)
    means = dict(found.means)
    if config.kl_coefficient:
        kl_N = divergence(_log_ratio(rows, "reference_logprobs"), config.kl_kind)
        kl = (kl_N * weights_N).sum()
        loss = loss + config.kl_coefficient * kl
        means["kl_reference"] = (kl.detach(), found.weight)
    if rows.entropy_N is not None:
        entropy = (rows.entropy_N * weights_N).sum()
        loss = loss - config.entropy_coefficient * entropy
        means["entropy"] = (entropy.detach(), found.weight)
    return found._replace(loss=loss, means=means)


def check_fields(name: str, fields: Mapping[str, tuple[int, ...]], config: LossConfig) -> None:
    """Raises ValueError unless these fields (name to shape) are what the loss takes."""
    if name not in LOSSES:
        raise ValueError(f"loss {name!r}: there are {', '.join(LOSSES)}")
    kind = LOSSES[name]
    needs = set(kind.needs)
    if config.kl_coefficient:
        needs.add("reference_logprobs")
    if missing := sorted(needs - set(fields)):
        raise ValueError(f"loss {name}: needs {', '.join(missing)}")
    if unknown := sorted(set(fields) - needs - set(kind.may)):
        raise ValueError(f"loss {name}: does not take {', '.join(unknown)}")
    target = fields["target_tokens"]
    if len(target) not in (1, 2) or (len(target) == 2 and target[1] < 1):
        raise ValueError(f"loss {name}: target_tokens are {list(target)}; need [T], or [T, K]")
    if len(target) != 1 and name != "cross_entropy":
        raise ValueError(f"loss {name}: target_tokens have {len(target)} dims; need one per token")
    if len(target) != 1 and (config.kl_coefficient or config.entropy_coefficient):
        raise ValueError(f"loss {name}: no divergence or entropy with several targets per token")
    for field, shape in fields.items():
        wanted = target if field in ("target_tokens", "weights") else target[:1]
        if shape != wanted:
            raise ValueError(f"loss {name}: {field} is {list(shape)}; need {list(wanted)}")
