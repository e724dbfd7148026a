"""Sum of several embedding rows per token (dMel audio: one row per mel bin)."""

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.embedding_sum import reference


def embedding_sum(ids_NB: Tensor, weight_VD: Tensor) -> Tensor:
    """out[n] = sum over b of weight[ids[n, b]], summed in fp32 (at least) by a fixed tree.

    ids_NB [N, B] int64 in [0, V) (otherwise as in embedding), weight_VD [V, D]. Returns [N, D] in
    fp32 (fp64 for an fp64 weight), unrounded: the norm that follows takes it so. Gradient: weight,
    ordered, no atomics.
    """
    if exact.records_gradient(weight_VD) and not dispatch.is_forced():
        from suzuri.kernels.embedding_sum import gradient

        return gradient.EmbeddingSum.apply(weight_VD, ids_NB)
    if dispatch.use_reference(weight_VD):
        return reference.embedding_sum(ids_NB, weight_VD)
    if weight_VD.device.type != "cuda":
        raise dispatch.no_kernel("embedding_sum", weight_VD)
    from suzuri.kernels.embedding_sum import kernel

    return kernel.embedding_sum(ids_NB, weight_VD)
