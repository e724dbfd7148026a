"""embedding's kernel: rows of the table, bit for bit; NaN for an id that it does not have."""

import pytest
import torch

from suzuri.kernels.embedding import cases, embedding
from tests.kernels.compare import LOW, Arguments, assert_same_bits, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import assert_rows_alone_on_gpu, without_sync

pytest.importorskip("triton")
from suzuri.kernels.embedding import kernel


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_rows_of_the_table_in_every_launch(device: str, case: str, dtype: torch.dtype):
    given: Arguments = cases.build(case, dtype, generator(1, device))
    expected = given["weight_VD"][given["ids_N"]]
    for block, warps in ((2048, 4), (16, 1), (8192, 8)):
        with nan_filled():
            found = kernel.embedding(**given, block=block, num_warps=warps)
        assert_same_bits(found, expected, f"block {block}")


@in_interpreter
def test_ids_beyond_the_table_strided_tables_and_no_rows():
    table = torch.randn(7, 12, generator=generator(2))
    ids = torch.tensor([4, -1, 5, 2**40, 0])
    found = kernel.embedding(ids, table[:5, ::2])
    assert_same_bits(found[[0, 4]], table[[4, 0], ::2])
    assert found[1:4].isnan().all()
    assert kernel.embedding(ids[:0], table).shape == (0, 12)
    with pytest.raises(NotImplementedError, match=r"embedding of torch\.float64"):
        kernel.embedding(ids, table.double())


@on_gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rows_alone_and_no_waiting(dtype: torch.dtype):
    assert_rows_alone_on_gpu("embedding", dtype)
    given: Arguments = cases.build("tiny", dtype, generator(3, "cuda"))
    given["ids_N"][2] = 40
    with without_sync():
        found = embedding(**given)
    assert found[2].isnan().all()
    assert found.isnan().any(1).sum() == 1
