"""token_logprobs' kernels: the bits of log_softmax of the whole logits, without them."""

import pytest
import torch

from suzuri.kernels import dispatch
from suzuri.kernels.token_logprobs import cases, token_logprobs
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


@pytest.mark.parametrize("tempered", [False, True], ids=["raw", "tempered"])
@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_bits_of_the_whole_softmax(device: str, case: str, dtype: torch.dtype, tempered: bool):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    n = len(arguments["h_ND"])
    temperature = torch.linspace(0.5, 1.7, n, device=device) if tempered else None
    expected = whole(arguments, temperature)
    for run in (None, 1, 2):
        with nan_filled():
            found = kernel.token_logprobs(**arguments, temperature_N=temperature, run=run)
        assert_same_bits(found, expected, f"{run} chunks at a time")
    logits = arguments["h_ND"].double() @ arguments["unembed_VD"].double().T * arguments["scale"]
    if temperature is not None:
        logits = logits / temperature.double()[:, None]
    exact = logits.log_softmax(-1).gather(1, arguments["targets_N"][:, None])[:, 0]
    assert (found.double() - exact).abs().max() < ERROR * logits.abs().max()


@in_interpreter
def test_a_target_outside_gives_nan_and_no_rows_give_none():
    arguments: Arguments = cases.build("tiny", torch.float32, generator(2))
    arguments["targets_N"][:2] = torch.tensor([-1, 301])
    found = kernel.token_logprobs(**arguments, temperature_N=None)
    assert found[:2].isnan().all() and found[2:].isfinite().all()
    none = {"h_ND": arguments["h_ND"][:0], "targets_N": arguments["targets_N"][:0]}
    assert kernel.token_logprobs(**(arguments | none), temperature_N=None).shape == (0,)


def test_logits_of_many_rows_are_cut():
    assert kernel.chunks_per_run(1) == kernel.MOST_CHUNKS
    for rows in (8192, 20000, 1 << 20):
        assert kernel.chunks_per_run(rows) == max(1, (1 << 26) // (rows * 2048))


@on_gpu
def test_rows_alone_have_the_bits_they_have_among_others_and_no_gradient():
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
    arguments["h_ND"].requires_grad_()
    with pytest.raises(NotImplementedError, match="token_logprobs: no gradient on a GPU yet"):
        token_logprobs(**arguments)
