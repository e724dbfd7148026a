"""What one step does: made by the scheduler, carried out by the runner; and what all steps did. No
torch here.
"""

# pyright: strict

import dataclasses

from suzuri.engine.request import Sequence


@dataclasses.dataclass(slots=True)
class Work:
    """Tokens start .. start+count-1 of a sequence; `samples`: the last row gives the next token.

    `from_device`: its one token is the newest sampled one, which the host has not seen. `slot` is
    remembered here because a sequence may lose it before the result comes.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    from_device: bool
    slot: int
    length: int
    """Tokens of the sequence before the one sampled here."""


@dataclasses.dataclass(slots=True)
class Plan:
    """In the order in which the runner does it.

    tables: rows of the sampler's tables to give back. before: snapshots (slot, snapshot, length) of
    sequences that ended. copies: (pool, source, destination) pages. restores: (snapshot, slot,
    length). Then the forward over `works`. after: snapshots (slot, snapshot, length) at the end of
    chunks.
    """

    works: list[Work] = dataclasses.field(default_factory=list[Work])
    before: list[tuple[int, int, int]] = dataclasses.field(
        default_factory=list[tuple[int, int, int]]
    )
    copies: list[tuple[str, int, int]] = dataclasses.field(
        default_factory=list[tuple[str, int, int]]
    )
    restores: list[tuple[int, int, int]] = dataclasses.field(
        default_factory=list[tuple[int, int, int]]
    )
    after: list[tuple[int, int, int]] = dataclasses.field(
        default_factory=list[tuple[int, int, int]]
    )
    changed: list[Sequence] = dataclasses.field(default_factory=list[Sequence])
    """Sequences whose page tables must be written anew."""
    tables: list[int] = dataclasses.field(default_factory=list[int])
    num_tokens: int = 0


@dataclasses.dataclass(kw_only=True)
class Counters:
    """What happened since the start; the source of metrics."""

    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    admissions: int = 0
    finished: int = 0
