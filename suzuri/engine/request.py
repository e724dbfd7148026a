"""Requests and their sequences: what the scheduler moves about. No torch here."""

# pyright: strict

import dataclasses
import enum
from collections.abc import Hashable
from typing import Any

from suzuri.engine.pages import Table
from suzuri.engine.routing import Record, Routing
from suzuri.engine.sampling_params import ResolvedSampling
from suzuri.engine.stopping import StopChecker


class Status(enum.Enum):
    """Where a sequence is. Legal moves: WAITING -> RUNNING -> WAITING (preempted), HELD -> WAITING,
    and from any of them to FINISHED."""

    WAITING = "waiting"
    HELD = "held"
    """Waits for another sequence to finish the prefill of the same prompt."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(kw_only=True)
class Media:
    """One picture or clip in a prompt: `count` tokens from `index` on, and what a tower reads.

    `inputs` is an array for the vision or audio tower; `features` what the tower made of it, filled
    by the runner once and shared by all sequences of the request. `keeps_inputs`: they are kept
    after that, in case the tower gets new weights.
    """

    index: int
    count: int
    kind: str
    digest: bytes
    inputs: Any
    features: Any = None
    keeps_inputs: bool = False


@dataclasses.dataclass(kw_only=True, eq=False)
class Request:
    """n samples of one prompt. `prompt` holds model rows; `keys` name them for the prefix cache."""

    id: str
    prompt: list[int]
    keys: list[int]
    sampling: ResolvedSampling
    root: tuple[Hashable, ...]
    """Version of the weights, and what keeps its cached prefixes apart."""
    priority: int = 0
    deadline: float | None = None
    media: list[Media] = dataclasses.field(default_factory=list[Media])
    sequences: list["Sequence"] = dataclasses.field(default_factory=list["Sequence"])
    prompt_logprobs: list[Any] | None = None
    prefix_cache: bool = True
    """Whether to resume from and leave resume points; with n > 1 always, if need be under its own
    root."""
    group: Hashable = None
    """Equal for requests of the same prompt."""
    has_dear_masks: bool = True
    """Whether the latest mask of its grammar took more than is free (masks.py); until one is known,
    it may."""

    def uses_cache(self, index: int) -> bool:
        """Whether sample `index` may resume: what owes the prompt's log-probs must run it."""
        return self.prefix_cache and not (index == 0 and self.prompt_logprobs is not None)


class Sequence:
    """One sample of a request, and the state it holds."""

    __slots__ = (
        "at_fault",
        "checker",
        "computed",
        "error",
        "event",
        "finish",
        "global_table",
        "in_flight",
        "index",
        "key",
        "limit",
        "local_table",
        "mask",
        "matcher",
        "num_cached",
        "num_prompt",
        "order",
        "owes_mask",
        "points",
        "recomputed",
        "request",
        "routing",
        "seed",
        "slot",
        "status",
        "stop",
        "table",
        "tokens",
    )

    def __init__(self, request: Request, index: int, *, limit: int, seed: int, order: int) -> None:
        self.request = request
        self.index = index
        self.tokens = list(request.prompt)
        self.num_prompt = len(request.prompt)
        self.limit = limit
        """Length at which it ends."""
        self.seed = seed
        self.order = order
        self.key: tuple[int, int] = (0, order)
        """Place in the queue: lower runs first. Kept over preemption."""
        self.status = Status.WAITING
        self.slot = 0
        self.global_table: Table | None = None
        self.local_table: Table | None = None
        self.table = -1
        """Its row in the sampler's tables, if it has one."""
        self.computed = 0
        """Tokens whose state is in the cache once the planned steps have run."""
        self.in_flight = 0
        """Sampled tokens that the device has and the host has not seen."""
        self.event = 0
        """Length from which decoding needs a page or may free one."""
        self.points: list[int] = []
        """Lengths at which a resume point is to be made, ascending."""
        self.num_cached = 0
        """Tokens taken from the prefix cache at the latest admission."""
        self.recomputed = 0
        self.finish: str | None = None
        self.stop: int | str | None = None
        self.error: str | None = None
        self.at_fault = False
        """Whether the error is that of the request, and not of the engine."""
        self.matcher: Any = None
        """Its way through a grammar (processing/grammar.py), if its output must follow one."""
        self.mask: bytes | None = None
        """What the grammar allows next: a bit per row."""
        self.owes_mask = False
        """Whether the mask is still that of the token before (masks.py); it waits then."""
        self.routing: Record | None = None
        """Which experts its tokens went to, if the request asks; filled as steps are committed."""
        self.checker: StopChecker
        """Finds the end of the output, and its text."""

    @property
    def length(self) -> int:
        """Tokens that exist, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is still to be run, or a resume point to be left."""
        return self.computed < self.length - 1 or bool(self.points)

    @property
    def routed(self) -> Routing | None:
        """The experts of all its tokens but the newest, or of as many as have run."""
        return None if self.routing is None else self.routing.first(len(self.tokens) - 1)

    def keys(self) -> list[int]:
        """The cache's names of all tokens."""
        return self.request.keys + self.tokens[self.num_prompt :]
