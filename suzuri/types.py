"""Plain records that rooms hand to each other, and the protocols they are known by.

No torch here.
"""

# pyright: strict

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaInput:
    """A picture or clip within a sample: `kind` "image" or "audio"; `index` of its first
    placeholder among the tokens; `inputs` for the tower: patches [M, ...] or mel bins [M, bins]."""

    kind: str
    index: int
    inputs: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence to train on. `tokens` [T]: what the model reads, in ids of the tokenizer.

    `inputs` of the loss, each of length T along the first dim: what stands at i belongs to the
    prediction made at token i. "target_tokens" [T] or [T, K] int64 (any valid id where its weight
    is 0); "weights" of the same shape, float; and what a loss asks for beyond (training/losses.py):
    "logprobs", "advantages", "reference_logprobs", "sequence_ratio_mask", [T] float.
    """

    tokens: Sequence[int]
    inputs: Mapping[str, Array]
    media: tuple[MediaInput, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """Something to learn from: `messages` and `tools` in OpenAI's form, with the reasoning effort
    that the model is told (a name or 0 to 0.99; None: it is told none); or a plain `text`.

    What the assistant says is learned, but for its messages with "weight": 0.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    effort: float | str | None = None
    text: str | None = None


class Dataset(Protocol):
    """Conversations by number. The same number gives the same conversation in every process."""

    @property
    def size(self) -> int | None:
        """How many there are; None: without end."""
        ...

    def conversation(self, index: int) -> Conversation:
        """The one at `index`, from 0 on. Raises ValueError saying why it cannot be used."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """What a pass over samples brought.

    `logprobs`: of each sample, those of its targets, [T] or [T, K] fp32. `loss_sum` and
    `weight_sum` over all of them; `metrics` by name with the reduction behind a colon
    ("loss:sum", "clip_fraction:mean").
    """

    loss_sum: float
    weight_sum: float
    logprobs: list[Array]
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Of one optimizer step. AdamW with decoupled weight decay (Loshchilov and Hutter, 2019).

    `grad_clip_norm`: largest norm of all gradients together; 0: any. `normalise`: divide the
    accumulated gradient by the accumulated weight sum, else it is that of the plain sum.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    normalise: bool = True


class Trainer(Protocol):
    """Five verbs. Gradients add up until `optim_step`, which applies and clears them."""

    def forward_backward(
        self, samples: Sequence[Sample], loss: str, config: Mapping[str, float | str] | None = None
    ) -> ForwardOutput: ...

    def forward(
        self, samples: Sequence[Sample], loss: str, config: Mapping[str, float | str] | None = None
    ) -> ForwardOutput: ...

    def optim_step(self, params: AdamParams) -> dict[str, float]: ...

    def save_state(self, path: str) -> None: ...

    def load_state(self, path: str) -> None: ...

    def publish_weights(self, path: str) -> str: ...
