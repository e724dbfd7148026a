"""What lies between the fused projection of an attention layer and its attention."""

from typing import NamedTuple

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.attention_prologue import reference


class Sequences(NamedTuple):
    """Where packed rows belong: positions_N [N] in the sequence, seq_ids_N [N] its index,
    seq_starts_S1 [S+1] its first row, all int64."""

    positions_N: Tensor
    seq_ids_N: Tensor
    seq_starts_S1: Tensor


class Scaling(NamedTuple):
    """Length-dependent scale of a global layer (`log_scaling`); `offset` is added to positions."""

    n_floor: float
    alpha: float
    offset: int = 0


class State(NamedTuple):
    """What the layer remembers, written in place: the ring of convolution inputs (`short_conv`) and
    the pages of keys and values (`kv_write`)."""

    conv_LRC: Tensor
    conv_slots_S: Tensor
    k_pages_PTUC: Tensor
    v_pages_PTUC: Tensor
    page_slots_N: Tensor


class Fields(NamedTuple):
    """q_NHC, r_NHB; k_NUC, v_NUC (None where they went into pages)."""

    q_NHC: Tensor
    r_NHB: Tensor
    k_NUC: Tensor | None
    v_NUC: Tensor | None


def attention_prologue(
    qkvr_NX: Tensor,
    conv_CK: Tensor,
    q_norm_C: Tensor,
    k_norm_C: Tensor,
    sequences: Sequences,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    scaling: Scaling | None = None,
    state: State | None = None,
    single_rows: bool = False,
) -> Fields:
    """Short convolution of keys and values, norms of queries and keys, scale, and the cache write.

    qkvr_NX [N, H * C + 2 * U * C + H * B]: queries, keys, values, relative-bias branch;
    conv_CK [2 * U * C, taps] over keys and values; q_norm_C, k_norm_C [C]. By definition the
    composition of `short_conv`, `rms_norm`, `log_scaling` (of q and r) and, with `state`,
    `kv_write`, with the roundings of each. `single_rows`: every sequence has exactly one row, which
    saves looking it up. Gradients (without state): qkvr and the weights.
    """
    channels = q_norm_C.shape[0]
    rest = qkvr_NX.shape[1] - (heads + 2 * kv_heads) * channels
    if rest <= 0 or rest % heads:
        raise ValueError(
            f"attention_prologue: rows of {qkvr_NX.shape[1]} for {heads} heads and {kv_heads} KV "
            f"heads of {channels} channels"
        )
    weights = (conv_CK, q_norm_C, k_norm_C)
    given = (qkvr_NX, *weights, sequences, heads, kv_heads, eps, scaling)
    is_recorded = exact.records_gradient(qkvr_NX, *weights)
    if dispatch.use_cpu(qkvr_NX.detach() if is_recorded else qkvr_NX) and conv_CK.shape[1]:
        if not is_recorded and (state is None or _is_whole(state)):
            from suzuri.kernels.attention_prologue import cpu

            return Fields(*cpu.attention_prologue(*given, state))
        if is_recorded and state is None:
            from suzuri.kernels.attention_prologue import gradient

            fields = gradient.AttentionPrologue.apply(
                qkvr_NX, *weights, *sequences, heads, kv_heads, eps, scaling
            )
            return Fields(*fields)
    if not is_recorded and not dispatch.use_reference(qkvr_NX) and qkvr_NX.device.type == "cuda":
        from suzuri.kernels.attention_prologue import kernel

        if kernel.covers(qkvr_NX, *weights, state):
            fields = kernel.attention_prologue(*given, state, single_rows=single_rows)
            return Fields(*fields)
    # On a GPU too: every part has its kernel, and its gradient.
    return Fields(*reference.attention_prologue(*given, state))


def _is_whole(state: State) -> bool:
    return all(x.is_contiguous() for x in (state.conv_LRC, state.k_pages_PTUC, state.v_pages_PTUC))
