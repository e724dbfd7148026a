"""Buffers of one step on one rank. Bounded by the token budget and the running sequences, none by
the context.

An upper bound for kernels that keep nothing alive longer than a sub-block: each line is the largest
moment of its kind. docs/plan.md explains the lines. Read next: sizes.py. No torch here.
"""

# pyright: strict

import functools
from collections.abc import Mapping

from suzuri.model.config import AttentionConfig, ModelConfig
from suzuri.model.sizes_shard import Sharding, kv_heads_per_rank
from suzuri.model.sizes_state import ACTIVATION_BYTES

LOGIT_BUFFER = 32 << 20
"""Logits of a slice of the vocabulary that `draw_tokens` makes at a time, whatever the batch."""
LOGIT_ROWS = 32
"""Rows whose logits are made as a whole at a time: those with filters, penalties or alternatives,
and of prompts."""
LOGIT_COPIES = 13
"""Most bytes at one time while either is drawn from, as copies of it (sorting; noise on a CPU)."""
DRAW_ROWS = 4096
DRAW_CHUNK = 2048
DRAW_BYTES = 32
"""Per row and chunk of the vocabulary: what a draw keeps of it."""
SPLIT_ROWS = 4096
"""Partial results of split attention that are kept at a time, per head; longer contexts and larger
batches take several turns, so this does not grow."""
TOWER_PATCHES = 1024
"""Patches (or audio frames) that a tower embeds at a time."""
LAUNCHES_PER_LAYER = 12
GRAPH_NODE_BYTES = 4096
"""Device memory of one captured kernel launch, rounded up from a measurement (docs/plan.md)."""
MAX_GRAPH_BATCH = 512
GRAPH_TOKENS, LEAST_GRAPH_TOKENS = 8192, 2048
"""Rows of the largest step with prompt tokens that is captured, at most and where memory is dear.
(A step of 8192 waits 2 ms for its launches; cut over several GPUs it takes less time than they.)"""
MORE_GRAPHS = 96
FP32 = 4
SAMPLING_BYTES = 9
"""Per vocabulary id of a sequence with a logit bias and penalties: fp32 bias, a flag for ids of the
prompt, int32 counts of the answer."""
GROWING_BYTES = 4
"""The widest of these tables is copied when it grows, so its old rows exist beside the new ones."""


@functools.lru_cache(maxsize=256)
def workspace(
    config: ModelConfig,
    sharding: Sharding,
    token_budget: int,
    *,
    on_gpu: bool,
    graph_tokens: int,
    dequantised_layer: bool,
) -> Mapping[str, int]:
    """Bytes by line, for steps of at most `token_budget` tokens.

    `on_gpu`: the kernels that keep relative biases, and gate and up of experts, within themselves.
    `graph_tokens`: of steps of so many the largest is recorded as a graph (0: none is).
    `dequantised_layer`: the references on the CPU unpack a whole layer's NVFP4 experts at once.
    """
    text = config.text
    attentions = [text.attention(layer) for layer in range(text.num_hidden_layers)]
    heads = max(a.num_heads // sharding.tp for a in attentions)
    lines = {"activations": _activations(config, sharding, token_budget, on_gpu)}
    if graph_tokens:
        # They share memory of their own, in which the largest is recorded, and the rows they give.
        rows = min(token_budget, graph_tokens)
        kept = rows * text.hidden_size * ACTIVATION_BYTES
        lines["recorded steps"] = _activations(config, sharding, rows, on_gpu) + kept
    if not on_gpu:
        lines["relative bias"] = max(_bias(a, sharding, token_budget) for a in attentions)
    lines |= {
        "split attention": heads * SPLIT_ROWS * (max(a.head_dim for a in attentions) + 2) * FP32,
        "logits": _logits(config, token_budget),
        "towers": _towers(config),
    }
    if dequantised_layer:
        # Gate and up, and down twice: as unpacked, and joined to the shared experts.
        values = 4 * text.n_routed_experts * text.intermediate_size * text.hidden_size
        lines["one layer's experts unpacked"] = values * ACTIVATION_BYTES // sharding.tp
    return lines


def graphs(config: ModelConfig, concurrency: int, drafts: int) -> int:
    """CUDA graphs: as many as `max_graphs` says.

    Their kernels write into the memory of "recorded steps", so a graph itself is that of its
    launches.
    """
    launches = LAUNCHES_PER_LAYER * (config.text.num_hidden_layers + drafts)
    return max_graphs(concurrency) * launches * GRAPH_NODE_BYTES


def max_graphs(concurrency: int) -> int:
    """Graphs that are kept at one time: one for every batch size, and MORE_GRAPHS for other widths
    of the page tables, and steps with prompt tokens."""
    return len(decode_buckets(concurrency)) + MORE_GRAPHS


def decode_buckets(concurrency: int) -> tuple[int, ...]:
    """Batch sizes that decode is captured for: all up to 8, then steps of 8. (A padding row costs
    the reading of its experts: what small batches wait for.)"""
    most = min(concurrency, MAX_GRAPH_BATCH)
    sizes = [size for size in (*range(1, 9), *range(16, most + 1, 8)) if size < most]
    return (*sizes, most)


def row_buckets(most: int) -> tuple[int, ...]:
    """Rows, up to `most`, that steps with prompt tokens are captured for: multiples of 16 up to
    128, then four sizes from one power of two to the next (those at which the vendor's products are
    tested), from 1024 on eight, from 2048 on sixteen. Padding is at most a fifth, or fifteen rows;
    of large steps a seventeenth."""
    sizes = [*range(16, 128, 16)]
    power = 128
    while power < most:
        parts = 4 if power < 1024 else 8 if power < 2048 else 16
        sizes += range(power, 2 * power, power // parts)
        power *= 2
    return (*(size for size in sizes if size < most), most)


def sequence_buckets(concurrency: int) -> tuple[int, ...]:
    """Sequences of such steps: 1, and powers of two with one more for padding."""
    sizes = [1, 2]
    while sizes[-1] < concurrency + 1:
        sizes.append(2 * (sizes[-1] - 1) + 1)
    return (*(size for size in sizes if size < concurrency + 1), concurrency + 1)


def sampling_tables(config: ModelConfig, concurrency: int) -> int:
    """Tables of biases and counts, as if every running sequence used all of them: which requests
    will is not known before they come, and running out then would end others."""
    return concurrency * (SAMPLING_BYTES + GROWING_BYTES) * config.text.vocab_size


def _activations(config: ModelConfig, sharding: Sharding, tokens: int, on_gpu: bool) -> int:
    """The stream's rows gathered from all ranks, their normed copy, and the next ones arriving;
    and the largest sub-block."""
    text = config.text
    attentions = [text.attention(layer) for layer in range(text.num_hidden_layers)]
    attention = max(_attention(a, sharding, tokens) for a in attentions)
    dense, experts = _dense(config, sharding, tokens), _experts(config, sharding, tokens, on_gpu)
    stream = 3 * tokens * text.hidden_size * ACTIVATION_BYTES
    return stream + max(attention, dense, experts)


def _attention(attention: AttentionConfig, sharding: Sharding, tokens: int) -> int:
    """Own heads as projected, as normed and as weighted, and these gathered from all ranks."""
    heads = attention.num_heads // sharding.tp
    kv_heads = kv_heads_per_rank(attention, sharding.tp)
    projected = (heads + 2 * kv_heads) * attention.head_dim + heads * attention.d_rel
    normed = (heads + 2 * kv_heads) * attention.head_dim
    out = heads * attention.head_dim
    gathered = attention.num_heads * attention.head_dim if sharding.tp > 1 else 0
    return tokens * (projected + normed + out + gathered) * ACTIVATION_BYTES


def _bias(attention: AttentionConfig, sharding: Sharding, tokens: int) -> int:
    """The band of learned biases: distances below the extent, never the length of the context."""
    heads = attention.num_heads // sharding.tp
    return tokens * heads * attention.rel_extent * ACTIVATION_BYTES


def _dense(config: ModelConfig, sharding: Sharding, tokens: int) -> int:
    """Own hidden units of gate and up, their product, and all units gathered."""
    if not config.text.dense_mlp_idx and not config.mtp_depths:
        return 0
    units = config.text.dense_intermediate_size
    gathered = units if sharding.tp > 1 else 0
    return tokens * (3 * (units // sharding.tp) + gathered) * ACTIVATION_BYTES


def _experts(config: ModelConfig, sharding: Sharding, tokens: int, on_gpu: bool) -> int:
    """Rows in expert order, gate and up, their product, all hidden units gathered within a group,
    the group's output channels, and those channels of other groups that this rank combines. On a
    GPU gate and up never leave the product's kernel, and the rows go before the outputs come.

    A group of ranks may get every token's every expert, so `ep` does not lessen the rows.
    """
    text = config.text
    if text.dense_mlp_idx >= text.num_hidden_layers:
        return 0
    group = sharding.tp // sharding.ep
    rows = tokens * (text.num_experts_per_tok + text.n_shared_experts)
    units, out = text.intermediate_size // group, text.hidden_size // group
    gathered = text.intermediate_size if group > 1 else 0
    if on_gpu:
        values = rows * max(text.hidden_size + units, units + gathered + out)
    else:
        values = rows * (text.hidden_size + 3 * units + gathered + out)
    if sharding.ep > 1:
        values += tokens * text.num_experts_per_tok * (text.hidden_size // sharding.tp)
    return values * ACTIVATION_BYTES


def _logits(config: ModelConfig, token_budget: int) -> int:
    """fp32 logits with all that is made of them, and what is kept of each chunk."""
    row = config.text.vocab_size * FP32
    held = min(token_budget * row, max(LOGIT_ROWS * row, LOGIT_BUFFER))
    chunks = -(-config.text.vocab_size // DRAW_CHUNK)
    return LOGIT_COPIES * held + min(token_budget, DRAW_ROWS) * chunks * DRAW_BYTES


def _towers(config: ModelConfig) -> int:
    largest = 0
    if config.vision is not None:
        vision, scales = config.vision, config.vision.scales()
        pixels = vision.temporal_patch_size * vision.patch_size**2
        # Values of one patch before and after each fold, both alive at once.
        per_scale = [pixels // (frames * side**2) * channels for frames, side, channels in scales]
        largest = 2 * max(per_scale) * FP32
    if config.audio is not None:
        # A frame's rows are summed as they are read; only the sum and its norm are kept.
        largest = max(largest, 2 * config.text.hidden_size * FP32)
    return TOWER_PATCHES * largest
