"""short_conv's backward, without state, against the reference's; and its packed loops."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.short_conv import cases, short_conv
from tests.kernels.backward import (
    assert_near,
    backward,
    backward_cases,
    check_backward,
    check_finite_differences,
    check_no_rows,
    grad_of,
)
from tests.kernels.compare import Arguments, assert_same_bits, each_low_dtype, generator, threads

NAMES = ("x_NC", "weight_CK")
LAYOUT = ("positions_N", "seq_ids_N", "seq_starts_S1")


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_as_the_reference(device: str, case: str, dtype: torch.dtype):
    check_backward(short_conv, cases.build(case, dtype, generator(1, device)), NAMES)


@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(["tiny"]))
def test_a_wider_weight(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(2, device))
    arguments["weight_CK"] = arguments["weight_CK"].to(torch.promote_types(dtype, torch.float32))
    check_backward(short_conv, arguments, NAMES)


def test_finite_differences():
    arguments: Arguments = cases.build("odd", torch.float64, generator(3))
    arguments |= {"x_NC": arguments["x_NC"][:, :2], "weight_CK": arguments["weight_CK"][:2]}
    check_finite_differences(short_conv, arguments, NAMES)


@each_low_dtype
def test_no_rows(dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(4))
    none = {name: arguments[name][:0] for name in ("x_NC", "positions_N", "seq_ids_N")}
    check_no_rows(short_conv, arguments | none | {"seq_starts_S1": torch.zeros(1).long()}, NAMES)


@each_low_dtype
@pytest.mark.parametrize("case", ["tiny", "odd", "one_tap", "five_taps"])
def test_packed_loops_have_the_bits_of_the_reference(case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(5))
    x, weight = arguments["x_NC"], arguments["weight_CK"]
    x[1, :4], x[2, 1] = torch.tensor([float("inf"), -0.0, 1e-42, 3e38]), float("nan")
    weight[0, 0], weight[2] = -0.0, -weight[2]
    with dispatch.force("reference"):
        expected = short_conv(**arguments)
    assert_same_bits(short_conv(**arguments).nan_to_num(7.0), expected.nan_to_num(7.0))


def test_threads_and_packing():
    """Threads change no bit. A sequence alone has the bits of its rows among others, in its output
    and in its gradient; and the weight's gradient is the sum of those of the sequences."""
    lengths, channels = (700, 1, 2, 1500, 0, 40), 96
    x = torch.randn(sum(lengths), channels, generator=generator(6))
    weight = torch.randn(channels, 4, generator=generator(7))
    whole: list[dict[str, Any]] = []
    for count in (1, 2):
        with threads(count):
            out, grads = backward(short_conv, _packed(x, weight, lengths), NAMES)
            whole.append(grads | {"out": out})
    for name, value in whole[0].items():
        assert_same_bits(whole[1][name], value, name)
    total, first = torch.zeros_like(weight), 0
    upstream = torch.randn(x.shape, generator=generator(99)).bfloat16().float()
    for length in lengths:
        rows = slice(first, first + length)
        leaves = [x[rows].clone().requires_grad_(), weight.clone().requires_grad_()]
        layout = _packed(x[rows], weight, (length,))
        out = short_conv(*leaves, *(layout[name] for name in LAYOUT))
        out.backward(upstream[rows])
        assert_same_bits(out.detach(), whole[0]["out"][rows])
        assert_same_bits(grad_of(leaves[0]), whole[0]["x_NC"][rows])
        total, first = total + grad_of(leaves[1]), rows.stop
    assert_near(total, whole[0]["weight_CK"], 1e-6, "weight")


def _packed(x: Tensor, weight: Tensor, lengths: tuple[int, ...]) -> Arguments:
    lengths_S = torch.tensor(lengths)
    starts = torch.cat([torch.zeros(1).long(), lengths_S.cumsum(0)])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths_S)
    positions = torch.arange(x.shape[0]) - starts[ids]
    values = (positions, ids, starts)
    return {"x_NC": x, "weight_CK": weight} | dict(zip(LAYOUT, values, strict=True))
