"""route: the router and the sort of its choice in one launch have the bits of the two."""

from typing import Any

import pytest
import torch

from suzuri.kernels.moe_permute.reference import all_slots
from suzuri.kernels.moe_permute.reference import moe_permute as by_sort
from suzuri.kernels.router import cases, route, router
from tests.kernels.compare import Arguments, assert_same_bits, changed, each_low_dtype, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu


def check(found: tuple[Any, ...], own: tuple[torch.Tensor, ...], rows_1: torch.Tensor | None):
    """`own`: by the router's kernel alone."""
    for one, other in zip(found[:3], own, strict=True):
        assert_same_bits(one, other)
    slots, num_experts = own[1].shape[1], own[2].shape[1]
    ids_NJ = all_slots(own[0], slots, num_experts, rows_1)
    expected = by_sort(own[2], ids_NJ, num_experts)[1:]
    assert found[3] is not None
    for one, other in zip(found[3], expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_one_launch_has_the_bits_of_two(
    device: str, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("triton")
    from suzuri.kernels.router import kernel

    monkeypatch.setattr(kernel, "MOST_ROWS", 64)  # more than pays
    whole: Arguments = cases.build(case, dtype, generator(1, device))
    for tokens in (1, 2, len(whole["x_ND"])):
        arguments = changed(whole, x_ND=whole["x_ND"][:tokens])
        own = kernel.router(**arguments)
        for real in (None, 0, 1, tokens):
            rows_1 = None if real is None else torch.tensor([real], device=device)
            with nan_filled():
                check(kernel.route(**arguments, num_rows_1=rows_1), own, rows_1)
        # Twice the same expert, and experts of which nobody thought.
        given = own[0].flip(0).contiguous()
        given[0] = own[0][0]
        replayed: Arguments = {**arguments, "given_NK": given}
        check(kernel.route(**replayed), kernel.router(**replayed), None)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(["tiny"]))
def test_one_expert_with_all_rows_and_counters_back_at_zero(
    device: str, case: str, dtype: torch.dtype
):
    pytest.importorskip("triton")
    from suzuri.kernels.router import kernel

    arguments: Arguments = cases.build(case, dtype, generator(2, device))
    arguments["x_ND"] = arguments["x_ND"][: kernel.MOST_ROWS]
    arguments["bias_R"] = torch.tensor([-9.0, 9, -9, -9, -9, 8, -9, -9], device=device)
    own = kernel.router(**arguments)
    assert (own[0] == torch.tensor([1, 5], device=device)).all()
    for _ in range(3):
        check(kernel.route(**arguments), own, None)
    assert not kernel._tickets[own[0].device].counters.any()


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(["tiny"]))
def test_too_many_rows_or_none_are_left_to_the_sort(
    monkeypatch: pytest.MonkeyPatch, device: str, case: str, dtype: torch.dtype
):
    pytest.importorskip("triton")
    from suzuri.kernels.router import kernel

    arguments: Arguments = cases.build(case, dtype, generator(3, device))
    assert kernel.route(**changed(arguments, x_ND=arguments["x_ND"][:0]))[3] is None
    monkeypatch.setattr(kernel, "MOST_ROWS", len(arguments["x_ND"]) - 1)
    found, own = kernel.route(**arguments), kernel.router(**arguments)
    assert found[3] is None
    for one, other in zip(found[:3], own, strict=True):
        assert_same_bits(one, other)


@each_low_dtype
def test_elsewhere_it_is_the_router(dtype: torch.dtype):
    arguments: Arguments = cases.build("odd", dtype, generator(4))
    *found, order = route(**arguments)
    assert order is None
    for one, other in zip(found, router(**arguments), strict=True):
        assert_same_bits(one, other)
    with pytest.raises(ValueError, match="router: top"):
        route(**changed(arguments, num_experts_per_token=8))


@in_interpreter
@pytest.mark.parametrize(("routed", "shared"), [(64, 2), (48, 2), (12, 2), (5, 1)])
def test_a_token_of_nan_has_experts_and_harms_no_neighbour(routed: int, shared: int):
    """Also where padded ids are larger than the number of all experts."""
    from suzuri.kernels.router import kernel

    g, top = generator(5), 4
    x = torch.randn(3, 32, generator=g)
    weight = torch.randn(routed + shared, 32, generator=g)
    rest = (weight, torch.zeros(routed), torch.ones(1), top, 1.0)
    sound = kernel.router(x, *rest)
    x[1] = float("nan")
    experts, weights, _, sorted_ = kernel.route(x, *rest)
    assert experts[1].tolist() == [0, 1, 2, 3], "as the reference ranks NaN"
    for row in (0, 2):
        assert_same_bits(experts[row], sound[0][row])
        assert_same_bits(weights[row], sound[1][row])
    assert sorted_ is not None
    order, inverse, offsets = sorted_
    slots = 3 * (top + shared)
    assert sorted(order.tolist()) == list(range(slots)) == order[inverse].tolist()
    assert int(offsets[-1]) == slots


@on_gpu
def test_a_graph_repeats_it():
    from suzuri.kernels.router import kernel

    arguments: Arguments = cases.build("inkling", torch.bfloat16, generator(5, "cuda"))
    rows_1 = torch.tensor([64], device="cuda")
    arguments["num_rows_1"] = rows_1
    route(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = route(**arguments)
    assert found[3] is not None
    for step in range(200):
        rows_1.fill_(step % 65)
        arguments["x_ND"].normal_()
        graph.replay()
        plain = {name: value for name, value in arguments.items() if name != "num_rows_1"}
        check(found, kernel.router(**plain), rows_1)
