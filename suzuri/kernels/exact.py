"""The few arithmetic primitives that every reference is built from (docs/exactness.md).

A row of each result has the same bits alone as among any other rows, on one thread or many.
Read `accumulate` first: it is the only matrix product, and `tree_sum` the only reduction.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from suzuri.kernels.arrays import array, has_arrays, tensor, tree
from suzuri.kernels.kept import kept, owner_of
from suzuri.kernels.scratch import operand, scratch

ROW_PAD = 8
"""Rows are padded to this: BLAS libraries send the last M mod 4 rows down another path."""
COLUMN_PAD = 16
K_CHUNK = 128
"""Longest run of K inside one library call. Beyond about 256 the library picks the summation order
by M and by thread count; at 128 it has one order (measured:
docs/measurements/cpu-row-invariance.md)."""
CUDA_ROWS = 128
"""On a GPU every call has exactly this many rows, so that the library always picks one kernel."""
COLUMNS_PER_CALL = 2048
"""Bounds the fp64 copy of a wide weight, and equals the chunk of the log-softmax, so that the
chunked head of token_logprobs makes the very calls of the whole head."""
FOLD = 4096
"""Sums longer than this fold chunks of this length in order."""

Chunks = tuple[Tensor, ...]
"""The runs of K of a weight, each [..., at most K_CHUNK, N] fp64."""


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic that the contract calls "fp32": fp64 stays fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def records_gradient(*tensors: Tensor) -> bool:
    """Whether autograd would record an operation on these. Where not, the primitives below skip
    their autograd Functions, which cost more than the arithmetic of a few rows."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def widen(x: Tensor) -> Tensor:
    """`x` in the arithmetic dtype of its own dtype: bf16, fp16, fp32 -> fp32; fp64 -> fp64."""
    return x.to(at_least_fp32(x.dtype))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """`x` [..., M, K] as fp64 [..., rows, columns], zero filled."""
    m, k = x.shape[-2:]
    if (m, k) == (rows, columns):
        return x.to(torch.float64)
    out = x.new_zeros((*x.shape[:-2], rows, columns), dtype=torch.float64)
    out[..., :m, :k] = x
    return out


def _product(x: Tensor, chunks: Chunks, *, passing: bool = False) -> Tensor:
    """One library call per at most K_CHUNK of K, [..., M, k] @ [..., k, N], folded in order. A
    `passing` result lies in scratch memory: the caller reads it at once."""
    if len(chunks) == 1:
        out = None
        if passing:
            shape = (*x.shape[:-1], chunks[0].shape[-1])
            out = scratch("product", shape, torch.float64)
        return torch.matmul(  # exact: at most K_CHUNK long, padded rows and columns
            x, chunks[0], out=out
        )
    total: Tensor | None = None
    for number, w in enumerate(chunks):
        first = number * K_CHUNK
        part = torch.matmul(  # exact: at most K_CHUNK long, padded rows and columns
            x[..., first : first + K_CHUNK], w
        )
        total = part if total is None else total + part
    assert total is not None
    return total


def multiply(x: Tensor, w: Tensor, out: Tensor) -> None:
    """out = x [..., M, k] @ w [..., k, N] on a CPU, for callers that have padded fp64 operands and
    at most K_CHUNK of k: one library call, as in `_product`."""
    assert x.shape[-1] <= K_CHUNK
    torch.matmul(x, w, out=out)  # exact: at most K_CHUNK long, padded rows and columns


def _product_cuda(x: Tensor, chunks: Chunks) -> Tensor:
    """As `_product`, in calls of one shape: one matrix, CUDA_ROWS rows."""
    if x.dim() > 2:
        flat = [chunk.flatten(0, -3) for chunk in chunks]
        parts = [
            _product_cuda(a, tuple(chunk[i] for chunk in flat))
            for i, a in enumerate(x.flatten(0, -3))
        ]
        return torch.stack(parts).unflatten(0, x.shape[:-2])
    blocks = [_product(x[m : m + CUDA_ROWS], chunks) for m in range(0, x.shape[0], CUDA_ROWS)]
    return torch.cat(blocks)


def _laid_out(w: Tensor) -> Iterator[tuple[int, Chunks]]:
    """w [..., N, K] as `_product` wants it: for every COLUMNS_PER_CALL of N their number and the
    chunks of K, each fp64, padded and transposed."""
    n, k = w.shape[-2:]
    rows = _round_up(k, COLUMN_PAD)
    for start in range(0, n, COLUMNS_PER_CALL):
        piece = w if n <= COLUMNS_PER_CALL else w[..., start : start + COLUMNS_PER_CALL, :]
        width = piece.shape[-2]
        w64 = _padded(piece, _round_up(width, COLUMN_PAD), rows).transpose(-1, -2)
        if rows <= K_CHUNK:
            yield width, (w64,)
        else:
            starts = range(0, rows, K_CHUNK)
            yield width, tuple(w64[..., k0 : k0 + K_CHUNK, :] for k0 in starts)


def _laid_out_once(w: Tensor) -> tuple[tuple[int, Chunks], ...]:
    return tuple(_laid_out(w))


def _pieces(w: Tensor) -> Iterable[tuple[int, Chunks]]:
    """`_laid_out`, made once for a weight. A weight that needs no copy is only viewed, and a view
    must not be kept."""
    owner = owner_of(w)
    n, k = w.shape[-2:]
    is_copied = w.dtype != torch.float64 or n % COLUMN_PAD or k % COLUMN_PAD
    if not is_copied or not isinstance(owner, torch.nn.Parameter):
        return _laid_out(w)
    num_bytes = 8 * w.numel() // (n * k) * _round_up(n, COLUMN_PAD) * _round_up(k, COLUMN_PAD)
    return kept(_laid_out_once, w, num_bytes=num_bytes)


def accumulators(x: Tensor, w: Tensor) -> Tensor:
    """x [..., M, K] times w [..., N, K] transposed, in fp64, before any rounding: [..., M, N] fp64.

    Row m has the same bits whatever M is (rule 2 of docs/exactness.md). Leading dims are equal.
    """
    m, k = x.shape[-2:]
    n = w.shape[-2]
    if 0 in (m, k, n):
        return x.new_zeros((*x.shape[:-1], n), dtype=torch.float64)
    on_cpu = x.device.type == "cpu"
    rows = _round_up(m, ROW_PAD if on_cpu else CUDA_ROWS)
    x64 = _padded(x, rows, _round_up(k, COLUMN_PAD))
    product = _product if on_cpu else _product_cuda
    out = [product(x64, chunks)[..., :m, :width] for width, chunks in _laid_out(w)]
    return out[0] if len(out) == 1 else torch.cat(out, -1)


def accumulators_once(x: Tensor, w: Tensor, *, passing: bool = False) -> Tensor:
    """As `accumulators`, where no gradient is recorded: the same calls with less around them. The
    fp64 copy of a Parameter is made once for as long as it does not change (kept.py). A `passing`
    result may be overwritten by the next product: the caller rounds or copies it first."""
    m, k = x.shape[-2:]
    n = w.shape[-2]
    if x.device.type != "cpu" or 0 in (m, k, n):
        return accumulators(x, w)
    rows, columns = _round_up(m, ROW_PAD), _round_up(k, COLUMN_PAD)
    if (m, k) == (rows, columns):
        x64 = x.to(torch.float64)
    else:
        x64, inner = operand((*x.shape[:-2], rows, columns), m, k)
        inner[...] = x
    passing = passing and n <= COLUMNS_PER_CALL
    out: list[Tensor] = []
    for width, chunks in _pieces(w):
        part = _product(x64, chunks, passing=passing)
        part = part if m == rows else part[..., :m, :]
        out.append(part if part.shape[-1] == width else part[..., :width])
    return out[0] if len(out) == 1 else torch.cat(out, -1)


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
    if records_gradient(x, w):
        return _Accumulators.apply(x, w).to(at_least_fp32(x.dtype))
    wide = at_least_fp32(x.dtype)
    return accumulators_once(x, w, passing=wide != torch.float64).to(wide)


def accumulate_unrounded(x: Tensor, w: Tensor) -> Tensor:
    """As `accumulate`, in fp64 before the rounding: for what is added on the same accumulator."""
    return _Accumulators.apply(x, w) if records_gradient(x, w) else accumulators_once(x, w)


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


@np.errstate(all="ignore")
def _tree_of_array(x: Tensor) -> Tensor:
    return tensor(np.asarray(tree(array(x))))


def _folded_trees(x: Tensor) -> Tensor:
    length = x.shape[-1]
    if length <= FOLD and x.device.type == "cpu" and has_arrays(x) and x.numel():
        return _tree_of_array(x)
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


def _plain_sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _plain_silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


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
        y = 1 / (1 + torch.exp(-x))
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
