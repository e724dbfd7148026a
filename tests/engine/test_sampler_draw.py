"""Draws from hidden rows: those of the whole logits, without ever holding these. That every other
test of the sampler agrees is checked in sampling.py, which draws both ways."""

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from suzuri.engine.sampler import SLICE, Sampled, Sampler
from suzuri.engine.sampling_rows import RowState, StepRows, greedy, is_direct
from suzuri.kernels.draw_tokens import MOST_ROWS, slices
from suzuri.kernels.matmul import matmul
from suzuri.model import sizes_workspace
from tests.engine.sampling import Row, V, assert_same_draw, resolved
from tests.engine.test_sampler_rows import NoReadBack, mixed_rows
from tests.kernels.compare import assert_same_bits, generator

PLAIN = ({"temperature": 0.0}, {"temperature": 0.7}, {}, {"temperature": 1.9, "logprobs": 0})
SCORED = ({"sampled_logprobs": True}, {"temperature": 0.0, "sampled_logprobs": True, "logprobs": 0})
LOOKING = ({"top_p": 0.8}, {"top_k": 5, "logprobs": 3}, {"logprobs": 2}, {"min_p": 0.1})


def states_of(rows: list[Row], sampler: Sampler) -> list[RowState]:
    states: list[RowState] = []
    for row in rows:
        sampling = resolved(sampler.tables.num_ids, **row.fields)
        states.append(
            RowState(
                sampling=sampling,
                seed=row.seed,
                position=row.position,
                num_output=len(row.output),
                sample_index=row.sample_index,
                slot=sampler.tables.acquire(sampling, row.prompt, row.output),
            )
        )
    return states


def head(rows: int, num_ids: int, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden rows and a head, with rows behind the real ids that would win."""
    h_SD = torch.randn(rows, 24, generator=generator(1))
    unembed_VD = torch.randn(num_ids + padding, 24, generator=generator(2)) / 4
    unembed_VD[num_ids:] *= 1000
    return h_SD, unembed_VD


def both(rows: list[Row], num_ids: int) -> tuple[Sampled, Sampled]:
    """(drawn from hidden rows, sampled from the whole logits)."""
    h_SD, unembed_VD = head(len(rows), num_ids, padding=7)
    found: list[Sampled] = []
    for from_hidden in (True, False):
        sampler = Sampler(num_ids=num_ids, max_slots=len(rows) or 1, device="cpu")
        states = states_of(rows, sampler)
        if from_hidden:
            found.append(sampler.draw(h_SD, unembed_VD, 0.5, sampler.step(states)))
        else:
            logits_SV = matmul(h_SD, unembed_VD[:num_ids], scale=0.5)
            found.append(sampler.sample(logits_SV, sampler.rows(states)))
    return found[0], found[1]


@pytest.mark.parametrize("kinds", [PLAIN, SCORED, LOOKING, PLAIN + LOOKING, SCORED + LOOKING])
@pytest.mark.parametrize("count", [0, 1, 6, SLICE + 1])
def test_kinds_of_rows(kinds: tuple[dict[str, Any], ...], count: int):
    rows = [Row(kinds[i % len(kinds)], seed=i, position=3 * i) for i in range(count)]
    found, expected = both(rows, 4099)
    assert_same_draw(found, expected, rows)
    assert (found.ids_S < 4099).all()


def test_n18_padding_behind_the_head_is_never_drawn_nor_counted():
    """N18: its logits would be the largest by far."""
    rows = [Row(fields, seed=i) for i, fields in enumerate((*PLAIN, *SCORED, *LOOKING) * 20)]
    found, expected = both(rows, 301)
    assert_same_draw(found, expected, rows)
    assert int(found.ids_S.max()) < 301


def test_c15_temperature_zero_beside_others():
    """C15: 0, what counts as 0, the least that does not, and 1, in one batch and alone."""
    temperatures = (0, 0.0, 1e-7, 1e-6, 1e-3, 1)
    rows = [Row({"temperature": t, "sampled_logprobs": True, "logprobs": 0}) for t in temperatures]
    found, expected = both(rows, 2050)
    assert_same_draw(found, expected, rows)
    assert found.sampled is not None
    assert found.raw is not None
    assert found.sampled.logprob_S[:3].tolist() == [0.0, 0.0, 0.0]
    for scores in (found.raw, found.sampled):
        assert scores.logprob_S.isfinite().all()
        assert (scores.logprob_S <= 0).all()


def test_neighbours_change_nothing():
    """Plain rows alone and among rows that need their logits; these alone as well."""
    rows, _ = mixed_rows()
    rows += [Row(kind, seed=i) for i, kind in enumerate((*PLAIN, *SCORED) * 5)]
    h_SD, unembed_VD = head(len(rows), 301)

    def draw(places: list[int]) -> Sampled:
        sampler = Sampler(num_ids=301, max_slots=len(rows), device="cpu")
        states = states_of([rows[place] for place in places], sampler)
        return sampler.draw(h_SD[places], unembed_VD, 1.0, sampler.step(states))

    whole = draw([*range(len(rows))])
    assert whole.raw is not None
    assert whole.sampled is not None
    for places in ([70, 71, 2, 3], [99, 0], [5], [72], [*range(40, 90)]):
        some = draw(places)
        assert_same_bits(some.ids_S, whole.ids_S[places])
        for one, all_ in ((some.raw, whole.raw), (some.sampled, whole.sampled)):
            if one is not None:
                assert_same_bits(one.logprob_S, all_.logprob_S[places])


def test_which_rows_need_no_logits():
    """A mask, a filter, alternatives, a slot, and a stop that must not come yet ask for them."""
    for kind in (*PLAIN, *SCORED, {"temperature": 0.0, "top_p": 0.1}):
        assert is_direct(states_of([Row(kind)], Sampler(num_ids=V, max_slots=1, device="cpu"))[0])
    more = ({"presence_penalty": 1.0}, {"logit_bias": {1: 1.0}}, {"min_tokens": 2})
    for kind in (*LOOKING, *more):
        state = states_of([Row(kind)], Sampler(num_ids=V, max_slots=1, device="cpu"))[0]
        assert not is_direct(state), kind
    late = Row({"min_tokens": 2}, output=[1, 2])
    assert is_direct(states_of([late], Sampler(num_ids=V, max_slots=1, device="cpu"))[0])
    masked = RowState(sampling=resolved(), seed=0, position=0, num_output=0, mask=b"\x01")
    assert not is_direct(masked)


def test_greedy_rows_upload_nothing_and_a_wrong_count_is_refused():
    sampler = Sampler(num_ids=301, max_slots=1, device="cpu")
    h_SD, unembed_VD = head(5, 301)
    found = sampler.draw(h_SD, unembed_VD, 0.5, greedy(5))
    assert_same_bits(found.ids_S, matmul(h_SD, unembed_VD).argmax(-1))
    assert found.raw is found.sampled is None
    with pytest.raises(ValueError, match="5 hidden rows; expected 4"):
        sampler.draw(h_SD, unembed_VD, 0.5, greedy(4))


def test_broken_rows_harm_no_other():
    rows = [Row(kind, seed=i) for i, kind in enumerate((*PLAIN, *SCORED, *LOOKING))]
    sampler = Sampler(num_ids=2050, max_slots=1, device="cpu")
    h_SD, unembed_VD = head(len(rows), 2050)
    step = sampler.step(states_of(rows, sampler))
    clean = sampler.draw(h_SD, unembed_VD, 1.0, step)
    h_SD[[1, 5, 7], 0] = torch.tensor([math.nan, math.inf, math.nan])
    found = sampler.draw(h_SD, unembed_VD, 1.0, step)
    assert found.ids_S[[1, 5, 7]].tolist() == [-1, -1, -1]
    others = [0, 2, 3, 4, 6, 8, 9]
    assert_same_bits(found.ids_S[others], clean.ids_S[others])
    for a, b in ((found.raw, clean.raw), (found.sampled, clean.sampled)):
        assert a is not None
        assert b is not None
        assert a.logprob_S[[1, 5, 7]].isnan().all()
        assert_same_bits(a.logprob_S[others], b.logprob_S[others])


def test_draws_are_counted_for_penalties():
    rows = [
        Row({}),
        Row({"frequency_penalty": 0.5}),
        Row({"top_k": 2}),
        Row({"presence_penalty": 1}),
    ]
    sampler = Sampler(num_ids=V, max_slots=4, device="cpu")
    states = states_of(rows, sampler)
    h_SD, unembed_VD = head(4, V)
    ids = sampler.draw(h_SD, unembed_VD, 1.0, sampler.step(states)).ids_S.tolist()
    assert sampler.tables.output_LV is not None
    for place in (1, 3):
        counts = sampler.tables.output_LV[states[place].slot]
        assert counts.nonzero()[:, 0].tolist() == [ids[place]]


def step_of(kinds: tuple[dict[str, Any], ...], count: int, sampler: Sampler) -> StepRows:
    rows = [Row(kinds[i % len(kinds)], seed=i) for i in range(count)]
    return sampler.step(states_of(rows, sampler))


class Memory(TorchDispatchMode):
    """The elements of the largest tensor, and the most bytes that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.live = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else [found]:
            if isinstance(x, Tensor):
                self._take(x)
        return found

    def _take(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.largest = max(self.largest, size // x.element_size())
        self.live += size
        self.most = max(self.most, self.live)

        def gone() -> None:
            self._seen.discard(key)
            self.live -= size

        weakref.finalize(storage, gone)


def test_no_tensor_of_all_logits(monkeypatch: pytest.MonkeyPatch):
    """100 rows of 20480 ids: plain rows never hold more than the buffer, others 32 rows."""
    monkeypatch.setattr(slices, "BUFFER_BYTES", 100 * 4096 * 4)
    sampler = Sampler(num_ids=20480, max_slots=100, device="cpu")
    h_SD, unembed_VD = head(100, 20480)
    limit = {"plain": 100 * 4096, "others": 20480 * SLICE}
    for kinds, most in (
        (PLAIN, limit["plain"]),
        (PLAIN + SCORED, limit["plain"]),
        (LOOKING, limit["others"]),
        (PLAIN + LOOKING, limit["others"]),
    ):
        step = step_of(kinds, 100, sampler)
        with Memory() as memory:
            sampler.draw(h_SD, unembed_VD, 1.0, step)
        # Weights that the CPU keeps transposed are no logits.
        assert memory.largest <= max(most, unembed_VD.numel()), kinds


EVERY = {"logprobs": 20, "sampled_logprobs": True, "top_p": 0.9, "frequency_penalty": 1.0}
CERTAIN = {"temperature": 0.0, "logprobs": 2, "sampled_logprobs": True, "logit_bias": {1: 2.0}}


@pytest.mark.parametrize(
    "kinds",
    [SCORED, LOOKING, (EVERY,), ({"logprobs": 20}, EVERY | {"logit_bias": {1: 2.0}}, CERTAIN)],
)
def test_the_plan_counts_what_is_held(monkeypatch: pytest.MonkeyPatch, kinds: Any):
    rows, num_ids = 64, 8192
    monkeypatch.setattr(slices, "BUFFER_BYTES", 4 * SLICE * num_ids)
    sampler = Sampler(num_ids=num_ids, max_slots=rows, device="cpu")
    h_SD, unembed_VD = head(rows, num_ids)
    step = step_of(kinds, rows, sampler)
    sampler.draw(h_SD, unembed_VD, 1.0, step)  # the head's transposed copy stays
    with Memory() as memory:
        sampler.draw(h_SD, unembed_VD, 1.0, step)
    assert memory.most <= sizes_workspace.LOGIT_COPIES * 4 * SLICE * num_ids + unembed_VD.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [PLAIN, SCORED, LOOKING, (EVERY,), PLAIN + LOOKING])
def test_the_plan_counts_what_is_held_on_a_gpu(kinds: tuple[dict[str, Any], ...]):
    """256 rows of Inkling's vocabulary, with a narrow head."""
    sampler = Sampler(num_ids=200058, max_slots=256, device="cuda")
    h_SD = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    unembed_VD = torch.randn(200058, 256, device="cuda", dtype=torch.bfloat16)
    step = step_of(kinds, 256, sampler)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sampler.draw(h_SD, unembed_VD, 0.05, step)
        held = torch.cuda.max_memory_allocated() - before
        assert held < sizes_workspace.LOGIT_COPIES * slices.BUFFER_BYTES
    if kinds in (PLAIN, SCORED):
        assert held < 36 << 20


def test_the_plan_knows_the_numbers_of_the_draw():
    assert sizes_workspace.LOGIT_BUFFER == slices.BUFFER_BYTES
    assert sizes_workspace.LOGIT_ROWS == SLICE
    assert (sizes_workspace.DRAW_ROWS, sizes_workspace.DRAW_CHUNK) == (MOST_ROWS, slices.CHUNK)


def test_nothing_between_hidden_rows_and_result_waits_for_the_device():
    rows, _ = mixed_rows()
    sampler = Sampler(num_ids=301, max_slots=70, device="cpu")
    step = sampler.step(states_of(rows, sampler))
    h_SD, unembed_VD = head(70, 301)
    with NoReadBack():
        assert sampler.draw(h_SD, unembed_VD, 1.0, step).ids_S.shape == (70,)
