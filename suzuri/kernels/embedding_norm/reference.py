"""The parts, one after the other."""

from torch import Tensor

from suzuri.kernels.embedding import embedding
from suzuri.kernels.rms_norm import rms_norm


def embedding_norm(
    ids_N: Tensor,
    weight_VD: Tensor,
    first_D: Tensor,
    second_D: Tensor,
    eps: float,
    num_rows: int | None,
) -> tuple[Tensor, Tensor]:
    h_ND = rms_norm(embedding(ids_N, weight_VD, num_rows=num_rows), first_D, eps)
    return h_ND, rms_norm(h_ND, second_D, eps)
