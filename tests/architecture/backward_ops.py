"""What backward code may use beside the lists of exact_ops.py: the file gradient.py of an op.

A gradient has equal bits from run to run and no more is promised of it (docs/exactness.md), so a
library may take a sum in its own order. What adds with atomics on a GPU stays out (index_add,
scatter_add, index_put, bincount), and cumsum of floats. In the same file the method `forward` of an
autograd Function is no backward code: it calls the op.
"""

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.architecture.source import nodes

_EITHER = {
    *("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "outer", "sum", "mean", "sigmoid"),
    *("softmax", "sqrt", "square", "addcmul", "gather", "index_select", "repeat_interleave"),
}
"""As functions of torch and as methods. The last three only move: here nothing records them."""
TORCH = _EITHER | {"autograd.function.once_differentiable", "promote_types", "result_type", "neg"}
METHODS = _EITHER | {
    *("scatter_", "add_", "sub_", "mul_", "div_", "addcmul_", "addmm_", "copy_", "zero_", "fill_"),
    *("exp", "neg", "masked_fill_", "chunk", "narrow", "view", "view_as", "new_ones"),
}
VALUES = {"mT", "is_cuda", "start", "stop"}


def is_backward(path: str) -> bool:
    """Whether a file holds the gradients of an op."""
    return path.startswith("suzuri/kernels/") and PurePosixPath(path).name == "gradient.py"


def forward_nodes(text: str) -> Iterator[ast.AST]:
    """The nodes of the methods named `forward`."""
    for node in nodes(text):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "forward":
                    yield from ast.walk(item)
