"""The rules on gradient.py find what they must, and let backward code be (backward_ops.py)."""

import pytest

from tests.architecture.checks import CHECKS

HEAD = """import torch
from torch.autograd.function import once_differentiable
from suzuri.kernels import exact
from suzuri.kernels.op import op
class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, i):
        ctx.save_for_backward(x, w, i)
        {forward}
    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, w, i = ctx.saved_tensors
        {backward}
def outside(x, w, i):
    {outside}
"""


def _complaints(path: str = "gradient.py", **parts: str) -> list[str]:
    text = HEAD.format(**{"forward": "pass", "backward": "pass", "outside": "pass"} | parts)
    return list(CHECKS["inexact_operations"]({f"suzuri/kernels/op/{path}": text}))


@pytest.mark.parametrize(
    "line",
    [
        "y = torch.matmul(x, w.mT) + x @ w + x.sum(-1) + torch.bmm(x, w) * x.sigmoid()",
        "y = x.gather(-1, i).index_select(0, i).view(3).scatter_(-1, i, x)",
        "y = exact.segment_sum(x.add_(w), i)",
    ],
)
def test_backward_may_use(line: str):
    assert _complaints(backward=line) == []
    assert _complaints(outside=line) == []
    assert _complaints(forward=line) != []
    assert _complaints("reference.py", outside=line) != []


@pytest.mark.parametrize(
    "line",
    [
        *("x.index_add_(0, i, w)", "x.scatter_add_(0, i, w)", "x.index_put_((i,), w)"),
        *("x.cumsum(0)", "torch.bincount(i, x)", "x.scatter_(0, i, w, reduce='add')"),
        *("torch.sort(x)", "x.topk(2)", "x.float()", "sum(x)", "x.scatter_reduce(0, i, w, 'sum')"),
        "torch.nn.functional.embedding(i, w)",
    ],
)
def test_backward_may_not_use(line: str):
    for part in ("forward", "backward", "outside"):
        assert len(_complaints(**{part: f"y = {line}"})) == 1, part


def test_forward_calls_the_op():
    assert _complaints(forward="return op(x, w.detach())") == []


def test_a_gradient_needs_its_test():
    files = {
        "suzuri/kernels/op/__init__.py": 'def op(x):\n    """Contract."""\n',
        **dict.fromkeys(("suzuri/kernels/op/reference.py", "suzuri/kernels/op/cases.py"), ""),
        **dict.fromkeys(("suzuri/kernels/op/gradient.py", "tests/kernels/test_op.py"), ""),
    }
    check, test = CHECKS["kernel_folders"], "tests/kernels/test_op_gradient.py"
    assert [words.partition(":")[0] for words in check(files)] == [test]
    assert list(check(files | {test: ""})) == []
