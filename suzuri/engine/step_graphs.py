"""Steps as captured CUDA graphs: one launch instead of hundreds.

A `Size` is recorded when it is wanted for the second time, and the last used ones are kept. What a
step is fed and how it is padded: step_batches.py.
"""

import bisect
import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from suzuri.engine.capacity import Capacity
from suzuri.engine.config import EngineConfig
from suzuri.engine.plan import Work
from suzuri.engine.step_batches import Size, num_blocks, step_fields
from suzuri.engine.transfers import upload_into
from suzuri.log import get_logger
from suzuri.model.sizes_workspace import decode_buckets, row_buckets, sequence_buckets

MIN_BLOCKS = 16
"""Pages of the narrowest table: short sequences share their graphs."""

log = get_logger(__name__)

Forward = Callable[[Tensor, Size], tuple[Tensor, ...]]
"""(fields, size) -> token ids [N], hidden rows [N, D], and with `size.more` what else there is, by
row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """A step of one size. `replay()` runs it on what the fields hold, and fills `rows`: what the
    forward gives, by row."""

    rows: tuple[Tensor, ...]
    replay: Callable[[], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is recorded: batches of one token per sequence (`decode`), other steps by rows and by
    sequences (padding is one more), ascending; all in tables of at most `max_blocks` columns."""

    decode: Sequence[int]
    rows: Sequence[int]
    sequences: Sequence[int]
    max_blocks: int
    page_size: int

    def of(self, works: Sequence[Work], *, more: bool = False) -> Size | None:
        """The size that holds such a step. None: it is too large."""
        total = sum(work.count for work in works)
        blocks = num_blocks(works, self.page_size)
        if total == len(works) and total <= self.decode[-1]:
            return self.holding(total, 0, blocks, more=more)
        return self.holding(total, len(works), blocks, more=more)

    def holding(self, rows: int, sequences: int, blocks: int, *, more: bool = False) -> Size | None:
        """The size for `rows` tokens of so many sequences (0: one token of each) that need so many
        columns. None: it is too large."""
        bucket = _at_least(rows, self.rows if sequences else self.decode)
        if bucket is None:
            return None
        if sequences:
            padding = bucket - rows
            found = _at_least(sequences + (padding > 0), self.sequences)
            if found is None:
                return None
            # Pages of padding: behind rows, and when there is nothing else.
            longest = max(padding, -(-bucket // found))
            sequences, blocks = found, max(blocks, -(-longest // self.page_size))
        if blocks > self.max_blocks:
            return None
        wide = max(MIN_BLOCKS, 1 << (blocks - 1).bit_length())
        return Size(bucket, sequences, min(wide, self.max_blocks), more)

    @property
    def num_fields(self) -> int:
        """Integers of the largest step's fields."""
        packed = Size(self.rows[-1], self.sequences[-1], 1)
        return max(packed.num_fields, Size(self.decode[-1], 0, 1).num_fields)


def sizes_of(config: EngineConfig, capacity: Capacity) -> Sizes:
    """What an engine records."""
    return Sizes(
        decode=decode_buckets(config.max_running),
        rows=row_buckets(min(config.token_budget, capacity.graph_tokens)),
        sequences=sequence_buckets(config.max_running),
        max_blocks=capacity.table_columns(config.page_size),
        page_size=config.page_size,
    )


def _at_least(number: int, sizes: Sequence[int]) -> int | None:
    place = bisect.bisect_left(sizes, number)
    return sizes[place] if place < len(sizes) else None


class CudaRecorder:
    """Captures steps as CUDA graphs that share one pool of memory.

    What packed steps give is kept in tensors of `most_rows` rows that all of them share: of their
    own, the pool would have to hold those of every graph.
    """

    def __init__(self, device: torch.device, most_rows: int) -> None:
        self._device, self._most_rows = device, most_rows
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        self._stream = torch.cuda.Stream(device)
        self._shared: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}

    def __call__(
        self, forward: Forward, fields: Tensor, size: Size, like: tuple[Tensor, ...]
    ) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        shared = None if size.is_decode else [self._rows(i, x) for i, x in enumerate(like)]
        with torch.cuda.stream(self._stream), self._capturing(graph):
            rows = forward(fields, size)
            if shared is not None:
                for target, value in zip(shared, rows, strict=True):
                    target.copy_(value)
                rows = tuple(shared)
        return Recorded(rows=rows, replay=graph.replay)

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Generator[None]:
        # Not torch.cuda.graph: it empties the allocator's cache, for every size again.
        if not self._graphs:  # a pool that nothing uses any more cannot be used again
            self._pool = torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            try:
                graph.capture_end()
            except RuntimeError:
                self._abandon_pool()
                if is_whole:  # of two errors the first says more
                    raise
        self._graphs.add(graph)

    def _abandon_pool(self) -> None:
        """After a capture that CUDA broke off: torch would go on as if it were under way, and would
        refuse another one in its pool. The graphs that are there keep theirs."""
        with contextlib.suppress(RuntimeError):
            place = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(place, self._pool)  # pyright: ignore[reportPrivateUsage]
            # The graph will not do this.
            torch._C._cuda_releasePool(place, self._pool)  # pyright: ignore[reportPrivateUsage]
        self._pool = torch.cuda.graph_pool_handle()

    def _rows(self, place: int, like: Tensor) -> Tensor:
        key = (place, like.dtype, like.shape[1:])
        if key not in self._shared:
            shape = (self._most_rows, *like.shape[1:])
            self._shared[key] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self._shared[key][: like.shape[0]]


class StepGraphs:
    """Recorded steps by size: `most` of them are kept, the last used ones.

    `record(forward, fields, size, like)` makes one without running it; a plain run of the size has
    just given `like` and made whatever is made on first use (kernels, tests of the library's
    products). A size that cannot be recorded (no memory is left, say) runs plainly from then on.
    `at_once`: whether a size is recorded when it is first wanted.
    """

    def __init__(
        self,
        record: Callable[[Forward, Tensor, Size, tuple[Tensor, ...]], Recorded],
        sizes: Sizes,
        *,
        most: int,
        device: torch.device,
    ) -> None:
        if most < 1:
            raise ValueError(f"most = {most}: at least one recorded step must find room")
        self.sizes = sizes
        self.at_once = False
        self._record, self._most, self._device = record, most, device
        # Steps follow each other on the device, so all may be fed from one place.
        self._fields = torch.zeros(sizes.num_fields, dtype=torch.int64, device=device)
        self._seen: set[Size] = set()
        self._refused: set[Size] = set()
        self._recorded: collections.OrderedDict[Size, Recorded] = collections.OrderedDict()
        self._has_room = False

    def __len__(self) -> int:
        return len(self._recorded)

    def run(
        self, forward: Forward, works: Sequence[Work], *, more: bool = False
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]] | None:
        """Token ids [N], slots [S], and hidden rows [N, D] with what else `forward` brings with
        `more`; those of the works, in order. The next run overwrites them. None: such a step is
        not recorded (yet). `forward` is always the same one; it is not kept, because it holds what
        holds this."""
        size = self.sizes.of(works, more=more)
        if size is None or size in self._refused:
            return None
        if size not in self._recorded and size not in self._seen and not self.at_once:
            self._seen.add(size)
            return None
        fields, step = self._fields[: size.num_fields], self._recorded.get(size)
        if step is None:
            self._make_room(forward, size)  # which may use the fields
        upload_into(fields, step_fields(works, size))
        if step is None:
            try:
                rows = forward(fields, size)
            except RuntimeError as error:
                self._refuse(size, error)  # tried again, it is to do without the padding
                raise
            self._keep(forward, size, rows)
        else:
            self._recorded.move_to_end(size)
            step.replay()
            rows = step.rows
        total = sum(work.count for work in works)
        ids_N, *rows = (x[:total] for x in rows)
        return ids_N, size.slots(fields)[: len(works)], tuple(rows)

    def record(self, forward: Forward, size: Size) -> bool:
        """Records a size unless it is; says whether there is a recorded one now. No state of a
        sequence changes."""
        if size in self._recorded:
            return True
        if size in self._refused:
            return False
        self._make_room(forward, size)
        fields = self._fields[: size.num_fields]
        upload_into(fields, step_fields((), size))
        try:
            rows = forward(fields, size)
        except RuntimeError as error:
            self._refuse(size, error)
        else:
            self._keep(forward, size, rows)
        return size in self._recorded

    def _make_room(self, forward: Forward, size: Size) -> None:
        """The largest packed step is recorded first: the others find room in the memory that it
        took. And the one that was not used for longest goes."""
        if not size.is_decode and not self._has_room:
            self._has_room = True
            _, sequences, blocks, more = size
            largest = self.sizes.holding(self.sizes.rows[-1], sequences, blocks, more=more)
            if largest not in (None, size):
                self.record(forward, largest)
        if len(self._recorded) >= self._most and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # it may still run
        while len(self._recorded) >= self._most:
            dropped, _ = self._recorded.popitem(last=False)
            self._seen.discard(dropped)

    def _keep(self, forward: Forward, size: Size, rows: tuple[Tensor, ...]) -> None:
        """Records the size of which a plain run gave `rows` just now."""
        try:
            fields = self._fields[: size.num_fields]
            self._recorded[size] = self._record(forward, fields, size, rows)
            self._seen.add(size)
        except RuntimeError as error:  # of memory or of CUDA: the step can run as it is
            self._refuse(size, error)

    def _refuse(self, size: Size, error: RuntimeError) -> None:
        if not self._refused:
            log.warning("steps of %s run without a CUDA graph: %s", size, error)
        self._refused.add(size)
