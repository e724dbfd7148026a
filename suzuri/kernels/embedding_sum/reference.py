"""Select every row, then one fixed tree over the bins."""

from torch import Tensor

from suzuri.kernels import exact
from suzuri.kernels.embedding import embedding


def embedding_sum(ids_NB: Tensor, weight_VD: Tensor) -> Tensor:
    rows_NBD = embedding(ids_NB.reshape(-1), weight_VD).unflatten(0, ids_NB.shape)
    return exact.tree_sum(exact.widen(rows_NBD).transpose(-1, -2))
