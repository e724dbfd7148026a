"""How many rows each expert got, and the selection biases that even it out."""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from suzuri.model.inkling import Inkling
from suzuri.model.moe import Router
from suzuri.training.optimizer import is_named


class ExpertLoads:
    """Counts by layer of the rows that went to each routed expert, since the last step. `frozen`:
    patterns of parameters; biases among them do not move."""

    def __init__(self, model: Inkling, frozen: Sequence[str] = ()) -> None:
        self._routers = {
            name: module for name, module in model.named_modules() if isinstance(module, Router)
        }
        self.counts = {
            name: torch.zeros_like(router.bias) for name, router in self._routers.items()
        }
        self._moves = {name for name in self._routers if not is_named(f"{name}.bias", frozen)}
        self._is_counting = False
        self._handles = [
            router.register_forward_hook(self._counter(name))
            for name, router in self._routers.items()
        ]

    def _counter(self, name: str) -> Any:
        def count(_: nn.Module, __: Any, output: tuple[Tensor, ...]) -> None:
            # Not when a layer is run again in a backward pass.
            if self._is_counting:
                counts = self.counts[name]
                ids = torch.arange(counts.shape[0], device=counts.device)
                counts += (output[0].reshape(-1, 1) == ids).sum(0)

        return count

    @contextlib.contextmanager
    def counting(self, wanted: bool) -> Generator[None]:
        """Rows that run inside the block count, if that is wanted."""
        self._is_counting = wanted
        try:
            yield
        finally:
            self._is_counting = False

    def metrics(self) -> dict[str, float]:
        """Over the layers: share of experts with rows, and with more than the mean load; by how
        much the fullest is above the mean, and the emptiest below, as shares of the mean."""
        loads = [counts / counts.mean() for counts in self.counts.values() if counts.sum() > 0]
        if not loads:
            return {}
        load_LE = torch.stack(loads)
        most_L, least_L = load_LE.amax(1) - 1, 1 - load_LE.amin(1)
        return {
            "e_frac_with_tokens:mean": float((load_LE > 0).float().mean()),
            "e_frac_oversubscribed:mean": float((load_LE > 1).float().mean()),
            "e_max_violation:mean": float(most_L.mean()),
            "e_max_violation:max": float(most_L.amax()),
            "e_min_violation:mean": float(least_L.mean()),
        }

    def move_biases(self, rate: float) -> None:
        """Moves each selection bias by `rate` towards the mean load, and begins to count anew."""
        for name, router in self._routers.items():
            counts = self.counts[name]
            if rate and name in self._moves and bool(counts.sum() > 0):
                with torch.no_grad():
                    router.bias.add_(rate * torch.sign(counts.mean() - counts))
        self.clear()

    def clear(self) -> None:
        """Begins to count anew."""
        for counts in self.counts.values():
            counts.zero_()

    def state(self) -> dict[str, Tensor]:
        return {f"load.{name}": counts for name, counts in self.counts.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        for name, counts in self.counts.items():
            counts.copy_(state[f"load.{name}"])
