"""How an engine is set up. No torch here."""

# pyright: strict

import dataclasses
from typing import Literal

MAX_RUNNING = 65_536
DTYPES = ("bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and sizes of one engine. Raises ValueError naming the field."""

    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Weights, activations and caches."""

    max_context: int | None = None
    """Longest sequence, prompt and answer together (default: the model's, or what memory holds)."""

    max_running: int = 64
    """Sequences that run at once."""

    max_waiting: int = 100_000
    """Sequences that may wait; more are refused."""

    token_budget: int = 2048
    """Tokens of one step, at least max_running."""

    max_chunk: int | None = None
    """Prompt tokens of one sequence in one step (default: the token budget)."""

    page_size: int = 128
    """Tokens per KV page."""

    memory_gb: float | None = None
    """Memory for everything, in GB (default: what is free)."""

    global_pages: int | None = None
    local_pages: int | None = None
    snapshots: int | None = None
    """Pool sizes by hand (tests, experiments); all of them or none."""

    prefix_cache: bool = True
    """Resume from what earlier requests left."""

    resume_stride: int = 0
    """Resume points also at multiples of so many tokens; 0: only where docs/engine.md says."""

    min_branch_gain: int = 32
    """Tokens that a point at a branch must save before one is made there."""

    max_path_tokens: int = 4_000_000
    """Ids of earlier prompts that are remembered without state, to learn branch points."""

    aging: int = 256
    """Steps of waiting that weigh as much as one level of priority."""

    overlap: bool = True
    """Plan the next step while one runs."""

    cuda_graphs: bool = True
    """On a GPU, replay captured decode steps. Every size takes two slow steps first."""

    prepare: bool = True
    """On a GPU, compile kernels and record steps before the first request, not during it."""

    undo: int = 1
    """Tokens at the end of a sequence that can be taken back."""

    def __post_init__(self) -> None:
        limits: dict[str, tuple[int, int]] = {
            "max_running": (1, MAX_RUNNING),
            "max_waiting": (1, 10**9),
            "token_budget": (1, 10**7),
            "page_size": (1, 2**16),
            "resume_stride": (0, 10**9),
            "min_branch_gain": (1, 10**9),
            "max_path_tokens": (0, 10**12),
            "aging": (1, 10**9),
            "undo": (1, 1024),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{name} = {value!r}: must be an integer from {low} to {high}")
        for name in ("max_context", "max_chunk", "global_pages", "local_pages", "snapshots"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} = {value!r}: must be a positive integer")
        if self.dtype not in DTYPES:
            raise ValueError(
                f"dtype = {self.dtype!r}: must be one of {', '.join(DTYPES)} (float16 cannot hold "
                "the values of these models)"
            )
        if self.max_context == 1:
            raise ValueError("max_context = 1: no prompt and answer fit; give at least 2")
        for name in ("prefix_cache", "overlap", "cuda_graphs", "prepare"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be True or False")
        if self.token_budget < self.max_running:
            raise ValueError(
                f"token_budget = {self.token_budget}: must be at least max_running = "
                f"{self.max_running}, so that every running sequence gets its token"
            )
        by_hand = (self.global_pages, self.local_pages, self.snapshots)
        if any(by_hand) and not all(by_hand):
            raise ValueError("global_pages, local_pages and snapshots go together; give all three")

    @property
    def chunk(self) -> int:
        """Prompt tokens of one sequence in one step."""
        return min(self.max_chunk or self.token_budget, self.token_budget)
