"""What one of `tp` ranks holds of each tensor, and which `tp` and `ep` a model can be cut into.

The bytes of a tensor come from the table of tensor_table.py; here is only the share. docs/plan.md
gives the reasons. Read next: sizes.py. No torch here.
"""

# pyright: strict

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal

from suzuri.model.config import AttentionConfig, ModelConfig
from suzuri.model.tensor_table import Entry

Part = Literal[
    "embed",
    "unembed",
    "attention",
    "dense MLP",
    "router",
    "routed experts",
    "shared experts",
    "norms and convs",
    "towers",
    "MTP",
]
PARTS: tuple[Part, ...] = (
    "embed",
    "unembed",
    "attention",
    "dense MLP",
    "router",
    "routed experts",
    "shared experts",
    "norms and convs",
    "towers",
    "MTP",
)
MAX_RANKS = 4096

_ATTENTION = (".wq_du.weight", ".wk_dv.weight", ".wv_dv.weight", ".wr_du.weight", ".wo_ud.weight")
_BY_TP = (
    "model.llm.embed.weight",
    "model.llm.unembed.weight",
    ".attn.wq_du.weight",
    ".attn.wr_du.weight",
    ".attn.wo_ud.weight",
    ".attn_sconv.weight",
    ".mlp_sconv.weight",
    ".mlp.w13_dn.weight",
    ".mlp.w2_md.weight",
    ".mlp.shared_experts.shared_w13_weight",
    ".mlp.shared_experts.shared_w2_weight",
)
"""Tensors of which each rank holds 1/tp of the output rows: heads, inner widths, output channels of
output and down projections, vocabulary rows, conv channels. The dimension that a product sums over
is never cut: every sum is made on one rank, in order (docs/exactness.md, rules 5 and 6)."""
_BY_KV_HEAD = (
    ".attn.wk_dv.weight",
    ".attn.wv_dv.weight",
    ".attn.k_sconv.weight",
    ".attn.v_sconv.weight",
)
_EXPERTS = ".mlp.experts."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """How one copy of the model is cut: over `tp` ranks, its routed experts over `ep` groups.

    Each group of tp / ep ranks holds 1/ep of the routed experts, and of each expert every rank its
    share of hidden units and of output channels; all else is cut by `tp`. So ep = 1 is layout (a)
    of rule 6 in docs/exactness.md, ep = tp layout (b).
    """

    tp: int = 1
    ep: int = 1


def part_of_entry(entry: Entry) -> Part:
    """The part that a tensor of the released layout is reported under."""
    name = entry.name
    if entry.part in ("vision", "audio"):
        return "towers"
    if entry.part == "mtp":
        return "MTP"
    if name == "model.llm.embed.weight":
        return "embed"
    if name == "model.llm.unembed.weight":
        return "unembed"
    if _EXPERTS in name:
        return "routed experts"
    if ".mlp.shared_experts." in name:
        return "shared experts"
    if ".mlp.gate." in name:
        return "router"
    if ".mlp." in name:
        return "dense MLP"
    if name.endswith((*_ATTENTION, ".rel_logits_proj.proj")):
        return "attention"
    return "norms and convs"


def kv_heads_per_rank(attention: AttentionConfig, tp: int) -> int:
    """KV heads that one rank keeps; with more ranks than heads each head is kept several times."""
    return max(attention.num_kv_heads // tp, 1)


def shard_bytes(entry: Entry, config: ModelConfig, sharding: Sharding) -> int:
    """Bytes of a tensor of the released layout that the fullest rank holds.

    The sharding must have passed `check_sharding`. What is not listed as cut is held whole by each
    rank: norms, router, biases of relative distance, towers, the input projections of draft depths.
    """
    name, tp = entry.name, sharding.tp
    if name.endswith(_BY_KV_HEAD):
        attention = _attention_of(entry, config)
        heads = kv_heads_per_rank(attention, tp)
        return entry.num_bytes // attention.num_kv_heads * heads
    if _EXPERTS in name:
        if entry.field in ("values", "codes", "block_scales"):
            return entry.num_bytes // tp
        # One number per expert goes with the expert; one per tensor is kept by every rank.
        per_expert = entry.field in ("global_scales", "global_divisors")
        return entry.num_bytes // sharding.ep if per_expert else entry.num_bytes
    if name.endswith(_BY_TP):
        return entry.num_bytes // tp
    return entry.num_bytes


def _attention_of(entry: Entry, config: ModelConfig) -> AttentionConfig:
    if entry.depth is not None:
        return config.depth_attention(entry.depth)
    return config.text.attention(int(entry.name.split(".")[3]))


def check_sharding(config: ModelConfig, sharding: Sharding) -> None:
    """Raises ValueError naming what cannot be cut so, and the nearest values that are possible."""
    tp, ep = sharding.tp, sharding.ep
    if tp < 1 or ep < 1:
        raise ValueError(f"--tp {tp} --ep {ep}: both must be at least 1")
    if tp % ep:
        raise ValueError(
            f"--ep {ep}: the routed experts are spread over the same GPUs as --tp {tp}, so ep must "
            f"divide tp; possible: {_listed(e for e in range(1, tp + 1) if tp % e == 0)}"
        )
    problem = next(_problems(config, sharding), None)
    if problem is None:
        return
    if next(_problems(config, Sharding(tp=tp)), None) is None:
        fits = [e for e in range(1, tp + 1) if tp % e == 0]
        fits = [e for e in fits if is_possible(config, Sharding(tp=tp, ep=e))]
        raise ValueError(f"--ep {ep}: {problem}; possible at --tp {tp}: {_listed(fits)}")
    possible = possible_tp(config)
    below = max((n for n in possible if n < tp), default=1)
    above = min((n for n in possible if n > tp), default=None)
    nearest = f"{below}" if above is None else f"{below} and {above}"
    raise ValueError(
        f"--tp {tp}: {problem}; nearest possible: {nearest} (all: {_listed(possible)})"
    )


def possible_tp(config: ModelConfig) -> tuple[int, ...]:
    """Every `tp` (with ep 1) that the model can be cut into, ascending; 1 is always among them."""
    # Every rank has at least one query head.
    most = min(attention.num_heads for attention in _attentions(config))
    return tuple(
        tp for tp in range(1, min(most, MAX_RANKS) + 1) if is_possible(config, Sharding(tp=tp))
    )


def is_possible(config: ModelConfig, sharding: Sharding) -> bool:
    """Whether `check_sharding` passes."""
    return sharding.tp % sharding.ep == 0 and next(_problems(config, sharding), None) is None


@functools.lru_cache(maxsize=16)
def _attentions(config: ModelConfig) -> tuple[AttentionConfig, ...]:
    """The kinds of attention in the decoder and the draft depths, each once."""
    text = config.text
    layers = [text.attention(layer) for layer in range(text.num_hidden_layers)]
    depths = [config.depth_attention(depth) for depth in range(config.mtp_depths)]
    return tuple(dict.fromkeys([*layers, *depths]))


def _problems(config: ModelConfig, sharding: Sharding) -> Iterator[str]:
    text, tp, ep = config.text, sharding.tp, sharding.ep
    for attention in _attentions(config):
        kind = "local" if attention.is_local else "global"
        if attention.num_heads % tp:
            yield f"{attention.num_heads} query heads ({kind}) cannot be shared evenly"
        if attention.num_kv_heads % tp and tp % attention.num_kv_heads:
            yield f"{attention.num_kv_heads} KV heads ({kind}) are neither cut nor repeated evenly"
    if text.hidden_size % tp:
        yield f"hidden_size {text.hidden_size} cannot be cut evenly"
    if text.vocab_size % tp:
        yield f"vocab_size {text.vocab_size} cannot be cut evenly"
    if (text.dense_mlp_idx or config.mtp_depths) and text.dense_intermediate_size % tp:
        yield f"dense_intermediate_size {text.dense_intermediate_size} cannot be cut evenly"
    if text.dense_mlp_idx >= text.num_hidden_layers:
        return
    inner = text.intermediate_size
    if text.n_routed_experts % ep:
        yield f"{text.n_routed_experts} routed experts cannot be spread evenly"
    if inner % (tp // ep) or (text.n_shared_experts and inner % tp):
        yield f"the expert width {inner} cannot be cut evenly"


def _listed(numbers: Iterator[int] | list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
