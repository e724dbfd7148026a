"""The few arithmetic primitives that every reference is built from (docs/exactness.md).

A row of each result has the same bits alone as among any other rows, on one thread or many.
Read `accumulators` first: it is the only matrix product, and `tree_sum` the only reduction. On a
CPU both are defined by the order of single operations and have the same bits on every CPU; there
the loops of loops.py run where numba is installed, and torch does the same, slowly, where not.
"""

import functools
import importlib.util  # exact: asks whether a module is there
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from suzuri.kernels.arrays import Array, array
from suzuri.kernels.kept import kept, owner_of
from suzuri.log import get_logger

_log = get_logger(__name__)

COLUMN_PAD = 16
K_CHUNK = 128
"""On a GPU: longest run of K inside one library call."""
CUDA_ROWS = 128
"""On a GPU every call has exactly this many rows, so that the library always picks one kernel."""
COLUMNS_PER_CALL = 2048
"""Bounds the fp64 copy of a wide weight on a GPU, and equals the chunk of the log-softmax, so that
the chunked head of token_logprobs makes the very calls of the whole head."""
FOLD = 4096
"""Sums longer than this fold chunks of this length in order."""


@functools.cache
def has_loops() -> bool:
    """Whether the compiled loops of the CPU can run; says once why not, if numba is there."""
    if importlib.util.find_spec("numba") is None:  # exact: no arithmetic
        return False
    try:
        _loops()
    except (ImportError, AttributeError, RuntimeError, SystemError) as error:
        _log.warning(  # exact: no arithmetic
            f"numba cannot be used ({error}); the CPU computes the same bits, slowly"
        )
        return False
    return True


@functools.cache
def _loops() -> Any:
    return importlib.import_module("suzuri.kernels.loops")  # exact: no arithmetic


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic that the contract calls "fp32": fp64 stays fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def records_gradient(*tensors: Tensor) -> bool:
    """Whether autograd would record an operation on these. Where not, the primitives below skip
    their autograd Functions, which cost more than the arithmetic of a few rows."""
    if torch.is_grad_enabled():
        return any(x.requires_grad for x in tensors)
    return False


def widen(x: Tensor) -> Tensor:
    """`x` in the arithmetic dtype of its own dtype: bf16, fp16, fp32 -> fp32; fp64 -> fp64."""
    return x if x.dtype == torch.float32 else x.to(at_least_fp32(x.dtype))


def _in_order(x: Tensor, w: Tensor) -> Tensor:
    """x [..., M, K] @ w [..., N, K] transposed in fp64, one k after the other: what `products` of
    loops.py computes."""
    x, w = x.to(torch.float64), w.to(torch.float64)
    total = x.new_zeros((*x.shape[:-1], w.shape[-2]))
    for x_k, w_k in zip(x.unbind(-1), w.unbind(-1), strict=True):
        total += x_k[..., :, None] * w_k[..., None, :]
    return total


def _transposed(w: Tensor) -> Array:
    """w [..., N, K] as [..., K, N], at least fp32; always a copy."""
    return array(widen(w).transpose(-1, -2).clone(memory_format=torch.contiguous_format))


def transposed(w: Tensor) -> Array:
    """w [..., N, K] as the loops read it: [..., K, N], at least fp32. Of a Parameter, which is used
    again and again, the copy is kept for as long as it does not change (kept.py)."""
    if not isinstance(w, Parameter) and not isinstance(owner_of(w), Parameter):
        return _transposed(w)
    return kept(_transposed, w, num_bytes=max(4, w.element_size()) * w.numel())


def widened(w: Tensor) -> Array:
    """A weight that the loops read as it lies, at least fp32."""
    return array(widen(w).contiguous())


def _looped(x: Tensor, w_KN: Array, dtype: torch.dtype) -> Tensor:
    """x [..., M, K] times w_KN [..., K, N] by the compiled loops, rounded to `dtype`."""
    x = widen(x).contiguous()
    out = x.new_empty((*x.shape[:-1], w_KN.shape[-1]), dtype=dtype)
    if x.dim() == 2:
        _loops().multiply(array(x), w_KN, array(out))  # exact: a loop of ours
        return out
    (m, k), n = x.shape[-2:], w_KN.shape[-1]
    x_XMK, out_XMN = array(x).reshape(-1, m, k), array(out).reshape(-1, m, n)
    for one in zip(x_XMK, w_KN.reshape(-1, k, n), out_XMN, strict=True):
        _loops().multiply(*one)  # exact: a loop of ours
    return out


def _product_cuda(x: Tensor, w: Tensor) -> Tensor:
    """x [..., M, K] @ w [..., N, K] transposed, fp64, in library calls of one shape."""
    if x.dim() > 2:
        pairs = zip(x.flatten(0, -3), w.flatten(0, -3), strict=True)
        return torch.stack([_product_cuda(*pair) for pair in pairs]).unflatten(0, x.shape[:-2])
    (m, k), n = x.shape, w.shape[0]
    x64 = _padded(x, -(-m // CUDA_ROWS) * CUDA_ROWS, -(-k // COLUMN_PAD) * COLUMN_PAD)
    out: list[Tensor] = []
    for start in range(0, n, COLUMNS_PER_CALL):
        piece = w[start : start + COLUMNS_PER_CALL]
        width = piece.shape[0]
        w64 = _padded(piece, -(-width // COLUMN_PAD) * COLUMN_PAD, x64.shape[1])
        blocks = [_folded(x64[i : i + CUDA_ROWS], w64) for i in range(0, x64.shape[0], CUDA_ROWS)]
        out.append(torch.cat(blocks)[:m, :width])
    return out[0] if len(out) == 1 else torch.cat(out, -1)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """`x` [M, K] as fp64 [rows, columns], zero filled."""
    out = x.new_zeros((rows, columns), dtype=torch.float64)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def _folded(x: Tensor, w: Tensor) -> Tensor:
    total: Tensor | None = None
    for first in range(0, x.shape[1], K_CHUNK):
        part = torch.matmul(  # exact: at most K_CHUNK long, one shape
            x[:, first : first + K_CHUNK], w[:, first : first + K_CHUNK].T
        )
        total = part if total is None else total + part
    assert total is not None
    return total


def accumulators(x: Tensor, w: Tensor) -> Tensor:
    """x [..., M, K] times w [..., N, K] transposed, in fp64, before any rounding: [..., M, N] fp64.

    Row m has the same bits whatever M is (rule 2 of docs/exactness.md). Leading dims are equal.
    """
    m, k = x.shape[-2:]
    n = w.shape[-2]
    if 0 in (m, k, n):
        return x.new_zeros((*x.shape[:-1], n), dtype=torch.float64)
    if x.device.type != "cpu":
        return _product_cuda(x, w)
    if has_loops():
        return _looped(x, _transposed(w), torch.float64)
    return _in_order(x, w)


class _Accumulators(torch.autograd.Function):
    """`accumulators` with a gradient. Backward in the working dtype: deterministic from run to run,
    which is all that the contract asks of gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return accumulators(x, w)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        grad = grads[0].to(at_least_fp32(x.dtype))
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.matmul(grad, w.to(grad.dtype)).to(x.dtype)  # exact: backward
        if ctx.needs_input_grad[1]:
            grad_w = torch.matmul(  # exact: backward
                grad.transpose(-1, -2), x.to(grad.dtype)
            ).to(w.dtype)
        return grad_x, grad_w


def accumulate(x: Tensor, w: Tensor) -> Tensor:
    """x [..., M, K] times w [..., N, K] transposed: [..., M, N] in fp32 (fp64 for fp64 inputs).

    Differentiable. The one matrix product of the references; callers round it where the contract
    says (docs/exactness.md, rounding points).
    """
    wide = at_least_fp32(x.dtype)
    if records_gradient(x, w):
        return _Accumulators.apply(x, w).to(wide)
    if x.device.type == "cpu" and has_loops() and x.numel() and w.numel():
        return _looped(x, transposed(w), wide)
    return accumulators(x, w).to(wide)


def accumulate_unrounded(x: Tensor, w: Tensor) -> Tensor:
    """As `accumulate`, in fp64 before the rounding: for what is added on the same accumulator."""
    return _Accumulators.apply(x, w) if records_gradient(x, w) else accumulators(x, w)


def _tree(x: Tensor) -> Tensor:
    """Sum over the last dim (at most FOLD long): halves added elementwise, as if zero padded."""
    n = x.shape[-1]
    if n == 0:
        return x.new_zeros(x.shape[:-1])
    half = 1 << ((n - 1).bit_length() - 1) if n > 1 else 0
    if half and n != 2 * half:
        head = x[..., :half].clone()
        head[..., : n - half] += x[..., half:]
        x, half = head, half // 2
    while half:
        head, tail = torch.split_with_sizes(x, (half, half), -1)
        x = head + tail
        half //= 2
    return x[..., 0]


def _folded_trees(x: Tensor) -> Tensor:
    length = x.shape[-1]
    if length <= FOLD:
        return _tree(x)
    total = _tree(x[..., :FOLD])
    for start in range(FOLD, length, FOLD):
        total = total + _tree(x[..., start : start + FOLD])
    return total


class _TreeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.length = x.shape[-1]
        return _folded_trees(x)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return grads[0].unsqueeze(-1).expand(*grads[0].shape, ctx.length)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dim in the dtype of `x` by a fixed tree of elementwise additions, so that
    neither the device, the thread count, the strides nor the other rows can change a bit."""
    return _TreeSum.apply(x) if records_gradient(x) else _folded_trees(x)


LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
ROUND = 1.5 * 2.0**52
"""Added to a smaller fp64 number it leaves the nearest integer in the low bits of the mantissa."""


def _exp(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return torch.exp(x)
    if x.device.type == "cpu" and has_loops() and x.dtype == torch.float32:
        x = x.contiguous()
        y = torch.empty_like(x)
        _loops().exp_all(x, y)  # exact: a loop of ours
        return y
    x64 = x.to(torch.float64).clamp(-150.0, 130.0)
    shifted = x64 * LOG2_E + ROUND
    rest = x64 - (shifted - ROUND) * LN_2
    y = torch.full_like(x64, 1 / 40320)
    for inverse in (5040, 720, 120, 24, 6, 2, 1, 1):
        y = y * rest + 1 / inverse
    power_bits = (shifted.view(torch.int64) + 1023) << 52  # exact: the bits as an integer
    power = power_bits.view(torch.float64)  # exact: and back
    return (y * power).to(x.dtype)


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = _exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grads[0] * y


def exp(x: Tensor) -> Tensor:
    """exp(x), within 0.51 units in the last place in fp32: a polynomial of degree 8 over
    [-ln 2 / 2, ln 2 / 2] in fp64 and one rounding, so that its bits are the same on every CPU, in
    vector lanes and tails, in torch and in the loops. fp64 is the library's own."""
    return _Exp.apply(x) if records_gradient(x) else _exp(x)


def _plain_sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + _exp(-x))


def _plain_silu(x: Tensor) -> Tensor:
    return x / (1 + _exp(-x))


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = _plain_sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grads[0] * (y * (1 - y))


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _plain_silu(x)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        y = 1 / (1 + _exp(-x))
        return grads[0] * (y * (1 + x * (1 - y)))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), spelled out: the library's own differs between vector lanes and tails.

    Its derivative is spelled out too: through exp(-x) = inf (fp32, x < -88) it would be NaN.
    """
    return _Sigmoid.apply(x) if records_gradient(x) else _plain_sigmoid(x)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), with its derivative as in `sigmoid`."""
    return _Silu.apply(x) if records_gradient(x) else _plain_silu(x)


def segment_sum(x: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """Sums the rows of x [M, C] that share a value of `segment` [M], without atomics.

    Returns (values [G] of `segment` that occur, ascending; sums [G, C]). A fixed doubling scan
    over the stably sorted rows: the same bits on every run and device.
    """
    segment, order = torch.sort(segment, stable=True)
    x = x.index_select(0, order)
    num_rows = x.shape[0]
    step = 1
    while step < num_rows:
        same = segment[step:] == segment[:-step]
        if not bool(same.any()):
            break
        added = torch.where(same[:, None], x[:-step], torch.zeros_like(x[:-step]))
        x = torch.cat([x[:step], x[step:] + added])
        step *= 2
    last = torch.ones(num_rows, dtype=torch.bool, device=x.device)
    if num_rows:
        last[:-1] = segment[1:] != segment[:-1]
    return segment[last], x[last]


def check_indices(index: Tensor, limit: int, what: str) -> None:
    """Raises IndexError naming the first of `index` that is not in [0, limit)."""
    wrong = index[(index < 0) | (index >= limit)]
    if wrong.numel():
        raise IndexError(f"{what} {int(wrong[0])} is not in [0, {limit})")


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.gather(-1, index)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        # A plain write: gather's own backward adds with atomics.
        return grads[0].new_zeros(ctx.shape).scatter_(-1, index, grads[0]), None


def select(x: Tensor, index: Tensor) -> Tensor:
    """x [..., E] at `index` [..., B] of the last dim: [..., B]; no sum, forward or backward.

    An index may repeat within a row only at an entry whose gradient the caller drops.
    """
    return _Select.apply(x, index) if records_gradient(x) else x.gather(-1, index)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows x[index] of dim 0, for what carries no gradient (it would be added with atomics)."""
    assert not records_gradient(x)
    return x.index_select(0, index)


def top_k(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest of the last dim, largest first, ties to the lowest index."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]
