"""Processes that make samples ahead of time, for runs whose steps are quicker than rendering."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Generator, Sequence

from suzuri.model.config import ModelConfig
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import vocabulary_of
from suzuri.training.data import Made, SampleMaker, make_samples
from suzuri.types import Dataset

_held: list[tuple[Dataset, SampleMaker]] = []
"""Of a worker process: what it makes samples from."""


class DataWorkers:
    """A pool of processes that each hold the data set. Raises ValueError for one that cannot be
    sent to a process."""

    def __init__(
        self, count: int, dataset: Dataset, shape: ModelConfig, max_tokens: int, *, skip_bad: bool
    ) -> None:
        try:
            sent = pickle.dumps((dataset, shape, max_tokens))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"data_workers = {count}: the data set cannot be sent to another process "
                f"({error}); use 0, or define it in a module that can be imported"
            ) from error
        self._count, self._skip_bad = count, skip_bad
        self._pool = concurrent.futures.ProcessPoolExecutor(
            count,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(sent,),
        )

    def submit(self, indices: Sequence[int]) -> list[concurrent.futures.Future[Made]]:
        """The samples of these conversations in parts, in order."""
        size = -(-len(indices) // self._count)
        parts = [indices[i : i + size] for i in range(0, len(indices), size)]
        with _one_thread(), _undisturbed():
            return [self._pool.submit(_make, list(part), self._skip_bad) for part in parts]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _one_thread() -> Generator[None]:
    """Processes that start within the block compute on one thread each: all of them together would
    otherwise spin on as many threads as there are cores times processes, and starve the trainer.
    Libraries read this when they are loaded, so it cannot be set in the process itself."""
    name = "OMP_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    """Processes that start within the block never see Ctrl-C, which a terminal sends to all of
    them: the trainer decides when they are done. One that died half-way through reading from the
    queue would leave the others waiting for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_the_trainer() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a worker"
    parent.join()
    os._exit(1)


def _start(sent: bytes) -> None:
    threading.Thread(target=_end_with_the_trainer, daemon=True).start()
    dataset, shape, max_tokens = pickle.loads(sent)
    tokenizer = Tokenizer()
    vocabulary = vocabulary_of(shape.kept_vocabulary, tokenizer.token_bytes)
    _held[:] = [(dataset, SampleMaker(tokenizer, shape, vocabulary, max_tokens))]


def _make(indices: list[int], skip_bad: bool) -> Made:
    dataset, maker = _held[0]
    return make_samples(dataset, maker, indices, skip_bad=skip_bad)
