"""Suzuri serves and trains the Inkling models from one exact model definition.

Rooms, from the ground up: kernels, distributed, model, processing, then engine, training and envs,
then rl, evals, server and tools; cli on top. docs/style.md says who may import whom.

For scripts: `suzuri.LLM` and `suzuri.SamplingParams`, found when they are first asked for.
"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    match name:
        case "LLM":
            from suzuri.engine.llm import LLM

            return LLM
        case "SamplingParams":
            from suzuri.engine.sampling_params import SamplingParams

            return SamplingParams
        case _:
            raise AttributeError(f"module 'suzuri' has no attribute {name!r}")
