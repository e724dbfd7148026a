"""How large the steps are that an engine records: as memory allows, and inside the sum."""

import dataclasses
from typing import Any

import pytest

from suzuri.engine.capacity import capacity, engine_sizes, state_bytes
from suzuri.engine.config import EngineConfig
from suzuri.engine.step_graphs import sizes_of
from suzuri.model.config import preset
from suzuri.model.sizes_workspace import GRAPH_TOKENS, LEAST_GRAPH_TOKENS

SMALL = preset("inkling-small")
FEW_LAYERS = dataclasses.replace(SMALL.text, num_hidden_layers=6, local_layer_ids=(0, 1, 2, 3))
SHAPE = dataclasses.replace(SMALL, text=FEW_LAYERS)
GB = 10**9


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(dtype="bfloat16", max_context=4096, max_running=8, **fields)


def needed(options: EngineConfig, memory: int) -> tuple[int, int]:
    """Rows that are recorded, and the sum of all that the engine then needs."""
    found = capacity(SHAPE, options, memory, on_gpu=True)
    tokens = found.graph_tokens
    sizes = engine_sizes(SHAPE, 0, options.token_budget, on_gpu=True, graph_tokens=tokens)
    by_load = [line for line in sizes.lines(1, options.max_running) if line.group == "workspace"]
    total = sum(sizes.weights.values()) + sum(line.num_bytes for line in by_load)
    return tokens, total + sum(state_bytes(SHAPE, options, found).values())


def test_more_memory_records_larger_steps_within_it() -> None:
    options = config(token_budget=8192)
    least = next(gb for gb in range(1, 200) if _fits(options, gb * GB)) * GB
    found = [needed(options, least + extra * GB // 8) for extra in range(80)]
    assert found[0][0] == LEAST_GRAPH_TOKENS
    assert found[-1][0] == GRAPH_TOKENS
    assert [tokens for tokens, _ in found] == sorted(tokens for tokens, _ in found)
    for extra, (_, total) in enumerate(found):
        assert total <= least + extra * GB // 8


def _fits(options: EngineConfig, memory: int) -> bool:
    try:
        capacity(SHAPE, options, memory, on_gpu=True)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("budget", [64, 2048, 3000, 8192])
def test_no_more_rows_than_a_step_has(budget: int) -> None:
    options = config(token_budget=budget)
    found = capacity(SHAPE, options, 200 * GB, on_gpu=True)
    assert sizes_of(options, found).rows[-1] == budget


def test_nothing_is_recorded_on_a_cpu_or_when_it_is_turned_off() -> None:
    assert capacity(SHAPE, config(), 200 * GB).graph_tokens == 0
    off = capacity(SHAPE, config(cuda_graphs=False), 200 * GB, on_gpu=True)
    assert off.graph_tokens == 0
    pools = {"global_pages": 200, "local_pages": 200, "snapshots": 9}
    assert capacity(SHAPE, config(**pools), 0, on_gpu=True).graph_tokens == GRAPH_TOKENS
    assert capacity(SHAPE, config(**pools), 0).graph_tokens == 0
