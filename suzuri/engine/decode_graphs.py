"""Decode steps as captured CUDA graphs: one launch instead of hundreds.

A step of one token per sequence depends on the host for three numbers per row only; all else is on
the device. `decode_batch` makes the batch from these there, so that a step can be recorded once per
size and replayed. Rows are filled up to a size with padding: first tokens of no sequence, whose
state goes to slot 0 and page 0, which nobody has. Page tables are as wide as the longest sequence
needs, rounded up to a power of two. No bit of a row depends on either (docs/exactness.md, rule 1).
"""

import bisect
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from suzuri.engine.plan import Work
from suzuri.engine.transfers import upload_into
from suzuri.model.batch import Batch, CacheView, LayerCache

FROM_DEVICE = -1
"""Instead of a row's token: the newest one of its slot, which the host has not seen."""
NO_SLOT = 0
"""Slot of a padding row; its page table names page 0."""
MIN_BLOCKS = 16
"""Pages of the narrowest table: short sequences share their graphs."""


class Tables(NamedTuple):
    """Per slot, on the device: pages of both kinds [slots, M] and the newest token [slots]."""

    global_LM: Tensor
    local_LM: Tensor
    newest_L: Tensor


def decode_batch(
    fields_3N: Tensor, blocks: int, page_size: int, tables: Tables, layers: tuple[LayerCache, ...]
) -> Batch:
    """One token per sequence. fields_3N [3, N] int64: token (or FROM_DEVICE), position, slot (or
    NO_SLOT: a padding row). `blocks`: columns of the page tables that rows may need."""
    ids_N, positions_N, slots_N = fields_3N
    block_N1, offset_N = (positions_N // page_size)[:, None], positions_N % page_size
    global_SM, local_SM = (table[slots_N, :blocks] for table in tables[:2])

    def page_slots(table_SM: Tensor) -> Tensor:
        return table_SM.gather(1, block_N1)[:, 0] * page_size + offset_N

    starts_S1 = torch.arange(fields_3N.shape[1] + 1, device=fields_3N.device)
    return Batch(
        token_ids_N=torch.where(ids_N == FROM_DEVICE, tables.newest_L[slots_N], ids_N),
        positions_N=positions_N,
        seq_ids_N=starts_S1[:-1],
        seq_starts_S1=starts_S1,
        single_rows=True,
        cache=CacheView(
            layers=layers,
            global_pages_SM=global_SM,
            local_pages_SM=local_SM,
            global_slots_N=page_slots(global_SM),
            local_slots_N=page_slots(local_SM),
            conv_slots_S=slots_N,
        ),
    )


def decode_fields(works: Sequence[Work], rows: int) -> npt.NDArray[np.int64]:
    """What the host knows of a step, [3, rows]: see `decode_batch`."""
    fields = np.full((3, rows), NO_SLOT, dtype=np.int64)
    for i, work in enumerate(works):
        token = FROM_DEVICE if work.from_device else work.sequence.tokens[work.start]
        fields[:, i] = token, work.start, work.slot
    return fields


def has_single_rows(works: Sequence[Work]) -> bool:
    """Whether every work is one token of text: decoding, or a chunk of one."""
    return all(
        work.count == 1
        and (not work.sequence.request.media or work.start >= work.sequence.num_prompt)
        for work in works
    )


Forward = Callable[[Tensor, int], tuple[Tensor, ...]]
"""(fields_3N, blocks) -> token ids [N], hidden rows [N, D], and whatever else, by row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """A step of one size. `replay()` runs it on what `fields_3N` holds, and fills the others."""

    fields_3N: Tensor
    token_ids_N: Tensor
    hidden_ND: Tensor
    replay: Callable[[], None]
    more: tuple[Tensor, ...] = ()


class CudaRecorder:
    """Captures steps as CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, forward: Forward, fields_3N: Tensor, blocks: int) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        # A graph that was dropped just now may still run.
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            forward(fields_3N, blocks)  # compiles, and tests the library's products
            # Not torch.cuda.graph: it empties the allocator's cache, for every size again.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                ids_N, hidden_ND, *more = forward(fields_3N, blocks)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return Recorded(
            fields_3N=fields_3N,
            token_ids_N=ids_N,
            hidden_ND=hidden_ND,
            replay=graph.replay,
            more=tuple(more),
        )


class DecodeGraphs:
    """Recorded steps by number of rows and of table columns, and by whether they say more than
    hidden rows.

    A size is recorded when it is wanted for the second time, and `most` of them are kept, the last
    used ones. `sizes`: numbers of rows, ascending; larger steps are not recorded. `record(forward,
    fields_3N, blocks)` makes one; fields_3N are then those of padding alone.
    """

    def __init__(
        self,
        record: Callable[[Forward, Tensor, int], Recorded],
        *,
        sizes: Sequence[int],
        max_blocks: int,
        most: int,
        device: torch.device,
    ) -> None:
        self._record, self._device = record, device
        self._sizes, self._max_blocks, self._most = sizes, max_blocks, most
        self._seen: set[tuple[int, int, bool]] = set()
        self._recorded: collections.OrderedDict[tuple[int, int, bool], Recorded] = (
            collections.OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._recorded)

    def key(self, num_rows: int, blocks: int) -> tuple[int, int] | None:
        """The size that holds such a step: rows and table columns. None: it is too large."""
        place = bisect.bisect_left(self._sizes, num_rows)
        if place == len(self._sizes):
            return None
        wide = max(MIN_BLOCKS, 1 << (blocks - 1).bit_length())
        return self._sizes[place], min(wide, self._max_blocks)

    def run(
        self, forward: Forward, works: Sequence[Work], blocks: int, *, more: bool = False
    ) -> tuple[Tensor, ...] | None:
        """Token ids [N], hidden rows [N, D], slots [N] and with `more` what else `forward` brings;
        first those of the works, in order, then padding; the next run overwrites them. None: such a
        step is not recorded (yet). `blocks`: table columns in use. `forward` is always the same
        one, and another with `more`; it is not kept, because it holds what holds this."""
        size = self.key(len(works), blocks)
        if size is None:
            return None
        key = (*size, more)
        step = self._recorded.get(key)
        if step is None:
            if key not in self._seen:
                self._seen.add(key)
                return None
            step = self._recorded[key] = self._made(forward, *size)
        self._recorded.move_to_end(key)
        upload_into(step.fields_3N, decode_fields(works, size[0]))
        step.replay()
        return step.token_ids_N, step.hidden_ND, step.fields_3N[2], *step.more

    def record(self, forward: Forward, num_rows: int, blocks: int) -> bool:
        """Records the size that holds such a step ahead; whether it is recorded now."""
        size = self.key(num_rows, blocks)
        if size is None:
            return False
        if (*size, False) not in self._recorded:
            self._recorded[*size, False] = self._made(forward, *size)
        return True

    def _made(self, forward: Forward, rows: int, blocks: int) -> Recorded:
        while len(self._recorded) >= self._most:
            self._recorded.popitem(last=False)
        fields_3N = torch.full((3, rows), NO_SLOT, dtype=torch.int64, device=self._device)
        return self._record(forward, fields_3N, blocks)
