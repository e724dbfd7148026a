"""Which implementation runs, and that nothing falls back silently."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from suzuri.kernels import dispatch
from suzuri.kernels.draw_tokens import draw_tokens
from suzuri.kernels.embedding import embedding
from suzuri.kernels.embedding_sum import embedding_sum
from suzuri.kernels.filter_logits import filter_logits
from suzuri.kernels.gelu import gelu
from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.kv_write import kv_write
from suzuri.kernels.log_scaling import log_scaling
from suzuri.kernels.log_softmax import log_softmax
from suzuri.kernels.matmul import matmul
from suzuri.kernels.moe_combine import moe_combine
from suzuri.kernels.moe_permute import Permutation, moe_permute
from suzuri.kernels.paged_attention import paged_attention
from suzuri.kernels.penalize_logits import penalize_logits
from suzuri.kernels.philox import philox
from suzuri.kernels.relative_attention import relative_attention
from suzuri.kernels.rms_norm import rms_norm
from suzuri.kernels.router import router
from suzuri.kernels.sample_tokens import sample_tokens
from suzuri.kernels.short_conv import short_conv
from suzuri.kernels.swiglu import swiglu
from suzuri.kernels.token_logprobs import token_logprobs
from tests.kernels.compare import assert_same_bits

I = torch.zeros(2, dtype=torch.int64, device="meta")  # noqa: E741
X = torch.zeros(2, 4, device="meta")
HEADS = torch.zeros(2, 1, 4, device="meta")
PAGES = torch.zeros(1, 2, 1, 4, device="meta")

CALLS = {
    "draw_tokens": lambda: draw_tokens(X, X, scale=1.0),
    "embedding": lambda: embedding(I, X),
    "embedding_sum": lambda: embedding_sum(I[:, None], X),
    "filter_logits": lambda: filter_logits(X, X[:, 0], I, X[:, 0]),
    "gelu": lambda: gelu(X),
    "grouped_gemm": lambda: grouped_gemm(X, X[None], I, out_dtype=X.dtype),
    "kv_write": lambda: kv_write(HEADS, HEADS, PAGES, PAGES, I),
    "log_scaling": lambda: log_scaling(HEADS, I, 8, 0.1),
    "log_softmax": lambda: log_softmax(X),
    "matmul": lambda: matmul(X, X),
    "moe_combine": lambda: moe_combine(X, Permutation(I, I, I), X[:, :1], out_dtype=X.dtype),
    "moe_permute": lambda: moe_permute(X, I[:, None], num_experts=1),
    "paged_attention": lambda: paged_attention(
        HEADS, HEADS, X.T, PAGES, PAGES, I[None], I[:1], I, window=None
    ),
    "penalize_logits": lambda: penalize_logits(
        X, X.bool(), X.to(torch.int32), I, X[:, 0], X[:, 0], X[:, 0]
    ),
    "philox": lambda: philox(I, I, I, I, I),
    "relative_attention": lambda: relative_attention(
        HEADS, HEADS, HEADS, HEADS, X.T, I, window=None
    ),
    "rms_norm": lambda: rms_norm(X, X[0], 1e-6),
    "router": lambda: router(X, X, X[0, :2], X[0, :1], num_experts_per_token=1, route_scale=1.0),
    "sample_tokens": lambda: sample_tokens(X, X[:, 0], I, I, I),
    "short_conv": lambda: short_conv(X, X.T, I, I, I),
    "swiglu": lambda: swiglu(X, out_dtype=X.dtype),
    "token_logprobs": lambda: token_logprobs(X, X, I, scale=1.0),
}


@pytest.mark.parametrize("op", CALLS)
def test_a_device_without_a_kernel_is_refused(op: str):
    with pytest.raises(NotImplementedError, match=rf"^{op}: no kernel for device 'meta'.*force"):
        CALLS[op]()


def test_forced_references_run_elsewhere():
    with dispatch.force("reference"):
        assert CALLS["gelu"]().device.type == "meta"
        assert CALLS["rms_norm"]().shape == X.shape


@pytest.mark.parametrize("name", ["triton", "", "Reference", "reference "])
def test_an_unknown_backend_is_refused(name: str):
    """N06: never a silent other path. The forced state stays as it was."""
    refused = pytest.raises(ValueError, match=f"unknown kernel backend '{name}'.*reference")
    with refused, dispatch.force(name):
        pytest.fail("the block must not run")
    assert not dispatch.use_reference(X)


def test_force_nests_and_resets():
    assert not dispatch.use_reference(X)
    with dispatch.force("reference"):
        assert dispatch.use_reference(X)
        with dispatch.force("reference"):
            assert dispatch.use_reference(X)
        assert dispatch.use_reference(X)
        with pytest.raises(ValueError, match="unknown"), dispatch.force("no such"):
            pass
        assert dispatch.use_reference(X)
    assert not dispatch.use_reference(X)


def test_force_resets_when_the_block_raises():
    with pytest.raises(RuntimeError, match="inside"), dispatch.force("reference"):
        assert dispatch.use_reference(X)
        raise RuntimeError("inside")
    assert not dispatch.use_reference(X)


@pytest.mark.gpu
def test_a_gpu_tensor_runs_the_reference_only_when_forced():
    """gelu has a kernel, but none for fp64."""
    x = torch.tensor([0.0, 100.0], device="cuda", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"torch\.float64: no kernel for device 'cuda:0'"):
        gelu(x)
    with dispatch.force("reference"):
        assert_same_bits(gelu(x), x)


def test_cpu_tensors_run_the_reference_forced_or_not():
    x = torch.tensor([1.0, -2.0])
    assert dispatch.use_reference(x)
    with dispatch.force("reference"):
        forced = gelu(x)
    assert_same_bits(forced, gelu(x))


def test_force_holds_on_every_thread():
    """The backward of GPU tensors, and recomputation in it, runs on a thread of autograd's own."""
    seen: list[bool] = []
    with dispatch.force("reference"):
        thread = threading.Thread(target=lambda: seen.append(dispatch.use_reference(X)))
        thread.start()
        thread.join()
    assert seen == [True]
    assert not dispatch.use_reference(X)


@pytest.mark.gpu
def test_force_reaches_recomputation_in_the_backward():
    x = torch.randn(3, 4, device="cuda", requires_grad=True)
    with dispatch.force("reference"):
        checkpoint(gelu, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


WIDE = torch.zeros(2, 4)
NARROW = WIDE.to(torch.bfloat16)
ROWS = torch.zeros(2, dtype=torch.int64)
QUERY, PAGE = NARROW[:, None], WIDE.view(1, 2, 1, 4)
MIXED = {
    "draw_tokens": lambda: draw_tokens(NARROW, WIDE, scale=1.0),
    "matmul": lambda: matmul(NARROW, WIDE),
    "grouped_gemm": lambda: grouped_gemm(NARROW, WIDE[None], ROWS, out_dtype=WIDE.dtype),
    "router": lambda: router(
        NARROW, WIDE, WIDE[0, :2], WIDE[0, :1], num_experts_per_token=1, route_scale=1.0
    ),
    "token_logprobs": lambda: token_logprobs(NARROW, WIDE, ROWS, scale=1.0),
    "relative_attention": lambda: relative_attention(
        QUERY, QUERY, QUERY, WIDE[:, None], WIDE.T, ROWS, window=None
    ),
    "paged_attention": lambda: paged_attention(
        QUERY, QUERY, NARROW.T, PAGE, PAGE, ROWS[None], ROWS[:1], ROWS, window=None
    ),
}


@pytest.mark.parametrize("op", MIXED)
def test_mixed_dtypes_are_refused(op: str):
    with pytest.raises(ValueError, match=f"{op}: .*dtype|{op}: x is|{op}: h is"):
        MIXED[op]()
