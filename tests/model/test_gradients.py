"""Gradients of every tensor in fp64 against finite differences, and their exact zeros.

`tiny` with random weights; the seed is one whose router choices are far enough from ties (margin
above 1e-3) that no difference step crosses one.
"""

import functools

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.model.batch import pack
from suzuri.model.moe import MoE
from suzuri.tools.golden import recorded
from tests.model.models import random_ids, random_model
from tests.model.staged import StagedLoss

SEED = 5
STEP = 3e-5
TOLERANCE = 1e-6
NUM_DIRECTIONS, NUM_ENTRIES = 4, 8
STAGES = range(11)


@functools.cache
def staged() -> StagedLoss:
    model = random_model("tiny", torch.float64, SEED)
    loss = StagedLoss(model, SEED)
    loss.run(keep=True).backward()
    return loss


def tensors(stage: int) -> list[tuple[str, torch.nn.Parameter]]:
    loss = staged()
    named = loss.model.named_parameters()
    return [(n, p) for n, p in named if p.requires_grad and loss.stage_of(n) == stage]


def difference(parameter: torch.nn.Parameter, direction: Tensor, stage: int) -> float:
    """Central difference of the loss along a direction."""
    kept = parameter.detach().clone()
    values: list[float] = []
    with torch.no_grad():
        for sign in (1, -1):
            parameter.copy_(kept + sign * STEP * direction)
            values.append(float(staged().run(stage)))
        parameter.copy_(kept)
    return (values[0] - values[1]) / (2 * STEP)


def test_inputs_keep_their_distance_from_router_ties() -> None:
    assert staged().router_margin() > 1e-3
    assert staged().num_stages == len(STAGES)


def test_the_stages_cover_every_tensor_and_only_the_selection_bias_has_no_gradient() -> None:
    model = staged().model
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert without == [n for n, _ in model.named_parameters() if n.endswith("router.bias")]
    assert without
    covered = [name for stage in STAGES for name, _ in tensors(stage)]
    assert sorted(covered + without) == sorted(n for n, _ in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_match_finite_differences(stage: int) -> None:
    generator = torch.Generator().manual_seed(stage)
    for name, parameter in tensors(stage):
        grad = parameter.grad
        assert grad is not None
        largest = float(grad.abs().max())
        assert largest > 1e-3, f"{name}: a gradient this small proves nothing"
        for _ in range(NUM_DIRECTIONS):
            direction = torch.randn(grad.shape, generator=generator, dtype=torch.float64)
            direction /= direction.norm()
            gap = abs(difference(parameter, direction, stage) - float((grad * direction).sum()))
            assert gap < TOLERANCE * largest, f"{name}: {gap / largest:.2e} of the largest"
        for entry in entries(grad, generator):
            direction = torch.zeros_like(grad)
            direction.view(-1)[entry] = 1
            gap = abs(difference(parameter, direction, stage) - float(grad.view(-1)[entry]))
            assert gap < TOLERANCE * largest, f"{name}[{entry}]: {gap / largest:.2e}"


def entries(grad: Tensor, generator: torch.Generator) -> list[int]:
    """The largest entry, others with a gradient, and a few from anywhere."""
    flat = grad.view(-1)
    alive = flat.nonzero()[:, 0]
    some = alive[torch.randint(len(alive), (NUM_ENTRIES // 2,), generator=generator)]
    anywhere = torch.randint(len(flat), (NUM_ENTRIES - len(some) - 1,), generator=generator)
    return [int(flat.abs().argmax()), *some.tolist(), *anywhere.tolist()]


def test_exact_zeros() -> None:
    """Where a gradient is exactly 0, and nowhere else: rows of tokens that do not occur, padding of
    the head, distances longer than any sequence, audio rows not asked for, experts not chosen."""
    loss, model = staged(), staged().model
    text = model.config.text
    expected_zero: dict[str, Tensor] = {}
    used = sorted({t for s in loss.sequences for t in s} - placeholders(loss))
    embed = torch.ones(text.vocab_size, dtype=torch.bool)
    embed[used] = False
    expected_zero["decoder.embed.weight"] = embed
    unembed = torch.zeros(text.vocab_size, dtype=torch.bool)
    unembed[text.unpadded_vocab_size :] = True
    expected_zero["decoder.unembed.weight"] = unembed
    assert model.audio is not None
    rows = loss.levels + model.audio.num_levels * torch.arange(model.audio.num_bands)
    audio = torch.ones(model.audio.encoder.weight.shape[0], dtype=torch.bool)
    audio[rows.flatten()] = False
    expected_zero["audio.encoder.weight"] = audio
    longest = max(len(s) for s in loss.sequences)
    zero_entries = 0
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is None:
            continue
        if name.endswith("rel_proj"):
            far = torch.arange(grad.shape[1]) >= longest
            zero = far[None].expand_as(grad)
        elif name in expected_zero:
            zero = expected_zero[name].view(-1, *[1] * (grad.dim() - 1)).expand_as(grad)
        elif (idle := idle_experts(name, grad)) is not None:
            zero = idle.view(-1, *[1] * (grad.dim() - 1)).expand_as(grad)
        else:
            zero = torch.zeros_like(grad, dtype=torch.bool)
        assert torch.equal(grad == 0, zero), f"{name}: {int((grad == 0).sum())} zeros"
        zero_entries += int(zero.sum())
    assert zero_entries > 10_000


def idle_experts(name: str, grad: Tensor) -> Tensor | None:
    """Which experts no token chose, for a tensor with one row per expert; None for another."""
    if not name.endswith(("mlp.gate_up", "mlp.down", "mlp.router.weight")):
        return None
    mlp = staged().model.decoder.blocks[int(name.split(".")[2])].mlp
    assert isinstance(mlp, MoE)
    with recorded(staged().model) as records, torch.no_grad():
        staged().run()
    idle = torch.ones(grad.shape[0], dtype=torch.bool)
    idle[records[mlp.router][0].unique()] = False
    idle[mlp.num_routed :] = False
    return idle


def placeholders(loss: StagedLoss) -> set[int]:
    """Tokens that occur only under media features."""
    covered = {(1, i) for i in (2, 3, 6, 7, 8)}
    places = [(s, i) for s, ids in enumerate(loss.sequences) for i in range(len(ids))]
    bare = {loss.sequences[s][i] for s, i in places if (s, i) not in covered}
    return {loss.sequences[s][i] for s, i in covered} - bare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_same_bits_on_every_run(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs: list[dict[str, Tensor]] = []
        for _ in range(2):
            model = random_model("tiny", dtype, SEED)
            StagedLoss(model, SEED).run().backward()
            runs.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    finally:
        torch.set_num_threads(threads)
    assert runs[0].keys() == runs[1].keys()
    for name, grad in runs[0].items():
        assert torch.isfinite(grad).all(), name
        assert torch.equal(grad, runs[1][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_same_bits_on_every_run_on_gpu(dtype: torch.dtype) -> None:
    model = random_model("tiny", dtype, SEED).to("cuda")
    ids = [random_ids(model, n, seed=n) for n in (40, 3, 90)]
    runs: list[dict[str, Tensor]] = []
    for _ in range(3):
        model.zero_grad()
        with dispatch.force("reference"):
            hidden_ND = model.decoder(pack(ids, device="cuda"))
            model.decoder.logits(hidden_ND).pow(2).sum().backward()
        runs.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert len(runs[0]) > 80
    for run in runs[1:]:
        assert all(torch.equal(grad, runs[0][name]) for name, grad in run.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_gradients_follow_fp64(dtype: torch.dtype) -> None:
    """Same weights, same inputs: the direction of the whole gradient stays that of fp64."""
    wide = staged().model
    model = random_model("tiny", dtype, SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(wide.get_parameter(name))
    StagedLoss(model, SEED).run().backward()
    ours, theirs = [], []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and (grad := wide.get_parameter(name).grad) is not None:
            ours.append(parameter.grad.to(torch.float64).flatten())
            theirs.append(grad.flatten())
    cosine = torch.cosine_similarity(torch.cat(ours), torch.cat(theirs), dim=0)
    assert cosine > (1 - 1e-6 if dtype == torch.float32 else 0.95), float(cosine)
