"""Row selection from an embedding table."""

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.embedding import reference


def embedding(ids_N: Tensor, weight_VD: Tensor) -> Tensor:
    """Selects rows: out[n] = weight[ids[n]]; a select, never a sum, so the bits are the weight's.

    ids_N [N] int64 in [0, V) (IndexError otherwise; on a GPU, where the host does not wait for ids,
    a row of NaN), weight_VD [V, D] any float dtype. Returns [N, D]. The gradient of the weight is
    an ordered sum without atomics, at least fp32 inside.
    """
    if dispatch.use_reference(weight_VD):
        return reference.embedding(ids_N, weight_VD)
    if weight_VD.device.type != "cuda":
        raise dispatch.no_kernel("embedding", weight_VD)
    if exact.records_gradient(weight_VD):
        raise NotImplementedError(
            "embedding: no gradient on a GPU yet; call it under torch.inference_mode()"
        )
    from suzuri.kernels.embedding import kernel

    return kernel.embedding(ids_N, weight_VD)
