"""Random weights as a source: the shapes and the speed of a model without its checkpoint."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.nvfp4 import Nvfp4
from suzuri.kernels.random_normal import random_normal
from suzuri.model.inkling import Inkling
from suzuri.model.model_io import ModelWeights
from suzuri.model.tensor_table import parameter_shapes, table
from suzuri.model.transfer import copy

STD = 0.02


class RandomWeights:
    """Matrices, banks and conv taps normal with `std`, norm weights and scales 1, router bias 0.

    Every value is a function of seed, parameter name and place alone: the same on every device, for
    every way of storing the model and for every part of it; all are bf16 numbers. A router bias
    that is not small beside the logits would send all tokens to the same experts.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        seed: int = 0,
        std: float = STD,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shapes, self._seed, self._std, self._device = dict(shapes), seed, std, device

    def is_nvfp4(self, parameter: str, lead: int) -> bool:
        return False

    def read(self, parameter: str, lead: int, start: int, stop: int) -> Tensor:
        shape = self._shapes[parameter]
        if len(shape) == 1:
            value = 0.0 if parameter.endswith("router.bias") else 1.0
            return torch.full((stop - start, 1), value, device=self._device)
        rows, columns = shape[-2:]
        first, count = (lead * rows + start) * columns, (stop - start) * columns
        stream = zlib.crc32(parameter.encode())
        with dispatch.force("reference"):
            values = random_normal(self._seed, stream, first, count, device=self._device)
        return (values * self._std).to(torch.bfloat16).view(stop - start, columns)

    def read_nvfp4(self, parameter: str, lead: int) -> Nvfp4:
        raise AssertionError("random weights are drawn, then quantised")

    def input_amax(self, parameter: str) -> Tensor | None:
        return None


def initialize(model: Inkling, seed: int = 0, std: float = STD) -> None:
    """Fill a model in place with RandomWeights, drawn (and quantised) on its own device."""
    shapes = parameter_shapes(table(model.config))
    device = next(model.parameters()).device
    weights = ModelWeights(model)
    copy(weights.regions(), RandomWeights(shapes, seed=seed, std=std, device=device), weights)
