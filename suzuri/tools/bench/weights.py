"""Random weights for timing, drawn where they lie, and a router that prefers some experts."""

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

from suzuri.model.config import ModelConfig
from suzuri.model.inkling import Inkling
from suzuri.model.random_weights import STD, initialize

SKEW = 2.0
"""Span of the selection bias between the most and the least preferred expert, in standard
deviations of the scores."""
SAMPLES = 1 << 14
MOST_VALUES = 1 << 28


def draw_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Inkling:
    """A model whose weights are distributed as those of RandomWeights, but drawn by the device's
    own generator: quicker, and other values on other devices. Quantised ones are drawn exactly."""
    model = Inkling(config, dtype=dtype, device=device, parts=frozenset())
    if config.quantization is not None:
        initialize(model, seed)
        return model.requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                fill_normal(parameter, generator, STD)
            else:
                # A router bias beyond the spread of the scores would choose the same experts for
                # every token, and a large batch would look as fast as a small one.
                parameter.fill_(0.0 if name.endswith("router.bias") else 1.0)
    return model.requires_grad_(False)


def fill_normal(tensor: Tensor, generator: torch.Generator, std: float = 1.0) -> None:
    """Normal numbers in place, no more than MOST_VALUES at a time (where a row has fewer)."""
    rows = max(1, MOST_VALUES * tensor.shape[0] // max(tensor.numel(), 1))
    with torch.no_grad():
        for start in range(0, tensor.shape[0], rows):
            tensor[start : start + rows].normal_(0.0, std, generator=generator)


@contextlib.contextmanager
def skewed_routing(model: Inkling, seed: int, skew: float = SKEW) -> Generator[None]:
    """Inside the block, every layer prefers some experts: the selection bias of the expert at rank
    r of R is -skew * ln(r) / ln(R) standard deviations of the scores, the ranks shuffled per layer.
    What it does to the loads is counted, not assumed."""
    biases = [p for name, p in model.named_parameters() if name.endswith("router.bias")]
    before = [bias.detach().clone() for bias in biases]
    generator = torch.Generator().manual_seed(seed)
    # Scores are sigmoids of logits; rows are normed, so a logit's deviation is STD * sqrt(hidden).
    logits = torch.randn(SAMPLES, generator=generator) * STD * model.config.text.hidden_size**0.5
    span = skew * float(logits.sigmoid().std())
    try:
        with torch.no_grad():
            for bias in biases:
                number = bias.shape[0]
                ranks = torch.randperm(number, generator=generator) + 1
                zipf = -span * ranks.double().log() / torch.tensor(float(max(number, 2))).log()
                bias.copy_(zipf)
        yield
    finally:
        with torch.no_grad():
            for bias, old in zip(biases, before, strict=True):
                bias.copy_(old)
