"""Stands for CUDA graphs on a CPU: steps that are replayed by running them once more."""

import weakref
from typing import Any

from torch import Tensor

from suzuri.engine.engine import Engine
from suzuri.engine.step_batches import Size
from suzuri.engine.step_graphs import Forward, Recorded, Sizes, StepGraphs

MOST_ROWS = 96


class Again:
    """Replays by running once more, and counts. Steps of all sizes give their rows in the same
    memory, as captured ones do."""

    def __init__(self) -> None:
        self.recorded: list[Size] = []
        self.replayed: list[Size] = []
        self._shared: list[Tensor] = []

    def __call__(
        self, forward: Forward, fields: Tensor, size: Size, found: tuple[Tensor, ...]
    ) -> Recorded:
        assert all(x.shape[0] == size.rows for x in found)
        self.recorded.append(size)
        method = weakref.WeakMethod(forward)  # a graph does not hold what it recorded either
        places = list(range(len(self._shared), len(found)))
        self._shared += [found[i].new_empty(MOST_ROWS, *found[i].shape[1:]) for i in places]
        rows = tuple(x[: size.rows] for x in self._shared[: len(found)])

        def replay() -> None:
            self.replayed.append(size)
            again = method()
            assert again is not None
            for x in self._shared:
                x.fill_(-1)  # nobody may still look at what an earlier step gave
            for target, value in zip(rows, again(fields, size), strict=True):
                target.copy_(value)

        return Recorded(rows=rows, replay=replay)


def sizes_of(engine: Engine) -> Sizes:
    return Sizes(
        decode=(1, 2, 3, 8, 12),
        rows=(16, 24, 48, MOST_ROWS),
        sequences=(1, 2, 3, 5, 13),
        max_blocks=engine.capacity.table_columns(engine.config.page_size),
        page_size=engine.config.page_size,
    )


def replayed_by(engine: Engine, recorder: Any, most: int = 100) -> StepGraphs:
    runner = engine.runner
    graphs = StepGraphs(recorder, sizes_of(engine), most=most, device=runner.device)
    runner.graphs = graphs
    return graphs
