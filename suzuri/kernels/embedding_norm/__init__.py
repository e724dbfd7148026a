"""The beginning of the decoder: rows of the table, their norm, and the norm of that."""

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.embedding_norm import reference

MOST_ROWS = 512
"""One launch saves launches; a program that walks a whole row waits more than three that do not."""


def embedding_norm(
    ids_N: Tensor,
    weight_VD: Tensor,
    first_D: Tensor,
    second_D: Tensor,
    *,
    eps: float,
    num_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(h, the norm of h with `second_D`), h the norm of weight[ids] with `first_D`; both [N, D].

    ids_N, weight_VD and num_rows as in `embedding`, with its errors. By definition the composition
    of `embedding` and `rms_norm` twice, with the roundings of each. Gradients: the weights.
    """
    given = (ids_N, weight_VD, first_D, second_D, eps, num_rows)
    is_recorded = exact.records_gradient(weight_VD, first_D, second_D)
    if is_recorded or dispatch.use_reference(weight_VD) or weight_VD.device.type != "cuda":
        return reference.embedding_norm(*given)
    from suzuri.kernels.embedding_norm import kernel

    if ids_N.shape[0] > MOST_ROWS or not kernel.covers(weight_VD, first_D, second_D):
        return reference.embedding_norm(*given)
    return kernel.embedding_norm(*given)
