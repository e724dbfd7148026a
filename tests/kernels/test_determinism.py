"""Gradients are bit-equal from run to run, so that a resumed run repeats itself (docs/exactness.md,
backward). Sizes are large enough for the library to share the work among threads.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from suzuri.kernels.embedding import embedding
from suzuri.kernels.embedding_sum import embedding_sum
from suzuri.kernels.gelu import gelu
from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.log_scaling import log_scaling
from suzuri.kernels.log_softmax import log_softmax
from suzuri.kernels.matmul import matmul
from suzuri.kernels.moe_combine import moe_combine
from suzuri.kernels.moe_permute import Permutation, moe_permute
from suzuri.kernels.relative_attention import relative_attention
from suzuri.kernels.rms_norm import rms_norm
from suzuri.kernels.router import router
from suzuri.kernels.short_conv import short_conv
from suzuri.kernels.swiglu import swiglu
from suzuri.kernels.token_logprobs import token_logprobs
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    each_low_dtype,
    generator,
    gradients,
    threads,
)

RUNS = 3


class Training(NamedTuple):
    """An op, its trained inputs by name and shape, and the rest of its arguments."""

    op: Callable[..., Tensor]
    shapes: dict[str, tuple[int, ...]]
    rest: Callable[[torch.dtype], Arguments] = lambda dtype: {}


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=generator(high))


def one_sequence(length: int) -> Arguments:
    return {
        "positions_N": torch.arange(length),
        "seq_ids_N": torch.zeros(length, dtype=torch.int64),
        "seq_starts_S1": torch.tensor([0, length]),
    }


def router_weights(**arguments: object) -> Tensor:
    return router(**arguments)[1]  # pyright: ignore[reportArgumentType]


def permuted(x_ND: Tensor, experts_NJ: Tensor) -> Tensor:
    return moe_permute(x_ND, experts_NJ, num_experts=32)[0]


def attention(window: int | None) -> Training:
    return Training(
        relative_attention,
        {
            "q_NHC": (200, 4, 32),
            "k_NUC": (200, 2, 32),
            "v_NUC": (200, 2, 32),
            "r_NHB": (200, 4, 4),
            "proj_BE": (4, window or 100),
        },
        lambda dtype: {"seq_starts_S1": torch.tensor([0, 130, 200]), "window": window},
    )


def shuffle(rows: int) -> Permutation:
    order_M = torch.randperm(rows, generator=generator(rows))
    return Permutation(order_M, order_M.argsort(), torch.zeros(0, dtype=torch.int64))


OPS = {
    "matmul": Training(matmul, {"x_NK": (400, 300), "weight_MK": (257, 300)}),
    "embedding": Training(
        embedding, {"weight_VD": (37, 129)}, lambda dtype: {"ids_N": integers(37, 2000)}
    ),
    "embedding_sum": Training(
        embedding_sum, {"weight_VD": (37, 65)}, lambda dtype: {"ids_NB": integers(37, 200, 20)}
    ),
    "rms_norm": Training(
        rms_norm, {"x_ND": (600, 129), "weight_D": (129,)}, lambda dtype: {"eps": 1e-6}
    ),
    "short_conv": Training(
        short_conv, {"x_NC": (700, 129), "weight_CK": (129, 4)}, lambda dtype: one_sequence(700)
    ),
    "log_scaling": Training(
        log_scaling,
        {"x_NHC": (300, 8, 33)},
        lambda dtype: {"positions_N": torch.arange(300), "n_floor": 20, "alpha": 0.1},
    ),
    "relative_attention global": attention(None),
    "relative_attention local": attention(40),
    "swiglu": Training(swiglu, {"gate_up_NF2": (300, 514)}, lambda dtype: {"out_dtype": dtype}),
    "gelu": Training(gelu, {"x": (300, 257)}),
    "router": Training(
        router_weights,
        {"x_ND": (600, 129), "weight_ED": (70, 129), "global_scale_1": (1,)},
        lambda dtype: {
            "bias_R": torch.zeros(68),
            "num_experts_per_token": 6,
            "route_scale": 8.0,
        },
    ),
    "moe_permute": Training(
        permuted, {"x_ND": (300, 129)}, lambda dtype: {"experts_NJ": integers(32, 300, 6)}
    ),
    "grouped_gemm": Training(
        grouped_gemm,
        {"x_MK": (500, 129), "weight_EFK": (5, 257, 129)},
        lambda dtype: {
            "offsets_E1": torch.tensor([0, 300, 300, 301, 450, 500]),
            "out_dtype": dtype,
        },
    ),
    "moe_combine": Training(
        moe_combine,
        {"y_MD": (1800, 129), "weights_NJ": (300, 6)},
        lambda dtype: {"permutation": shuffle(1800), "out_dtype": dtype},
    ),
    "log_softmax": Training(log_softmax, {"logits_NV": (40, 4099)}),
    "token_logprobs": Training(
        token_logprobs,
        {"h_ND": (200, 65), "unembed_VD": (4099, 65)},
        lambda dtype: {"targets_N": integers(4099, 200), "scale": 1 / 24},
    ),
}


def on_device(value: object, device: str) -> object:
    if isinstance(value, Permutation):
        return Permutation(*(x.to(device) for x in value))
    return value.to(device) if isinstance(value, Tensor) else value


def assert_repeats(op: Callable[..., Tensor], arguments: Arguments, names: list[str]) -> None:
    with threads(2):
        first = gradients(op, arguments, names)
        assert all(grad.isfinite().all() and grad.any() for grad in first)
        for run in range(1, RUNS):
            again = gradients(op, arguments, names)
            for name, a, b in zip(names, again, first, strict=True):
                assert_same_bits(a, b, f"{name}, run {run}")


@each_low_dtype
@pytest.mark.parametrize("op", OPS)
def test_gradients_repeat_bit_for_bit(device: str, op: str, dtype: torch.dtype):
    training = OPS[op]
    arguments: Arguments = {
        name: torch.randn(shape, generator=generator(i)).to(device, dtype)
        for i, (name, shape) in enumerate(training.shapes.items())
    }
    rest = {name: on_device(value, device) for name, value in training.rest(dtype).items()}
    assert_repeats(training.op, arguments | rest, list(training.shapes))


def test_a_gradient_that_changes_is_caught():
    def noisy(x: Tensor) -> Tensor:
        return x * (1 + 1e-6 * torch.rand(x.shape))

    with pytest.raises(AssertionError, match=r"x, run 1: .* differ in bits"):
        assert_repeats(noisy, {"x": torch.ones(50)}, ["x"])
