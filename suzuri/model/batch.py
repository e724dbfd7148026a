"""The one input of every forward: tokens of several sequences packed along one axis.

Shape suffixes, for the whole project: N packed tokens, S sequences, D hidden, H query heads, U KV
heads, C channels of a head or conv, B relative-bias width (in kernels also: a block), E experts (of
attention: reach of the bias), R routed experts, K experts per token or conv taps, J expert slots
per token (routed and shared), F expert hidden, V vocabulary rows, M sorted or selected rows, P
pages, T page size or rows of one sequence, L layers (of conv state: slots), G group; in rl/ and
envs/: P problems, G group members, T time. A 1 after a letter is one more (seq_starts_S1).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np  # exact: integers on the host only
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """State of one layer, shared by all sequences; written in place by the forward.

    k_pages, v_pages [P, T, U, C]: normed keys and convolved values. Conv rings [L, R, C] of inputs,
    the input at position p in row p mod R: `kv` over the fused key and value channels, `attn` and
    `mlp` over the hidden size.
    """

    k_pages_PTUC: Tensor
    v_pages_PTUC: Tensor
    kv_conv_LRC: Tensor
    attn_conv_LRC: Tensor
    mlp_conv_LRC: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheView:
    """Where the batch's sequences keep their state.

    global_pages_SM, local_pages_SM [S, M] int64: page of positions m * T .. m * T + T - 1 in layers
    of either kind; global_slots_N, local_slots_N [N] int64: page * T + offset where each new
    token's key and value go (negative: nowhere); conv_slots_S [S] int64: row of the conv rings.
    """

    layers: tuple[LayerCache, ...]
    global_pages_SM: Tensor
    local_pages_SM: Tensor
    global_slots_N: Tensor
    local_slots_N: Tensor
    conv_slots_S: Tensor


class Routes:
    """The experts of a forward, written by its layers with experts, of which `count` are waited
    for: what they chose, or were given."""

    def __init__(self, count: int) -> None:
        self._experts: list[Tensor | None] = [None] * count
        self._weights: list[Tensor | None] = [None] * count

    def put(self, index: int, experts_NK: Tensor, weights_NJ: Tensor) -> None:
        """`index`: the layer's place among those with experts. Put again, it counts once."""
        self._experts[index] = experts_NK.to(torch.uint8)
        self._weights[index] = weights_NJ.detach()

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Ids [N, L, K] uint8 in slot order, a byte each (so of at most 256 experts), and weights
        [N, L, J] fp32 (at least), of these slots and then of the shared experts. Of at least one
        layer."""
        experts = [x for x in self._experts if x is not None]
        weights = [x for x in self._weights if x is not None]
        assert len(experts) == len(self._experts), "a layer has not run"
        return torch.stack(experts, 1), torch.stack(weights, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed tokens and, when decoding, the view of their cache.

    token_ids_N [N] int64 model rows; positions_N [N] int64 0-based position of the token in its
    sequence (padding is a sequence of its own and never counts); seq_ids_N [N] int64 its sequence;
    seq_starts_S1 [S+1] int64 first row of each sequence, then N. Media: row media_rows_M[m] of the
    embedded input is replaced by media_features_MD[m]. Without a cache every sequence starts at
    position 0; with one, at first_positions_S. What ops find out about these tensors they keep for
    as long as the tensors do not change (kernels/kept.py).

    single_rows: every sequence has exactly one row, as in decoding (the host knows).
    num_rows_1 [1] int64: rows from it on are padding of a step of a fixed size. Experts take none
    of them; what becomes of them is finite and of no use. For inference alone.

    given_experts_LNK [L, N, K] int64, L the layers with experts: ids, rising, to take in place of
    the router's choice; negative: none are given for this row. `routes` is told what each of these
    layers took.
    """

    token_ids_N: Tensor
    positions_N: Tensor
    seq_ids_N: Tensor
    seq_starts_S1: Tensor
    media_rows_M: Tensor | None = None
    media_features_MD: Tensor | None = None
    cache: CacheView | None = None
    single_rows: bool = False
    num_rows_1: Tensor | None = None
    given_experts_LNK: Tensor | None = None
    routes: Routes | None = None

    @functools.cached_property
    def first_positions_S(self) -> Tensor:
        """Position of each sequence's first new row [S] (empty sequences: any valid value)."""
        if self.single_rows:
            return self.positions_N
        last = max(self.positions_N.shape[0] - 1, 0)
        return self.positions_N[self.seq_starts_S1[:-1].clamp(max=last)]

    @functools.cached_property
    def num_scores(self) -> int:
        """Keys that the rows see in a layer without a window, all rows together: a measure of work.
        Reads positions_N, which is free on a CPU only."""
        return self.positions_N.shape[0] + sum(self.positions_N.tolist())

    def threads(self, width: int) -> contextlib.AbstractContextManager[None]:
        """A block in which rows of `width` channels are computed by as many CPU threads as they
        are worth. No bit depends on it."""
        device = self.positions_N.device
        work = (self.num_scores + width) * width if device.type == "cpu" else 0
        return dispatch.threads_for(work, device)


def pack(
    sequences: Sequence[Sequence[int] | Array],
    *,
    first_positions: Sequence[int] | None = None,
    media: Sequence[tuple[int, int, Tensor]] = (),
    cache: CacheView | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """Packs sequences of model rows into a Batch.

    `first_positions` gives the position of each sequence's first token (default 0; needs a cache
    when not 0). `media` holds (sequence, index of its first placeholder within the sequence given
    here, features [M, D]). Raises ValueError where media do not fit.
    """
    lengths = [len(sequence) for sequence in sequences]
    starts_S1 = np.cumsum([0, *lengths])
    firsts = list(first_positions) if first_positions is not None else [0] * len(lengths)
    if cache is None and any(firsts):
        raise ValueError(f"first_positions {firsts}: without a cache every sequence starts at 0")
    if len(firsts) != len(lengths):
        raise ValueError(f"{len(firsts)} first_positions for {len(lengths)} sequences")
    ids = [_integers(sequence) for sequence in sequences]
    seq_ids_N = np.repeat(np.arange(len(lengths)), lengths)
    # A row's place in its sequence, from where that begins.
    offsets_S = np.asarray(firsts, np.int64) - starts_S1[:-1]
    positions_N = np.arange(starts_S1[-1]) + np.repeat(offsets_S, lengths)

    def tensor(values: Array) -> Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(device)

    return Batch(
        token_ids_N=tensor(np.concatenate([np.zeros(0, np.int64), *ids])),
        positions_N=tensor(positions_N),
        seq_ids_N=tensor(seq_ids_N),
        seq_starts_S1=tensor(starts_S1),
        media_rows_M=tensor(_media_rows(media, lengths, starts_S1)) if media else None,
        media_features_MD=torch.cat([features for _, _, features in media]) if media else None,
        cache=cache,
        single_rows=all(length == 1 for length in lengths),
    )


def _integers(sequence: Sequence[int] | Array) -> Array:
    if isinstance(sequence, np.ndarray):
        is_sound = sequence.dtype.kind in "iu" and sequence.ndim == 1
    else:
        is_sound = all(type(token) is int for token in sequence)
    if not is_sound:
        raise ValueError("token ids must be integers")
    return np.asarray(sequence, np.int64)


def _media_rows(
    media: Sequence[tuple[int, int, Tensor]], lengths: list[int], starts_S1: Array
) -> Array:
    """Packed rows [M] of the placeholders, in the order of the features."""
    rows: list[Array] = []
    for sequence, index, features in media:
        if not 0 <= sequence < len(lengths):
            raise ValueError(f"media for sequence {sequence} of {len(lengths)}")
        if index < 0 or index + features.shape[0] > lengths[sequence]:
            raise ValueError(
                f"media of {features.shape[0]} tokens at index {index} do not fit into sequence "
                f"{sequence} of {lengths[sequence]} tokens"
            )
        rows.append(starts_S1[sequence] + index + np.arange(features.shape[0]))
    rows_M = np.concatenate(rows)
    if len(np.unique(rows_M)) != len(rows_M):
        raise ValueError("media overlap: two features for one token")
    return rows_M
