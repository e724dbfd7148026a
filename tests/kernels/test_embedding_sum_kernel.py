"""embedding_sum's kernel: the tree of the reference, bit for bit."""

import pytest
import torch

from suzuri.kernels.embedding_sum import cases, embedding_sum, reference
from tests.kernels.compare import LOW, Arguments, assert_same_bits, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import assert_rows_alone_on_gpu, without_sync

pytest.importorskip("triton")
from suzuri.kernels.embedding_sum import kernel


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_bits_of_the_reference_in_every_launch(device: str, case: str, dtype: torch.dtype):
    given: Arguments = cases.build(case, dtype, generator(1, device))
    expected = reference.embedding_sum(**given)
    for elements, warps in ((4096, 4), (128, 1), (16384, 8)):
        with nan_filled():
            found = kernel.embedding_sum(**given, elements=elements, num_warps=warps)
        assert_same_bits(found, expected, f"{elements} elements")


@in_interpreter
def test_ids_beyond_the_table_one_bin_and_no_rows():
    table = torch.randn(6, 10, generator=generator(2))
    ids = torch.tensor([[0, 1, 5], [3, 6, 2], [2, 2, 2]])
    found = kernel.embedding_sum(ids, table[:, ::2])
    assert found[1].isnan().all()
    rows = table[:, ::2]
    assert_same_bits(found[0], (rows[0] + rows[5]) + rows[1])
    assert_same_bits(kernel.embedding_sum(ids[:, :1], table), table[ids[:, 0]])
    assert kernel.embedding_sum(ids[:0], table).shape == (0, 10)
    with pytest.raises(NotImplementedError, match=r"embedding_sum of torch\.float64"):
        kernel.embedding_sum(ids, table.double())


@on_gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rows_alone_and_no_waiting(dtype: torch.dtype):
    assert_rows_alone_on_gpu("embedding_sum", dtype)
    given: Arguments = cases.build("odd", dtype, generator(3, "cuda"))
    with without_sync():
        found = embedding_sum(**given)
    assert_same_bits(found, reference.embedding_sum(**given))
