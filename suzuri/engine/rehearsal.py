"""The steps that serving is made of, walked through once so that their kernels are known.

`walk` runs the model's steps with launches noted in place of being made (launches.py): what
is compiled afterwards is what steps like these launch, whatever kernels those are. A step's kernels
depend on its number of tokens and sequences and on the width of its page tables; the sizes here
stand for all others. Layers of one kind launch the same kernels, so one of each kind is walked.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator

import torch
from torch import nn

from suzuri.engine.capacity import Capacity
from suzuri.engine.config import EngineConfig
from suzuri.engine.launches import Launches, unlaunched
from suzuri.engine.plan import Plan, Work
from suzuri.engine.request import Request
from suzuri.engine.request import Sequence as Sample
from suzuri.engine.runner import Runner
from suzuri.engine.sampling_params import SamplingParams, resolve
from suzuri.engine.step_batches import Size, step_fields
from suzuri.engine.step_graphs import MIN_BLOCKS, Sizes
from suzuri.engine.transfers import upload
from suzuri.kernels.matmul import buckets
from suzuri.model.decoder import Decoder, Layer
from suzuri.processing.vocabulary import Vocabulary

TILE = 64
"""Rows: numbers of tokens between two multiples of this are cut into tiles alike."""
DENSE_UP_TO = 2048
"""Tokens up to which every multiple of TILE is walked; beyond, every multiple of COARSE."""
COARSE = 512
FEW_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49)

Rows = tuple[tuple[int, int], ...]
"""Of each sequence of a step: tokens before it, and tokens in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The rows of a step, and how its sequences sample, in turn."""

    rows: Rows
    params: tuple[SamplingParams, ...] = (SamplingParams(max_tokens=1),)


def token_sizes(budget: int) -> list[int]:
    """Numbers of tokens that stand for all up to `budget`, largest first."""
    whole = [*range(TILE, min(budget, DENSE_UP_TO) + 1, TILE)]
    whole += range(DENSE_UP_TO + COARSE, budget + 1, COARSE)
    sizes = {*FEW_TOKENS, *whole, *(size - 1 for size in whole), budget}
    return sorted((size for size in sizes if size <= budget), reverse=True)


def widths(columns: int) -> list[int]:
    """Columns of page tables: around every power of two, up to `columns`."""
    powers = [1 << i for i in range(columns.bit_length())]
    found = {columns, *powers, *(power + 1 for power in powers if power <= TILE)}
    return sorted(width for width in found if width <= columns)


def split(tokens: int, sequences: int, start: int = 0) -> Rows:
    """`tokens` shared out among the sequences."""
    each, more = divmod(tokens, sequences)
    return tuple((start, each + (i < more)) for i in range(sequences))


def prefill_steps(config: EngineConfig, capacity: Capacity) -> Iterator[Step]:
    """Prompts alone, several at once, and beside sequences that decode."""
    longest, most = capacity.max_context - 1, config.max_running
    for tokens in token_sizes(config.token_budget):
        fewest = -(-tokens // longest)
        counts = {fewest, 2, 16, most} if tokens % TILE == 0 else {fewest, 3, most}
        for count in sorted(n for n in counts if fewest <= n <= min(tokens, most)):
            yield Step(rows=split(tokens, count))
        beside = min(most, tokens) - 1
        for count in {beside if tokens % TILE == 0 else 1} if beside > 0 else ():
            if 1 < tokens - count <= longest:
                yield Step(rows=((0, tokens - count), *((1, 1),) * count))


def wide_steps(config: EngineConfig, capacity: Capacity) -> Iterator[Step]:
    """Chunks of prompts and decoding behind pasts of every length."""
    longest, most = capacity.max_context - 1, config.max_running
    sizes = (1, 2, 17, config.chunk)
    for width in widths(-(-longest // config.page_size)):
        end = min(longest, width * config.page_size)
        for tokens in sorted({size for size in sizes if size <= min(end, config.chunk)}):
            yield Step(rows=((end - tokens, tokens),))
            if 1 < tokens < config.token_budget and most > 1:
                yield Step(rows=((end - tokens, tokens), (0, 1)))
        for count in sorted({2, 8, most // 4, most} & {*range(2, most + 1)}):
            yield Step(rows=((end - 1, 1),) * count)


def sampling_steps(config: EngineConfig) -> Iterator[Step]:
    """What samplers can be asked for, by all rows of a step and by some."""
    plain = SamplingParams(max_tokens=1)
    kinds = (
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
        {"logprobs": 0},
        {"temperature": 1.0, "logprobs": 5, "sampled_logprobs": True},
        {"logit_bias": {0: 1.0}},
    )
    asked = [SamplingParams(max_tokens=1, seed=0, **kind) for kind in kinds]  # pyright: ignore[reportArgumentType]
    everything = SamplingParams(
        max_tokens=1,
        seed=0,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        logprobs=2,
        sampled_logprobs=True,
        repetition_penalty=1.2,
        logit_bias={0: 1.0},
        min_tokens=1,
        stop_token_ids=[1],
    )
    most = config.max_running
    for count in sorted({1, 2, 3, 16, 32, 33, most} & {*range(1, most + 1)}):
        rows = ((1, 1),) * count
        for params in (*asked, everything):
            yield Step(rows=rows, params=(params,))
        yield Step(rows=rows, params=(plain, everything))
        yield Step(rows=rows, params=(*asked, everything, plain))
    scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
    for tokens in (2, 34, 64, 65):
        if tokens <= config.token_budget:
            yield Step(rows=((0, tokens),), params=(scored,))


@contextlib.contextmanager
def one_of_each_kind(decoder: Decoder) -> Generator[None]:
    """Inside the block the decoder has one layer of each kind."""
    kinds: dict[object, Layer] = {}
    for layer in decoder.blocks:
        parts = tuple((name, x.shape, x.dtype) for name, x in layer.state_dict().items())
        kinds.setdefault((type(layer.mlp), layer.attn.config, parts), layer)
    layers, decoder.layers = decoder.layers, nn.ModuleList(kinds.values())
    try:
        yield
    finally:
        decoder.layers = layers


class Rehearsal:
    """Walks steps through a runner. Sequences are nobody's: slot 0, page 0."""

    def __init__(self, runner: Runner, vocabulary: Vocabulary) -> None:
        self.runner = runner
        self._vocabulary = vocabulary
        self._zeros: list[int] = []

    def execute(self, step: Step) -> None:
        """The step as the runner runs it, and what it owes taken back."""
        works = [
            self._work(start, count, step.params[i % len(step.params)], i)
            for i, (start, count) in enumerate(step.rows)
        ]
        self.runner.execute(Plan(works=works, after=[(0, 0, step.rows[0][0] + step.rows[0][1])]))
        tables = [work.sequence.table for work in works if work.sequence.table >= 0]
        self.runner.execute(Plan(tables=tables))

    def recorded(self, size: Size) -> None:
        """A step as it is recorded."""
        fields = upload(step_fields((), size), self.runner.device)
        self.runner.step_rows(fields, size)

    def _work(self, start: int, count: int, params: SamplingParams, index: int) -> Work:
        text = self.runner.model.config.text
        sampling = resolve(
            params, self._vocabulary, num_rows=text.unpadded_vocab_size, eos_token_id=None
        )
        scores = params.prompt_logprobs is not None
        length = start + count
        request = Request(
            id="rehearsal",
            prompt=[],
            keys=[],
            sampling=sampling,
            root=(),
            prompt_logprobs=[] if scores else None,
        )
        sequence = Sample(request, 0, limit=length + 1, seed=index, order=0)
        if len(self._zeros) != length:
            self._zeros = [0] * length
        # The same for all: of a million tokens each its own would take longer than all the rest.
        request.prompt = sequence.tokens = self._zeros
        sequence.num_prompt = length
        return Work(
            sequence=sequence,
            start=start,
            count=count,
            samples=True,
            from_device=count == 1 and start > 0,
            slot=0,
            length=length,
        )


def all_steps(config: EngineConfig, capacity: Capacity) -> list[Step]:
    """All that is walked."""
    return [
        *prefill_steps(config, capacity),
        *wide_steps(config, capacity),
        *sampling_steps(config),
    ]


def recorded_sizes(sizes: Sizes) -> list[Size]:
    """Steps as they are recorded: of one token per sequence all; others by rows and sequences in
    narrow tables (wide ones: `wide_steps`)."""
    columns = sizes.max_blocks
    wide = [1 << i for i in range(columns.bit_length()) if MIN_BLOCKS <= 1 << i < columns]
    widths = [*wide, columns]
    decode = [Size(rows, 0, width) for rows in sizes.decode for width in widths]
    packed = [
        sizes.holding(rows, sequences, 1)
        for rows in sizes.rows
        if rows <= DENSE_UP_TO or rows % (2 * COARSE) == 0
        for sequences in sizes.sequences
        if sequences <= rows
    ]
    return decode + [size for size in packed if size is not None]


def walk(
    runner: Runner,
    vocabulary: Vocabulary,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Launches, list[buckets.Shape]]:
    """The kernels of all steps, and the products of which the library's bits are to be tested;
    `show(done, total)` of the steps.

    Nothing of the engine's state changes but page 0 and slot 0, which are nobody's.
    """
    config, capacity = runner.config, runner.capacity
    rehearsal, shapes = Rehearsal(runner, vocabulary), list[buckets.Shape]()
    steps = all_steps(config, capacity)
    recorded = [] if runner.graphs is None else recorded_sizes(runner.graphs.sizes)
    total = len(steps) + len(recorded)
    replays, runner.replays = runner.replays, False
    try:
        with (
            torch.no_grad(),
            one_of_each_kind(runner.model.decoder),
            buckets.untested(shapes),
            unlaunched() as found,
        ):
            for done, step in enumerate(steps):
                rehearsal.execute(step)
                show(done, total)
            for done, size in enumerate(recorded, len(steps)):
                rehearsal.recorded(size)
                show(done, total)
            for shape in shapes:
                buckets.rehearse(shape, runner.device)
    finally:
        runner.replays = replays
    return found, shapes
