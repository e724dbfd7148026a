"""Rule 3 of docs/exactness.md: which operations kernels and the model may use.

Everything under suzuri/kernels but the Triton files is held to a list of what is allowed: each
entry has the same bits wherever a value lies (vector lanes or tails, strides), and leaves no order
of addition to the library. The model adds, multiplies and moves only: a short list of what is
forbidden there. A line opts out with a comment that says why:

    order = counts.cumsum(0)  # exact: integers

The backward of an op, its file gradient.py, is held to a longer list: backward_ops.py.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from tests.architecture import backward_ops
from tests.architecture.source import Files, comments, imports, nodes

# Allowed in every kernel file. A name is added here only with a test that shows its bits do not
# depend on neighbours, strides or threads, and that its backward has no atomics.
TORCH = {
    *("Tensor", "dtype", "device", "finfo", "bool", "int32", "int64", "float32", "float64"),
    *("bfloat16", "uint8", "float8_e4m3fn", "inf"),
    *("autograd.Function", "utils.checkpoint.checkpoint", "nn.functional.logsigmoid"),
    *("exp", "log", "rsqrt", "tanh", "erf", "maximum", "minimum", "where"),
    *("arange", "full", "full_like", "ones", "ones_like", "zeros", "zeros_like", "tensor"),
    *("empty", "empty_like", "cat", "stack", "searchsorted", "sort", "unique"),
    *("split_with_sizes", "from_numpy", "nn.Parameter", "inference_mode"),
    *("is_grad_enabled", "get_num_threads", "set_num_threads", "contiguous_format"),
    "multiprocessing.reductions.StorageWeakRef",
}
METHODS = {
    *("abs", "amax", "amin", "max", "min", "clamp", "masked_fill", "any", "all", "nonzero"),
    *("to", "detach", "clone", "contiguous", "new_zeros", "new_full", "new_empty"),
    *("expand", "expand_as", "flatten", "unflatten", "reshape", "permute", "transpose"),
    *("squeeze", "unsqueeze", "split", "unbind", "index_select", "repeat_interleave"),
    *("dim", "numel", "size", "item", "tolist", "is_floating_point"),
    *(
        "data_ptr",
        "element_size",
        "storage_offset",
        "stride",
        "untyped_storage",
        "is_contiguous",
        "is_inference",
    ),
    *("apply", "save_for_backward", "mark_non_differentiable", "mark_dirty", "__init__"),
    "set_materialize_grads",
    # Of Python's own types:
    *("append", "extend", "pop", "clear", "join", "items", "keys", "get", "bit_length"),
}
VALUES = {
    *("shape", "dtype", "device", "T", "values", "indices", "ndim", "requires_grad"),
    *("saved_tensors", "needs_input_grad", "is_cpu"),
}
"""Attributes that may be read; a tensor's operations may not be: a call is checked, a name not."""
CASES_TORCH = {"Generator", "rand", "randn", "randint", "randperm", "repeat_interleave"}
CASES_METHODS = {"argsort", "sort", "view"}
ONLY_IN_EXACT = {"gather", "scatter_"}
ONLY_IN_FUNCTIONS = {"index_select", "repeat_interleave"}
"""Their own backward adds rows, with atomics on a GPU; an autograd Function replaces it."""
MODULES = {
    *("torch", "suzuri", "collections", "contextlib", "dataclasses", "enum", "functools"),
    *("itertools", "math", "statistics", "threading", "typing", "warnings", "weakref"),
}
NUMPY = {
    *("ndarray", "int64", "inf", "errstate", "arange", "zeros", "zeros_like", "full_like"),
    *("where", "minimum", "maximum", "amax", "concatenate", "copyto", "array_equal", "unique"),
    *("asarray", "ascontiguousarray", "empty_like", "empty", "sqrt", "bool_", "isnan"),
    *("float32", "float64", "uint16", "uint32", "int32", "full", "nan"),
}
"""Allowed beside + - * / and comparisons in the files that work on arrays: what IEEE 754 rounds in
one way, or does not round. (+ - * / are the operators: a ufunc by name could be told to sum.)"""
ARRAY_METHODS = {"numpy", "copy", "view"}
ARRAY_VALUES = {"size"}
ARRAY_FILES = {
    f"suzuri/kernels/{name}.py" for name in ("arrays", "exact", "loops", "gradient_products")
}
"""May import NumPy, as every cpu.py may."""
BUILTINS_TO_AVOID = {"eval", "exec", "getattr", "globals", "locals", "pow", "vars", "__import__"}

# Matrix products and sums may be written in two files only; everything else calls those.
PRIMITIVE_FILES = {"suzuri/kernels/exact.py", "suzuri/kernels/matmul/reference.py"}
PRODUCTS = {
    *("@", "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "tensordot", "einsum"),
    *("addmm", "addmv", "addbmm", "baddbmm", "linear", "bilinear", "chain_matmul", "multi_dot"),
    *("grouped_mm", "scaled_mm", "int_mm", "cdist", "trace"),
}
PRIMITIVES = PRODUCTS | {"sum", "mean", "nansum", "nanmean"}

FORBIDDEN_IN_MODEL = PRIMITIVES | {
    *("prod", "norm", "var", "std", "var_mean", "std_mean", "softmax", "softmin", "log_softmax"),
    *("logsumexp", "logaddexp", "logcumsumexp", "cumsum", "cumprod", "amax", "amin", "aminmax"),
    *("argmax", "argmin", "topk", "median", "bincount", "histc", "segment_reduce"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logit", "sqrt", "rsqrt", "pow"),
    *("float_power", "sin", "cos", "tan", "sinh", "cosh", "tanh", "erf", "erfc", "erfinv"),
    *("sigmoid", "logsigmoid", "silu", "gelu", "relu", "glu", "softplus", "mish", "expit"),
    *("rms_norm", "layer_norm", "group_norm", "normalize", "kron", "outer", "addcmul", "lerp"),
    *("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention", "embedding", "gather"),
    *("index_select", "index_add", "index_put", "index_reduce"),
    *("scatter", "scatter_add", "scatter_reduce"),
}
MODEL_MODULES = {"nn.Module", "nn.ModuleList", "nn.ModuleDict", "nn.Parameter", "nn.Buffer"}
FORBIDDEN_PARTS = {"nn", "special", "linalg", "fft", "ops", "functional", "_C"}
"""Parts of torch of which the model uses nothing but MODEL_MODULES."""

OTHER_RULES = {
    *("kernel.py", "kernel_rows.py", "triton_math.py", "buckets.py", "tiles.py"),
    *("compiled.py", "cache_folder.py", "gpu_support.py", "micro.py"),
}
"""Triton files are judged by their tests on a GPU, not by names (buckets.py asks the vendor
library, and only where its bits were seen to be the kernel's), and micro.py, which writes vector
instructions, by tests/kernels/test_micro.py; the others do no arithmetic."""
OPT_OUT = "# exact:"
FIXES = {
    "exact.sigmoid or exact.silu": {"sigmoid", "silu", "expit", "hardswish", "glu", "Sigmoid"},
    "exact.select": {"gather"},
    "exact.segment_sum": {"index_add", "scatter_add", "scatter", "index_put", "bincount"},
    "exact.top_k, or torch.sort with stable=True": {"topk", "sort", "argsort", "argmax", "argmin"},
    "exact.widen (fp64 must stay fp64)": {"float", "half", "double", "bfloat16", "type"},
    "x * x, torch.rsqrt, or a constant": {"sqrt", "pow", "**", "square"},
    "amax or amin": {"max", "min"},
    "the name itself": BUILTINS_TO_AVOID - {"pow"},
}

Use = tuple[int, int, str]
"""First line, last line, name of an operation that is not allowed."""


def inexact_operations(files: Files) -> Iterator[str]:
    """Kernel files other than those for Triton use allowed operations only."""
    kernels = {
        path: text
        for path, text in files.items()
        if path.startswith("suzuri/kernels/") and PurePosixPath(path).name not in OTHER_RULES
    }
    fields = {name for text in kernels.values() for name in _fields(text)}
    for path, text in kernels.items():
        yield from _judge(path, text, _kernel_uses(path, text, fields))


def model_operations(files: Files) -> Iterator[str]:
    """The model leaves sums, products and functions of tensors to the kernels."""
    for path, text in files.items():
        if path.startswith("suzuri/model/"):
            yield from _judge(path, text, _model_uses(path, text))


def _judge(path: str, text: str, uses: Iterator[Use]) -> Iterator[str]:
    notes = {line: note for line, note in comments(text).items() if note.startswith(OPT_OUT)}
    for line, note in notes.items():
        if len(note.removeprefix(OPT_OUT).strip()) < 8:
            yield f"{path}:{line}: say why after {OPT_OUT!r}"
    for first, last, name in sorted(set(uses)):
        excused = any(line in notes for line in range(first, last + 1))
        plain = name if name.endswith("__") else name.strip("_")
        where = f"{path}:{first}: {plain!r}"
        if plain in PRIMITIVES | {"gather"} and path not in PRIMITIVE_FILES:
            yield f"{where} is written in suzuri/kernels/exact.py only; call that{_fix(name)}"
        elif excused:
            continue
        elif path.startswith("suzuri/model/"):
            yield f"{where} belongs into a kernel; call one of suzuri/kernels"
        else:
            yield (
                f"{where} is not bitwise stable (docs/exactness.md rule 3) or not yet listed in "
                f"tests/architecture/exact_ops.py{_fix(name)}; if it is here, "
                f"end the line with '{OPT_OUT} <why>'"
            )


def _fix(name: str) -> str:
    for fix, names in FIXES.items():
        if name.strip("_") in names or name in names:
            return f": use {fix}"
    return ""


def _kernel_uses(path: str, text: str, fields: set[str]) -> Iterator[Use]:
    if not backward_ops.is_backward(path):
        file = _KernelFile(path, text, fields)
        yield from file.imports()
        yield from file.uses(nodes(text))
        return
    forward = list(backward_ops.forward_nodes(text))
    within = set(map(id, forward))
    backward = _KernelFile(path, text, fields, backward=True)
    yield from backward.imports()
    yield from backward.uses(node for node in nodes(text) if id(node) not in within)
    yield from _KernelFile(path, text, fields).uses(forward)


class _KernelFile:
    """One file under suzuri/kernels; `fields` are those of the classes of all of them."""

    def __init__(self, path: str, text: str, fields: set[str], *, backward: bool = False) -> None:
        self.path, self.text, self.fields, self.backward = path, text, fields, backward
        is_cases = PurePosixPath(path).name == "cases.py"
        self.is_cases, self.is_exact = is_cases, path == "suzuri/kernels/exact.py"
        self.torch = TORCH | (CASES_TORCH if is_cases else set())
        self.methods = METHODS | (CASES_METHODS if is_cases else set())
        if self.is_exact:
            self.methods = self.methods | ONLY_IN_EXACT
        self.modules, self.values = MODULES, VALUES
        if path in ARRAY_FILES or PurePosixPath(path).name == "cpu.py":
            self.modules = MODULES | {"numpy"}
            self.methods = self.methods | ARRAY_METHODS
            self.values = self.values | ARRAY_VALUES
        if backward:
            self.torch = self.torch | backward_ops.TORCH
            self.methods = self.methods | backward_ops.METHODS
            self.values = self.values | backward_ops.VALUES
        self.torch_names = _torch_names(path, text)
        self.own_modules = _own_modules(path, text, self.modules)
        self.numpy_names = {i.bound for i in imports(path, text) if i.module == "numpy"}
        self.own = _assigned_on_self(text)
        self.in_functions: set[int] = set()
        self.called: dict[int, ast.Call] = {}
        self.bases: set[int] = set()
        self.excused_sorts: set[int] = set()
        for node in nodes(text):
            if isinstance(node, ast.Call):
                self.called[id(node.func)] = node
            elif isinstance(node, ast.Attribute):
                self.bases.add(id(node.value))
                if node.attr == "values" and isinstance(node.value, ast.Call):
                    self.excused_sorts.add(id(node.value))  # equal values are alike in any order
            elif isinstance(node, ast.ClassDef) and self._is_function(node):
                self.in_functions.update(map(id, ast.walk(node)))

    def imports(self) -> Iterator[Use]:
        for item in imports(self.path, self.text):
            top = item.module.split(".")[0]
            is_part_of_numpy = top == "numpy" and (item.name or item.module != "numpy")
            if (
                top not in self.modules
                or is_part_of_numpy
                or (top != "torch" and item.name == "torch")
            ):
                yield item.line, item.line, item.name or item.module
            elif top == "torch":
                name = ".".join(filter(None, (item.module, item.name)))[len("torch.") :]
                if name and not _is_part(name, self.torch):
                    yield item.line, item.line, name.split(".")[-1]

    def uses(self, of: Iterable[ast.AST]) -> Iterator[Use]:
        for node in of:
            if isinstance(node, ast.expr | ast.AugAssign) and (name := self._complaint(node)):
                yield node.lineno, node.end_lineno or node.lineno, name

    def _complaint(self, node: ast.expr | ast.AugAssign) -> str | None:
        match node:
            case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.MatMult()):
                return None if self.backward else "@"
            case ast.BinOp(left, ast.Pow(), right):
                constant = _is_constant(left) and _is_constant(right)
                return None if constant or self.is_cases else "**"
            case ast.AugAssign(op=ast.Pow()):
                return "**"
            case ast.Name(name) if name in BUILTINS_TO_AVOID:
                return name
            case ast.Name("sum", ast.Load()) if not self.is_cases:
                call = self.called.get(id(node))
                return None if call and _sums_numbers(call) else "sum"
            case ast.Name(name, ast.Load()) if name in self.torch_names:
                path = self.torch_names[name]
                is_module = path not in self.torch
                return name if is_module and id(node) not in self.bases else None
            case ast.Attribute():
                return self._attribute(node)
            case _:
                return None

    def _attribute(self, node: ast.Attribute) -> str | None:
        name, call = node.attr, self.called.get(id(node))
        if (path := self._torch_path(node)) is not None:
            if id(node) in self.bases and _is_part(path, self.torch) and path not in self.torch:
                return None
            if path not in self.torch:
                return name
            return None if path != "sort" or self._is_stable(call) else "sort"
        if isinstance(node.value, ast.Name):
            root = node.value.id
            if root in self.numpy_names:
                return None if name in NUMPY else name
            if root in self.own_modules:
                return name if name == "torch" else None
            if (root in ("self", "cls", "ctx") or self.backward) and name in self.own:
                return None
        if isinstance(node.ctx, ast.Store):
            return None
        if call is None:
            return None if name in self.values | self.fields or _is_plain_value(node) else name
        if name in ("max", "min") and (call.args or call.keywords):
            return name
        if name == "scatter_" and any(word.arg in (None, "reduce") for word in call.keywords):
            return name
        if name in ONLY_IN_FUNCTIONS:
            may = id(node) in self.in_functions or self.is_exact or self.backward
            return None if may else name
        return None if name in self.methods else name

    def _is_function(self, node: ast.ClassDef) -> bool:
        return any(self._torch_path(base) == "autograd.Function" for base in node.bases)

    def _torch_path(self, node: ast.expr) -> str | None:
        return _chain(node, self.torch_names)

    def _is_stable(self, call: ast.Call | None) -> bool:
        if call is None:
            return False
        for word in call.keywords:
            match word:
                case ast.keyword("stable", ast.Constant(True)):
                    return True
                case _:
                    pass
        return id(call) in self.excused_sorts


def _model_uses(path: str, text: str) -> Iterator[Use]:
    torch_names = _torch_names(path, text)
    own_modules = _own_modules(path, text, None)
    own = _assigned_on_self(text)
    bases = {id(node.value) for node in nodes(text) if isinstance(node, ast.Attribute)}
    for item in imports(path, text):
        name = (item.name or item.module).split(".")[-1]
        if item.module.split(".")[0] == "torch":
            full = ".".join(filter(None, (item.module, item.name)))[len("torch.") :]
            if full != "nn" and _forbidden_in_model(full):
                yield item.line, item.line, name
        elif name in ("numpy", "scipy", "operator"):
            yield item.line, item.line, name
    for node in nodes(text):
        last = getattr(node, "end_lineno", None) or 0
        match node:
            case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.MatMult()):
                yield node.lineno, last, "@"
            case ast.Name(name, ast.Load()) if name in torch_names:
                path_of = torch_names[name]
                is_module = path_of in ("", *FORBIDDEN_PARTS)
                if is_module and id(node) not in bases:
                    yield node.lineno, last, name
            case ast.Call(ast.Name("getattr"), [_, ast.Constant(str() as name), *_]):
                if name.strip("_") in FORBIDDEN_IN_MODEL:
                    yield node.lineno, last, name
            case ast.Call(ast.Attribute(attr="max" | "min" as name) as func, args, keywords):
                if (args or keywords) and _root(func) not in own_modules:
                    yield node.lineno, last, name
            case ast.Attribute(value, name, ast.Load()):
                full = _chain(node, torch_names)
                direct = value.id if isinstance(value, ast.Name) else None
                known = direct in own_modules or (direct == "self" and name in own)
                if full is not None:
                    if id(node) not in bases and _forbidden_in_model(full):
                        yield node.lineno, last, name
                elif name.strip("_") in FORBIDDEN_IN_MODEL and not known:
                    yield node.lineno, last, name
            case _:
                pass


def _forbidden_in_model(full: str) -> bool:
    first, last = full.partition(".")[0], full.rpartition(".")[2]
    if first in FORBIDDEN_PARTS:
        return full not in MODEL_MODULES
    return last.strip("_") in FORBIDDEN_IN_MODEL or last == "*" or last.endswith("_mm")


def _torch_names(path: str, text: str) -> dict[str, str]:
    """Local names that stand for torch or a part of it, and which part ("" is torch itself)."""
    names: dict[str, str] = {}
    for item in imports(path, text):
        if item.module.split(".")[0] == "torch":
            whole = item.name is None and item.bound == "torch"
            full = "torch" if whole else ".".join(filter(None, (item.module, item.name)))
            names[item.bound] = full.removeprefix("torch").lstrip(".")
    return names


def _own_modules(path: str, text: str, allowed: set[str] | None) -> set[str]:
    """Local names that are modules (not of torch) and nothing else: no argument, no variable."""
    found: set[str] = set()
    for item in imports(path, text):
        top = item.module.split(".")[0]
        inside = item.module == "suzuri.kernels" or item.name in (
            "reference",
            "cpu",
            "kernel",
            "cases",
            "gradient",
        )
        is_module = item.name is None or (top == "suzuri" and inside)
        if top != "torch" and is_module and (allowed is None or top in allowed):
            found.add(item.bound)
    for node in nodes(text):
        match node:
            case ast.arg(name) | ast.Name(name, ast.Store()):
                found.discard(name)
            case _:
                pass
    return found


def _assigned_on_self(text: str) -> set[str]:
    """Attributes that the file itself sets on self or ctx, and its methods."""
    found: set[str] = set()
    for node in nodes(text):
        match node:
            case ast.Attribute(ast.Name("self" | "ctx"), name, ast.Store()):
                found.add(name)
            case ast.ClassDef(body=body):
                found.update(item.name for item in body if isinstance(item, ast.FunctionDef))
            case _:
                pass
    return found


def _fields(text: str) -> Iterator[str]:
    """Annotated fields of the classes of a file."""
    for node in nodes(text):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                match item:
                    case ast.AnnAssign(ast.Name(name)):
                        yield name
                    case _:
                        pass


def _is_part(name: str, allowed: set[str]) -> bool:
    """An allowed name, or a module on the way to one: nn.functional."""
    return any(entry == name or entry.startswith(f"{name}.") for entry in allowed)


def _is_plain_value(node: ast.Attribute) -> bool:
    """`x.device.type`, `torch.finfo(dtype).min`"""
    match node:
        case ast.Attribute(ast.Attribute(attr="device") | ast.Name("device"), "type" | "index"):
            return True
        case ast.Attribute(ast.Call(ast.Attribute(attr="finfo")), "min" | "max" | "eps" | "tiny"):
            return True
        case _:
            return False


def _is_constant(node: ast.expr) -> bool:
    match node:
        case ast.Constant():
            return True
        case ast.UnaryOp(operand=operand):
            return _is_constant(operand)
        case ast.BinOp(left, _, right):
            return _is_constant(left) and _is_constant(right)
        case _:
            return False


def _sums_numbers(call: ast.Call) -> bool:
    """Whether a call of the builtin `sum` can only add Python numbers."""
    match call.args:
        case [ast.GeneratorExp(elt=element) | ast.ListComp(elt=element)]:
            return _is_number(element)
        case [ast.List(elts=elements) | ast.Tuple(elts=elements)]:
            return all(map(_is_number, elements))
        case [ast.Call(ast.Attribute(attr="tolist"))]:
            return True
        case _:
            return False


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Call(ast.Name("len" | "int" | "float" | "bool")):
            return True
        case ast.Call(ast.Attribute(attr="numel" | "dim" | "item" | "bit_length")):
            return True
        case ast.Subscript(ast.Attribute(attr="shape"), ast.Constant(int()) | ast.UnaryOp()):
            return True
        case ast.BinOp(left, _, right):
            return _is_number(left) and _is_number(right)
        case _:
            return _is_constant(node)


def _chain(node: ast.expr, torch_names: dict[str, str]) -> str | None:
    """What follows "torch." in the full name of a chain of names; None outside torch."""
    if isinstance(node, ast.Name):
        return torch_names.get(node.id)
    if isinstance(node, ast.Attribute):
        inner = _chain(node.value, torch_names)
        return None if inner is None else f"{inner}.{node.attr}".lstrip(".")
    return None


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
