"""token_logprobs' kernels: the bits of log_softmax of the whole logits, without them."""

import pytest
import torch

from suzuri.kernels import dispatch
from suzuri.kernels.token_logprobs import cases, token_logprobs, token_logprobs_and_entropy
from tests.kernels.compare import Arguments, assert_same_bits, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu

pytest.importorskip("triton")
from suzuri.kernels.log_softmax.kernel import log_softmax
from suzuri.kernels.matmul.kernel import ours
from suzuri.kernels.token_logprobs import kernel

ERROR = 2.0**-17
"""Relative to the largest logit, against fp64: the product's own error."""


def whole(arguments: Arguments, temperature_N: torch.Tensor | None) -> torch.Tensor:
    """By way of all logits."""
    h, unembed, scale = arguments["h_ND"], arguments["unembed_VD"], arguments["scale"]
    logits = ours(h, unembed, scale, torch.float32)
    if temperature_N is not None:
        logits = logits / temperature_N[:, None]
    return log_softmax(logits).gather(1, arguments["targets_N"][:, None])[:, 0]


def statistics(
    arguments: Arguments,
    temperature_N: torch.Tensor | None,
    run: int | None = None,
    *,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The kernels, with every target twice."""
    targets = arguments["targets_N"][:, None].expand(-1, 2)
    given = (arguments["h_ND"], arguments["unembed_VD"], targets, arguments["scale"])
    return kernel.statistics(*given, temperature_N, with_entropy, run)


@pytest.mark.parametrize("tempered", [False, True], ids=["raw", "tempered"])
@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_bits_of_the_whole_softmax(device: str, case: str, dtype: torch.dtype, tempered: bool):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    n = len(arguments["h_ND"])
    temperature = torch.linspace(0.5, 1.7, n, device=device) if tempered else None
    expected = whole(arguments, temperature)
    for run in (None, 1, 2):
        with nan_filled():
            found, norm, entropy = statistics(arguments, temperature, run=run)
        assert_same_bits(found[:, 0], expected, f"{run} chunks at a time")
        assert_same_bits(found[:, 1], expected, f"{run} chunks at a time, again")
        with nan_filled():
            assert_same_bits(statistics(arguments, temperature, with_entropy=False)[0], found)
    logits = arguments["h_ND"].double() @ arguments["unembed_VD"].double().T * arguments["scale"]
    if temperature is not None:
        logits = logits / temperature.double()[:, None]
    exact = logits.log_softmax(-1)
    of_targets = exact.gather(1, arguments["targets_N"][:, None])
    bound = ERROR * logits.abs().max()
    assert (found.double() - of_targets).abs().max() < bound
    assert (norm.double() - logits.logsumexp(-1)).abs().max() < bound
    assert entropy is not None
    expected = torch.special.entr(exact.exp()).sum(-1)
    assert (entropy.double() - expected).abs().max() < bound


@in_interpreter
def test_a_target_outside_gives_nan_and_no_rows_give_none():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(2))
    arguments["targets_N"][:2] = torch.tensor([-1, 301])
    found = statistics(arguments, None)[0]
    assert found[:2].isnan().all() and found[2:].isfinite().all()
    none = {"h_ND": arguments["h_ND"][:0], "targets_N": arguments["targets_N"][:0]}
    assert [list(x.shape) for x in statistics(arguments | none, None) if x is not None] == [
        [0, 2],
        [0],
        [0],
    ]


def test_logits_of_many_rows_are_cut():
    assert kernel.chunks_per_run(1) == kernel.MOST_CHUNKS
    for rows in (8192, 20000, 1 << 20):
        assert kernel.chunks_per_run(rows) == max(1, (1 << 26) // (rows * 2048))


@on_gpu
def test_rows_alone_have_the_bits_they_have_among_others():
    arguments: Arguments = cases.build("odd", torch.bfloat16, generator(3, "cuda"))
    g = generator(4, "cuda")
    arguments["h_ND"] = torch.randn(70, 45, generator=g, device="cuda").bfloat16()
    arguments["targets_N"] = torch.randint(4099, (70,), generator=g, device="cuda")
    every = token_logprobs(**arguments)
    for n in range(1, 71):
        part = {name: arguments[name][-n:] for name in ("h_ND", "targets_N")}
        assert_same_bits(token_logprobs(**(arguments | part)), every[-n:], f"last {n}")
    with dispatch.force("reference"):
        assert (token_logprobs(**arguments) - every).abs().max() < 1e-4
    targets = arguments["targets_N"][:, None]
    many: Arguments = arguments | {"targets_N": torch.cat([targets.flip(0), targets, targets], 1)}
    logprobs, entropy = token_logprobs_and_entropy(**many)
    assert_same_bits(logprobs[:, 1], every)
    assert_same_bits(logprobs[:, 2], every)
    for n in (1, 3, 69):
        part = {name: many[name][-n:] for name in ("h_ND", "targets_N")}
        assert_same_bits(token_logprobs_and_entropy(**(many | part))[1], entropy[-n:], f"last {n}")
