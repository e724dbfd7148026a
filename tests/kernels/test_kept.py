"""Values made once from tensors: never stale, never beyond the limit, gone with what is freed."""

import gc

import pytest
import torch
from torch import Tensor

from suzuri.kernels import exact, kept
from suzuri.kernels.matmul import matmul
from tests.kernels.compare import assert_same_bits, generator


def doubled(x: Tensor) -> Tensor:
    return 2 * x.double()


def frozen(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape, generator=generator(1)), requires_grad=False)


def test_a_value_is_made_once():
    w = frozen(3, 4)
    assert kept.kept(doubled, w) is kept.kept(doubled, w)
    assert kept.kept(doubled, w[:2]) is kept.kept(doubled, w[:2])
    assert kept.kept(doubled, w[:2]) is not kept.kept(doubled, w[1:])
    assert kept.kept(doubled, w).shape != kept.kept(doubled, w.T).shape


CHANGES = {
    "in place": lambda w: w.add_(1),
    "through a view": lambda w: w[1].mul_(3),
    "through detach": lambda w: w.detach().zero_(),
    "copied over": lambda w: w.copy_(torch.ones(3, 4)),
    "other memory": lambda w: setattr(w, "data", torch.full((3, 4), 7.0)),
    "other dtype": lambda w: setattr(w, "data", torch.full((3, 4), 7.0, dtype=torch.float64)),
    "resized": lambda w: setattr(w, "data", torch.full((2, 4), 7.0)),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str):
    w = frozen(3, 4)
    for _ in range(3):
        assert torch.equal(kept.kept(doubled, w), 2 * w.double())
        assert torch.equal(kept.kept(doubled, w[1:]), 2 * w[1:].double())
        CHANGES[change](w)
    assert torch.equal(kept.kept(doubled, w), 2 * w.double())


@torch.no_grad()
def test_memory_that_comes_back_with_other_contents_is_no_hit():
    """`data` moved away and to a new tensor at the old address, with the old version."""
    w = frozen(300, 400)
    kept.kept(doubled, w)
    for fill in range(20):
        w.data = torch.zeros(1)
        w.data = torch.full((300, 400), float(fill))
        assert torch.equal(kept.kept(doubled, w), 2 * w.double())


@torch.no_grad()
def test_a_weight_that_dies_takes_its_copy_along():
    gc.collect()
    before = kept.held()
    w, index = frozen(3, 4), torch.arange(3)
    kept.kept(doubled, w, num_bytes=96)
    kept.kept(doubled, w[:2], num_bytes=64)
    kept.kept(lambda a, b: a.double(), index, w)
    assert kept.held() == (before[0] + 3, before[1] + 160)
    del index
    assert kept.held()[0] == before[0] + 2
    del w
    assert kept.held() == before


@torch.no_grad()
def test_beyond_the_limit_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept, "LIMIT_BYTES", kept.held()[1] + 100)
    small, large = frozen(3, 4), frozen(30, 40)
    kept.kept(doubled, small, num_bytes=96)
    count = kept.held()
    assert torch.equal(kept.kept(doubled, large, num_bytes=9600), 2 * large.double())
    assert kept.held() == count


def test_tensors_without_a_version_are_not_kept():
    with torch.inference_mode():
        x = torch.ones(3)
        assert torch.equal(kept.kept(doubled, x), 2 * x.double())
        x.add_(1)
        assert torch.equal(kept.kept(doubled, x), 2 * x.double())


@pytest.mark.parametrize("shape", [(16, 64), (17, 45), (2050, 20), (5, 300)], ids=str)
def test_a_product_sees_every_change_of_its_weight(shape: tuple[int, int]):
    """An optimiser's step between two evaluations, and a weight published in place."""
    w = torch.nn.Parameter(torch.randn(shape, generator=generator(2)))
    x = torch.randn(9, shape[1], generator=generator(3))
    optimizer = torch.optim.SGD([w], lr=0.1)
    for _ in range(3):
        expected = exact.accumulators(x, w.detach().clone()).float()
        with torch.no_grad():
            assert_same_bits(matmul(x, w), expected)
            assert_same_bits(matmul(x, w[:3]), expected[:, :3])
        matmul(x, w).square().sum().backward()
        optimizer.step()
    w.requires_grad_(False).copy_(torch.ones(shape))
    assert_same_bits(matmul(x, w), exact.accumulators(x, torch.ones(shape)).float())


def test_products_inside_and_outside_inference_mode_share_their_memory():
    w = frozen(16, 40)
    x = torch.randn(9, 40, generator=generator(4))
    expected = exact.accumulators(x, w).float()
    for _ in range(2):
        with torch.inference_mode():
            assert_same_bits(matmul(x, w), expected)
        with torch.no_grad():
            assert_same_bits(matmul(x, w), expected)


def test_of_a_model_made_in_inference_mode_nothing_is_kept():
    with torch.inference_mode():
        w = frozen(3, 4)
        x = torch.randn(2, 4, generator=generator(2))
        assert kept.kept(doubled, w) is not kept.kept(doubled, w)
        assert_same_bits(matmul(x, w), matmul(x.clone(), w.clone()))
