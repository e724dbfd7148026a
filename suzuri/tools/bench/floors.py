"""The least time of one step of the engine, whatever is in it: prompts, chunks, decoded rows.

The same sums as in tools/plan/floors.py (a test holds them together), for one GPU and for steps
that mix sequences, as in a trace. No torch here.
"""

import dataclasses
from collections.abc import Sequence

from suzuri.model.config import ModelConfig
from suzuri.model.sizes import Layout, loaded_entries, weights_by_part
from suzuri.model.sizes_shard import Part, part_of_entry
from suzuri.model.sizes_state import ACTIVATION_BYTES, state_sizes
from suzuri.model.tensor_table import BYTES_PER_VALUE
from suzuri.tools.plan.floors import EVERY_TOKEN, distinct_experts
from suzuri.tools.plan.hardware import Gpu

Span = tuple[int, int, bool]
"""Tokens of a sequence before the step, its new rows, and whether its last row gets logits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFloor:
    """Bytes that must be moved, FLOPs that must be computed, and the longer of both times."""

    num_bytes: float
    flops: float
    memory_ms: float
    compute_ms: float

    @property
    def ms(self) -> float:
        return max(self.memory_ms, self.compute_ms)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_ms >= self.compute_ms else "compute"


class StepFloors:
    """Floors of a whole model on one card, in its stored format."""

    def __init__(self, config: ModelConfig, card: Gpu) -> None:
        layers = () if config.quantization is None else config.quantization.layers
        layout = Layout(nvfp4_layers=layers)
        self.config, self.card = config, card
        self._bytes = weights_by_part(config, layout)
        self._values: dict[Part, int] = dict.fromkeys(self._bytes, 0)
        for entry in loaded_entries(config, dataclasses.replace(layout, nvfp4_layers=())):
            if entry.depth is None:
                values = entry.num_bytes // BYTES_PER_VALUE[entry.dtype]
                self._values[part_of_entry(entry)] += values
        text = config.text
        self._attentions = [text.attention(layer) for layer in range(text.num_hidden_layers)]
        self._state = state_sizes(config, tp=1, kv_dtype="bf16", drafts=0, resume_points=1)

    def step(self, spans: Sequence[Span], *, experts: float | None = None) -> StepFloor:
        """`experts`: different routed experts that a layer uses, if they were counted; else the
        expected number for random choices."""
        tokens = sum(count for _, count, _ in spans)
        logit_rows = sum(samples for _, _, samples in spans)
        num_bytes = self._weight_bytes(tokens, logit_rows, experts)
        num_bytes += sum(self._state_bytes(start, count) for start, count, _ in spans)
        flops = self._flops(tokens, logit_rows)
        for attention in self._attentions:
            pairs = sum(_pairs(start, count, attention.window) for start, count, _ in spans)
            flops += 4.0 * pairs * attention.num_heads * attention.head_dim
        return StepFloor(
            num_bytes=num_bytes,
            flops=flops,
            memory_ms=1e3 * num_bytes / self.card.floor_bandwidth,
            compute_ms=1e3 * flops / self.card.floor_bf16,
        )

    def expected_experts(self, tokens: int) -> float:
        """Different routed experts that a layer uses for so many tokens, if they choose at
        random."""
        text = self.config.text
        return distinct_experts(text.n_routed_experts, text.num_experts_per_tok, tokens)

    def _weight_bytes(self, tokens: int, logit_rows: int, experts: float | None) -> float:
        text, own = self.config.text, self._bytes
        total = float(sum(own.get(part, 0) for part in EVERY_TOKEN))
        if logit_rows:
            total += own["unembed"]
        if routed := own.get("routed experts", 0):
            used = self.expected_experts(tokens) if experts is None else experts
            total += routed * used / text.n_routed_experts
        return total + min(tokens * text.hidden_size * ACTIVATION_BYTES, own["embed"])

    def _state_bytes(self, start: int, count: int) -> float:
        """Keys, values and conv rows: what was there is read, what is new and kept is written."""
        state = self._state
        num = (start + count) * state.global_per_token
        num += (min(start, state.window) + min(count, state.window)) * state.local_per_token
        if start:
            rows = min(count, state.taps - 1)
            num += (state.taps - 1 + rows) * state.conv_row
        return num

    def _flops(self, tokens: int, logit_rows: int) -> float:
        text, values = self.config.text, self._values
        per_token = float(sum(values.get(part, 0) for part in EVERY_TOKEN))
        if routed := values.get("routed experts", 0):
            per_token += routed * text.num_experts_per_tok / text.n_routed_experts
        return 2.0 * (tokens * per_token + logit_rows * values["unembed"])


def _pairs(start: int, count: int, window: int | None) -> int:
    """(row, key) pairs that `count` rows behind `start` tokens see."""
    if window is None:
        return count * start + count * (count + 1) // 2
    ramp = max(0, min(count, window - 1 - start))
    return ramp * start + ramp * (ramp + 1) // 2 + (count - ramp) * window
