"""embedding_norm is the composition of its parts, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels.embedding import embedding
from suzuri.kernels.embedding_norm import cases, embedding_norm
from suzuri.kernels.rms_norm import rms_norm
from tests.kernels.compare import (
    assert_same_bits,
    changed,
    check_gradients,
    device_cases,
    each_dtype,
    generator,
)


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_its_parts(device: str, case: str, dtype: torch.dtype):
    given = cases.build(case, dtype, generator(1, device))
    rows_ND = embedding(given["ids_N"], given["weight_VD"])
    h_ND = rms_norm(rows_ND, given["first_D"], given["eps"])
    x_ND = rms_norm(h_ND, given["second_D"], given["eps"])
    for found, wanted in zip(embedding_norm(**given), (h_ND, x_ND), strict=True):
        assert_same_bits(found, wanted)


def test_gradients():
    given = cases.build("tiny", torch.float64, generator(2))

    def run(**arguments: Any) -> Tensor:
        return torch.cat(embedding_norm(**arguments), 1)

    check_gradients(run, given, ["weight_VD", "first_D", "second_D"])


def test_padding_rows_are_refused():
    given = cases.build("tiny", torch.float32, generator(3))
    with pytest.raises(IndexError, match="id 30 is not in"):
        embedding_norm(**changed(given, ids_N=torch.tensor([1, 30])), num_rows=30)
