"""Plain records that rooms hand to each other, and the protocols they are known by.

No torch here.
"""

# pyright: strict

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


def is_number(value: object) -> bool:
    """A finite one, of numpy as well; True and False are none."""
    return type(value) is not bool and isinstance(value, numbers.Real) and math.isfinite(value)


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

    `routing` uint8 [T, L, K]: the experts that each token goes to in each of the L layers that have
    any, in place of those that the model would choose; K ids, rising. `routing_mask` bool [T]:
    where that says something; elsewhere the model chooses. None: everywhere.
    """

    tokens: Sequence[int]
    inputs: Mapping[str, Array]
    media: tuple[MediaInput, ...] = ()
    routing: Array | None = None
    routing_mask: Array | None = None

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
    accumulated gradient by the accumulated weight sum, else it is that of the plain sum. Raises
    ValueError naming the field.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    normalise: bool = True

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            if not is_number(value := getattr(self, name)) or value < 0:
                raise ValueError(f"{name} = {value!r}: must be a number, not negative")
        for name in ("beta1", "beta2"):
            if not is_number(value := getattr(self, name)) or not 0 <= value < 1:
                raise ValueError(f"{name} = {value!r}: must be from 0 to below 1")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a sampler goes on from: tokenizer ids, a slot id wherever a picture or clip has a token,
    and those media."""

    tokens: Sequence[int]
    media: tuple[MediaInput, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleParams:
    """How an answer is drawn: from the whole distribution at a temperature (0: its most likely
    token each time).

    Nothing is cut off it (top-p, top-k, penalties): a trainer would have to do the same. `seed`:
    None draws one. `routing`: the answer is to say which experts its tokens went to.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    routing: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a sampler drew. `tokens`: ids, the one that ends the turn included. `logprobs`: of each
    under the distribution it was drawn from. `versions`: of the weights that drew each.

    `finish`: "stop" (the model ended its turn), "length" (max_tokens, or no room in the context),
    "error" (`error` says why; what was drawn until then is kept).

    `routing` uint8 [T, L, K], if it was asked for: the experts (as in `Sample`) of the tokens of
    prompt and answer, in order, but the last one, which nothing was drawn from; each as of the
    weights that drew the token after it. After an error they may be fewer.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish: str
    error: str | None = None
    routing: Array | None = None


class SamplerLost(RuntimeError):
    """A sampler that will draw nothing more: the fault of no prompt, and the end of a run."""


class Sampler(Protocol):
    """Draws answers. Many may be asked for at the same time; the seed alone decides what comes, not
    what else runs."""

    @property
    def version(self) -> int:
        """Of the weights that draw the next token."""
        ...

    async def sample(self, prompt: Prompt, params: SampleParams) -> Answer:
        """Raises ValueError for a prompt that cannot be run, SamplerLost once none can."""
        ...
