"""The least time that a step can take: bytes over bandwidth, FLOPs over rate or bytes over links,
whichever is most, and the waiting for each exchange between GPUs.

No kernel is below these; how near one comes is for measurements. docs/plan.md derives them. Byte
sums of weights come from the tensor table through suzuri/model/sizes.py.
"""

import dataclasses

from suzuri.model.config import AttentionConfig, ModelConfig
from suzuri.model.sizes import Layout, loaded_entries, weights_by_part
from suzuri.model.sizes_shard import Part, part_of_entry, shard_bytes
from suzuri.model.sizes_state import ACTIVATION_BYTES, StateSizes, state_sizes
from suzuri.model.tensor_table import BYTES_PER_VALUE
from suzuri.tools.plan.hardware import NETWORK, Gpu, Link

FP32 = 4
EVERY_TOKEN: tuple[Part, ...] = (
    "attention",
    "dense MLP",
    "router",
    "shared experts",
    "norms and convs",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floor:
    """One step on one rank: what must be moved and computed, and the seconds that takes."""

    num_bytes: float
    flops: float
    memory_s: float
    compute_s: float
    links_s: float
    collectives: int
    latency_s: float
    """Of the collectives. Each waits for the one before, so it adds up; moving their bytes can
    happen while others are computed."""

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s, self.links_s) + self.latency_s

    @property
    def bound(self) -> str:
        """What decides it: memory, compute, links or latency."""
        times = {
            "memory": self.memory_s,
            "compute": self.compute_s,
            "links": self.links_s,
            "latency": self.latency_s,
        }
        return max(times, key=lambda name: times[name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftFloor:
    """A step that drafts with every depth in use and verifies all drafts in one pass."""

    seconds: float
    drafts: int
    break_even: float
    """Tokens per step from which it beats plain decoding."""


def distinct_experts(num_experts: int, per_token: int, tokens: float) -> float:
    """Expected number of different routed experts that `tokens` tokens choose, each `per_token`
    different ones at random."""
    return num_experts * (1 - (1 - per_token / num_experts) ** tokens)


class Floors:
    """Floors of one rank of a model held as `layout` on `gpu`. Sequences are per copy."""

    def __init__(self, config: ModelConfig, layout: Layout, gpu: Gpu) -> None:
        self._config, self._layout, self._gpu = config, layout, gpu
        self._bytes = weights_by_part(config, layout)
        # FLOPs follow the number of values, so the bf16 table counts them also for NVFP4.
        plain = dataclasses.replace(layout, nvfp4_layers=())
        self._values = dict.fromkeys(self._bytes, 0)
        self._draft_bytes = [0] * layout.drafts
        self._draft_values = [0] * layout.drafts
        for entry in loaded_entries(config, plain):
            num_bytes = shard_bytes(entry, config, layout.sharding)
            values = num_bytes // BYTES_PER_VALUE[entry.dtype]
            if entry.depth is not None:
                self._draft_bytes[entry.depth] += num_bytes
                self._draft_values[entry.depth] += values
            else:
                self._values[part_of_entry(entry)] += values
        text = config.text
        self._attentions = [text.attention(layer) for layer in range(text.num_hidden_layers)]
        self._state: StateSizes = state_sizes(
            config,
            tp=layout.tp,
            kv_dtype=layout.kv_dtype,
            drafts=layout.drafts,
            resume_points=layout.resume_points,
        )

    def decode(self, sequences: int, context: int, rows: int = 1) -> Floor:
        """A step that gives each of `sequences` sequences `rows` new tokens after `context`."""
        tokens = sequences * rows
        state = self._state
        reach = min(context, state.window)
        kv = context * state.global_per_token + reach * state.local_per_token
        written = rows * (state.global_per_token + state.local_per_token + state.conv_row)
        conv = (state.taps - 1) * state.conv_row
        pairs = {None: tokens * context, state.window: tokens * reach}
        num_bytes = self._weight_bytes(tokens) + sequences * (kv + conv + written)
        return self._floor(num_bytes, self._flops(tokens, tokens, pairs), tokens, tokens)

    def prefill(self, sequences: int, length: int) -> Floor:
        """All of `sequences` new prompts of `length` tokens in one pass, logits of the last rows.

        Cutting them into chunks reads the weights more often: never faster.
        """
        tokens = sequences * length
        state = self._state
        ramp = min(length, state.window)
        near = ramp * (ramp + 1) // 2 + (length - ramp) * state.window
        pairs = {None: sequences * (length * (length + 1) // 2), state.window: sequences * near}
        kept = length * state.global_per_token + ramp * state.local_per_token
        num_bytes = self._weight_bytes(tokens) + sequences * kept
        return self._floor(num_bytes, self._flops(tokens, sequences, pairs), tokens, sequences)

    def draft_and_verify(self, sequences: int, context: int) -> DraftFloor | None:
        """With the layout's draft depths; None when none is in use."""
        drafts = self._layout.drafts
        if not drafts:
            return None
        seconds = self.decode(sequences, context, rows=drafts + 1).seconds
        unembed = self._bytes.get("unembed", 0)
        for depth in range(drafts):
            attention = self._config.depth_attention(depth)
            reach = context if attention.window is None else min(context, attention.window)
            # Every depth makes logits of its own, and runs over the rows of the verify window.
            num_bytes = self._draft_bytes[depth] + unembed + sequences * reach * self._kv(depth)
            tokens = sequences * (drafts + 1)
            flops = 2.0 * tokens * self._draft_values[depth]
            flops += 2.0 * sequences * self._values["unembed"]
            seconds += self._floor(num_bytes, flops, tokens, sequences, layers=1).seconds
        plain = self.decode(sequences, context).seconds
        return DraftFloor(seconds=seconds, drafts=drafts, break_even=seconds / plain)

    def _kv(self, depth: int) -> float:
        is_local = self._config.depth_attention(depth).is_local
        depths = range(self._layout.drafts)
        alike = sum(self._config.depth_attention(d).is_local == is_local for d in depths)
        state = self._state
        total = state.draft_local_per_token if is_local else state.draft_global_per_token
        return total / alike

    def _weight_bytes(self, tokens: int) -> float:
        """Weights that a step over so many tokens reads: of the routed experts those chosen."""
        text, own = self._config.text, self._bytes
        total = float(sum(own.get(part, 0) for part in (*EVERY_TOKEN, "unembed")))
        if routed := own.get("routed experts", 0):
            chosen = distinct_experts(text.n_routed_experts, text.num_experts_per_tok, tokens)
            total += routed * chosen / text.n_routed_experts
        rows = tokens * text.hidden_size // self._layout.tp * ACTIVATION_BYTES
        return total + min(rows, own["embed"])

    def _flops(self, tokens: int, logit_rows: int, pairs: dict[int | None, int]) -> float:
        text, values = self._config.text, self._values
        per_token = float(sum(values.get(part, 0) for part in EVERY_TOKEN))
        if routed := values.get("routed experts", 0):
            per_token += routed * text.num_experts_per_tok / text.n_routed_experts
        dense = 2.0 * (tokens * per_token + logit_rows * values["unembed"])
        return dense + sum(self._attention_flops(a, pairs[a.window]) for a in self._attentions)

    def _attention_flops(self, attention: AttentionConfig, pairs: int) -> float:
        """Scores and weighted values: two products of a head's width per pair of tokens."""
        return 4.0 * pairs * attention.num_heads / self._layout.tp * attention.head_dim

    def _floor(
        self,
        num_bytes: float,
        flops: float,
        tokens: int,
        logit_rows: int,
        layers: int | None = None,
    ) -> Floor:
        count, links_s, latency_s = self._collectives(tokens, logit_rows, layers)
        return Floor(
            num_bytes=num_bytes,
            flops=flops,
            memory_s=num_bytes / self._gpu.floor_bandwidth,
            compute_s=flops / self._gpu.floor_bf16,
            links_s=links_s,
            collectives=count,
            latency_s=latency_s,
        )

    def _collectives(
        self, tokens: int, logit_rows: int, layers: int | None
    ) -> tuple[int, float, float]:
        """(how many, seconds on the links, seconds of waiting): two sums of full rows per layer,
        and the columns of the embedding and of the logits brought together."""
        tp, text = self._layout.tp, self._config.text
        if tp == 1:
            return 0, 0.0, 0.0
        link = link_of(self._gpu, tp)
        sums = 2 * (text.num_hidden_layers if layers is None else layers)
        row = tokens * text.hidden_size * ACTIVATION_BYTES
        # A sum is a reduce-scatter and an all-gather: each rank sends its row (tp - 1) / tp twice.
        moved = (2 * sums + 1) * row + logit_rows * text.vocab_size * FP32
        count = sums + 2
        return count, moved * (tp - 1) / tp / link.bandwidth, count * link.latency


def link_of(gpu: Gpu, tp: int) -> Link:
    """The slowest link within a group of `tp` GPUs."""
    if tp <= gpu.link.joined:
        return gpu.link
    return dataclasses.replace(NETWORK, bandwidth=min(gpu.link.bandwidth, NETWORK.bandwidth))
