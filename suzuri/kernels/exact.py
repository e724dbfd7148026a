"""The few arithmetic primitives that every reference is built from (docs/exactness.md).

A row of each result has the same bits alone as among any other rows, on one thread or many.
Read `accumulate` first: it is the only matrix product, and `tree_sum` the only reduction.
"""

import torch
from torch import Tensor

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


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic that the contract calls "fp32": fp64 stays fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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


def _product(x: Tensor, w: Tensor) -> Tensor:
    """One library call per at most K_CHUNK of K: [..., M, K] @ [..., N, K]^T, folded in order."""
    total: Tensor | None = None
    for k in range(0, x.shape[-1], K_CHUNK):
        part = torch.matmul(  # exact: at most K_CHUNK long, padded rows and columns
            x[..., k : k + K_CHUNK], w[..., k : k + K_CHUNK].transpose(-1, -2)
        )
        total = part if total is None else total + part
    assert total is not None
    return total


def _product_cuda(x: Tensor, w: Tensor) -> Tensor:
    """As `_product`, in calls of one shape: one matrix, CUDA_ROWS rows."""
    if x.dim() > 2:
        parts = [
            _product_cuda(a, b) for a, b in zip(x.flatten(0, -3), w.flatten(0, -3), strict=True)
        ]
        return torch.stack(parts).unflatten(0, x.shape[:-2])
    blocks = [_product(x[m : m + CUDA_ROWS], w) for m in range(0, x.shape[0], CUDA_ROWS)]
    return torch.cat(blocks)


def accumulators(x: Tensor, w: Tensor) -> Tensor:
    """x [..., M, K] times w [..., N, K] transposed, in fp64, before any rounding: [..., M, N] fp64.

    Row m has the same bits whatever M is (rule 2 of docs/exactness.md). Leading dims are equal.
    """
    m, k = x.shape[-2:]
    n = w.shape[-2]
    if 0 in (m, k, n):
        return x.new_zeros((*x.shape[:-1], n), dtype=torch.float64)
    on_cpu = x.device.type == "cpu"
    columns = _round_up(k, COLUMN_PAD)
    x64 = _padded(x, _round_up(m, ROW_PAD if on_cpu else CUDA_ROWS), columns)
    product = _product if on_cpu else _product_cuda
    out: list[Tensor] = []
    for start in range(0, n, COLUMNS_PER_CALL):
        piece = w[..., start : start + COLUMNS_PER_CALL, :]
        width = piece.shape[-2]
        w64 = _padded(piece, _round_up(width, COLUMN_PAD), columns)
        out.append(product(x64, w64)[..., :m, :width])
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
    return accumulate_unrounded(x, w).to(at_least_fp32(x.dtype))


def accumulate_unrounded(x: Tensor, w: Tensor) -> Tensor:
    """As `accumulate`, in fp64 before the rounding: for what is added on the same accumulator."""
    return _Accumulators.apply(x, w)


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
        x = x[..., :half] + x[..., half:]
        half //= 2
    return x[..., 0]


class _TreeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.length = x.shape[-1]
        if ctx.length <= FOLD:
            return _tree(x)
        total = _tree(x[..., :FOLD])
        for start in range(FOLD, ctx.length, FOLD):
            total = total + _tree(x[..., start : start + FOLD])
        return total

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return grads[0].unsqueeze(-1).expand(*grads[0].shape, ctx.length)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dim in the dtype of `x` by a fixed tree of elementwise additions, so that
    neither the device, the thread count, the strides nor the other rows can change a bit."""
    return _TreeSum.apply(x)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = 1 / (1 + torch.exp(-x))
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
        return x / (1 + torch.exp(-x))

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        y = 1 / (1 + torch.exp(-x))
        return grads[0] * (y * (1 + x * (1 - y)))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), spelled out: the library's own differs between vector lanes and tails.

    Its derivative is spelled out too: through exp(-x) = inf (fp32, x < -88) it would be NaN.
    """
    return _Sigmoid.apply(x)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), with its derivative as in `sigmoid`."""
    return _Silu.apply(x)


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
    return _Select.apply(x, index)


def top_k(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest of the last dim, largest first, ties to the lowest index."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]
