"""What a run reads: its batches by the number of the step, and what it is evaluated on."""

import concurrent.futures
from collections.abc import Sequence

from suzuri.training.config import SftConfig
from suzuri.training.data import Batch, Checked, Order, SampleMaker, make_batch
from suzuri.training.trainer import LocalTrainer
from suzuri.types import Dataset

LOSS = "cross_entropy"


class Batches:
    """The batches of a run by the number of their step. The next one is made while one is used."""

    def __init__(
        self, config: SftConfig, dataset: Dataset, maker: SampleMaker, checked: Checked | None
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
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "data")
        self._next: tuple[int, concurrent.futures.Future[Batch]] | None = None

    def batch(self, step: int) -> Batch:
        """Raises ValueError naming the step and a conversation that cannot be learned from."""
        if self._next is None or self._next[0] != step:
            self._next = step, self._thread.submit(self._make, step)
        made = self._next[1]
        try:
            batch = made.result()
        except ValueError as error:
            raise ValueError(f"step {step}: {error}") from error
        if step < self.steps:
            self._next = step + 1, self._thread.submit(self._make, step + 1)
        return batch

    def epoch(self, step: int) -> float | None:
        return None if self._order is None else self._order.epoch(step)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _make(self, step: int) -> Batch:
        size, config = self._config.batch_size, self._config
        indices: Sequence[int] = range((step - 1) * size, step * size)
        if self._order is not None:
            epochs = config.epochs if config.steps is None else None
            indices = self._order.batch(step, epochs)
        return make_batch(self._dataset, self._maker, indices, skip_bad=config.skip_bad)


class Holdout:
    """What a run is evaluated on."""

    def __init__(self, dataset: Dataset, maker: SampleMaker, checked: Checked | None) -> None:
        assert checked is not None, "the config asks for eval_size without an end"
        self._dataset, self._maker, self._indices = dataset, maker, checked.indices.tolist()

    def loss(self, trainer: LocalTrainer, batch_size: int) -> tuple[float, float]:
        """The loss per weight, and the weight. The trainer is as before."""
        # Rows that pass the router are counted, and the counts move the selection biases.
        loads = {name: count.clone() for name, count in trainer.loads.state().items()}
        loss, weight = 0.0, 0.0
        for start in range(0, len(self._indices), batch_size):
            indices = self._indices[start : start + batch_size]
            batch = make_batch(self._dataset, self._maker, indices, skip_bad=False)
            output = trainer.forward(batch.samples, LOSS)
            loss, weight = loss + output.loss_sum, weight + output.weight_sum
        trainer.loads.load(loads)
        return loss / weight, weight
