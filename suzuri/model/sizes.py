"""Every byte that serving a model takes on one rank, from the config alone.

`suzuri plan` and the engine at its start ask the same `Sizes`; nothing else decides sizes. Weights
are summed from the table of tensor_table.py, cut as sizes_shard.py says; state: sizes_state.py;
buffers of a step: sizes_workspace.py. No torch here.
"""

# pyright: strict

import dataclasses
import functools
from collections.abc import Callable

from suzuri.model.config import ModelConfig
from suzuri.model.sizes_shard import (
    PARTS,
    Part,
    Sharding,
    check_sharding,
    part_of_entry,
    shard_bytes,
)
from suzuri.model.sizes_state import StateSizes, state_sizes
from suzuri.model.sizes_workspace import (
    LEAST_GRAPH_TOKENS,
    graphs,
    sampling_tables,
    workspace,
)
from suzuri.model.tensor_table import Entry, Storage, table

MAX_CONCURRENCY = 65_536
STATE_NAMES = {
    "global_kv": "global KV",
    "local_kv": "local KV",
    "conv": "conv rows",
    "draft_kv": "draft KV",
    "draft_conv": "draft conv rows",
    "draft_rows": "draft hidden rows",
    "resume_points": "resume points",
}
MIB = 2**20
DRIVER_BYTES = {"cuda": 640 * MIB}
"""What the driver keeps of the memory that it reports, before any process runs."""
CONTEXT_BYTES = {"cuda": 704 * MIB, "rocm": 1024 * MIB, "metal": 512 * MIB, "cpu": 1024 * MIB}
"""Context, loaded kernels and library workspaces of one process, by platform."""
COLLECTIVE_BYTES = 896 * MIB
"""Buffers and channels of the collective library, once a rank has peers."""
FRAGMENTATION = 50
"""One part in so many of the memory is left free for holes between allocations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is held, whatever the load. `nvfp4_layers`: whose routed experts are NVFP4."""

    tp: int = 1
    ep: int = 1
    nvfp4_layers: tuple[int, ...] = ()
    kv_dtype: str = "bf16"
    drafts: int = 0
    """Draft depths in use; the weights of the others are not loaded."""
    resume_points: int = 1
    """Places per running sequence at which a later request can go on."""
    token_budget: int = 8192
    """Tokens of one step at most."""
    platform: str = "cuda"
    """cuda, rocm, metal or cpu."""

    @property
    def sharding(self) -> Sharding:
        return Sharding(tp=self.tp, ep=self.ep)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One summand: `group` is weights, state, workspace or reserve."""

    group: str
    name: str
    num_bytes: int


class Sizes:
    """The sum for one rank of one copy of the model. Every rank holds the same amount.

    `memory_bytes` is what the driver reports for the rank's device, `system_bytes` what of it an
    operating system in the same memory needs. `on_gpu`: whether the kernels are those of a GPU, and
    `graph_tokens`: the largest step that is recorded as a graph (0: none); unless given, as the
    platform has it at least. Raises ValueError when the model cannot be cut so, naming the nearest
    values, or has fewer draft depths.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        memory_bytes: int,
        *,
        system_bytes: int = 0,
        on_gpu: bool | None = None,
        graph_tokens: int | None = None,
    ) -> None:
        on_gpu = layout.platform in ("cuda", "rocm") if on_gpu is None else on_gpu
        if graph_tokens is None:
            graph_tokens = LEAST_GRAPH_TOKENS if on_gpu else 0
        self._records = graph_tokens > 0
        if not 0 <= layout.drafts <= config.mtp_depths:
            raise ValueError(
                f"--mtp {layout.drafts}: the model has {config.mtp_depths} draft depths; "
                f"give 0 to {config.mtp_depths}"
            )
        check_sharding(config, layout.sharding)
        self.config, self.layout, self.memory_bytes = config, layout, memory_bytes
        self.weights = weights_by_part(config, layout)
        self.state: StateSizes = state_sizes(
            config,
            tp=layout.tp,
            kv_dtype=layout.kv_dtype,
            drafts=layout.drafts,
            resume_points=layout.resume_points,
        )
        self.workspace = dict(
            workspace(
                config,
                layout.sharding,
                layout.token_budget,
                on_gpu=on_gpu,
                graph_tokens=graph_tokens,
                dequantised_layer=layout.platform == "cpu" and bool(layout.nvfp4_layers),
            )
        )
        self.workspace["local KV in flight"] = self.state.in_flight(layout.token_budget)
        self._fixed = sum(self.weights.values()) + sum(self.workspace.values())
        self._reserve = self._reserve_lines(system_bytes)
        self._fixed += sum(line.num_bytes for line in self._reserve)

    def lines(self, context: int, concurrency: int) -> tuple[Line, ...]:
        """All summands for `concurrency` sequences of `context` tokens each on this copy."""
        sequence = dataclasses.asdict(self.state.sequence(context))
        return (
            *(Line(group="weights", name=part, num_bytes=n) for part, n in self.weights.items()),
            *(
                Line(group="state", name=STATE_NAMES[name], num_bytes=n * concurrency)
                for name, n in sequence.items()
            ),
            *(
                Line(group="workspace", name=name, num_bytes=n)
                for name, n in self.workspace.items()
            ),
            *(
                Line(group="workspace", name=name, num_bytes=n)
                for name, n in self._by_load(concurrency).items()
            ),
            *self._reserve,
        )

    def total(self, context: int, concurrency: int) -> int:
        """The sum of `lines`. Never less for a longer context or more sequences."""
        return self._sum(self.state.sequence(context).total, concurrency)

    def fits(self, context: int, concurrency: int) -> bool:
        """The one inequality that every answer comes from."""
        return self.total(context, concurrency) <= self.memory_bytes

    def largest_context(self, concurrency: int) -> int:
        """The longest context, up to the model's limit, for so many sequences; 0 if none."""
        limit = self.config.text.model_max_length
        return _largest(limit, lambda context: self.fits(context, concurrency))

    def largest_concurrency(self, context: int) -> int:
        """The most sequences of that context (at most MAX_CONCURRENCY); 0 if not even one."""
        per_sequence = self.state.sequence(context).total
        return _largest(
            MAX_CONCURRENCY,
            lambda number: self._sum(per_sequence, number) <= self.memory_bytes,
        )

    def _sum(self, per_sequence: int, concurrency: int) -> int:
        by_load = sum(self._by_load(concurrency).values())
        return self._fixed + by_load + concurrency * per_sequence

    def _by_load(self, concurrency: int) -> dict[str, int]:
        """Workspace that follows the number of running sequences."""
        lines = {"sampling tables": sampling_tables(self.config, concurrency)}
        if self._records:
            lines["graphs"] = graphs(self.config, concurrency, self.layout.drafts)
        return lines

    def _reserve_lines(self, system_bytes: int) -> tuple[Line, ...]:
        lines = {
            "operating system": system_bytes,
            "driver": DRIVER_BYTES.get(self.layout.platform, 0),
            "process context": CONTEXT_BYTES[self.layout.platform],
        }
        if self.layout.tp > 1:
            lines["collective buffers"] = COLLECTIVE_BYTES
        lines["fragmentation"] = self.memory_bytes // FRAGMENTATION
        return tuple(
            Line(group="reserve", name=name, num_bytes=n) for name, n in lines.items() if n
        )


def weights_by_part(config: ModelConfig, layout: Layout) -> dict[Part, int]:
    """Bytes of each part on one rank, parts that the model lacks left out."""
    return dict(_weights(config, layout.sharding, layout.nvfp4_layers, layout.drafts))


def loaded_entries(config: ModelConfig, layout: Layout) -> list[Entry]:
    """The table's tensors that are loaded: all but those of draft depths that are not in use."""
    return _loaded(config, layout.nvfp4_layers, layout.drafts)


# Searches for what would fit ask for the same weights with hundreds of loads and cards.
@functools.lru_cache(maxsize=256)
def _weights(
    config: ModelConfig, sharding: Sharding, nvfp4_layers: tuple[int, ...], drafts: int
) -> tuple[tuple[Part, int], ...]:
    sums = dict.fromkeys(PARTS, 0)
    for entry in _loaded(config, nvfp4_layers, drafts):
        sums[part_of_entry(entry)] += shard_bytes(entry, config, sharding)
    return tuple((part, num_bytes) for part, num_bytes in sums.items() if num_bytes)


def _loaded(config: ModelConfig, nvfp4_layers: tuple[int, ...], drafts: int) -> list[Entry]:
    entries = _table(config, nvfp4_layers)
    if drafts == 0:
        return [entry for entry in entries if entry.part != "mtp"]
    return [entry for entry in entries if entry.depth is None or entry.depth < drafts]


@functools.lru_cache(maxsize=4)
def _table(config: ModelConfig, nvfp4_layers: tuple[int, ...]) -> tuple[Entry, ...]:
    return tuple(table(config, Storage(nvfp4_layers=nvfp4_layers)))


def _largest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number from 1 to `limit` that holds, when all below it do too; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
