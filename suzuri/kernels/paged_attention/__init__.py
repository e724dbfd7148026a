"""Attention of new rows (decode, verify, chunked prefill) against a paged KV cache."""

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.paged_attention import reference


def paged_attention(
    q_NHC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    k_pages_PTUC: Tensor,
    v_pages_PTUC: Tensor,
    page_table_SM: Tensor,
    first_positions_S: Tensor,
    seq_starts_S1: Tensor,
    *,
    window: int | None,
) -> Tensor:
    """As `relative_attention`, with keys and values read from pages; the bits are equal.

    q_NHC [N, H, C], r_NHB [N, H, B], proj_BE [B, E]: the new rows, packed by sequence;
    k_pages_PTUC, v_pages_PTUC [pages, page size, U, C]: the pool, in which the new rows are already
    written (`kv_write`); page_table_SM [S, M]: page of positions m * size .. m * size + size - 1
    (entries that no row can see may be anything); first_positions_S [S]: position of each
    sequence's first new row; seq_starts_S1 [S+1]. Pages must hold finite values where unused.
    Returns [N, H, C] in the dtype of q. No gradients.
    """
    heads, kv_heads = q_NHC.shape[1], k_pages_PTUC.shape[2]
    if heads % kv_heads:
        raise ValueError(f"paged_attention: {heads} query heads over {kv_heads} KV heads")
    if any(x.dtype != q_NHC.dtype for x in (r_NHB, proj_BE, k_pages_PTUC, v_pages_PTUC)):
        raise ValueError("paged_attention: all of q, k, v, r and proj must have one dtype")
    if dispatch.use_cpu(q_NHC, r_NHB, proj_BE):
        from suzuri.kernels.paged_attention import cpu

        attend = cpu.paged_attention
    elif dispatch.use_reference(q_NHC):
        attend = reference.paged_attention
    elif q_NHC.device.type != "cuda":
        raise dispatch.no_kernel("paged_attention", q_NHC)
    elif exact.records_gradient(q_NHC, r_NHB, proj_BE, k_pages_PTUC, v_pages_PTUC):
        raise NotImplementedError("paged_attention: no gradient on a GPU; use torch.no_grad()")
    else:
        from suzuri.kernels.paged_attention import kernel

        attend = kernel.paged_attention
    return attend(
        q_NHC,
        r_NHB,
        proj_BE,
        k_pages_PTUC,
        v_pages_PTUC,
        page_table_SM,
        first_positions_S,
        seq_starts_S1,
        window,
    )
