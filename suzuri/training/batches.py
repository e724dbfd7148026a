"""What a run reads: its batches by the number of the step, and what it is evaluated on."""

import concurrent.futures
from collections.abc import Sequence

from suzuri.training.config import SftConfig
from suzuri.training.data import (
    Batch,
    Checked,
    Made,
    Order,
    SampleMaker,
    joined,
    make_batch,
    make_samples,
)
from suzuri.training.data_workers import DataWorkers
from suzuri.training.trainer import LocalTrainer
from suzuri.types import Dataset, Sample

LOSS = "cross_entropy"
MOST_KEPT = 2**28
"""Bytes of samples that an evaluation keeps for the next one; what is more is made anew."""
AHEAD = 2
"""Steps that workers are ahead."""


class Batches:
    """The batches of a run by the number of their step. The next ones are made while one is used:
    by a thread, or by `workers`."""

    def __init__(
        self,
        config: SftConfig,
        dataset: Dataset,
        maker: SampleMaker,
        checked: Checked | None,
        workers: DataWorkers | None = None,
    ) -> None:
        self._config, self._dataset, self._maker = config, dataset, maker
        self.num_bad = 0 if checked is None else checked.num_bad
        self._order: Order | None = None
        if checked is not None:
            self._order = Order(
                checked,
                seed=config.seed,
                batch_size=config.batch_size,
                batch_tokens=config.batch_tokens,
            )
        steps = config.steps
        if steps is None:
            assert self._order is not None, "the config asks for steps without an end"
            steps = self._order.num_steps(config.epochs)
        self.steps = steps
        """Of the whole run."""
        self._workers = workers
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "data")
        self._ahead: dict[int, Sequence[concurrent.futures.Future[Made]]] = {}

    def batch(self, step: int) -> Batch:
        """Raises ValueError naming the step and a conversation that cannot be learned from."""
        last = min(step + (AHEAD if self._workers else 1), self.steps)
        self._ahead = {
            number: self._ahead.get(number) or self._begin(number)
            for number in range(step, last + 1)
        }
        try:
            return joined([part.result() for part in self._ahead[step]])
        except ValueError as error:
            raise ValueError(f"step {step}: {error}") from error

    def epoch(self, step: int) -> float | None:
        return None if self._order is None else self._order.epoch(step)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()

    def _begin(self, step: int) -> Sequence[concurrent.futures.Future[Made]]:
        size, config = self._config.batch_size, self._config
        indices: Sequence[int] = range((step - 1) * size, step * size)
        if self._order is not None:
            epochs = config.epochs if config.steps is None else None
            indices = self._order.batch(step, epochs)
        if self._workers is not None:
            return self._workers.submit(indices)
        given = (self._dataset, self._maker, indices)
        return [self._thread.submit(make_samples, *given, skip_bad=config.skip_bad)]


class Holdout:
    """What a run is evaluated on."""

    def __init__(self, dataset: Dataset, maker: SampleMaker, checked: Checked | None) -> None:
        assert checked is not None, "the config asks for eval_size without an end"
        self._dataset, self._maker, self._indices = dataset, maker, checked.indices.tolist()
        self._kept: dict[int, Batch] = {}
        self._room = MOST_KEPT

    def loss(self, trainer: LocalTrainer, batch_size: int) -> tuple[float, float]:
        """The loss per weight, and the weight. The trainer is as before."""
        loss, weight = 0.0, 0.0
        for start in range(0, len(self._indices), batch_size):
            output = trainer.forward(self._batch(start, batch_size).samples, LOSS)
            loss, weight = loss + output.loss_sum, weight + output.weight_sum
        return loss / weight, weight

    def _batch(self, start: int, size: int) -> Batch:
        if start in self._kept:
            return self._kept[start]
        indices = self._indices[start : start + size]
        batch = make_batch(self._dataset, self._maker, indices, skip_bad=False)
        num_bytes = sum(_num_bytes(sample) for sample in batch.samples)
        if num_bytes <= self._room:
            self._room -= num_bytes
            self._kept[start] = batch
        return batch


def _num_bytes(sample: Sample) -> int:
    """About what it takes in memory."""
    arrays = [*sample.inputs.values(), *(item.inputs for item in sample.media)]
    return 8 * sample.num_tokens + sum(array.nbytes for array in arrays)
