"""Random samples for trainers of `tiny`."""

from typing import Any

import numpy as np
import torch

from suzuri.processing.vocabulary import FullVocabulary
from suzuri.training.config import TrainingConfig
from suzuri.training.trainer import LocalTrainer
from suzuri.types import Sample
from tests.model.models import random_model


def sample(generator: np.random.Generator, length: int, **inputs: Any) -> Sample:
    """A random sequence whose targets are its next tokens; half of the weights are 0."""
    ids = generator.integers(0, 900, length + 1)
    weights = generator.integers(0, 2, length).astype(np.float32)
    weights[-1] = 1.0
    fields = {"target_tokens": ids[1:], "weights": weights}
    return Sample(tokens=ids[:-1].tolist(), inputs={**fields, **inputs})


def samples(lengths: tuple[int, ...] = (9, 21, 5, 30), seed: int = 0) -> list[Sample]:
    generator = np.random.default_rng(seed)
    return [sample(generator, length) for length in lengths]


def policy_samples(lengths: tuple[int, ...] = (9, 21, 5), seed: int = 1) -> list[Sample]:
    generator = np.random.default_rng(seed)
    return [
        sample(
            generator,
            length,
            logprobs=-generator.random(length).astype(np.float32) * 8,
            advantages=generator.normal(size=length).astype(np.float32),
            reference_logprobs=-generator.random(length).astype(np.float32) * 8,
        )
        for length in lengths
    ]


def trainer(
    dtype: str = "float32", model: str = "tiny", device: str = "cpu", **fields: Any
) -> LocalTrainer:
    found = random_model(model, getattr(torch, dtype)).to(device)
    return LocalTrainer(found, TrainingConfig(**fields), FullVocabulary())
