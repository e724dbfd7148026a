"""Carries out a plan: moves state, runs the model, samples. Read `Runner.execute` first.

Nothing here waits for the device: what the host must know comes as a `Download`.
"""

import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from suzuri.engine.cache import StackCache
from suzuri.engine.capacity import Capacity
from suzuri.engine.config import EngineConfig
from suzuri.engine.plan import Plan, Work
from suzuri.engine.request import Media
from suzuri.engine.sampler import SLICE, Sampler, Scores, score
from suzuri.engine.sampling_rows import RowState, greedy
from suzuri.engine.step_batches import Size, Tables, is_text, num_blocks, step_batch, step_fields
from suzuri.engine.step_graphs import CudaRecorder, StepGraphs, sizes_of
from suzuri.engine.transfers import Download, upload
from suzuri.model.batch import Batch, Routes
from suzuri.model.cache import decoder_attentions
from suzuri.model.inkling import Inkling
from suzuri.model.sizes_workspace import max_graphs

Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launched:
    """A step that was started: the works that sampled, in row order, and what they drew, on its
    way to the host; prompt log-probs likewise, and `routing`: ids and weights of the tokens of all
    works that ask for it (routing_records.py)."""

    sampling: list[Work]
    ids: Download | None = None
    raw: Download | None = None
    sampled: Download | None = None
    prompts: list[tuple[Work, Download]]
    plan: Plan | None = None
    routing: Download | None = None


class _Rows(NamedTuple):
    """What the decoder made of a step: token ids [N] and hidden rows [N, D], the works' slots [S],
    and the end row of each work; `routes`: the experts of all rows (Routes.stacked), or nothing."""

    token_ids_N: Tensor
    hidden_ND: Tensor
    slots_S: Tensor
    ends: list[int]
    routes: Many[Tensor]


class Runner:
    """The model, its caches and its buffers on one device.

    `observer(works, token_ids_N, hidden_ND)` is shown what each step fed to the decoder and what
    came out, packed in the order of the works. `replays`: whether recorded steps may be used.
    """

    def __init__(self, model: Inkling, config: EngineConfig, capacity: Capacity) -> None:
        self.model, self.config, self.capacity = model, config, capacity
        weight = model.decoder.norm.weight
        self.device = weight.device
        self.page_size = config.page_size
        text = model.config.text
        self.cache = StackCache(
            decoder_attentions(model.config),
            hidden_size=text.hidden_size,
            taps=text.sconv_kernel_size,
            page_size=config.page_size,
            pages={"global": capacity.global_pages, "local": capacity.local_pages},
            slots=capacity.slots,
            snapshots=capacity.snapshots,
            ring=capacity.ring,
            dtype=weight.dtype,
            device=self.device,
        )
        shape = (capacity.slots, capacity.table_columns(config.page_size))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        self._tables = Tables(zeros(*shape), zeros(*shape), zeros(capacity.slots))
        self.observer: Callable[[Many[Work], Tensor, Tensor], None] | None = None
        self.replays = True
        self.graphs: StepGraphs | None = None
        if capacity.graph_tokens and self.device.type == "cuda":
            sizes = sizes_of(config, capacity)
            self.graphs = StepGraphs(
                CudaRecorder(self.device, most_rows=sizes.rows[-1]),
                sizes,
                most=max_graphs(config.max_running),
                device=self.device,
            )
        # A step gives back the rows of what ended or was preempted before it takes any.
        self.sampler = Sampler(
            num_ids=text.unpadded_vocab_size, max_slots=config.max_running, device=self.device
        )

    @torch.no_grad()
    def execute(self, plan: Plan) -> Launched:
        """Start a step. Order matters: see Plan."""
        for table in plan.tables:
            self.sampler.tables.release(table)
        self.cache.snapshot(plan.before)
        self.cache.copy_pages(plan.copies)
        self.cache.restore(plan.restores)
        self._write_tables(plan)
        if not plan.works:
            return Launched(sampling=[], prompts=[], plan=plan)
        records = any(work.sequence.routing is not None for work in plan.works)
        rows = self._replay(plan.works, records) or self._forward(plan.works, records)
        hidden_ND, ends = rows.hidden_ND, rows.ends
        if self.observer is not None:
            self.observer(plan.works, rows.token_ids_N, hidden_ND)
        self.cache.snapshot(plan.after)
        prompts = self._prompt_logprobs(plan.works, hidden_ND, ends)
        routing = self._routing(plan.works, rows)
        sampling = [work for work in plan.works if work.samples]
        if not sampling:
            return Launched(sampling=[], prompts=prompts, plan=plan, routing=routing)
        last_SD, slots_S = hidden_ND, rows.slots_S
        if len(sampling) < hidden_ND.shape[0]:
            last = [end - 1 for work, end in zip(plan.works, ends, strict=True) if work.samples]
            last_SD = hidden_ND[upload(last, self.device)]
            slots_S = upload([work.slot for work in sampling], self.device)
        if all(_is_plain(work) for work in sampling):
            rows_S = greedy(len(sampling))
        else:
            rows_S = self.sampler.step([self._row_state(work) for work in sampling])
        decoder = self.model.decoder
        sampled = self.sampler.draw(last_SD, decoder.unembed.weight, decoder.logit_scale, rows_S)
        # Without an answer (-1) the row is about to end; the step that overlaps needs some id.
        self._tables.newest_L[slots_S] = sampled.ids_S.clamp(min=0)
        return Launched(
            sampling=sampling,
            ids=Download([sampled.ids_S]),
            raw=None if sampled.raw is None else Download(sampled.raw),
            sampled=None if sampled.sampled is None else Download(sampled.sampled),
            prompts=prompts,
            plan=plan,
            routing=routing,
        )

    def step_rows(self, fields: Tensor, size: Size) -> tuple[Tensor, ...]:
        """Token ids [N] and hidden rows [N, D] of a step without media, and with `size.more` the
        experts of each row: what a graph replays. Fields: step_batches.py, on the device."""
        layers = tuple(self.cache.layers)
        batch = step_batch(fields, size, self.page_size, self._tables, layers)
        return batch.token_ids_N, *self._decoded(batch, size.more)

    @torch.no_grad()
    def record(
        self, rows: int, sequences: int = 0, blocks: int = 1, *, routing: bool = False
    ) -> bool:
        """Records steps of `rows` tokens ahead, and says whether they are recorded now. They are of
        `sequences` sequences, padding included, or one token each of as many (0), in page tables of
        `blocks` columns; sizes are rounded up (`Sizes.holding`). Changes no state. The largest
        first takes the least memory."""
        if self.graphs is None:
            return False
        size = self.graphs.sizes.holding(rows, sequences, blocks, more=routing)
        return size is not None and self.graphs.record(self.step_rows, size)

    def _decoded(self, batch: Batch, records: bool) -> tuple[Tensor, ...]:
        """Hidden rows [N, D], and with `records` the experts of each row (Routes.stacked)."""
        if not records:
            return (self.model.decoder(batch),)
        routes = Routes(self.model.config.text.num_moe_layers)
        return self.model.decoder(dataclasses.replace(batch, routes=routes)), *routes.stacked()

    def _replay(self, works: Many[Work], records: bool) -> "_Rows | None":
        """A step from its graph; None where there is none."""
        if self.graphs is None or not self.replays or not is_text(works):
            return None
        step = self.graphs.run(self.step_rows, works, more=records)
        if step is None:
            return None
        ids_N, slots_S, (hidden_ND, *routes) = step
        return _Rows(ids_N, hidden_ND, slots_S, _ends(works), routes)

    def _forward(self, works: Many[Work], records: bool) -> "_Rows":
        batch = self._batch(works)
        assert batch.cache is not None
        hidden_ND, *routes = self._decoded(batch, records)
        slots_S = batch.cache.conv_slots_S
        return _Rows(batch.token_ids_N, hidden_ND, slots_S, _ends(works), routes)

    def _routing(self, works: Many[Work], rows: _Rows) -> Download | None:
        """Experts of the works that ask."""
        if not rows.routes:
            return None
        asking = [
            np.arange(end - work.count, end)
            for work, end in zip(works, rows.ends, strict=True)
            if work.sequence.routing is not None
        ]
        rows_M = self._moved(np.concatenate(asking))
        return Download([x[rows_M] for x in rows.routes])

    def _row_state(self, work: Work) -> RowState:
        sequence = work.sequence
        sampling = sequence.request.sampling
        if sampling.needs_slot and sequence.table < 0:
            prompt, output = sequence.request.prompt, sequence.tokens[sequence.num_prompt :]
            sequence.table = self.sampler.tables.acquire(sampling, prompt, output)
        return RowState(
            sampling=sampling,
            seed=sequence.seed,
            position=work.length,
            num_output=work.length - sequence.num_prompt,
            sample_index=sequence.index,
            slot=sequence.table,
            mask=sequence.mask,
        )

    def _write_tables(self, plan: Plan) -> None:
        for sequence in plan.changed:
            if not sequence.slot or sequence.global_table is None or sequence.local_table is None:
                continue  # preempted later in the same plan
            for pages_LM, table in (
                (self._tables.global_LM, sequence.global_table),
                (self._tables.local_LM, sequence.local_table),
            ):
                pages_LM[sequence.slot, : len(table.pages)] = upload(table.pages, self.device)

    def _batch(self, works: Many[Work]) -> Batch:
        """The packed batch, without padding."""
        ends = _ends(works)
        size = Size(ends[-1], len(works), num_blocks(works, self.page_size))
        fields = upload(step_fields(works, size), self.device)
        layers = tuple(self.cache.layers)
        batch = step_batch(fields, size, self.page_size, self._tables, layers)
        single = all(work.count == 1 for work in works)
        batch = dataclasses.replace(batch, single_rows=single, num_rows_1=None)
        firsts = _integers(ends) - _integers([work.count for work in works])
        rows_M, features_MD = self._media(works, firsts)
        if rows_M is None:
            return batch
        return dataclasses.replace(batch, media_rows_M=rows_M, media_features_MD=features_MD)

    def _moved(self, values: Integers) -> Tensor:
        return upload(values, self.device)

    def _media(self, works: Many[Work], firsts: Integers) -> tuple[Tensor | None, Tensor | None]:
        """Rows of the batch that a picture or clip fills, and what fills them."""
        rows: list[int] = []
        features: list[Tensor] = []
        for work, first in zip(works, firsts.tolist(), strict=True):
            end = work.start + work.count
            for item in work.sequence.request.media:
                low, high = max(item.index, work.start), min(item.index + item.count, end)
                if low < high:
                    rows += range(first + low - work.start, first + high - work.start)
                    features.append(self._features(item)[low - item.index : high - item.index])
        if not rows:
            return None, None
        return upload(rows, self.device), torch.cat(features)

    def _features(self, item: Media) -> Tensor:
        """What the tower makes of a picture or clip, once."""
        if item.features is None:
            tower = self.model.vision if item.kind == "image" else self.model.audio
            assert tower is not None, f"no tower for {item.kind}"
            inputs = torch.as_tensor(item.inputs)
            item.features = tower(inputs.to(self.device))
            if not item.keeps_inputs:
                item.inputs = None
        return item.features

    def _prompt_logprobs(
        self, works: Many[Work], hidden_ND: Tensor, ends: list[int]
    ) -> list[tuple[Work, Download]]:
        found: list[tuple[Work, Download]] = []
        for work, end in zip(works, ends, strict=True):
            sequence = work.sequence
            if sequence.request.prompt_logprobs is None or sequence.index != 0:
                continue
            # Rows that ran before a preemption were reported then.
            first = max(work.start, sequence.recomputed)
            stop = min(work.start + work.count, sequence.num_prompt - 1)
            if first >= stop:
                continue
            offset = end - work.count - work.start
            rows_TD = hidden_ND[offset + first : offset + stop]
            targets = sequence.tokens[first + 1 : stop + 1]
            top = sequence.request.sampling.params.prompt_logprobs or 0
            found.append((work, Download(self._scores(rows_TD, targets, top))))
        return found

    def _scores(self, rows_TD: Tensor, targets: list[int], top: int) -> Scores:
        """Raw log-probs of prompt tokens; the logits of SLICE rows exist at one time."""
        targets_T = upload(targets, self.device)
        parts = [
            score(self.model.decoder.logits(rows_TD[i : i + SLICE]), targets_T[i : i + SLICE], top)
            for i in range(0, rows_TD.shape[0], SLICE)
        ]
        return Scores(*map(torch.cat, zip(*parts, strict=True)))


def _is_plain(work: Work) -> bool:
    return work.sequence.request.sampling.is_plain and work.sequence.mask is None


def _ends(works: Many[Work]) -> list[int]:
    """One beyond the last row of each work."""
    return list(itertools.accumulate(work.count for work in works))


def _integers(values: Many[int]) -> Integers:
    return np.array(values, dtype=np.int64)
