"""How many pages, slots and snapshots an engine gets: the sizes of `suzuri plan`, made real.

No torch here. A model that does not fit is refused with the sum, before a weight is read.
"""

# pyright: strict

import dataclasses

from suzuri.engine.config import EngineConfig
from suzuri.model.config import ModelConfig
from suzuri.model.sizes import Layout, Sizes
from suzuri.model.sizes_state import StateSizes, state_sizes
from suzuri.model.sizes_workspace import GRAPH_TOKENS, LEAST_GRAPH_TOKENS

MIN_CONTEXT = 256
"""Without a max_context, the longest sequence is what memory holds, but not less than this."""
WIDTHS = {"bfloat16": 1, "float32": 2, "float64": 4}
"""The plan counts state in bf16; wider engines take as many times that."""
ID_BYTES = 8
"""Of a page or token number on the device."""
GRAPH_SHARE = 16
"""Of what is left for pages, at most one part in so many goes to the recording of larger steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """Sizes of the pools, the page or slot 0 of each included."""

    max_context: int
    global_pages: int
    local_pages: int
    slots: int
    snapshots: int
    ring: int
    graph_tokens: int = 0
    """Rows of the largest step with prompt tokens that is recorded as a graph (0: none is)."""

    def table_columns(self, page_size: int) -> int:
        """Entries of a slot's row in a page table."""
        return -(-self.max_context // page_size) + 1


def state_bytes(model: ModelConfig, config: EngineConfig, found: Capacity) -> dict[str, int]:
    """Bytes of every tensor that keeps state between steps, by kind. Exactly what is allocated."""
    state = state_sizes(model, tp=1, kv_dtype="bf16", drafts=0, resume_points=1)
    wide, size = WIDTHS[config.dtype], config.page_size
    row = state.conv_row * wide
    return {
        "global pages": found.global_pages * size * state.global_per_token * wide,
        "local pages": found.local_pages * size * state.local_per_token * wide,
        "conv slots": found.slots * found.ring * row,
        "resume points": found.snapshots * state.taps * row,
        # For each slot a row of global and of local pages, and its newest token.
        "tables": found.slots * (2 * found.table_columns(size) + 1) * ID_BYTES,
    }


def capacity(
    model: ModelConfig, config: EngineConfig, memory_bytes: int, *, on_gpu: bool = False
) -> Capacity:
    """The pools that fit into `memory_bytes` beside weights and buffers, which a GPU's kernels and
    its recorded steps have others of.

    Each running sequence and each resume point gets its window of local pages; what is left becomes
    global pages. Raises ValueError with the sum when not even one sequence of `max_context` fits,
    and for a pool given by hand that is too small for that.
    """
    text = model.text
    context = min(config.max_context or text.model_max_length, text.model_max_length)
    if config.max_context is not None and config.max_context > text.model_max_length:
        raise ValueError(
            f"max_context = {config.max_context}: the model's model_max_length is "
            f"{text.model_max_length}"
        )
    taps, size = text.sconv_kernel_size, config.page_size
    ring = taps + config.undo
    state = state_sizes(model, tp=1, kv_dtype="bf16", drafts=0, resume_points=1)
    if config.global_pages and config.local_pages and config.snapshots:
        found = Capacity(
            max_context=context,
            global_pages=config.global_pages + 1,
            local_pages=config.local_pages + 1,
            slots=config.max_running + 1,
            snapshots=config.snapshots + 1,
            ring=ring,
            graph_tokens=GRAPH_TOKENS if on_gpu and config.cuda_graphs else 0,
        )
    else:
        found = _fill(model, config, state, context, ring, memory_bytes, on_gpu)
    _check(found, state, size, by_hand=config.global_pages is not None)
    return found


def engine_sizes(
    model: ModelConfig, memory_bytes: int, rows: int, *, on_gpu: bool, graph_tokens: int
) -> Sizes:
    """The sizes of an engine whose steps have at most so many rows, with two bytes a value. (Of
    `memory_bytes` the driver and the process have taken theirs already, as on a CPU.)"""
    layers = () if model.quantization is None else model.quantization.layers
    layout = Layout(nvfp4_layers=layers, token_budget=rows, platform="cpu")
    return Sizes(model, layout, memory_bytes, on_gpu=on_gpu, graph_tokens=graph_tokens)


def _recorded(sizes: Sizes) -> int:
    return sizes.workspace.get("recorded steps", 0)


def _fill(
    model: ModelConfig,
    config: EngineConfig,
    state: StateSizes,
    context: int,
    ring: int,
    memory_bytes: int,
    on_gpu: bool,
) -> Capacity:
    wide, size = WIDTHS[config.dtype], config.page_size

    def sizes_with(graph_tokens: int) -> Sizes:
        budget = config.token_budget
        return engine_sizes(model, memory_bytes, budget, on_gpu=on_gpu, graph_tokens=graph_tokens)

    least = LEAST_GRAPH_TOKENS if on_gpu and config.cuda_graphs else 0
    sizes = sizes_with(least)
    fixed = {"weights": 0, "workspace": 0, "reserve": 0}
    for line in sizes.lines(1, config.max_running):
        if line.group in fixed:
            fixed[line.group] += line.num_bytes * (1 if line.group == "reserve" else wide)
    rings = config.max_running
    snapshots = 2 * rings if config.prefix_cache else 8
    local_ring = (state.window + config.undo) // size + 2 if state.window else 0
    in_flight = -(-config.token_budget // size)
    local = (rings + snapshots) * local_ring + in_flight if state.window else 0
    found = Capacity(
        max_context=context,
        global_pages=1,
        local_pages=local + 1,
        slots=rings + 1,
        snapshots=snapshots + 1,
        ring=ring,
    )
    beside = sum(fixed.values()) + sum(state_bytes(model, config, found).values())
    global_page = size * state.global_per_token * wide
    left = memory_bytes - beside
    needed = -(-context // size) + 2
    most = left // global_page if global_page else rings * needed
    if most < needed and config.max_context is None and (most - 2) * size >= MIN_CONTEXT:
        context, needed = (most - 2) * size, most
    if most < needed or left < 0:
        lines = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in fixed.items())
        raise ValueError(
            f"the model does not fit: {lines}, state of {rings} sequences and {snapshots} resume "
            f"points {(beside - sum(fixed.values())) / 1e9:.2f}, one sequence of {context} tokens "
            f"{needed * global_page / 1e9:.2f}, in GB, are more than the {memory_bytes / 1e9:.2f} "
            "GB there are; lower max_context or max_running, or give more memory"
        )
    wanted = (rings + snapshots) * needed
    # What no sequence would use can be had for nothing.
    free = max(left // GRAPH_SHARE, left - wanted * global_page)
    graph_tokens, taken = least, 0
    while least and graph_tokens < min(config.token_budget, GRAPH_TOKENS):
        more = (_recorded(sizes_with(2 * graph_tokens)) - _recorded(sizes)) * wide
        if more > free or left - more < needed * global_page:
            break
        graph_tokens, taken = 2 * graph_tokens, more
    most = (left - taken) // global_page if global_page else most
    return dataclasses.replace(
        found,
        max_context=context,
        global_pages=min(most, wanted) + 1,
        graph_tokens=graph_tokens,
    )


def _check(found: Capacity, state: StateSizes, size: int, *, by_hand: bool) -> None:
    """One sequence of the longest context must always be able to go on alone."""
    if not by_hand:
        return
    needed = -(-found.max_context // size) + 1
    if state.global_per_token and found.global_pages - 1 < needed:
        raise ValueError(
            f"global_pages = {found.global_pages - 1}: one sequence of {found.max_context} tokens "
            f"takes {needed} pages of {size}; give more, or a smaller max_context"
        )
    window = min(state.window + 2, found.max_context)
    needed = -(-window // size) + 2
    if state.window and found.local_pages - 1 < needed:
        raise ValueError(
            f"local_pages = {found.local_pages - 1}: a window of {state.window} tokens takes "
            f"{needed} pages of {size}"
        )
