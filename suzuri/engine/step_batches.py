"""What the host knows of a step as one run of integers, and the batch that the device makes of it.

All shapes follow from a `Size`, and nothing here reads a tensor on the host, so that a step can be
recorded once per size and replayed. Rows are filled up to a size with padding, which has no slot:
decode rows of no sequence, whose state goes to slot 0 and page 0, which nobody has; behind packed
rows sequences of their own, whose keys and values go nowhere. No bit of a row depends on either
(docs/exactness.md, rule 1).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from suzuri.engine.plan import Work
from suzuri.model.batch import Batch, CacheView, LayerCache

FROM_DEVICE = -1
"""Instead of a row's token: the newest one of its slot, which the host has not seen."""
NO_SLOT = 0
"""Slot of padding; its page table names page 0."""
NOWHERE = -1
"""Page slot of a row whose key and value are not kept."""
ALIGNMENT = 32
"""Integers to a multiple of which parts of a packed step's fields begin: the compiler looks at
addresses, so that others would be other kernels."""

Integers = npt.NDArray[np.int64]


class Tables(NamedTuple):
    """Per slot, on the device: pages of both kinds [slots, M] and the newest token [slots]."""

    global_LM: Tensor
    local_LM: Tensor
    newest_L: Tensor


class Size(NamedTuple):
    """Shape of a step: rows, sequences (0: every row is the one token of its sequence), columns of
    the page tables, and whether it says more of its rows than what leaves the decoder."""

    rows: int
    sequences: int
    blocks: int
    more: bool = False

    @property
    def is_decode(self) -> bool:
        return self.sequences == 0

    @property
    def num_fields(self) -> int:
        return self.count_at + 1

    @property
    def count_at(self) -> int:
        """Where the number of rows that are no padding is."""
        if self.is_decode:
            return _aligned(3 * self.rows)
        return 3 * _aligned(self.rows) + 2 * _aligned(self.sequences + 1)

    @property
    def parts(self) -> list[slice]:
        """Where the fields are: of rows token (or FROM_DEVICE), position and, of a decode step,
        slot (or NO_SLOT); of a packed one the sequence, and of sequences slots and starts."""
        if self.is_decode:
            return [slice(i * self.rows, (i + 1) * self.rows) for i in range(3)]
        rows, sequences = _aligned(self.rows), _aligned(self.sequences + 1)
        begins = [0, rows, 2 * rows, 3 * rows, 3 * rows + sequences]
        lengths = [self.rows] * 3 + [self.sequences, self.sequences + 1]
        return [slice(at, at + n) for at, n in zip(begins, lengths, strict=True)]

    def slots(self, fields: Tensor) -> Tensor:
        """Slots of the step's sequences, padding behind them."""
        return fields[self.parts[2 if self.is_decode else 3]]


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def step_fields(works: Sequence[Work], size: Size) -> Integers:
    """What the host knows of a step, [size.num_fields]."""
    fields = np.full(size.num_fields, NO_SLOT, dtype=np.int64)
    (_decode_fields if size.is_decode else _packed_fields)(works, fields, size)
    fields[size.count_at] = sum(work.count for work in works)
    return fields


def _decode_fields(works: Sequence[Work], fields: Integers, size: Size) -> None:
    fields_3N = fields[: 3 * size.rows].reshape(3, size.rows)
    for i, work in enumerate(works):
        token = FROM_DEVICE if work.from_device else work.sequence.tokens[work.start]
        fields_3N[:, i] = token, work.start, work.slot


def _packed_fields(works: Sequence[Work], fields: Integers, size: Size) -> None:
    ids_N, positions_N, seq_ids_N, slots_S, starts_S1 = (fields[part] for part in size.parts)
    starts_S1[0] = end = 0
    for i, work in enumerate(works):
        begin, end = end, end + work.count
        if work.from_device:
            ids_N[begin] = FROM_DEVICE
        else:
            ids_N[begin:end] = work.sequence.tokens[work.start : work.start + work.count]
        positions_N[begin:end] = np.arange(work.start, work.start + work.count)
        seq_ids_N[begin:end] = i
        slots_S[i], starts_S1[i + 1] = work.slot, end
    # The other sequences share the padding, so that none of them needs many pages.
    first = len(works)
    padding, others = size.rows - end, size.sequences - first
    assert others or not padding, "no sequence is left for padding"
    each = max(-(-padding // max(others, 1)), 1)
    places = np.arange(padding)
    positions_N[end:], seq_ids_N[end:] = places % each, first + places // each
    starts_S1[first + 1 :] = end + np.minimum(each * np.arange(1, others + 1), padding)


def step_batch(
    fields: Tensor, size: Size, page_size: int, tables: Tables, layers: tuple[LayerCache, ...]
) -> Batch:
    """The batch of a step whose fields [size.num_fields] int64 are on the device."""
    if size.is_decode:
        ids_N, positions_N, slots_S = fields[: 3 * size.rows].view(3, size.rows)
        starts_S1 = torch.arange(size.rows + 1, device=fields.device)
        seq_ids_N, slots_N, is_padding_N = starts_S1[:-1], slots_S, None
    else:
        ids_N, positions_N, seq_ids_N, slots_S, starts_S1 = (fields[part] for part in size.parts)
        slots_N = slots_S[seq_ids_N]
        is_padding_N = slots_N == NO_SLOT
    block_N, offset_N = positions_N // page_size, positions_N % page_size
    global_SM, local_SM = (table[slots_S, : size.blocks] for table in tables[:2])

    def page_slots(table_SM: Tensor) -> Tensor:
        if is_padding_N is None:  # that of decode steps has pages: page 0
            return table_SM.gather(1, block_N[:, None])[:, 0] * page_size + offset_N
        found_N = table_SM[seq_ids_N, block_N] * page_size + offset_N
        return found_N.masked_fill(is_padding_N, NOWHERE)

    return Batch(
        token_ids_N=torch.where(ids_N == FROM_DEVICE, tables.newest_L[slots_N], ids_N),
        positions_N=positions_N,
        seq_ids_N=seq_ids_N,
        seq_starts_S1=starts_S1,
        single_rows=size.is_decode,
        num_rows_1=fields[size.count_at :],
        cache=CacheView(
            layers=layers,
            global_pages_SM=global_SM,
            local_pages_SM=local_SM,
            global_slots_N=page_slots(global_SM),
            local_slots_N=page_slots(local_SM),
            conv_slots_S=slots_S,
        ),
    )


def num_blocks(works: Sequence[Work], page_size: int) -> int:
    """Columns of the page tables that the works' rows may need."""
    return max((work.start + work.count - 1 for work in works), default=0) // page_size + 1


def is_text(works: Sequence[Work]) -> bool:
    """Whether no row may be that of a picture or clip."""
    return all(
        not work.sequence.request.media or work.start >= work.sequence.num_prompt for work in works
    )
