"""The chunked head's own backward, its entropy, and many targets of one row."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.token_logprobs import (
    cases,
    gradient,
    token_logprobs,
    token_logprobs_and_entropy,
)
from tests.kernels.backward import (
    BOUND,
    assert_near,
    backward_cases,
    check_backward,
    check_finite_differences,
)
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    changed,
    each_dtype,
    each_low_dtype,
    generator,
    leaves,
    widened,
)

TRAINED = ["h_ND", "unembed_VD"]
SMALL_CASES = backward_cases(name for name in cases.SHAPES if not name.startswith("inkling"))
TEMPERED = pytest.mark.parametrize("tempered", [False, True], ids=["raw", "tempered"])


def arguments_of(
    case: str, dtype: torch.dtype, seed: int, device: str = "cpu", *, tempered: bool = False
) -> Arguments:
    arguments: Arguments = cases.build(case, dtype, generator(seed, device))
    if tempered:
        rows = len(arguments["h_ND"])
        arguments["temperature_N"] = torch.linspace(0.6, 1.9, rows, device=device)
    return arguments


def entropy(**arguments: Any) -> Tensor:
    return token_logprobs_and_entropy(**arguments)[1]


def mixed(**arguments: Any) -> Tensor:
    """Both outputs in one loss per row."""
    logprobs, of_row = token_logprobs_and_entropy(**arguments)
    logprobs = logprobs if logprobs.dim() == 1 else logprobs[:, 0] - 2 * logprobs[:, -1]
    return logprobs + 0.3 * of_row


def some_targets(rows: int, vocabulary: int, device: str = "cpu") -> Tensor:
    """Four of each row: the first and last id, one in the middle, and the same one again."""
    middle = torch.randint(vocabulary, (rows, 1), generator=generator(rows, device), device=device)
    ends = torch.tensor([[0, vocabulary - 1]], device=device).expand(rows, 2)
    return torch.cat([ends, middle, middle], 1)


@TEMPERED
@pytest.mark.parametrize(("device", "case", "dtype"), backward_cases(cases.SHAPES))
def test_against_the_reference(device: str, case: str, dtype: torch.dtype, tempered: bool):
    arguments = arguments_of(case, dtype, 1, device, tempered=tempered)
    # A sum in order over 6144 fp32 terms leaves a logit of 77 up to 2e-4 off, and a probability by
    # as much of itself; the products of the backward pass sum in another order.
    wide = arguments["h_ND"].shape[1] > 1000
    check_backward(
        token_logprobs, arguments, TRAINED, BOUND | {torch.float32: 2e-4} if wide else BOUND
    )


@TEMPERED
@pytest.mark.parametrize("op", [entropy, mixed])
@pytest.mark.parametrize(("device", "case", "dtype"), SMALL_CASES)
def test_entropy_and_many_targets_against_the_reference(
    device: str, case: str, dtype: torch.dtype, op: Any, tempered: bool
):
    arguments = arguments_of(case, dtype, 2, device, tempered=tempered)
    # Probabilities of which more than one counts.
    arguments["scale"] = 0.05
    rows, vocabulary = len(arguments["h_ND"]), len(arguments["unembed_VD"])
    arguments["targets_N"] = some_targets(rows, vocabulary, device)
    check_backward(op, arguments, TRAINED)


def test_finite_differences():
    g = generator(3)
    arguments: Arguments = {
        "h_ND": torch.randn(3, 4, generator=g, dtype=torch.float64),
        "unembed_VD": torch.randn(5, 4, generator=g, dtype=torch.float64),
        "targets_N": torch.tensor([[0, 4], [3, 3], [4, 1]]),
        "scale": 0.7,
        "temperature_N": torch.tensor([0.5, 1.0, 2.0]),
    }
    check_finite_differences(token_logprobs, arguments, TRAINED)
    check_finite_differences(entropy, arguments, TRAINED)
    check_finite_differences(mixed, arguments, TRAINED)


@each_dtype
@TEMPERED
def test_entropy_and_logprobs_of_many_targets_are_those_of_all_logits(
    tempered: bool, dtype: torch.dtype
):
    arguments = arguments_of("odd", dtype, 4, tempered=tempered)
    arguments["scale"] = 0.05
    one = token_logprobs(**arguments)
    targets = torch.stack([arguments["targets_N"], torch.tensor([2047, 2048, 4096, 0, 7])], 1)
    found, of_rows = token_logprobs_and_entropy(**changed(arguments, targets_N=targets))
    assert found.shape == (5, 2)
    assert_same_bits(found[:, 0], one)
    again = token_logprobs(**changed(arguments, targets_N=targets[:, 1]))
    assert_same_bits(found[:, 1], again)
    wide = widened(arguments)
    logits = wide["h_ND"] @ wide["unembed_VD"].T * 0.05
    if tempered:
        logits = logits / wide["temperature_N"][:, None]
    logprobs = torch.log_softmax(logits, -1)
    expected = -(logprobs.exp() * logprobs).sum(-1)
    assert (of_rows.double() - expected).abs().max() < 1e-5
    assert_near(found, logprobs.gather(1, targets), 1e-6, "log-probs")


def test_entropy_of_one_id_and_of_equal_ones():
    h, targets = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    for vocabulary in (1, 2047, 2049, 5000):
        found = entropy(h_ND=h, unembed_VD=torch.ones(vocabulary, 3), targets_N=targets, scale=2.0)
        assert torch.allclose(found, torch.tensor(float(vocabulary)).log().expand(2), atol=1e-6)
    sure = torch.zeros(4000, 3)
    sure[3000] = 1e4
    assert not entropy(h_ND=h, unembed_VD=sure, targets_N=targets, scale=1.0).any()


@each_low_dtype
def test_the_backward_holds_the_logits_of_some_ids_at_a_time(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
):
    """The same gradients however few logits may exist at one time, and never more than those."""
    arguments = arguments_of("odd", dtype, 5)
    seen: list[int] = []
    grad_logits = gradient._grad_logits

    def noting(log_NB: Tensor, *rest: Any) -> Tensor:
        seen.append(log_NB.numel())
        return grad_logits(log_NB, *rest)

    def run() -> list[Tensor]:
        given = leaves(arguments, TRAINED)
        token_logprobs(**given).backward(torch.linspace(-1, 2, 5))
        return [given[name].grad for name in TRAINED]

    monkeypatch.setattr(gradient, "_grad_logits", noting)
    expected = run()
    assert seen == [5 * 4099]
    monkeypatch.setitem(gradient.MOST_LOGITS, "cpu", 5 * 2048)
    for name, a, b in zip(TRAINED, run(), expected, strict=True):
        assert_near(a, b, 1e-6 if dtype == torch.float32 else 1e-2, name)
    assert seen[1:] == [5 * 2048, 5 * 2048, 5 * 3]


def test_a_row_has_its_gradient_whatever_else_is_there():
    arguments = arguments_of("odd", torch.float32, 6)
    among = leaves(arguments, TRAINED)
    token_logprobs(**among).sum().backward()
    part = {name: arguments[name][3:4] for name in ("h_ND", "targets_N")}
    alone = leaves(changed(arguments, **part), TRAINED)
    token_logprobs(**alone).sum().backward()
    assert_near(alone["h_ND"].grad, among["h_ND"].grad[3:4], 1e-6, "h")


def test_outputs_that_no_loss_uses():
    arguments = arguments_of("tiny", torch.float32, 7)
    found, expected = leaves(arguments, TRAINED), leaves(arguments, TRAINED)
    token_logprobs_and_entropy(**found)[0].sum().backward()
    token_logprobs(**expected).sum().backward()
    for name in TRAINED:
        assert_same_bits(found[name].grad, expected[name].grad, name)


def test_no_rows_and_no_targets():
    arguments = arguments_of("tiny", torch.bfloat16, 8)
    part = {name: arguments[name][:0] for name in ("h_ND", "targets_N")}
    given = leaves(changed(arguments, **part), TRAINED)
    logprobs, of_rows = token_logprobs_and_entropy(**given)
    (logprobs.sum() + of_rows.sum()).backward()
    assert_same_bits(given["unembed_VD"].grad, torch.zeros(301, 64).bfloat16())
    assert given["h_ND"].grad.shape == (0, 64)
    none = changed(arguments, targets_N=torch.zeros(9, 0, dtype=torch.int64))
    assert token_logprobs(**none).shape == (9, 0)
    with dispatch.force("reference"):
        assert_same_bits(entropy(**none), entropy(**arguments))


@pytest.mark.parametrize("shape", [(), (8,), (9, 2, 1)])
def test_targets_of_another_shape_are_refused(shape: tuple[int, ...]):
    arguments = arguments_of("tiny", torch.float32, 9)
    arguments["targets_N"] = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match="token_logprobs: targets"):
        token_logprobs(**arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_padding_rows_are_not_there_and_get_no_gradient(dtype: torch.dtype) -> None:
    """As a slice of the weight, but its gradient comes unrounded."""
    h_ND = torch.randn(5, 16, generator=generator(1), dtype=torch.float64).to(dtype)
    weight = torch.nn.Parameter(
        torch.randn(700, 16, generator=generator(2), dtype=torch.float64).to(dtype)
    )
    weight.grad_dtype = torch.promote_types(dtype, torch.float32)
    targets_N = torch.tensor([0, 599, 3, 3, 270])
    found_N = token_logprobs(h_ND, weight, targets_N, scale=0.5, num_rows=600)
    plain_N = token_logprobs(h_ND, weight.detach()[:600], targets_N, scale=0.5)
    assert_same_bits(found_N, plain_N)
    found_N.sum().backward()
    whole = torch.nn.Parameter(weight.detach()[:600].to(weight.grad_dtype))
    token_logprobs(h_ND.to(whole.dtype), whole, targets_N, scale=0.5).sum().backward()
    assert weight.grad is not None
    assert whole.grad is not None
    assert weight.grad.dtype == whole.dtype
    assert not weight.grad[600:].any()
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-12
    assert_near(weight.grad[:600], whole.grad, bound, "weight")
    assert bool((weight.grad != weight.grad.to(torch.bfloat16)).any())
