"""Learning from a batch: compared first, corrected where it is old, then a step or several.

No torch here.
"""

# pyright: strict

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from suzuri.rl.config import RlConfig
from suzuri.rl.consistency import Agreement
from suzuri.rl.drawing import Played
from suzuri.rl.samples import samples_of
from suzuri.types import ForwardOutput, Sample, Trainer

Line = dict[str, Any]


class Learner:
    """A trainer that is shown batches."""

    def __init__(self, config: RlConfig, trainer: Trainer) -> None:
        self._config, self._trainer = config, trainer

    def learn(self, step: int, groups: Sequence[Played]) -> Line:
        """The optimizer steps of step `step`. Metrics. Without samples, or where every weight is 0,
        no step is taken: neither moments nor decay of weights move anything then."""
        agreement, line = Agreement(), Line()
        silent = [
            sample
            for group in groups
            for trajectory in (group.made.silent if group.made.samples else group.trajectories)
            for sample in samples_of(trajectory, 0.0)
        ]
        if silent:  # nothing is learned from them; that both see the same is checked all the same
            agreement.add(silent, self._forward(silent).logprobs)
        samples = [sample for group in groups for sample in group.made.samples]
        has_own_pass = self._has_own_pass(samples)
        if has_own_pass:
            logprobs = self._forward(samples).logprobs
            agreement.add(samples, logprobs)
            if self._corrects(samples):
                samples, more = self._config.correction.corrected(samples, logprobs)
                line |= more
        idle = 0
        for part in _parts(samples, self._config.minibatches):
            if not any(np.any(sample.inputs["weights"]) for sample in part):
                idle += 1
                continue
            output, optim = self._optimize(step, part)
            if not has_own_pass:  # then the only step's own forward came before it
                agreement.add(part, output.logprobs)
            line |= {f"train/{name}": value for name, value in output.metrics.items()}
            line["train/loss"] = output.loss_sum / (output.weight_sum or 1.0)
            line |= {f"optim/{name}": value for name, value in optim.items()}
        line["train/samples"] = len(samples)
        line["train/tokens"] = sum(sample.num_tokens for sample in samples)
        line["train/without_weight"] = idle
        return line | agreement.metrics()

    def _has_own_pass(self, samples: Sequence[Sample]) -> bool:
        is_split = min(self._config.minibatches, len(samples)) > 1
        return is_split or (bool(samples) and self._config.correction.kind != "none")

    def _corrects(self, samples: Sequence[Sample]) -> bool:
        """Samples that do not say how they were drawn are learned as they are."""
        return all("logprobs" in sample.inputs for sample in samples)

    def _optimize(
        self, step: int, samples: Sequence[Sample]
    ) -> tuple[ForwardOutput, dict[str, float]]:
        config, algorithm = self._config, self._config.algorithm
        params = config.optimizer.params(step, config.steps)
        if algorithm.divisor == "answers":
            samples = [_scaled(sample, 1 / len(samples)) for sample in samples]
            params = dataclasses.replace(params, normalise=False)
        settings = {**algorithm.loss_settings, **self._distribution}
        output = self._trainer.forward_backward(samples, algorithm.loss, settings)
        return output, self._trainer.optim_step(params)

    def _forward(self, samples: Sequence[Sample]) -> ForwardOutput:
        """Log-probs, whatever loss the samples are for."""
        plain = [
            dataclasses.replace(
                sample,
                inputs={
                    "target_tokens": sample.inputs["target_tokens"],
                    "weights": (sample.inputs["weights"] != 0).astype(np.float32),
                },
            )
            for sample in samples
        ]
        return self._trainer.forward(plain, "cross_entropy", self._distribution)

    @property
    def _distribution(self) -> dict[str, float]:
        """What the trainer's log-probs are of: that from which the sampler drew."""
        return {"temperature": self._config.limits.temperature}


def _parts(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """Up to `count` runs of samples, as even as can be; none of nothing."""
    count = min(count, len(samples))
    ends = [len(samples) * (i + 1) // count for i in range(count)]
    return [list(samples[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def _scaled(sample: Sample, factor: float) -> Sample:
    weights = sample.inputs["weights"] * factor
    return dataclasses.replace(sample, inputs={**sample.inputs, "weights": weights})
