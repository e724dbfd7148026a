"""embedding_norm's kernel: the bits of the kernels of its parts, one after the other."""

import pytest
import torch
from torch import Tensor

from suzuri.kernels.embedding_norm import cases, embedding_norm
from tests.kernels.compare import LOW, Arguments, assert_same_bits, changed, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import without_sync

pytest.importorskip("triton")
from suzuri.kernels.embedding import kernel as table_kernel
from suzuri.kernels.embedding_norm import kernel
from suzuri.kernels.rms_norm import kernel as norm_kernel


def parts(given: Arguments, num_rows: int | None = None) -> tuple[Tensor, Tensor]:
    weight, eps = given["weight_VD"], given["eps"]
    rows_ND = table_kernel.embedding(given["ids_N"], weight[:num_rows])
    h_ND = norm_kernel.rms_norm(rows_ND, given["first_D"], eps, weight.dtype)
    return h_ND, norm_kernel.rms_norm(h_ND, given["second_D"], eps, weight.dtype)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_same_bits_in_every_launch(device: str, case: str, dtype: torch.dtype):
    given = cases.build(case, dtype, generator(1, device))
    expected = parts(given)
    for warps in (1, 4, 8):
        with nan_filled():
            found = kernel.embedding_norm(**given, num_rows=None, num_warps=warps)
        for one, wanted in zip(found, expected, strict=True):
            assert_same_bits(one, wanted)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(pytest.param("cpu", dtype, marks=in_interpreter) for dtype in LOW),
        *(pytest.param("cuda", dtype, marks=on_gpu) for dtype in LOW),
    ],
)
@pytest.mark.parametrize("width", [21, 4096, 4099, 8192])
def test_wide_rows_and_ids_beyond_the_table(device: str, dtype: torch.dtype, width: int):
    g = generator(2, device)
    table, norms = torch.randn(2, 9, width, generator=g, device=device).to(dtype)
    given = {
        "ids_N": torch.tensor([3, 0, 7, 6, -1, 100], device=device),
        "weight_VD": table,
        "first_D": norms[0],
        "second_D": norms[1],
        "eps": 1e-6,
    }
    with nan_filled():
        found = kernel.embedding_norm(**given, num_rows=7)
    for one, wanted in zip(found, parts(given, 7), strict=True):
        assert one.isnan().any(1).tolist() == [False, False, True, False, True, True]
        assert one[[2, 4, 5]].isnan().all()
        assert_same_bits(one[[0, 1, 3]], wanted[[0, 1, 3]])


@in_interpreter
def test_what_is_not_covered_and_no_rows():
    given = cases.build("tiny", torch.float32, generator(3))
    numbers = (given["weight_VD"], given["first_D"], given["second_D"])
    assert kernel.covers(*numbers)
    assert not kernel.covers(numbers[0].double(), *numbers[1:])
    none = changed(given, ids_N=given["ids_N"][:0])
    assert [len(x) for x in kernel.embedding_norm(**none, num_rows=None)] == [0, 0]


@on_gpu
def test_the_op_runs_the_kernel_without_waiting():
    given = cases.build("inkling", torch.bfloat16, generator(4, "cuda"))
    expected = parts(given)
    with without_sync():
        found = embedding_norm(**given)
    for one, wanted in zip(found, expected, strict=True):
        assert_same_bits(one, wanted)
