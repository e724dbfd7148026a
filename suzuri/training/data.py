"""From conversations to samples: rendering, checking all of them before training, and their order.

Read `SampleMaker` first. jsonl.py reads files; `Order` says which conversations a step takes.
"""

import array
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from suzuri.model.config import ModelConfig
from suzuri.processing.chat import ChatRenderer, TrainingExample
from suzuri.processing.tokenizer import ENDOFTEXT, Tokenizer
from suzuri.processing.vocabulary import Speller, Vocabulary
from suzuri.training.jsonl import JsonlData
from suzuri.types import Conversation, Dataset, MediaInput, Sample

MOST_NAMED = 20
"""Faulty conversations that an error lists."""

Progress = Callable[[int, int], None]
"""Told (done, total)."""


class SampleMaker:
    """Makes the samples of conversations for one model. `max_tokens`: of the longest sample."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        vocabulary: Vocabulary,
        max_tokens: int,
    ) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._renderer = ChatRenderer(tokenizer, config, local_files=True)
        self._speller = Speller(vocabulary)

    def samples(self, conversation: Conversation) -> list[Sample]:
        """Usually one. Raises ValueError saying why there is nothing to learn."""
        if conversation.text is not None:
            ids = [*self._tokenizer.encode(conversation.text), ENDOFTEXT]
            examples = [TrainingExample(token_ids=ids, weights=[1.0] * len(ids))]
        else:
            examples = self._renderer.render_for_training(
                conversation.messages,
                conversation.tools or None,
                conversation.effort,
                max_tokens=self._max_tokens + 1,
            )
        found = [self.sample(example) for example in examples]
        found = [one for one in found if np.any(one.inputs["weights"])]
        if not found:
            raise ValueError(
                "nothing to learn: every weight is 0 (there is no message of the assistant, or "
                "each has weight 0)"
            )
        return found

    def sample(self, example: TrainingExample) -> Sample:
        """The example in ids that the model has rows for, its targets one place on.

        The last token is a target only; the first is none. Raises ValueError above `max_tokens`.
        """
        ids, starts = self._speller.spelled(example.token_ids)
        if len(ids) - 1 > self._max_tokens:
            raise ValueError(f"{len(ids) - 1} tokens; at most {self._max_tokens} fit")
        if len(ids) < 2:
            raise ValueError("a single token, which nothing predicts")
        weights = np.repeat(np.array(example.weights, np.float32), np.diff(starts, append=len(ids)))
        media = tuple(
            MediaInput(kind=one.kind, index=int(starts[one.index]), inputs=one.inputs)
            for one in example.media
        )
        inputs = {"target_tokens": np.array(ids[1:], np.int64), "weights": weights[1:]}
        return Sample(tokens=ids[:-1], inputs=inputs, media=media)


def place(dataset: Dataset, index: int) -> str:
    """What a conversation is called in an error."""
    return dataset.place(index) if isinstance(dataset, JsonlData) else f"conversation {index}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """Conversations that can be learned from: their indices, rising, and tokens of each.
    `num_bad`: how many cannot; `faults` describes the first of them."""

    indices: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    num_bad: int
    faults: tuple[str, ...]

    def refuse_bad(self) -> None:
        """Raises ValueError that lists what cannot be learned from, if anything."""
        if not self.num_bad:
            return
        more = self.num_bad - len(self.faults)
        lines = [*self.faults, *([f"and {more} more"] if more else [])]
        total = self.num_bad + len(self.indices)
        raise ValueError(
            f"{self.num_bad} of {total} conversations cannot be learned from; mend them, or leave "
            "them out with --skip-bad:\n  " + "\n  ".join(lines)
        )


def check_data(
    dataset: Dataset, maker: SampleMaker, *, most: int | None = None, progress: Progress
) -> Checked:
    """Makes the samples of the first `most` conversations (default: all) once and keeps none.

    Raises ValueError when none is left.
    """
    total = dataset.size if most is None else min(most, dataset.size or most)
    assert total is not None, "a data set without end is not checked as a whole"
    indices, lengths = array.array("q"), array.array("q")
    faults: list[str] = []
    for index in range(total):
        try:
            samples = maker.samples(dataset.conversation(index))
        except (ValueError, RecursionError) as error:
            if len(faults) < MOST_NAMED:
                faults.append(f"{place(dataset, index)}: {error}")
        else:
            indices.append(index)
            lengths.append(sum(sample.num_tokens for sample in samples))
        progress(index + 1, total)
    checked = Checked(
        indices=np.array(indices, np.int64),
        lengths=np.array(lengths, np.int64),
        num_bad=total - len(indices),
        faults=tuple(faults),
    )
    if not indices:
        checked.refuse_bad()
        raise ValueError("the data set is empty; give conversations to learn from")
    return checked


class Order:
    """Which conversations a step takes, from the number of the step alone.

    Each epoch is a permutation drawn from the seed. Steps take `batch_size` conversations, over the
    borders of epochs; or as many as fit into `batch_tokens` (at least one), not over them.
    """

    def __init__(
        self, checked: Checked, *, seed: int, batch_size: int, batch_tokens: int | None = None
    ) -> None:
        self._checked, self._seed = checked, seed
        self._batch_size, self._batch_tokens = batch_size, batch_tokens
        self._permutations: dict[int, npt.NDArray[np.int64]] = {}
        self._cuts: dict[int, list[int]] = {}

    def num_steps(self, epochs: int) -> int:
        """Steps that go through the data so many times."""
        if self._batch_tokens is None:
            return -(-epochs * len(self._checked.indices) // self._batch_size)
        return sum(len(self._starts(epoch)) - 1 for epoch in range(epochs))

    def batch(self, step: int, epochs: int | None = None) -> list[int]:
        """Indices of step `step`, from 1 on; none from later epochs than `epochs`."""
        count = len(self._checked.indices)
        if self._batch_tokens is None:
            first = (step - 1) * self._batch_size
            last = first + self._batch_size
            if epochs is not None:
                last = min(last, epochs * count)
            places = [divmod(position, count) for position in range(first, last)]
            return [int(self._permutation(epoch)[at]) for epoch, at in places]
        epoch, left = 0, step - 1
        while left >= len(self._starts(epoch)) - 1:
            left -= len(self._starts(epoch)) - 1
            epoch += 1
        start, end = self._starts(epoch)[left : left + 2]
        return [int(index) for index in self._permutation(epoch)[start:end]]

    def epoch(self, step: int) -> float:
        """Epochs gone through after step `step`."""
        count = len(self._checked.indices)
        if self._batch_tokens is None:
            return step * self._batch_size / count
        epoch, left = 0, step
        while left > len(self._starts(epoch)) - 1:
            left -= len(self._starts(epoch)) - 1
            epoch += 1
        return epoch + self._starts(epoch)[left] / count

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._permutations:
            self._forget(self._permutations)
            self._permutations[epoch] = self._checked.indices[self._drawn(epoch)]
        return self._permutations[epoch]

    def _drawn(self, epoch: int) -> npt.NDArray[np.int64]:
        # Raw bits and a stable sort: numpy promises these for ever, but not its permutations.
        bits = np.random.PCG64(np.random.SeedSequence((self._seed, epoch)))
        return np.argsort(bits.random_raw(len(self._checked.indices)), kind="stable")

    def _starts(self, epoch: int) -> list[int]:
        """Where the batches of an epoch begin in its permutation, and its end."""
        if epoch not in self._cuts:
            assert self._batch_tokens is not None
            ends = np.cumsum(self._checked.lengths[self._drawn(epoch)])
            starts, taken = [0], 0
            while starts[-1] < len(ends):
                fits = int(np.searchsorted(ends, taken + self._batch_tokens, "right"))
                starts.append(max(fits, starts[-1] + 1))
                taken = int(ends[starts[-1] - 1])
            self._cuts[epoch] = starts
        return self._cuts[epoch]

    @staticmethod
    def _forget(kept: dict[int, npt.NDArray[np.int64]]) -> None:
        """Two epochs can meet in one step; more are never needed."""
        while len(kept) > 1:
            kept.pop(min(kept))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of a step. `num_skipped`: conversations that could not be learned from."""

    samples: Sequence[Sample]
    num_skipped: int = 0


class Made(NamedTuple):
    """Samples of some conversations, and what is wrong with those that were left out."""

    samples: list[Sample]
    faults: list[str]


def make_samples(
    dataset: Dataset, maker: SampleMaker, indices: Sequence[int], *, skip_bad: bool
) -> Made:
    """The samples of these conversations, in order. Raises ValueError naming one that cannot be
    learned from, unless `skip_bad`."""
    made = Made([], [])
    for index in indices:
        try:
            made.samples.extend(maker.samples(dataset.conversation(index)))
        except (ValueError, RecursionError) as error:
            made.faults.append(f"{place(dataset, index)}: {error}")
            if not skip_bad:
                raise ValueError(made.faults[0]) from error
    return made


def joined(parts: Sequence[Made]) -> Batch:
    """One batch. Raises ValueError when it has no sample."""
    samples = [sample for part in parts for sample in part.samples]
    faults = [fault for part in parts for fault in part.faults]
    if not samples:
        raise ValueError(f"no conversation of this step can be learned from; {faults[0]}")
    return Batch(samples=samples, num_skipped=len(faults))


def make_batch(
    dataset: Dataset, maker: SampleMaker, indices: Sequence[int], *, skip_bad: bool
) -> Batch:
    """`make_samples` as a batch."""
    return joined([make_samples(dataset, maker, indices, skip_bad=skip_bad)])
