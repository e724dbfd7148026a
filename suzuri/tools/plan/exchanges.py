"""What the ranks of one copy send each other in a step, when sums never cross ranks.

The engine of docs/exactness.md, rules 5 and 6: outputs are gathered, the dimension of a sum is
never cut. Everything here is the least that such an engine can do. Read next: floors.py.
"""

import dataclasses
from typing import Literal

from suzuri.model.config import AttentionConfig, ModelConfig
from suzuri.model.sizes_state import ACTIVATION_BYTES
from suzuri.tools.plan.hardware import NETWORK, Gpu, Link

Experts = Literal["", "hidden units", "whole experts", "groups"]
VOCABULARY_CHUNK = 2048
CHUNK_BYTES = 16
"""Of a row's chunk of logits: its largest, its sum, the best sample and its id, 4 bytes each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchanges:
    """Bytes that one rank receives over its links and through its network port, and how many
    exchanges follow one after the other. Seconds: `latency_s` for the waiting alone."""

    link_bytes: float = 0.0
    network_bytes: float = 0.0
    count: int = 0
    latency_s: float = 0.0

    def __add__(self, other: "Exchanges") -> "Exchanges":
        return Exchanges(
            link_bytes=self.link_bytes + other.link_bytes,
            network_bytes=self.network_bytes + other.network_bytes,
            count=self.count + other.count,
            latency_s=self.latency_s + other.latency_s,
        )

    def __mul__(self, times: float) -> "Exchanges":
        """The same traffic for `times` as many rows; as many exchanges as before."""
        return dataclasses.replace(
            self, link_bytes=self.link_bytes * times, network_bytes=self.network_bytes * times
        )

    def repeated(self, times: int) -> "Exchanges":
        """One after the other."""
        return dataclasses.replace(
            self * times, count=self.count * times, latency_s=self.latency_s * times
        )


def link_of(gpu: Gpu, tp: int) -> Link:
    """The slowest link within a group of `tp` GPUs."""
    if tp <= gpu.link.joined:
        return gpu.link
    return dataclasses.replace(NETWORK, bandwidth=min(gpu.link.bandwidth, NETWORK.bandwidth))


def experts_of(tp: int, ep: int) -> Experts:
    """How the routed experts lie: nothing to say on one rank; "hidden units" is layout (a) of
    rule 6, "whole experts" (b), "groups" both at once."""
    if tp == 1:
        return ""
    if ep == 1:
        return "hidden units"
    return "whole experts" if ep == tp else "groups"


class Traffic:
    """Exchanges of the parts of a model, for one token (or row of logits) each."""

    def __init__(self, config: ModelConfig, gpu: Gpu, tp: int) -> None:
        self._config, self._gpu, self._tp = config, gpu, tp
        self._near = min(tp, gpu.link.joined)
        self.channels = self.gather(config.text.hidden_size)
        """The residual stream of all ranks, for the norm; also the embedding's columns."""

    def gather(self, values: int, ranks: int | None = None) -> Exchanges:
        """Each of `ranks` (default: all) ends with all `values`, of which it has its share.

        Ranks that share a link fetch each remote value once through one port of theirs.
        """
        ranks = self._tp if ranks is None else ranks
        if ranks == 1:
            return Exchanges()
        near = min(ranks, self._near)
        num_bytes = values * ACTIVATION_BYTES
        through_port = num_bytes * (ranks - near) / ranks / near
        return Exchanges(
            link_bytes=num_bytes * (ranks - 1) / ranks - through_port,
            network_bytes=through_port,
            count=1,
            latency_s=link_of(self._gpu, ranks).latency,
        )

    def slot_outputs(self, ep: int) -> Exchanges:
        """Whole experts per group: each slot's output to the owners of its channels, on average
        over random routing."""
        if ep == 1:
            return Exchanges()
        text = self._config.text
        each = text.num_experts_per_tok * text.hidden_size / self._tp * ACTIVATION_BYTES
        remote = 1 - max(self._near / self._tp, 1 / ep)
        return Exchanges(
            link_bytes=each * ((ep - 1) / ep - remote),
            network_bytes=each * remote,
            count=1,
            latency_s=link_of(self._gpu, self._tp).latency,
        )

    def attention(self, attention: AttentionConfig) -> Exchanges:
        """The heads' outputs for the output projection, then the stream's channels."""
        return self.gather(attention.num_heads * attention.head_dim) + self.channels

    def dense(self) -> Exchanges:
        """Hidden units for the down projection. The channels that follow are counted apart: after
        the last layer only rows with logits need them."""
        return self.gather(self._config.text.dense_intermediate_size)

    def sparse(self, ep: int) -> Exchanges:
        """The same of routed and shared experts, the routed ones spread over `ep` groups."""
        text = self._config.text
        shared = self.gather(text.n_shared_experts * text.intermediate_size)
        # A group gathers the hidden units of its own experts: 1/ep of the slots on average.
        slots = text.num_experts_per_tok / ep
        routed = self.gather(text.intermediate_size, self._tp // ep) * slots
        sent = self.slot_outputs(ep)
        # The shared experts' gather needs nothing of the routed experts' and goes beside it.
        longest = max(routed.count + sent.count, shared.count)
        latency = max(routed.latency_s + sent.latency_s, shared.latency_s)
        return dataclasses.replace(routed + sent + shared, count=longest, latency_s=latency)

    def logits(self) -> Exchanges:
        """Of one row, the results of each chunk of the vocabulary: the least that sampling needs.
        Requests for more (log-probs of the whole vocabulary) move more."""
        chunks = -(-self._config.text.vocab_size // VOCABULARY_CHUNK)
        return self.gather(chunks * CHUNK_BYTES // ACTIVATION_BYTES)

    def seconds(self, exchanges: Exchanges) -> float:
        """The least time on the links and the network, which work side by side."""
        network = min(self._gpu.link.bandwidth, NETWORK.bandwidth)
        return max(
            exchanges.link_bytes / self._gpu.link.bandwidth, exchanges.network_bytes / network
        )
