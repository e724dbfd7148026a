"""The least time that a step can take: bytes over bandwidth, FLOPs over rate, bytes over links or
the waiting for exchanges between GPUs, whichever is most.

No kernel is below these; how near one comes is for measurements. docs/plan.md derives them. Byte
sums of weights come from the tensor table through suzuri/model/sizes.py, traffic from exchanges.py.
"""

import dataclasses
from collections.abc import Iterable

from suzuri.model.config import AttentionConfig, ModelConfig
from suzuri.model.sizes import Layout, loaded_entries, weights_by_part
from suzuri.model.sizes_shard import Part, Sharding, is_possible, part_of_entry, shard_bytes
from suzuri.model.sizes_state import ACTIVATION_BYTES, StateSizes, state_sizes
from suzuri.model.tensor_table import BYTES_PER_VALUE
from suzuri.tools.plan.exchanges import Exchanges, Experts, Traffic, experts_of
from suzuri.tools.plan.hardware import Gpu

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
    link_bytes: float
    """Received by this rank, over links and network."""
    links_s: float
    exchanges: int
    """Each needs the result of the one before."""
    latency_s: float
    """The waiting for all of them."""
    experts: Experts = ""
    """How the routed experts lie, on several ranks."""

    @property
    def seconds(self) -> float:
        """All four overlapped as if nothing depended on anything: surely a lower bound."""
        return max(self.memory_s, self.compute_s, self.links_s, self.latency_s)

    @property
    def waiting_in_turn_s(self) -> float:
        """If nothing is read, computed or moved while the ranks wait for each other."""
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
    exchanges: int


def distinct_experts(num_experts: int, per_token: int, tokens: float) -> float:
    """Expected number of different routed experts that `tokens` tokens choose, each `per_token`
    different ones at random."""
    return num_experts * (1 - (1 - per_token / num_experts) ** tokens)


class Floors:
    """Floors of one rank of a model held as `layout` on `gpu`. Sequences are per copy.

    `any_experts`: the routed experts may lie either way, whatever layout.ep says, so each step
    takes the better one; `Floor.experts` tells which.
    """

    def __init__(
        self, config: ModelConfig, layout: Layout, gpu: Gpu, *, any_experts: bool = False
    ) -> None:
        self._config, self._layout, self._gpu = config, layout, gpu
        self._traffic = Traffic(config, gpu, layout.tp)
        eps = (1, layout.tp) if any_experts else (layout.ep,)
        sparse = config.text.dense_mlp_idx < config.text.num_hidden_layers
        self._eps = [
            ep
            for ep in dict.fromkeys(eps if sparse else (1,))
            if is_possible(config, Sharding(tp=layout.tp, ep=ep))
        ]
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
        flops = self._flops(tokens, tokens, pairs)
        state_bytes = sequences * (kv + conv + written)
        # Among equals the first: hidden units, where no rank waits for one with more experts.
        return min(
            (self._step(ep, state_bytes, flops, tokens, tokens) for ep in self._eps),
            key=lambda floor: floor.seconds,
        )

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
        flops = self._flops(tokens, sequences, pairs)
        # Among equals the one that leaves less to hide.
        return min(
            (self._step(ep, sequences * kept, flops, tokens, sequences) for ep in self._eps),
            key=lambda floor: (floor.seconds, floor.links_s),
        )

    def draft_and_verify(self, sequences: int, context: int) -> DraftFloor | None:
        """With the layout's draft depths; None when none is in use."""
        drafts = self._layout.drafts
        if not drafts:
            return None
        parts = [self.decode(sequences, context, rows=drafts + 1)]
        unembed = self._bytes.get("unembed", 0)
        for depth in range(drafts):
            attention = self._config.depth_attention(depth)
            reach = context if attention.window is None else min(context, attention.window)
            # Every depth makes logits of its own, and runs over the rows of the verify window.
            num_bytes = self._draft_bytes[depth] + unembed + sequences * reach * self._kv(depth)
            tokens = sequences * (drafts + 1)
            flops = 2.0 * tokens * self._draft_values[depth]
            flops += 2.0 * sequences * self._values["unembed"]
            exchanges = self._depth_exchanges(attention, tokens, sequences)
            parts.append(self._floor(num_bytes, flops, exchanges))
        seconds = _together(parts).seconds
        plain = self.decode(sequences, context).seconds
        return DraftFloor(
            seconds=seconds,
            drafts=drafts,
            break_even=seconds / plain,
            exchanges=sum(part.exchanges for part in parts),
        )

    def _kv(self, depth: int) -> float:
        is_local = self._config.depth_attention(depth).is_local
        depths = range(self._layout.drafts)
        alike = sum(self._config.depth_attention(d).is_local == is_local for d in depths)
        state = self._state
        total = state.draft_local_per_token if is_local else state.draft_global_per_token
        return total / alike

    def _weight_bytes(self, tokens: int, ep: int) -> float:
        """Weights that a step over so many tokens reads: of the routed experts those chosen, and
        on the fullest of `ep` groups at least one."""
        text, own = self._config.text, self._bytes
        total = float(sum(own.get(part, 0) for part in (*EVERY_TOKEN, "unembed")))
        if routed := own.get("routed experts", 0):
            chosen = distinct_experts(text.n_routed_experts, text.num_experts_per_tok, tokens)
            total += routed * max(chosen, ep) / text.n_routed_experts
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

    def _step(
        self, ep: int, state_bytes: float, flops: float, tokens: int, logit_rows: int
    ) -> Floor:
        floor = self._floor(
            self._weight_bytes(tokens, ep) + state_bytes,
            flops,
            self._decoder_exchanges(ep, tokens, logit_rows),
        )
        text = self._config.text
        sparse = text.dense_mlp_idx < text.num_hidden_layers
        return dataclasses.replace(floor, experts=experts_of(self._layout.tp, ep) if sparse else "")

    def _floor(self, num_bytes: float, flops: float, exchanges: Exchanges) -> Floor:
        return Floor(
            num_bytes=num_bytes,
            flops=flops,
            memory_s=num_bytes / self._gpu.floor_bandwidth,
            compute_s=flops / self._gpu.floor_bf16,
            link_bytes=exchanges.link_bytes + exchanges.network_bytes,
            links_s=self._traffic.seconds(exchanges),
            exchanges=exchanges.count,
            latency_s=exchanges.latency_s,
        )

    def _decoder_exchanges(self, ep: int, tokens: int, logit_rows: int) -> Exchanges:
        """The embedding's columns; per layer heads, channels, hidden units (or slot outputs) and
        channels again, after the last layer of the rows that get logits; the logits' chunks."""
        text, traffic = self._config.text, self._traffic
        num_dense = min(text.dense_mlp_idx, text.num_hidden_layers)
        total = traffic.channels
        for attention in self._attentions:
            total += traffic.attention(attention)
        total += traffic.dense().repeated(num_dense)
        total += traffic.sparse(ep).repeated(text.num_hidden_layers - num_dense)
        total += traffic.channels.repeated(text.num_hidden_layers - 1)
        return total * tokens + (traffic.channels + traffic.logits()) * logit_rows

    def _depth_exchanges(
        self, attention: AttentionConfig, tokens: int, sequences: int
    ) -> Exchanges:
        """One draft depth: a layer with a dense MLP, the columns of the drafted token's embedding
        before it, and its own logits after it."""
        traffic = self._traffic
        layer = traffic.attention(attention) + traffic.dense()
        new = traffic.channels + traffic.channels + traffic.logits()
        return layer * tokens + new * sequences


def _together(parts: Iterable[Floor]) -> Floor:
    """One step after another: what each needs adds up."""
    first, *others = parts
    names = [field.name for field in dataclasses.fields(Floor) if field.name != "experts"]
    sums = {name: sum(getattr(part, name) for part in (first, *others)) for name in names}
    return dataclasses.replace(first, **sums)
