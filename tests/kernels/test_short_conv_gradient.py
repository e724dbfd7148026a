"""short_conv's backward, without state, against the reference's; its packed loops; and the kernel
that the backward has on a GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.short_conv import cases, gradient, short_conv
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
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu

NAMES = ("x_NC", "weight_CK")
LAYOUT = ("positions_N", "seq_ids_N", "seq_starts_S1")
OPTIONS: list[Arguments] = [
    *({"num_warps": 2}, {"num_warps": 8}, {"needs_x": False}, {"needs_weight": False}),
]
LENGTHS = (70, 0, 1, 2, 63, 0, 9)
KERNEL_DEVICES = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=in_interpreter),
        pytest.param("cuda", torch.float32, marks=on_gpu),
        pytest.param("cuda", torch.bfloat16, marks=on_gpu),
    ],
)


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


def on_kernel(given: Arguments, grad_NC: Tensor, **options: Any) -> dict[str, Tensor]:
    """The gradients by the kernel, in memory that was filled with NaN."""
    pytest.importorskip("triton")
    from suzuri.kernels.short_conv import kernel

    names = ("x_NC", "weight_CK", "seq_ids_N", "seq_starts_S1")
    with nan_filled():
        grads = kernel.short_conv_backward(
            **{name: given[name] for name in names}, grad_NC=grad_NC, **options
        )
    return {name: g for name, g in zip(NAMES, grads, strict=True) if g is not None}


def in_fp64(given: Arguments, grad_NC: Tensor) -> dict[str, Tensor]:
    x, weight, grad = (t.double().cpu() for t in (*(given[n] for n in NAMES), grad_NC))
    grads = gradient._backward(x, weight, given["positions_N"].cpu(), grad, True)
    return {name: g for name, g in zip(NAMES, grads, strict=True) if g is not None}


def _on(device: str, dtype: torch.dtype, given: Arguments) -> Arguments:
    return {n: t.to(device, dtype if n in NAMES else t.dtype) for n, t in given.items()}


def _check_near_fp64(found: dict[str, Tensor], given: Arguments, grad_NC: Tensor) -> None:
    dtype = given["x_NC"].dtype
    for name, expected in in_fp64(given, grad_NC).items():
        low = name == "x_NC" and dtype == torch.bfloat16
        assert found[name].dtype == (dtype if low else torch.float32)
        assert_near(found[name].cpu(), expected, 5e-3 if low else 1e-6, name)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_kernel_in_every_launch(device: str, case: str, dtype: torch.dtype):
    """Near fp64, and in equal bits with other warps and where less is needed."""
    given: Arguments = cases.build(case, dtype, generator(10, device))
    grad = torch.randn(given["x_NC"].shape, generator=generator(11, device), device=device)
    grad = grad.to(dtype)
    found = on_kernel(given, grad)
    _check_near_fp64(found, given, grad)
    for options in OPTIONS:
        for name, other in on_kernel(given, grad, **options).items():
            assert_same_bits(other, found[name], f"{name}, {options}")


@KERNEL_DEVICES
def test_kernel_over_several_tiles_and_sequences_alone(device: str, dtype: torch.dtype):
    """More rows and channels than a tile has, sequences across its edge and empty ones."""
    x = torch.randn(sum(LENGTHS), 70, generator=generator(12))
    weight = torch.randn(70, 4, generator=generator(13))
    grad = torch.randn(x.shape, generator=generator(14)).to(device, dtype)
    given = _on(device, dtype, _packed(x, weight, LENGTHS))
    found = on_kernel(given, grad)
    _check_near_fp64(found, given, grad)
    first = 0
    for length in LENGTHS:
        rows = slice(first, first + length)
        alone = _on(device, dtype, _packed(x[rows], weight, (length,)))
        grad_x = on_kernel(alone, grad[rows])["x_NC"]
        assert_same_bits(grad_x, found["x_NC"][rows], f"{length} rows")
        first = rows.stop


@KERNEL_DEVICES
def test_kernel_of_tensors_where_they_lie(device: str, dtype: torch.dtype):
    x = torch.randn(20, 30, generator=generator(15))
    weight = torch.randn(4, 30, generator=generator(16)).T
    grad = torch.randn(30, 20, generator=generator(17)).to(device, dtype).T
    given = _on(device, dtype, _packed(x, weight, (13, 7)))
    expected = on_kernel(given, grad.contiguous())
    wide = torch.zeros(20, 67, device=device, dtype=dtype)
    wide[:, 3:63:2] = given["x_NC"]
    strided = given | {"x_NC": wide[:, 3:63:2]}
    assert not any(t.is_contiguous() for t in (grad, *(strided[n] for n in NAMES)))
    for name, value in on_kernel(strided, grad).items():
        assert_same_bits(value, expected[name], name)
    of_sum = torch.ones((), device=device, dtype=dtype).expand(20, 30)
    for name, value in on_kernel(given, of_sum.contiguous()).items():
        assert_same_bits(on_kernel(given, of_sum)[name], value, name)


@in_interpreter
def test_kernel_without_rows():
    given = _packed(torch.zeros(0, 6), torch.ones(6, 4), (0, 0))
    found = on_kernel(given, torch.zeros(0, 6))
    assert found["x_NC"].shape == (0, 6)
    assert_same_bits(found["weight_CK"], torch.zeros(6, 4))


@in_interpreter
def test_the_op_runs_the_kernel(monkeypatch: pytest.MonkeyPatch):
    given: Arguments = cases.build("odd", torch.float32, generator(18))
    grad = torch.randn(given["x_NC"].shape, generator=generator(19))
    expected = on_kernel(given, grad)
    leaves = {name: given[name].requires_grad_() for name in NAMES}
    out = short_conv(**given)
    monkeypatch.setattr(dispatch, "use_cpu", lambda *_: False)
    monkeypatch.setattr(dispatch, "use_reference", lambda _: False)
    out.backward(grad)
    for name, leaf in leaves.items():
        assert_same_bits(grad_of(leaf), expected[name], name)


def test_kernel_refuses_fp64():
    given: Arguments = cases.build("odd", torch.float64, generator(20))
    with pytest.raises(NotImplementedError, match=r"backward of short_conv with torch\.float64"):
        on_kernel(given, given["x_NC"])


@on_gpu
@pytest.mark.parametrize("shape", [(9000, 6144), (100_000, 256), (70, 16_384)], ids=str)
def test_many_rows_in_equal_bits_and_without_a_sync(shape: tuple[int, ...]):
    from tests.kernels.row_kernels import without_sync

    g = generator(21, "cuda")
    rows, channels = shape
    lengths = (rows // 3, 1, rows - rows // 3 - 1)
    x = torch.randn(shape, generator=g, device="cuda").cpu()
    weight = torch.randn(channels, 4, generator=g, device="cuda").cpu()
    given = _on("cuda", torch.bfloat16, _packed(x, weight, lengths))
    leaves = [given[name].requires_grad_() for name in NAMES]
    leaves[1].grad_dtype = torch.float32
    grad = torch.randn(shape, generator=g, device="cuda").bfloat16()
    found: list[tuple[Tensor, ...]] = []
    for _ in range(3):
        out = short_conv(**given)
        with without_sync():
            found.append(torch.autograd.grad(out, leaves, grad))
    for again in found[1:]:
        for a, b in zip(again, found[0], strict=True):
            assert_same_bits(a, b)
    with torch.no_grad():
        wide = (leaves[0].double(), leaves[1].double(), given["positions_N"], grad.double())
        expected_x, expected_weight = gradient._backward(*wide, True)
    assert expected_x is not None
    assert expected_weight is not None
    assert_near(found[0][0], expected_x, 5e-3, "x")
    assert_near(found[0][1], expected_weight, 1e-5, "weight")
