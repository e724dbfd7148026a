"""What the engine's process and the others say to each other, in msgpack; never pickle.

No torch here. `Add` and `Event` first. Read next: worker.py (the engine's side), client.py (the
other side).
"""

# pyright: strict

from typing import Any, Literal

import msgspec

from suzuri.engine.config import EngineConfig
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.config import ModelConfig
from suzuri.processing.grammar_request import GrammarSpec

VERSION = 4
"""Raised with every change of a record; two processes with different ones refuse each other."""
HEARTBEAT_SECONDS = 0.25


OnPublish = Literal["finish", "continue", "restart"]
"""What becomes of answers that are being drawn when new weights come. finish: the weights wait for
them. continue: they go on from where they are, on the new weights, which read again what the old
ones drew; every token keeps the version that drew it. restart: they begin anew."""


class MediaInput(msgspec.Struct, frozen=True, array_like=True):
    """A picture or clip as a tower reads it: `data` is the array's bytes in C order."""

    index: int
    count: int
    kind: str
    digest: bytes
    dtype: str
    shape: tuple[int, ...]
    data: bytes


# To the engine


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """The first message: which model to serve, and how. Fields as `load_engine` takes them."""

    version: int
    model: str
    config: EngineConfig
    random_weights: bool = False
    seed: int = 0
    device: str = "cpu"
    text_only: bool = False
    allow_updates: bool = False
    """Whether new weights may come; what they need of running requests is kept."""


class ChatStops(msgspec.Struct, frozen=True, array_like=True):
    """Stop strings are looked for in the text of a chat's answer alone (chat_stops.py), which is
    read with or without `tools`."""

    tools: bool


class Add(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """A request. `id` is the sender's, unique for the life of the engine; `wants_prompt` asks for
    the prompt's ids as the model reads them. `chat_stops`: None, stop strings are looked for in all
    text. `may_restart`: with new weights it may begin anew; else it goes on."""

    id: int
    prompt: list[int]
    params: SamplingParams
    media: list[MediaInput] = []
    priority: int = 0
    deadline: float | None = None
    salt: str | None = None
    wants_prompt: bool = False
    grammar: GrammarSpec | None = None
    chat_stops: ChatStops | None = None
    may_restart: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Ends a request wherever it is; one that is over already is no error."""

    id: int


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True, tag="update"):
    """Take over the weights of a folder, as `version` (None: the next one). Refused, with the old
    weights left as they are, where their hash is not `content_hash`, or `replaces` is not the
    version of the old ones (None: whatever they are)."""

    id: int
    folder: str
    version: int | None = None
    content_hash: str | None = None
    replaces: int | None = None
    on_publish: OnPublish = "finish"


Request = Load | Add | Abort | UpdateWeights


# From the engine


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Loading has come so far; bytes, 0 of 0 where nothing can be counted."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine takes requests. `fingerprint` is of everything that can change a bit."""

    version: int
    model: str
    max_context: int
    max_running: int
    config: ModelConfig
    """The model's shape, towers as they were loaded."""
    dtype: str
    device: str
    weight_version: int
    fingerprint: dict[str, str]
    content_hash: str | None = None
    """Of the weights (model/content_hash.py); None for those that it was started with."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start, for a reason with its fix in words; it ends after this."""

    error: str


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """A request is queued. `prompt`: its ids as the model reads them, if they were wanted."""

    id: int
    num_prompt: int
    prompt: list[int] | None = None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A request cannot run; nothing is kept of it. `busy`: it is not at fault, and may be sent
    again."""

    id: int
    error: str
    busy: bool = False


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-prob of one token, raw and under the distribution drawn from, and the most likely ids."""

    raw: float | None
    sampled: float | None
    top: tuple[tuple[int, float], ...]


class Waits(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of one sample: in the queue until its first step, from there to its first token."""

    queue: float
    prefill: float


class Routed(msgspec.Struct, frozen=True, array_like=True):
    """Experts of the tokens of prompt and answer but the last: uint8 of `shape` [T, L, K], in C
    order (routing.py)."""

    shape: tuple[int, int, int]
    data: bytes


class Event(msgspec.Struct, frozen=True, array_like=True):
    """What a step brought for sample `index` of a request: a token (None if none), text that may be
    shown, and its end.

    With a sample's first token come `cached`, prompt tokens that the prefix cache had, and `waits`;
    with that of sample 0 `prompt_logprobs`, one for each prompt token but the first. `at_fault`:
    the `error` is the request's own. `version`: of the weights that drew it. `restarted`: what came
    before counts no more, and nothing else is in this event. With the end comes `routed`, if it was
    asked for.
    """

    id: int
    index: int
    token: int | None
    text: str
    finish: str | None = None
    stop: int | str | None = None
    logprobs: Logprobs | None = None
    cached: int = 0
    error: str | None = None
    prompt_logprobs: list[Logprobs] | None = None
    waits: Waits | None = None
    at_fault: bool = False
    version: int = 0
    restarted: bool = False
    routed: Routed | None = None


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The engine now, and what it has done so far (steps, preemptions); `step_tokens`, of prompts
    and answers, are those of the last step."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    pages_used: int = 0
    pages: int = 0
    snapshots_used: int = 0
    preemptions: int = 0
    step_tokens: int = 0


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Everything that one step brought."""

    events: list[Event]
    stats: Stats


class WeightsUpdated(msgspec.Struct, frozen=True, array_like=True, tag="updated"):
    """Everything from here on is drawn by these weights. Seconds: of reading them beside the
    requests, of waiting for answers to end, and of the pause in which they were written."""

    id: int
    version: int
    content_hash: str
    num_bytes: int
    read_seconds: float
    wait_seconds: float
    pause_seconds: float


class UpdateRefused(msgspec.Struct, frozen=True, array_like=True, tag="update_refused"):
    """`kind`: the weights cannot be used ("invalid"), or are not those that were announced or may
    come next ("conflict"): the old ones serve on. "lost": they were written in part, and the
    engine's process ends."""

    id: int
    error: str
    kind: Literal["invalid", "conflict", "lost"]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """The process lives. `busy`: within a step, or with more to do; `steps` done so far."""

    steps: int
    busy: bool


Reply = Progress | Ready | Failed
"""Before the engine is ready; records with names, as they are few."""
Report = Accepted | Refused | Step | WeightsUpdated | UpdateRefused | Heartbeat
"""From then on; arrays, as they are many."""

FROM_LOADING = b"l"
FROM_RUNNING = b"r"
"""First frame of what the engine sends: which of the two unions follows."""


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def request_decoder() -> msgspec.msgpack.Decoder[Request]:
    return msgspec.msgpack.Decoder(Request)


def reply_decoder() -> msgspec.msgpack.Decoder[Reply]:
    return msgspec.msgpack.Decoder(Reply)


def report_decoder() -> msgspec.msgpack.Decoder[Report]:
    return msgspec.msgpack.Decoder(Report)
