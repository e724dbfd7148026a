"""What other models say of the tokens that were drawn: a teacher, a reference. No torch here.

An answer to which one gives no numbers (it reads other tokens, cannot take a picture, is not
there) has no scores, and an algorithm that needs them leaves it out and counts it. Where that holds
for all answers of a batch, the run ends: nothing could be learned, and it would not show.
"""

# pyright: strict

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from suzuri.envs.env import Trajectory
from suzuri.rl.samples import samples_of
from suzuri.types import Array, Sample


class ScoringError(RuntimeError):
    """A model that is needed gave no numbers for anything."""


class Scorer(Protocol):
    async def logprobs(self, samples: Sequence[Sample]) -> list[Array | str]:
        """Of each sample those of its targets, [T] at temperature 1; or why there are none."""
        ...


async def with_scores(
    trajectories: Sequence[Trajectory], scorers: Mapping[str, Scorer]
) -> list[Trajectory]:
    """The attempts with what each scorer says, under its name. Raises ScoringError."""
    found = list(trajectories)
    for who, scorer in scorers.items():
        samples = [samples_of(one, 0.0) for one in found]
        scores = await scorer.logprobs([sample for some in samples for sample in some])
        given = iter(scores)
        found = [
            _scored(one, who, [(sample, next(given)) for sample in some])
            for one, some in zip(found, samples, strict=True)
        ]
        faults = [score for score in scores if isinstance(score, str)]
        if faults and len(faults) == len(scores):
            raise ScoringError(f"the {who} gave no numbers for any of {len(faults)}: {faults[-1]}")
    return found


def _scored(
    trajectory: Trajectory, who: str, given: Sequence[tuple[Sample, Array | str]]
) -> Trajectory:
    """Drawn tokens of the samples are those of the answers, in order."""
    parts: list[Array] = []
    for sample, score in given:
        if isinstance(score, str):
            return trajectory
        parts.append(score[sample.inputs["weights"] != 0])
    rest = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    turns = list(trajectory.turns)
    for place, turn in enumerate(turns):
        count = len(turn.answer.tokens)
        turns[place] = dataclasses.replace(turn, scores={**turn.scores, who: rest[:count]})
        rest = rest[count:]
    assert not len(rest), "a sample has tokens that no answer has"
    return dataclasses.replace(trajectory, turns=turns)


def tokens_of(sample: Sample) -> list[int]:
    """All of the conversation, the last target included."""
    return [*sample.tokens, int(sample.inputs["target_tokens"][-1])]
