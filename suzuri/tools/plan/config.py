"""What `suzuri plan` can be asked. No torch here."""

import dataclasses
import math
from typing import Annotated, Any, Literal

from tyro.conf import Positional
from tyro.constructors import PrimitiveConstructorSpec

from suzuri.model.sizes import MAX_CONCURRENCY

MAX_TOKEN_BUDGET = 1_048_576
MAX_GPUS = 65_536
CARD_RANGES = {
    "memory": (0.1, 1e6, "GB"),
    "bandwidth": (0.001, 1e6, "TB/s"),
    "tflops": (0.001, 1e6, "TFLOP/s"),
    "link": (0.001, 1e6, "GB/s"),
}
"""What a card can be said to have: no device is outside, and no result is infinite inside."""


def _whole(words: list[str]) -> int:
    text = words[0]
    try:
        return int(text)
    except ValueError:
        pass
    try:
        meant = float(text)
    except ValueError:
        meant = math.nan
    hint = ""
    if abs(meant) < 1e15 and meant == int(meant):
        hint = f"; write {int(meant)}"
    raise ValueError(f"{text!r} is no whole number{hint}")


def _is_whole(value: Any) -> bool:
    return value is None or isinstance(value, int)


def _words_of(value: int | None) -> list[str]:
    return [str(value)]


_WHOLE = PrimitiveConstructorSpec[int | None](
    nargs=1,
    metavar="INT",
    instance_from_str=_whole,
    is_instance=_is_whole,
    str_from_instance=_words_of,
)
Whole = Annotated[int, _WHOLE]
"""A whole number, refused in words when it is written in another way."""
MaybeWhole = Annotated[int | None, _WHOLE]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Say whether a model runs on some hardware, with the sum, from its config alone.

    Exit code 0 for yes, 1 for no (the last line says why and what would help), 2 when the input
    cannot be used.
    """

    model: Positional[str]
    """A preset (inkling, inkling-small), a config.json, a model folder, or a hub id."""

    gpu: str | None = None
    """Card, in any spelling: h200, "RTX PRO 6000", dgx-spark, cpu, ..."""

    num_gpus: Whole = 1
    """How many of them. More than --tp: data-parallel copies."""

    memory: float | None = None
    """GB per GPU as on the box, for a card that is not in the list (with --bandwidth and --tflops),
    or for a version of one that is."""

    bandwidth: float | None = None
    """TB/s of its memory."""

    tflops: float | None = None
    """Its dense bf16 TFLOP/s."""

    link: float | None = None
    """GB/s per GPU and direction between GPUs (a card by numbers: 32)."""

    experts: Literal["bf16", "nvfp4"] | None = None
    """How the routed experts are stored. Default: as the model's config says."""

    tp: MaybeWhole = None
    """GPUs that share one copy of the model (default: all)."""

    ep: MaybeWhole = None
    """Groups of them that the routed experts are spread over; divides --tp. 1: every GPU has a part
    of each expert; --tp: whole experts. Default: memory for 1, floors for the better one."""

    context: MaybeWhole = None
    """Tokens per sequence, prompt and answer together (default 32768, or the model's limit)."""

    concurrency: Whole = 8
    """Sequences of that length at the same time, over all copies."""

    kv_dtype: str = "bf16"
    """bf16, or fp8 where the hardware has it."""

    mtp: MaybeWhole = None
    """Draft depths in use (default: all that the model has)."""

    resume_points: Whole = 1
    """Places kept per running sequence where a later request can go on."""

    token_budget: Whole = 8192
    """Tokens of one step at most; sets the workspace."""

    random_weights: bool = False
    """The model has no weights, only a shape. A plan needs no more, so nothing else changes."""

    command: bool = False
    """Print the serve command alone (nothing on a no)."""

    json: bool = False
    """Print the whole plan as JSON."""

    def resolve(self) -> "PlanConfig":
        """Checks each field. Raises ValueError naming the flag and the fix."""
        for name, (least, most, unit) in CARD_RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(
                    f"--{name} {value}: must be a number from {least:g} to {most:.0f} ({unit})"
                )
        if not 1 <= self.num_gpus <= MAX_GPUS:
            raise ValueError(f"--num-gpus {self.num_gpus}: must be from 1 to {MAX_GPUS}")
        if self.tp is not None and self.tp < 1:
            raise ValueError(f"--tp {self.tp}: must be at least 1")
        if self.ep is not None and self.ep < 1:
            raise ValueError(f"--ep {self.ep}: must be at least 1")
        if self.context is not None and self.context < 1:
            raise ValueError(f"--context {self.context}: must be at least 1")
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ValueError(f"--concurrency {self.concurrency}: must be 1 to {MAX_CONCURRENCY}")
        if self.mtp is not None and self.mtp < 0:
            raise ValueError(f"--mtp {self.mtp}: must be at least 0")
        if not 0 <= self.resume_points <= 1024:
            raise ValueError(f"--resume-points {self.resume_points}: must be 0 to 1024")
        if not 1 <= self.token_budget <= MAX_TOKEN_BUDGET:
            raise ValueError(f"--token-budget {self.token_budget}: must be 1 to {MAX_TOKEN_BUDGET}")
        if self.command and self.json:
            raise ValueError("--command and --json: give one of them")
        return self
