"""A sampler, a trainer and problems whose every number is known."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from suzuri.envs.env import Env, Outcome, Trajectory
from suzuri.types import AdamParams, Answer, ForwardOutput, Prompt, Sample, SampleParams


class FakeSampler:
    """Answers with one token, seed mod 10, whose log-prob is that of the version's weights."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[tuple[list[int], SampleParams, int]] = []
        self.fault: Callable[[Prompt], None] | None = None

    async def sample(self, prompt: Prompt, params: SampleParams) -> Answer:
        self.asked.append((list(prompt.tokens), params, self.version))
        if self.fault is not None:
            self.fault(prompt)
        token, version = (params.seed or 0) % 10, self.version
        await asyncio.sleep(0)
        return Answer(
            tokens=[token], logprobs=[logprob(version)], versions=[version], finish="stop"
        )


def logprob(version: int) -> float:
    return -1.0 - version


class FakeTrainer:
    """Its weights are the number of its steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.calls: list[str] = []
        self.seen: list[list[Sample]] = []
        self.params: list[AdamParams] = []
        self.off = 0.0
        """What its log-probs are beside those of the sampler."""

    def forward(
        self, samples: Sequence[Sample], loss: str, config: Mapping[str, Any] | None = None
    ) -> ForwardOutput:
        self.calls.append("forward")
        return self._output(samples)

    def forward_backward(
        self, samples: Sequence[Sample], loss: str, config: Mapping[str, Any] | None = None
    ) -> ForwardOutput:
        self.calls.append(f"forward_backward {loss}")
        self.seen.append(list(samples))
        return self._output(samples)

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        self.calls.append("optim_step")
        self.params.append(params)
        self.num_steps += 1
        return {"grad_norm": 1.0}

    def save_state(self, path: str) -> None: ...

    def load_state(self, path: str) -> None: ...

    def publish_weights(self, path: str) -> str:
        return ""

    def _output(self, samples: Sequence[Sample]) -> ForwardOutput:
        value = logprob(self.num_steps) + self.off
        return ForwardOutput(
            loss_sum=2.0,
            weight_sum=float(sum(s.inputs["weights"].sum() for s in samples)),
            logprobs=[np.full(s.num_tokens, value, np.float32) for s in samples],
            metrics={"ratio:mean": 1.0},
        )


class FakeEnv:
    """Is over after one answer, whose reward is `judge` of its token."""

    def __init__(self, prompt: list[int], judge: Callable[[int], Any]) -> None:
        self._prompt, self._judge = prompt, judge

    async def initial(self) -> Prompt:
        return Prompt(tokens=self._prompt)

    async def step(self, answer: Answer) -> Outcome:
        return Outcome(reward=self._judge(answer.tokens[0]))


class FakeGroup:
    name = "fake/one"

    def __init__(self, index: int, judge: Callable[[int], Any]) -> None:
        self._index, self._judge = index, judge

    def envs(self, count: int) -> Sequence[Env]:
        return [FakeEnv([100, self._index], self._judge) for _ in range(count)]

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        return [0.0] * len(trajectories)


class FakeProblems:
    def __init__(self, judge: Callable[[int], Any], size: int | None = None) -> None:
        self.size, self._judge = size, judge
        self.indices: list[int] = []

    def group(self, index: int) -> FakeGroup:
        self.indices.append(index)
        return FakeGroup(index, self._judge)
