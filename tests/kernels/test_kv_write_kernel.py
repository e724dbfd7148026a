"""kv_write's kernel: the bits of the reference, whatever the strides, and nothing else touched."""

import pytest
import torch

from suzuri.kernels.kv_write import cases, kv_write, reference
from tests.kernels.compare import Arguments, assert_same_bits, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, on_gpu
from tests.kernels.row_kernels import without_sync

pytest.importorskip("triton")
from suzuri.kernels.kv_write import kernel


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_bits_of_the_reference_in_every_launch(device: str, case: str, dtype: torch.dtype):
    for block, warps in ((1024, 4), (8, 1), (4096, 8)):
        given: Arguments = cases.build(case, dtype, generator(1, device))
        given["k_NUC"][0] = torch.nan
        expected = {name: value.clone() for name, value in given.items()}
        reference.kv_write(**expected)
        kernel.kv_write(**given, block=block, num_warps=warps)
        for name in ("k_pages_PTUC", "v_pages_PTUC"):
            assert_same_bits(given[name], expected[name], f"{name}, block {block}")


@in_interpreter
def test_rows_and_pages_where_they_lie():
    given: Arguments = cases.build("odd", torch.float32, generator(2))
    expected = {name: value.clone() for name, value in given.items()}
    reference.kv_write(**expected)
    fused = torch.stack([given["v_NUC"], given["k_NUC"]], 1)
    layers = torch.zeros(2, 2, 3, 7, 3, 3)
    views = [layers[i, 1].permute(0, 3, 2, 1) for i in range(2)]
    for view, name in zip(views, ("k_pages_PTUC", "v_pages_PTUC"), strict=True):
        view[...] = given[name]
    slots = torch.stack([given["slots_N"], given["slots_N"]], 1)[:, 0]
    kernel.kv_write(fused[:, 1], fused[:, 0], views[0], views[1], slots)
    for view, name in zip(views, ("k_pages_PTUC", "v_pages_PTUC"), strict=True):
        assert_same_bits(view.contiguous(), expected[name], name)
    assert (layers[:, 0] == 0).all()
    with pytest.raises(NotImplementedError, match="kv_write of pages with unequal strides"):
        kernel.kv_write(fused[:, 1], fused[:, 0], views[0], given["v_pages_PTUC"], slots)


@in_interpreter
def test_no_rows():
    given: Arguments = cases.build("tiny", torch.float32, generator(3))
    before = given["k_pages_PTUC"].clone()
    given |= {name: given[name][:0] for name in ("k_NUC", "v_NUC", "slots_N")}
    kernel.kv_write(**given)
    assert_same_bits(given["k_pages_PTUC"], before)


@on_gpu
def test_pages_beyond_two_gibibytes_and_no_waiting():
    """Offsets are 64 bits wide: the last page begins behind 2^31 elements."""
    rows = torch.randn(3, 8, 128, device="cuda").bfloat16()
    pages = torch.zeros(2, 16400, 128, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([16399 * 128 + 127, -1, 0], device="cuda")
    with without_sync():
        kv_write(rows, -rows, pages[0], pages[1], slots)
    assert_same_bits(pages[0, -1, -1], rows[0])
    assert_same_bits(pages[1, -1, -1], -rows[0])
    assert_same_bits(pages[0, 0, 0], rows[2])
    assert int((pages[0] != 0).sum()) == int((rows[[0, 2]] != 0).sum())
