"""Row selection from an embedding table."""

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.embedding import reference


def embedding(ids_N: Tensor, weight_VD: Tensor, *, num_rows: int | None = None) -> Tensor:
    """Selects rows: out[n] = weight[ids[n]]; a select, never a sum, so the bits are the weight's.

    ids_N [N] int64 in [0, V) (IndexError otherwise; on a GPU, where the host does not wait for ids,
    a row of NaN), weight_VD [V, D] any float dtype. Returns [N, D]. With `num_rows` only so many
    rows of the table exist (the rest is padding); a slice of the table would do as well, but its
    gradient would be rounded to the dtype of the table. Gradient: the weight, in fp32 at least, an
    ordered sum without atomics.
    """
    if exact.records_gradient(weight_VD) and not dispatch.is_forced():
        from suzuri.kernels.embedding import gradient

        return gradient.Embedding.apply(weight_VD, ids_N, num_rows)
    if num_rows is not None:
        weight_VD = weight_VD[:num_rows]
    if dispatch.use_reference(weight_VD):
        return reference.embedding(ids_N, weight_VD)
    if weight_VD.device.type != "cuda":
        raise dispatch.no_kernel("embedding", weight_VD)
    from suzuri.kernels.embedding import kernel

    return kernel.embedding(ids_N, weight_VD)
