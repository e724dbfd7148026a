"""The router's kernel: the reference's choice and weights, from logits of our own product."""

import pytest
import torch

from suzuri.kernels import dispatch, exact
from suzuri.kernels.matmul import buckets
from suzuri.kernels.router import cases, router
from tests.kernels.compare import Arguments, assert_close, assert_same_bits, changed, generator
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu

pytest.importorskip("triton")
from suzuri.kernels.matmul.kernel import Tile, ours
from suzuri.kernels.router import kernel

NOISE = 2.0**-18
EPS = 2.0**-20
"""Relative error allowed in a weight given its logits: a handful of fp32 operations."""


def check_choice(arguments: Arguments, found: tuple[torch.Tensor, ...]) -> None:
    """Experts and weights are the formulas' in fp64 of the kernel's own logits."""
    experts_NK, weights_NJ, logits_NE = found
    k, bias_R = arguments["num_experts_per_token"], arguments["bias_R"].double()
    routed = len(bias_R)
    logits = logits_NE.double()
    score = 1 / (1 + torch.exp(-logits[:, :routed])) + bias_R
    # Where fp32 can tell the last chosen from the first left out, the choice is the exact one.
    ranked = torch.sort(score, dim=-1, descending=True, stable=True)
    clear = torch.ones(len(score), dtype=torch.bool, device=score.device)
    if k < routed:
        clear = ranked.values[:, k - 1] - ranked.values[:, k] > 1e-6
    assert clear.float().mean() > 0.5
    expected = ranked.indices[:, :k].sort(-1).values
    assert torch.equal(experts_NK[clear], expected[clear])
    assert (experts_NK.diff(dim=-1) > 0).all()
    raw = torch.cat([logits.gather(1, experts_NK), logits[:, routed:]], 1)
    share = torch.nn.functional.logsigmoid(raw).softmax(-1)
    weights = share * arguments["route_scale"] * arguments["global_scale_1"].double()
    assert weights_NJ.dtype == torch.float32
    assert_close(weights_NJ, weights, ulps=4, noise=EPS)


@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_choice_weights_and_logits(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    with nan_filled():
        found = kernel.router(**arguments)
    x, w = arguments["x_ND"].double(), arguments["weight_ED"].double()
    assert_close(found[2], x @ w.T, ulps=1, noise=NOISE, magnitude=x.abs() @ w.abs().T)
    check_choice(arguments, found)


def with_logits(logits_E: list[float], routed: int, k: int, device: str) -> Arguments:
    return {
        "x_ND": torch.ones(1, 1, device=device),
        "weight_ED": torch.tensor(logits_E, device=device)[:, None],
        "bias_R": torch.zeros(routed, device=device),
        "global_scale_1": torch.tensor([1.3], device=device),
        "num_experts_per_token": k,
        "route_scale": 8.0,
    }


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=in_interpreter), pytest.param("cuda", marks=on_gpu)],
)
def test_ties_go_to_the_lowest_ids_and_far_logits_stay_finite(device: str):
    tied = with_logits([1.0, 3.0, 1.0, 3.0, 1.0, 0.5], 5, 4, device)
    assert kernel.router(**tied)[0].tolist() == [[0, 1, 2, 3]]
    tied["bias_R"] = torch.tensor([0.0, -0.5, 0.0, -0.5, 0.0], device=device)
    assert kernel.router(**tied)[0].tolist() == [[0, 1, 2, 4]]
    for low in (-100.0, -3e4):
        far = with_logits([low, low - 1, low - 2, low], 3, 2, device)
        experts, weights, _ = kernel.router(**far)
        assert experts.tolist() == [[0, 1]]
        share = torch.tensor([[0.0, -1.0, 0.0]], dtype=torch.float64).softmax(-1) * 8.0 * 1.3
        assert_close(weights, share.to(device), ulps=8, noise=2.0**-9 if low < -1e3 else EPS)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_alone_and_other_launches_have_the_same_bits(dtype: torch.dtype):
    arguments: Arguments = cases.build("inkling", dtype, generator(3, "cuda"))
    g = generator(4, "cuda")
    arguments["x_ND"] = buckets.hostile_rows(70, 6144, g).to(dtype) * 0.05
    whole = kernel.router(**arguments)
    logits = ours(arguments["x_ND"], arguments["weight_ED"], 1.0, torch.float32)
    assert_same_bits(whole[2], logits)
    for tile, warps in ((Tile(64, 64, 32, 4, 2), 1), (Tile(16, 16, 64, 2, 2, True), 8)):
        for part, again in zip(
            whole, kernel.router(**arguments, tile=tile, warps=warps), strict=True
        ):
            assert_same_bits(again, part, f"{tile}, {warps} warps")
    for m in range(1, 71):
        for rows in (slice(0, m), slice(70 - m, 70)):
            alone = router(**changed(arguments, x_ND=arguments["x_ND"][rows]))
            for part, every in zip(alone, whole, strict=True):
                assert_same_bits(part, every[rows], f"{rows}")


@on_gpu
def test_the_op_agrees_with_the_reference():
    arguments: Arguments = cases.build("inkling", torch.bfloat16, generator(5, "cuda"))
    with dispatch.force("reference"):
        experts, weights, logits = router(**arguments)
    found = router(**arguments)
    same = (found[0] == experts).all(-1)
    assert same.float().mean() > 0.9
    assert (found[2] - logits).abs().max() < 1e-3
    assert (found[1][same] - weights[same]).abs().max() < 1e-3
    assert_same_bits(
        found[0],
        exact.top_k(exact.sigmoid(found[2][:, :256]) + arguments["bias_R"], 6).sort(-1).values,
    )
