"""`suzuri verify` notices a broken engine: each fault is one classic mistake in its state.

A fault is put into the running package, which then verifies `tiny`; the check that must notice it
is the first that fails. Read `FAULTS`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

import suzuri.engine.engine as engine_file
from suzuri.engine import sampler as sampler_file
from suzuri.engine.cache import StackCache
from suzuri.engine.drafts import DraftState
from suzuri.engine.engine import Engine
from suzuri.engine.pages import Table
from suzuri.engine.request import Status
from suzuri.engine.runner import Runner
from suzuri.engine.sampler import Sampler
from suzuri.engine.sampling_tables import SamplingTables
from suzuri.model import short_conv as short_conv_file
from suzuri.model.inkling import Inkling
from suzuri.tools.verify.config import VerifyConfig
from suzuri.tools.verify.run import load, show, verify

CONFIG = VerifyConfig(model="tiny", random_weights=True, dtype="float32", fast=True)
Patch = pytest.MonkeyPatch


@functools.cache
def tiny() -> Inkling:
    return load(CONFIG, Console())


def wrap(patch: Patch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """`owner.name(*args)` becomes `wrapper(usual, *args)`."""
    usual = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        return wrapper(usual, *args, **options)

    patch.setattr(owner, name, wrapped)


def conv_rows_not_restored(patch: Patch) -> None:
    wrap(patch, StackCache, "restore", lambda usual, cache, items: None)


def conv_rows_restored_one_late(patch: Patch) -> None:
    def late(usual: Any, cache: Any, items: Any) -> None:
        usual(cache, [(kept, slot, length + 1) for kept, slot, length in items])

    wrap(patch, StackCache, "restore", late)


def snapshot_one_token_late(patch: Patch) -> None:
    def late(usual: Any, cache: Any, items: Any) -> None:
        usual(cache, [(slot, kept, length + 1) for slot, kept, length in items])

    wrap(patch, StackCache, "snapshot", late)


def chunks_begin_without_conv_inputs(patch: Patch) -> None:
    """c01: the second chunk starts as if nothing came before it."""

    def forgetful(usual: Any, x: Any, weight: Any, positions: Any, *rest: Any, **state: Any) -> Any:
        if state and x.shape[0] > 1:
            state["state_LRC"].zero_()
        return usual(x, weight, positions, *rest, **state)

    wrap(patch, short_conv_file, "short_conv", forgetful)


def bias_shifted_after_a_hit(patch: Patch) -> None:
    def shifted(usual: Any, runner: Any, works: Any) -> Any:
        batch = usual(runner, works)
        hits = torch.tensor([int(work.sequence.num_cached > 0) for work in works])
        # A cached property: what attention reads, and nothing else.
        batch.__dict__["first_positions_S"] = batch.first_positions_S + hits
        return batch

    wrap(patch, Runner, "_batch", shifted)


def drop_local_pages_early(patch: Patch, tokens: int) -> None:
    def early(usual: Any, table: Any, position: int) -> None:
        usual(table, position + (tokens if table.pool.name == "local" else 0))

    wrap(patch, Table, "drop_before", early)


def local_page_freed_one_token_early(patch: Patch) -> None:
    """A row needs its window; the scheduler keeps two tokens before it as well."""
    drop_local_pages_early(patch, 3)


def local_page_of_a_point_freed_early(patch: Patch) -> None:
    """The end of a turn is a point one token before what has run, and needs its window, too."""
    drop_local_pages_early(patch, 2)


def copy_on_write_skipped(patch: Patch) -> None:
    wrap(patch, Table, "copy_on_write", lambda usual, table, block: None)


def copies_carried_out_after_the_step(patch: Patch) -> None:
    def late(usual: Any, runner: Any, plan: Any) -> Any:
        copies, plan.copies = plan.copies, []
        launched = usual(runner, plan)
        runner.cache.copy_pages(copies)
        return launched

    wrap(patch, Runner, "execute", late)


def conv_ring_too_short_by_one(patch: Patch) -> None:
    def short(usual: Any, *args: Any, **words: Any) -> Any:
        found = usual(*args, **words)
        return dataclasses.replace(found, ring=found.ring - 1)

    wrap(patch, engine_file, "capacity", short)


def stale_page_table_after_preemption(patch: Patch) -> None:
    """c06: the tables of a sequence that comes back are those of whoever had the slot before."""

    def stale(usual: Any, runner: Any, plan: Any) -> None:
        plan.changed = [s for s in plan.changed if not s.recomputed]
        usual(runner, plan)

    wrap(patch, Runner, "_write_tables", stale)


def pages_reused_while_an_aborted_step_runs(patch: Patch) -> None:
    """The rows of the aborted sequence's last step are written once more, after the next step."""
    places: dict[int, list[tuple[str, int, int]]] = {}
    late: list[tuple[str, int, int]] = []

    def execute(usual: Any, runner: Any, plan: Any) -> Any:
        launched = usual(runner, plan)
        for pool, page, row in late:
            for pages in runner.cache.kv[pool]:
                pages[:, page, row] += 1
        late.clear()
        places.clear()
        for work in plan.works:
            tables = (work.sequence.global_table, work.sequence.local_table)
            places[id(work.sequence)] = [
                (table.pool.name, table.pages[p // table.page_size], p % table.page_size)
                for table in tables
                if table is not None
                for p in range(work.start, work.start + work.count)
            ]
        return launched

    def abort(usual: Any, engine: Any, id_: str) -> bool:
        request = engine._requests.get(id_)
        for sequence in request.sequences if request else ():
            if sequence.status is Status.RUNNING:
                late.extend(places.get(id(sequence), []))
        return usual(engine, id_)

    wrap(patch, Runner, "execute", execute)
    wrap(patch, Engine, "abort", abort)


def logprobs_of_the_wrong_row(patch: Patch) -> None:
    def rolled(usual: Any, x: Any, ids: Any, top: int) -> Any:
        return usual(x, ids.roll(1), top)

    wrap(patch, sampler_file, "_scores_of", rolled)


def rows_changed(patch: Patch, change: Callable[[int, Any], Any]) -> None:
    """What the sampler is told of row i of its batch."""

    def changed(usual: Any, sampler: Any, states: Any) -> Any:
        return usual(sampler, [change(i, state) for i, state in enumerate(states)])

    wrap(patch, Sampler, "step", changed)


def seed_depends_on_the_row(patch: Patch) -> None:
    rows_changed(patch, lambda i, state: dataclasses.replace(state, seed=state.seed + i))


def position_counts_the_output_alone(patch: Patch) -> None:
    rows_changed(patch, lambda i, state: dataclasses.replace(state, position=state.num_output))


def samples_share_their_noise(patch: Patch) -> None:
    rows_changed(patch, lambda i, state: dataclasses.replace(state, sample_index=0))


def penalties_forget_the_output_when_preempted(patch: Patch) -> None:
    def forgetful(usual: Any, tables: Any, sampling: Any, prompt: Any, output: Any = ()) -> int:
        return usual(tables, sampling, prompt)

    wrap(patch, SamplingTables, "acquire", forgetful)


def media_shared_by_placeholder(patch: Patch) -> None:
    wrap(patch, engine_file, "_keys", lambda usual, rows, media: list(rows))


def tenants_share(patch: Patch) -> None:
    def unsalted(usual: Any, *args: Any, **options: Any) -> Any:
        return usual(*args, **{**options, "salt": None})

    wrap(patch, Engine, "add", unsalted)


def draft_state_not_rolled_back(patch: Patch) -> None:
    """c07: rows that consumed drafts are taken for true ones."""

    def kept(usual: Any, state: Any, works: Any) -> Any:
        for i, (sequence, new, tokens) in enumerate(works):
            if sequence.hidden_TD is not None:
                stale = sequence.hidden_TD.shape[0]
                sequence.rows += stale
                sequence.hidden_TD = None
                works[i] = (sequence, new, tokens[stale:])
        return usual(state, works)

    wrap(patch, DraftState, "propose", kept)


def draft_conv_ring_without_room(patch: Patch) -> None:
    def short(usual: Any, cache: Any, attentions: Any, **sizes: Any) -> None:
        if sizes["snapshots"] == 1:  # that of the depths
            # One row less than taps - 1 inputs behind depths - 1 rows that are run again.
            sizes["ring"] = sizes["taps"] + len(attentions) - 3
        usual(cache, attentions, **sizes)

    wrap(patch, StackCache, "__init__", short)


FAULTS: dict[Callable[[Patch], None], str] = {
    chunks_begin_without_conv_inputs: "other thread count",
    conv_rows_not_restored: "prefix hit",
    conv_rows_restored_one_late: "prefix hit",
    snapshot_one_token_late: "identical prompt",
    bias_shifted_after_a_hit: "prefix hit",
    local_page_freed_one_token_early: "chunks of 1",
    local_page_of_a_point_freed_early: "stopped turn",
    copy_on_write_skipped: "prefix hit",
    copies_carried_out_after_the_step: "prefix hit",
    conv_ring_too_short_by_one: "stopped turn",
    stale_page_table_after_preemption: "preemption",
    pages_reused_while_an_aborted_step_runs: "neighbours abort",
    logprobs_of_the_wrong_row: "decode one by one",
    seed_depends_on_the_row: "decode one by one",
    position_counts_the_output_alone: "other thread count",
    samples_share_their_noise: "n samples",
    penalties_forget_the_output_when_preempted: "sampling = alone",
    media_shared_by_placeholder: "media",
    tenants_share: "tenants apart",
    draft_state_not_rolled_back: "draft state",
    draft_conv_ring_without_room: "draft state",
}


def verdict(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and last line, up to the first check that fails."""
    console = Console()
    code = show(console, CONFIG, verify(tiny(), CONFIG, console, keep_going=False))
    return code, capsys.readouterr().out.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_broken_engine_fails_and_names_the_check(
    fault: Callable[[Patch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny()
    fault(monkeypatch)
    code, last = verdict(capsys)
    assert code == 1
    assert last.startswith("FAILED 1 of ")
    assert f"first {FAULTS[fault]}" in last


def test_the_first_layer_and_token_that_differ_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny()
    conv_rows_not_restored(monkeypatch)
    code, last = verdict(capsys)
    assert code == 1
    assert "hidden row of request 1, sample 0, token " in last
    assert last.endswith("first differs in layer 0 attn")
