"""What some sequences carry from step to step for sampling, on the device: biases and counts.

A sequence that uses logit_bias, allowed_token_ids or a penalty holds a slot, one row of every
table; all others cost nothing. Tables are made when first needed and grow by doubling.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from suzuri.engine.sampling_params import ResolvedSampling
from suzuri.engine.transfers import upload
from suzuri.kernels import exact
from suzuri.kernels.penalize_logits import penalize_logits

FIRST_SLOTS = 4


class SamplingTables:
    """Slots 0 .. max_slots - 1. At V ids a slot takes 4 V bytes of bias_LV (fp32, -inf where an id
    is not allowed), V of prompt_LV (bool) and 4 V of output_LV (int32), each table only once some
    sequence has needed it."""

    def __init__(self, *, num_ids: int, max_slots: int, device: torch.device) -> None:
        self.num_ids, self.max_slots, self.device = num_ids, max_slots, device
        self.bias_LV: Tensor | None = None
        self.prompt_LV: Tensor | None = None
        self.output_LV: Tensor | None = None
        self._free = list(range(max_slots - 1, -1, -1))
        self._used: set[int] = set()

    def acquire(
        self, sampling: ResolvedSampling, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> int:
        """A slot with the sequence's bias and counts, or -1 if it needs none. `prompt` and `output`
        are model rows; after a preemption the output so far is counted again. Raises ValueError
        when no slot is free."""
        if not sampling.needs_slot:
            return -1
        if not self._free:
            raise ValueError(f"all {self.max_slots} slots for penalties and biases are in use")
        slot = self._free.pop()
        self._used.add(slot)
        if sampling.has_bias:
            self.bias_LV = self._with_room(self.bias_LV, slot, torch.float32)
            self.bias_LV[slot] = upload(self._bias_row(sampling), self.device)
        if sampling.params.has_penalties:
            self.prompt_LV = self._with_room(self.prompt_LV, slot, torch.bool)
            self.output_LV = self._with_room(self.output_LV, slot, torch.int32)
            self.prompt_LV[slot] = upload(self._counts(prompt) > 0, self.device)
            self.output_LV[slot] = upload(self._counts(output), self.device)
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back; -1 is no slot. Raises ValueError if it is not in use."""
        if slot == -1:
            return
        if slot not in self._used:
            raise ValueError(f"slot {slot} of the sampling tables is not in use")
        self._used.remove(slot)
        self._free.append(slot)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def add(self, slots_M: Tensor, ids_M: Tensor) -> None:
        """Counts one generated id per slot; -1 counts nothing."""
        assert self.output_LV is not None
        one_M = (ids_M >= 0).to(torch.int32)
        # Integers: the order of the additions cannot matter.
        self.output_LV.index_put_((slots_M, ids_M.clamp(min=0)), one_M, accumulate=True)

    def biased(self, x_MV: Tensor, slots_M: Tensor) -> Tensor:
        """x with the bias of each row's slot added; a bias of 0 changes no bit."""
        assert self.bias_LV is not None
        bias_MV = self.bias_LV.index_select(0, slots_M).to(x_MV.dtype)
        return torch.where(bias_MV == 0, x_MV, exact.widen(x_MV) + bias_MV)

    def penalized(
        self, x_MV: Tensor, slots_M: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
    ) -> Tensor:
        assert self.prompt_LV is not None
        assert self.output_LV is not None
        return penalize_logits(
            x_MV, self.prompt_LV, self.output_LV, slots_M, repetition, frequency, presence
        )

    def _with_room(self, table: Tensor | None, slot: int, dtype: torch.dtype) -> Tensor:
        size = 0 if table is None else table.shape[0]
        if table is not None and slot < size:
            return table
        wanted = min(max(FIRST_SLOTS, 2 * size, slot + 1), self.max_slots)
        grown = torch.zeros(wanted, self.num_ids, dtype=dtype, device=self.device)
        if table is not None:
            grown[:size] = table
        return grown

    def _bias_row(self, sampling: ResolvedSampling) -> Tensor:
        row_V = torch.zeros(self.num_ids)
        if sampling.allowed is not None:
            row_V = torch.full((self.num_ids,), -math.inf)
            row_V[list(sampling.allowed)] = 0.0
        if sampling.bias:
            places, values = zip(*sampling.bias, strict=True)
            row_V[list(places)] += torch.tensor(values, dtype=torch.float32)
        return row_V

    def _counts(self, ids: Sequence[int]) -> Tensor:
        counts = torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=self.num_ids)
        return counts.to(torch.int32)
