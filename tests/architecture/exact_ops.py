"""Rule 3 of docs/exactness.md: which operations a kernel's reference may use.

Forbidden are those whose bits depend on where a value lies (vector lanes against tails, strides)
or whose order of addition is the library's choice. A line opts out with a comment that says why:

    order = counts.cumsum(0)  # exact: integers
"""

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.architecture.source import Files, comments, imports, nodes

# Matrix products and sums may be written in two files only; everything else calls those.
PRIMITIVE_FILES = {"suzuri/kernels/exact.py", "suzuri/kernels/matmul/reference.py"}
PRIMITIVES = {
    *("@", "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "tensordot", "einsum"),
    *("addmm", "addmv", "addbmm", "baddbmm", "linear"),
    *("sum", "mean", "nansum", "nanmean"),
}
FORBIDDEN = PRIMITIVES | {
    *("sigmoid", "silu", "gelu", "softplus", "mish", "exp2"),
    *("softmax", "softmin", "log_softmax", "logsumexp", "logcumsumexp"),
    *("cumsum", "prod", "cumprod", "norm", "var", "std", "var_mean", "std_mean"),
    *("layer_norm", "rms_norm", "group_norm", "topk"),
    *("conv1d", "scaled_dot_product_attention"),
    *("index_add", "scatter_add", "index_put", "scatter_reduce", "index_reduce"),
}
NOT_TENSORS = {"math", "statistics"}
OPT_OUT = "# exact:"


def inexact_operations(files: Files) -> Iterator[str]:
    """Kernel files other than kernel.py use allowed operations only."""
    for path, text in files.items():
        if path.startswith("suzuri/kernels/") and PurePosixPath(path).name != "kernel.py":
            yield from _in_file(path, text)


def _in_file(path: str, text: str) -> Iterator[str]:
    notes = {line: note for line, note in comments(text).items() if note.startswith(OPT_OUT)}
    for line, note in notes.items():
        if len(note.removeprefix(OPT_OUT).strip()) < 8:
            yield f"{path}:{line}: say why after {OPT_OUT!r}"
    for first, last, name in sorted(set(_uses(path, text))):
        excused = any(line in notes for line in range(first, last + 1))
        if name in PRIMITIVES and path not in PRIMITIVE_FILES:
            yield f"{path}:{first}: {name!r} is written in suzuri/kernels/exact.py only; call that"
        elif not excused:
            yield (
                f"{path}:{first}: {name!r} is not bitwise stable (docs/exactness.md rule 3); "
                f"if it is here, end the line with '{OPT_OUT} <why>'"
            )


def _uses(path: str, text: str) -> Iterator[tuple[int, int, str]]:
    """(first line, last line, name) of each forbidden operation."""
    torch_names, safe_names = _bindings(path, text)
    for item in imports(path, text):
        if item.module.split(".")[0] == "torch" and item.name and _plain(item.name) in FORBIDDEN:
            yield item.line, item.line, _plain(item.name)
    for node in nodes(text):
        match node:
            case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.MatMult()):
                yield node.lineno, node.end_lineno or node.lineno, "@"
            case ast.Attribute(attr=attr) if _plain(attr) in FORBIDDEN:
                if _root(node) in torch_names:  # also when it is passed on without a call
                    yield node.lineno, node.end_lineno or node.lineno, _plain(attr)
            case ast.Call(func=ast.Attribute(attr=attr)) if _plain(attr) in FORBIDDEN:
                if _root(node.func) not in safe_names | torch_names:
                    yield node.lineno, node.end_lineno or node.lineno, _plain(attr)
            case _:
                pass


def _bindings(path: str, text: str) -> tuple[set[str], set[str]]:
    """Local names that stand for torch or a part of it, and those that never hold a tensor op."""
    torch_names = {"torch", "F"}
    safe_names: set[str] = set()
    for item in imports(path, text):
        top = item.module.split(".")[0]
        if top == "torch":
            torch_names.add(item.bound)
        elif top in NOT_TENSORS or top == "suzuri":
            safe_names.add(item.bound)
    return torch_names, safe_names


def _plain(name: str) -> str:
    """In-place and private spellings count as the operation itself: index_add_, _softmax."""
    return name.strip("_")


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
