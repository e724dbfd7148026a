"""Causal attention with a learned relative bias over packed sequences (no cache)."""

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.relative_attention import reference


def relative_attention(
    q_NHC: Tensor,
    k_NUC: Tensor,
    v_NUC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    seq_starts_S1: Tensor,
    *,
    window: int | None,
) -> Tensor:
    """Each row attends to its own sequence's rows up to itself (at most `window` of them).

    q_NHC [N, H, C] and k_NUC, v_NUC [N, U, C] (H a multiple of U; query head h reads KV head
    h // (H / U)); r_NHB [N, H, B] and proj_BE [B, E]: the bias of a key at distance d is
    (r @ proj)[d] for d < E and 0 beyond; seq_starts_S1 [S+1]: first row of each sequence.
    score = q.k / C + bias. Returns [N, H, C] in the dtype of q; rows of no sequence give zeros.

    Bits: scores and softmax in fp32 (at least); keys in tiles of 64 at absolute positions, partial
    results in chunks at absolute boundaries (512 keys global, 256 with a window) folded in order; p
    is rounded to the dtype of q relative to the running max of its tile; one rounding of the
    output. So a row's bits equal those of `paged_attention` on the same keys. Gradients: q, k, v,
    r, proj. Source: docs/architecture.md 2.4, docs/exactness.md rule 4.
    """
    heads, kv_heads = q_NHC.shape[1], k_NUC.shape[1]
    if heads % kv_heads:
        raise ValueError(f"relative_attention: {heads} query heads over {kv_heads} KV heads")
    if any(x.dtype != q_NHC.dtype for x in (k_NUC, v_NUC, r_NHB, proj_BE)):
        raise ValueError("relative_attention: all of q, k, v, r and proj must have one dtype")
    if exact.records_gradient(q_NHC, k_NUC, v_NUC, r_NHB, proj_BE) and not dispatch.is_forced():
        from suzuri.kernels.relative_attention import gradient

        return gradient.RelativeAttention.apply(
            q_NHC, k_NUC, v_NUC, r_NHB, proj_BE, seq_starts_S1, window
        )
    if dispatch.use_cpu(q_NHC, k_NUC, v_NUC, r_NHB, proj_BE):
        from suzuri.kernels.relative_attention import cpu

        return cpu.relative_attention(q_NHC, k_NUC, v_NUC, r_NHB, proj_BE, seq_starts_S1, window)
    if dispatch.use_reference(q_NHC):
        return reference.relative_attention(
            q_NHC, k_NUC, v_NUC, r_NHB, proj_BE, seq_starts_S1, window
        )
    if q_NHC.device.type != "cuda":
        raise dispatch.no_kernel("relative_attention", q_NHC)
    from suzuri.kernels.relative_attention import kernel

    return kernel.relative_attention(q_NHC, k_NUC, v_NUC, r_NHB, proj_BE, seq_starts_S1, window)
