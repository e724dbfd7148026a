"""State of the draft depths (MTP): kept like the decoder's, re-run where it was only guessed.

Row j of depth d consumes token j + d + 1. When tokens 0 .. C are known and the decoder has run rows
0 .. C - 1, depth d has true rows up to C - 1 - d; the rows behind them consumed drafts. Those are
run again, with true tokens and hidden states, as soon as the tokens are known: every depth starts
at the same row, D - 1 before the first new one. Taking back is that and nothing more, because pages
are rewritten in place and the conv rings have room for D - 1 rows.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from suzuri.engine.cache import POOLS, StackCache
from suzuri.engine.pages import Pool, Table
from suzuri.model.batch import CacheView, pack
from suzuri.model.cache import draft_attentions
from suzuri.model.inkling import Inkling


@dataclasses.dataclass(kw_only=True)
class DraftSequence:
    """What one sequence holds for the depths.

    `hidden_TD`: the decoder's final-norm rows of the last D - 1 tokens that were given; `rows`: how
    many rows all depths have run with true tokens.
    """

    slot: int
    tables: dict[str, Table]
    hidden_TD: Tensor | None = None
    rows: int = 0


class DraftState:
    """Caches of all depths of a model for `slots` sequences.

    `pages`: sizes of the pools "global" and "local" (page 0 included); the pools are called
    draft_global and draft_local.
    """

    def __init__(
        self, model: Inkling, *, page_size: int, pages: dict[str, int], slots: int, snapshots: int
    ) -> None:
        assert model.draft is not None, "the model has no draft depths"
        self.model, self.draft, self.page_size = model, model.draft, page_size
        self.depths = len(model.draft.depths)
        weight, taps = model.decoder.norm.weight, model.config.text.sconv_kernel_size
        self.device = weight.device
        attentions = draft_attentions(model.config)[: self.depths]
        self.window = max((a.window or 0 for a in attentions), default=0)
        self.cache = StackCache(
            attentions,
            hidden_size=model.config.text.hidden_size,
            taps=taps,
            page_size=page_size,
            pages=pages,
            slots=slots,
            snapshots=snapshots,
            ring=taps + self.depths,
            dtype=weight.dtype,
            device=self.device,
        )
        self.pools = {f"draft_{name}": Pool(f"draft_{name}", pages[name]) for name in POOLS}

    def open(self, slot: int) -> DraftSequence:
        """The state of a new sequence."""
        tables = {name: Table(self.pools[f"draft_{name}"], self.page_size) for name in POOLS}
        return DraftSequence(slot=slot, tables=tables)

    def close(self, sequence: DraftSequence) -> None:
        """Give back what a sequence holds."""
        for table in sequence.tables.values():
            table.clear()

    @torch.no_grad()
    def propose(
        self, works: Sequence[tuple[DraftSequence, Tensor, Sequence[int]]]
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Run all depths over new rows and draft one token with each, greedily.

        Per sequence: its state, the decoder's final-norm rows of its new tokens [n, D], and the
        model rows of the tokens that these and the D - 1 rows before them consume at depth 0: the
        last one is the newest, which the decoder has not run. Returns the drafts of each sequence,
        depth by depth, and their logits [depths, V].
        """
        firsts: list[int] = []
        hidden: list[Tensor] = []
        known: list[list[int]] = []
        for sequence, new_TD, tokens in works:
            kept_TD = sequence.hidden_TD
            rows_TD = new_TD if kept_TD is None else torch.cat([kept_TD, new_TD])
            assert len(tokens) == rows_TD.shape[0], f"{len(tokens)} tokens, {len(rows_TD)} rows"
            firsts.append(sequence.rows)
            hidden.append(rows_TD)
            known.append(list(tokens))
            self._grow(sequence, sequence.rows + rows_TD.shape[0])
        view = self._view([sequence for sequence, _, _ in works], firsts, hidden)
        lengths = [rows_TD.shape[0] for rows_TD in hidden]
        ends = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        hidden_ND = torch.cat(hidden)
        logits: list[Tensor] = []
        for depth in range(self.depths):
            consumed = [ids[depth : depth + n] for ids, n in zip(known, lengths, strict=True)]
            batch = pack(consumed, first_positions=firsts, cache=view, device=self.device)
            embedded_ND = self.model.decoder.embedded(batch)
            hidden_ND = self.draft(depth, hidden_ND, embedded_ND, batch)
            logits_SV = self.model.decoder.logits(hidden_ND[ends])
            logits.append(logits_SV)
            for ids, row in zip(known, logits_SV, strict=True):
                ids.append(int(row.argmax()))
        for (sequence, _, _), rows_TD in zip(works, hidden, strict=True):
            keep = min(self.depths - 1, rows_TD.shape[0])
            sequence.hidden_TD = rows_TD[rows_TD.shape[0] - keep :] if keep else None
            sequence.rows += rows_TD.shape[0] - keep
        drafts = [ids[n:] for ids, n in zip(known, lengths, strict=True)]
        return drafts, list(torch.stack(logits, 1))

    def _grow(self, sequence: DraftSequence, length: int) -> None:
        if self.window:
            sequence.tables["local"].drop_before(sequence.rows - self.window)
        for name, table in sequence.tables.items():
            if self.cache.kv[name][0].numel():
                table.grow(length)

    def _view(
        self, sequences: Sequence[DraftSequence], firsts: list[int], hidden: list[Tensor]
    ) -> CacheView:
        tables: dict[str, Tensor] = {}
        slots: dict[str, Tensor] = {}
        for name in POOLS:
            pages = [sequence.tables[name].pages for sequence in sequences]
            width = max(1, *(len(row) for row in pages))
            table_SM = torch.tensor([row + [0] * (width - len(row)) for row in pages])
            tables[name] = table_SM.to(self.device)
            places = [
                (i, position)
                for i, (first, rows_TD) in enumerate(zip(firsts, hidden, strict=True))
                for position in range(first, first + rows_TD.shape[0])
            ]
            row_N, position_N = torch.tensor(places).T
            block_N = (position_N // self.page_size).clamp(max=width - 1)
            slot_N = table_SM[row_N, block_N] * self.page_size + position_N % self.page_size
            slots[name] = slot_N.to(self.device)
        return CacheView(
            layers=tuple(self.cache.layers),
            global_pages_SM=tables["global"],
            local_pages_SM=tables["local"],
            global_slots_N=slots["global"],
            local_slots_N=slots["local"],
            conv_slots_S=torch.tensor([s.slot for s in sequences], device=self.device),
        )
