"""Row selection from an embedding table."""

from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.embedding import reference


def embedding(ids_N: Tensor, weight_VD: Tensor) -> Tensor:
    """Selects rows: out[n] = weight[ids[n]]; a select, never a sum, so the bits are the weight's.

    ids_N [N] int64 in [0, V) (IndexError otherwise), weight_VD [V, D] any float dtype. Returns
    [N, D]. The gradient of the weight is an ordered sum without atomics, at least fp32 inside.
    """
    if dispatch.use_reference(weight_VD):
        return reference.embedding(ids_N, weight_VD)
    raise dispatch.no_kernel("embedding", weight_VD)
