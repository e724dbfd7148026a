"""Slots without a copy of their rows, shared experts that no id names, and rows of padding: in the
sort, in the experts, in the model's layer."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.moe_combine import moe_combine
from suzuri.kernels.moe_experts import cases, expert_outputs, moe_experts, reference
from suzuri.kernels.moe_permute import copy_rows, moe_permute, sort_slots
from suzuri.kernels.moe_permute.reference import all_slots
from suzuri.kernels.moe_permute.reference import moe_permute as by_sort
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    changed,
    device_cases,
    each_dtype,
    each_low_dtype,
    generator,
)
from tests.kernels.on_triton import in_interpreter, nan_filled, on_gpu
from tests.kernels.triton_interpreter import patch_loop_bounds

PER_TOKEN = ["x_ND", "experts_NK", "weights_NJ"]
SMALL = [name for name in cases.SHAPES if not name.startswith("inkling")]
WAYS = {"at once": {}, "in blocks": {"at_once": 0}, "by sort": {"at_once": 0, "in_blocks": 0}}
DEVICES = [pytest.param("cpu", marks=in_interpreter), pytest.param("cuda", marks=on_gpu)]


def drawn(tokens: int, routed: int, k: int, device: str = "cpu") -> Tensor:
    scores = torch.rand(tokens, routed, generator=generator(1))
    return scores.argsort(-1)[:, :k].sort(-1).values.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("real", [None, 0, 1, 17, 40])
def test_the_kernel_sorts_shared_slots_and_padding(
    monkeypatch: pytest.MonkeyPatch, device: str, way: str, real: int | None
):
    pytest.importorskip("triton")
    from suzuri.kernels.moe_permute import kernel

    patch_loop_bounds(monkeypatch)
    monkeypatch.setattr(kernel, "BLOCK", 128)
    experts = drawn(40, 9, 3, device)
    if real not in (None, 40):
        experts[real:] = 1 << 40  # what is written there is nobody's business
    rows_1 = None if real is None else torch.tensor([real], device=device)
    x = torch.randn(40, 5, generator=generator(2)).to(device)
    for num_slots, num_experts in ((3, 9), (5, 11)):
        expected = by_sort(x, all_slots(experts, num_slots, num_experts, rows_1), num_experts)
        assert int(expected[3][-1]) == num_slots * (40 if real is None else real)
        options: dict[str, Any] = {"num_slots": num_slots, "num_rows_1": rows_1, **WAYS[way]}
        with nan_filled():
            found = kernel.moe_permute(x, experts, num_experts, **options)
            alone = kernel.moe_permute(None, experts, num_experts, **options)
            copied = kernel.copy_rows(x, alone[1:])
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)
        for one, other in zip(alone[1:], expected[1:], strict=True):
            assert_same_bits(one, other)
        assert_same_bits(copied, expected[0])


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_the_order_alone_is_that_of_the_copy(device: str, case: str, dtype: torch.dtype):
    given = cases.build(case, dtype, generator(1, device))
    x, experts = given["x_ND"], given["experts_NK"]
    options = {"num_experts": len(given["down_EDF"]), "num_slots": given["weights_NJ"].shape[1]}
    rows_MD, permutation = moe_permute(x, experts, **options)
    alone = sort_slots(x, experts, **options)
    for one, other in zip(alone, permutation, strict=True):
        assert_same_bits(one, other)
    assert_same_bits(copy_rows(x, alone), rows_MD)
    assert copy_rows(x[:0], sort_slots(x[:0], experts[:0], **options)).shape == (0, x.shape[1])


@each_low_dtype
@pytest.mark.parametrize("case", SMALL)
def test_rows_are_copied_or_read_where_they_are(
    monkeypatch: pytest.MonkeyPatch, case: str, dtype: torch.dtype
):
    given = cases.build(case, dtype, generator(3))
    found: list[Tensor] = []
    for most in (0, 1 << 20):
        monkeypatch.setattr(reference, "GATHERED", most)
        with dispatch.force("reference"):
            found.append(moe_experts(**given))
    assert_same_bits(found[0], found[1])
    assert_same_bits(moe_experts(**given), found[0])


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(SMALL), indirect=["device"])
@pytest.mark.parametrize("gathered", [0, 96])
def test_padding_changes_no_row_and_is_zero(
    monkeypatch: pytest.MonkeyPatch, device: str, case: str, gathered: int, dtype: torch.dtype
):
    monkeypatch.setattr(reference, "GATHERED", gathered)
    given: Arguments = cases.build(case, dtype, generator(4, device))
    tokens = len(given["x_ND"])
    whole = moe_experts(**given)
    for real in (0, 1, tokens - 1, tokens):
        rows_1 = torch.tensor([real], device=device)
        found = moe_experts(**given, num_rows_1=rows_1)
        assert_same_bits(found[:real], whole[:real])
        assert_same_bits(found[real:], torch.zeros_like(found[real:]))
        outputs = expert_outputs(**given, num_rows_1=rows_1)
        y_MD, order, weights = outputs
        assert_same_bits(moe_combine(y_MD, order, weights, out_dtype=dtype), found)
        assert int(order.offsets_E1[-1]) == real * weights.shape[1]
        assert not y_MD[int(order.offsets_E1[-1]) :].any()


@each_low_dtype
def test_an_expert_whom_only_padding_wants_is_not_read(dtype: torch.dtype):
    given = cases.build("tiny", dtype, generator(5))
    given["experts_NK"][:] = torch.tensor([1, 3])
    given["experts_NK"][4:] = torch.tensor([0, 6])
    expected = moe_experts(**changed(given, **{name: given[name][:4] for name in PER_TOKEN}))
    for name in ("gate_up_EFD", "down_EDF"):
        given[name][[0, 6]] = float("nan")
    given["x_ND"][4:] = float("nan")
    found = moe_experts(**given, num_rows_1=torch.tensor([4]))
    assert_same_bits(found[:4], expected)
    assert not found[4:].any()
    order = expert_outputs(**given, num_rows_1=torch.tensor([4])).permutation
    counts = [end - begin for begin, end in pairwise(order.offsets_E1.tolist())]
    assert counts == [0, 4, 0, 4, 0, 0, 0, 0, 4, 4]


def test_padding_has_no_gradient():
    given = cases.build("tiny", torch.float32, generator(6))
    given["x_ND"].requires_grad_()
    rows_1 = torch.tensor([4])
    with pytest.raises(ValueError, match="padding"):
        moe_experts(**given, num_rows_1=rows_1)
    with pytest.raises(ValueError, match="padding"):
        moe_permute(given["x_ND"], given["experts_NK"], num_experts=10, num_rows_1=rows_1)


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_together(monkeypatch: pytest.MonkeyPatch, device: str):
    """Sort, both products and the sum as a GPU runs them, of numbers whose sums are exact."""
    pytest.importorskip("triton")
    from suzuri.kernels.grouped_gemm import kernel as grouped
    from suzuri.kernels.moe_combine import kernel as combine
    from suzuri.kernels.moe_permute import kernel as permute
    from suzuri.kernels.swiglu import kernel as swiglu

    patch_loop_bounds(monkeypatch)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    g, (tokens, d, f, routed, k, slots) = generator(7), (7, 16, 8, 6, 2, 3)
    x = torch.randint(-2, 3, (tokens, d), generator=g).to(device, dtype)
    gate_up = torch.randint(-2, 3, (routed + 1, 2 * f, d), generator=g).to(device, dtype) / 8
    down = torch.randint(-2, 3, (routed + 1, d, f), generator=g).to(device, dtype)
    weights = torch.rand(tokens, slots, generator=g).to(device)
    experts = drawn(tokens, routed, k, device)

    def run(real: int, gathers: bool) -> Tensor:
        rows_1 = torch.tensor([real], device=device)
        options = {"num_slots": slots, "num_rows_1": rows_1}
        with nan_filled():
            rows, *order = permute.moe_permute(x, experts, routed + 1, **options)
            given = {"order_M": order[0], "num_slots": slots} if gathers else {}
            hidden = grouped.grouped_gemm(
                x if gathers else rows, gate_up, order[2], dtype, swiglu=True, **given
            )
            # A sum of bf16 hidden units is not exact: halves are.
            y = grouped.grouped_gemm((hidden * 2).round() / 2, down, order[2], dtype)
            return combine.moe_combine(y, order[1], weights, dtype)

    rows, *order = permute.moe_permute(x, experts, routed + 1, num_slots=slots)
    both = grouped.grouped_gemm(rows, gate_up, order[2], torch.float32)
    hidden = (swiglu.swiglu(both, dtype) * 2).round() / 2
    expected = grouped.grouped_gemm(hidden, down, order[2], dtype)
    expected = combine.moe_combine(expected, order[1], weights, dtype)
    for real in (0, 3, 7):
        for gathers in (False, True):
            found = run(real, gathers)
            assert_same_bits(found[:real], expected[:real])
            assert not found[real:].any()
