"""Every check can fail: each line is a small tree that breaks one rule, or stays inside it."""

from pathlib import Path

import pytest

from tests.architecture.checks import CHECKS
from tests.architecture.source import Files
from tests.architecture.without_torch import failed_imports

OP = "suzuri/kernels/op/reference.py"
EXACT = "suzuri/kernels/exact.py"
CPU = "suzuri/kernels/op/cpu.py"
LAZY = "def __getattr__(name):\n    from suzuri.log import x\n    return x"
CASES = "suzuri/kernels/op/cases.py"
MODEL = "suzuri/model/a.py"
COMPLETE_OP = {
    "suzuri/kernels/op/__init__.py": 'def op(x):\n    """Contract."""\n',
    "suzuri/kernels/op/reference.py": "",
    "suzuri/kernels/op/cases.py": "",
    "tests/kernels/test_op.py": "",
}


def one(path: str, *lines: str) -> Files:
    return {path: "\n".join(lines) + "\n"}


def without(path: str) -> Files:
    return {other: text for other, text in COMPLETE_OP.items() if other != path}


def each(rule: str, path: str, head: str, snippets: dict[str, str]) -> list[tuple[str, Files, str]]:
    """One case per snippet: `head`, then the snippet, which is found by the words it maps to."""
    return [(rule, one(path, head, snippet), words) for snippet, words in snippets.items()]


NOT_IN_A_KERNEL = {
    "torch.special.expit(x)": "'expit'",
    **{f"F.{name}(x)": f"'{name}'" for name in ("glu", "selu", "hardswish", "normalize")},
    **{f"F.{name}(x, w)": f"'{name}'" for name in ("cross_entropy", "embedding", "embedding_bag")},
    **{f"F.{name}(x, w)": f"'{name}'" for name in ("conv2d", "avg_pool1d")},
    **{f"torch.{name}(x)": f"'{name}'" for name in ("sqrt", "log1p", "expm1", "sin", "argmax")},
    **{f"x.{name}()": f"'{name}'" for name in ("sqrt", "pow", "float", "half", "argsort", "sin")},
    **{f"torch.{name}(x, y)": f"'{name}'" for name in ("logaddexp", "kron", "lerp", "addcmul")},
    **{f"torch.{name}(x, y)": "exact.py only" for name in ("chain_matmul", "cdist", "trace")},
    **{f"torch.{name}(x, y)": "exact.py only" for name in ("_grouped_mm", "_scaled_mm")},
    **{f"torch.linalg.{name}(x)": f"'{name}'" for name in ("norm", "vector_norm")},
    "x**0.5": "'**'",
    "x **= 2": "'**'",
    "pow(x, 2)": "'pow'",
    "nn.Linear(2, 2)(x)": "'Linear'",
    "nn.Sigmoid()(x)": "'Sigmoid'",
    "x.scatter_(0, i, y, reduce='add')": "'scatter'",
    "torch.bincount(i, weights=x)": "'bincount'",
    "torch.segment_reduce(x, 'sum')": "'segment_reduce'",
    "x.max(-1).indices": "amax or amin",
    "x.min(dim=0)": "amax or amin",
    "torch.sort(x)": "stable=True",
    "torch.sort(x, stable=False).indices": "stable=True",
    "f = torch.sort": "'sort'",
    "x.sort(-1)": "stable=True",
    "f = x.sum; f(-1)": "exact.py only",
    "f = x.max; f(-1)": "'max'",
    "Tensor.sum(x)": "exact.py only",
    "getattr(torch, 'sigmoid')(x)": "'torch'",
    "getattr(x, 'sum')()": "'getattr'",
    "t = torch; t.exp(x)": "'torch'",
    "g = torch.nn.functional": "'functional'",
    "torch.__dict__['exp']": "'__dict__'",
    "torch.ops.aten.sigmoid(x)": "'sigmoid'",
    "x.__matmul__(w)": "'__matmul__'",
    "x.to(torch.float16)": "'float16'",
    "x.gather(-1, i)": "use exact.select",
    "torch.gather(x, -1, i)  # exact: it is small": "exact.py only",
    "x.index_select(0, i)": "'index_select'",
    "exact.torch.exp(x)": "'torch'",
    "def f(exact): return exact.sum(-1)": "exact.py only",
    "sum(xs)": "exact.py only",
    "sum(x for x in xs)": "exact.py only",
    "f = sum": "exact.py only",
    "import numpy": "'numpy'",
    "from operator import matmul": "'matmul'",
    "from torch import *": "'*'",
    "from torch import special": "'special'",
    "from suzuri.kernels.exact import torch": "'torch'",
    "class A(nn.Module): pass": "'Module'",
    "class A(Base):\n    def f(self, x): return x.index_select(0, self.i)": "'index_select'",
}
NOT_IN_THE_MODEL = {
    "x @ w": "exact.py only",
    "x @= w": "exact.py only",
    "x.T.matmul(w)": "exact.py only",
    "torch.einsum('ij->i', x)": "exact.py only",
    "torch._grouped_mm(x, w)": "exact.py only",
    "y = x.sum(-1)  # exact: it is small": "exact.py only",
    "F.linear(x, w)": "exact.py only",
    "nn.Linear(2, 2)": "'Linear'",
    "torch.linalg.norm(x)": "'norm'",
    "torch.special.expit(x)": "'expit'",
    "F.dropout(x)": "'dropout'",
    **{f"x.{name}()": f"'{name}'" for name in ("prod", "norm", "cumsum", "tanh", "sigmoid")},
    **{f"torch.{name}(x)": f"'{name}'" for name in ("softmax", "logsumexp", "exp", "rsqrt")},
    "f = x.softmax": "'softmax'",
    "x.index_add_(0, i, y)": "'index_add'",
    "x.max(-1)": "'max'",
    "torch.max(x, y)": "'max'",
    "getattr(x, 'exp')()": "'exp'",
    "getattr(torch, name)(x)": "'torch'",
    "from torch.nn.functional import silu": "'silu'",
    "from torch import special": "'special'",
    "from torch import exp": "'exp'",
    "import numpy as np": "'numpy'",
    "def f(math): return math.exp()": "'exp'",
    "h.norm(1)": "'norm'",
}
HEAD = """import torch
from torch import Tensor, nn
import torch.nn.functional as F
from suzuri.kernels import exact"""

BAD: list[tuple[str, Files, str]] = [
    *each("inexact_operations", OP, HEAD.replace("Tensor, nn", "Tensor"), NOT_IN_A_KERNEL),
    *each("model_operations", MODEL, HEAD + "\nimport math", NOT_IN_THE_MODEL),
    *each(
        "inexact_operations",
        CASES,
        "import torch",
        {"torch.sigmoid(x)": "'sigmoid'", "torch.normal(0, 1)": "'normal'"},
    ),
    ("inexact_operations", one(OP, "import torch", "torch.rand(3)"), "'rand'"),
    ("inexact_operations", one(EXACT, "x.scatter_(0, i, y, reduce='add')"), "'scatter'"),
    *each(
        "import_order",
        MODEL,
        "import importlib",
        {
            "importlib.import_module('suzuri.engine.engine')": "imports point down",
            "__import__('suzuri.cli')": "imports point down",
            "importlib.import_module('.cli', 'suzuri')": "literal, absolute",
            "importlib.import_module(name)": "literal, absolute",
        },
    ),
    ("torch_free", one("suzuri/cli.py", "__import__('torch')"), "suzuri/cli.py -> torch"),
    *each(
        "no_environment",
        "suzuri/a.py",
        "import os.path",
        {
            "os.environ": "os.environ",
            "from os import *": "os.*",
            "import posix; posix.environ": "os.environ",
            "os.path.os.environ": "os.environ",
            "os.path.expandvars('$X')": "os.expandvars",
            "from os.path import expandvars": "os.expandvars",
            "o = os": "os passed on",
            "getattr(os, 'environ')": "os passed on",
            "__import__('os').environ": "use an import statement",
        },
    ),
    *each(
        "no_broad_except",
        "suzuri/a.py",
        "import builtins",
        {
            "E = Exception": "a name for Exception",
            "E: type = BaseException": "a name for Exception",
            "E = (OSError, *[builtins.Exception])": "a name for Exception",
            "if (E := Exception): pass": "a name for Exception",
            "from builtins import Exception as E": "under another name",
        },
    ),
    *each(
        "private_access",
        "suzuri/engine/a.py",
        "from suzuri.model.layout import Layout, make",
        {
            "Layout._split(1)": "Layout._split",
            "make()._split": "_split is private",
            "def f(layout: Layout): return layout._split": "layout._split",
            "class A:\n    def f(self): return self.layout._split": "self.layout._split",
        },
    ),
    (
        "import_order",
        one("suzuri/model/a.py", "from suzuri.engine.engine import Engine"),
        "imports point down",
    ),
    ("import_order", one("suzuri/model/a.py", "from suzuri import engine"), "imports point down"),
    ("import_order", one("suzuri/model/a.py", "import suzuri.cli"), "imports point down"),
    (
        "import_order",
        one("suzuri/model/a.py", "def f():", "    from ..processing.b import c"),
        "imports point down",
    ),
    (
        "import_order",
        one("suzuri/engine/a.py", "from suzuri.training.trainer import LocalTrainer"),
        "side by side",
    ),
    ("import_order", one("suzuri/log.py", "from suzuri.config import parse"), "side by side"),
    ("import_order", one("suzuri/odd/a.py", "x = 1"), "not in the list"),
    ("import_order", one("suzuri/model/a.py", "import suzuri.odd"), "unknown room"),
    (
        "import_order",
        one("suzuri/kernels/op/a.py", "from suzuri.config import parse"),
        "tensors and numbers only",
    ),
    (
        "import_order",
        one("suzuri/kernels/op/a.py", "from suzuri.distributed.mesh import Mesh"),
        "imports point down",
    ),
    (
        "import_order",
        one("suzuri/processing/a.py", "from suzuri.model.decoder import Decoder"),
        "nothing else of model",
    ),
    ("import_order", one("suzuri/__init__.py", "from suzuri.log import x"), "the package itself"),
    ("torch_free", one("suzuri/cli.py", "import torch.nn as nn"), "suzuri/cli.py -> torch.nn"),
    ("torch_free", one("suzuri/types.py", "from torch import Tensor"), "-> torch"),
    ("torch_free", one("suzuri/model/config.py", "if True:", "    import torch"), "-> torch"),
    (
        "torch_free",
        one("suzuri/tools/plan/run.py", "import safetensors.torch"),
        "-> safetensors.torch",
    ),
    ("torch_free", one("suzuri/processing/a/b.py", "import tml_renderers.v0"), "-> tml_renderers"),
    (
        "torch_free",
        one("suzuri/cli.py", "from suzuri.tools import trace")
        | one("suzuri/tools/trace.py", "from suzuri.model.decoder import Decoder")
        | one("suzuri/model/decoder.py", "import torch"),
        "suzuri/cli.py -> suzuri/tools/trace.py -> suzuri/model/decoder.py -> torch",
    ),
    (
        "torch_free",
        one("suzuri/model/__init__.py", "import torch")
        | one("suzuri/server/app.py", "import suzuri.model.config")
        | one("suzuri/model/config.py", "x = 1"),
        "suzuri/server/app.py -> suzuri/model/__init__.py -> torch",
    ),
    ("docstring_rooms", one("suzuri/model/__init__.py", ""), "needs a docstring"),
    (
        "docstring_rooms",
        one("suzuri/model/__init__.py", '"""Room."""', "from suzuri.model.config import A"),
        "no code",
    ),
    ("docstring_rooms", one("suzuri/__init__.py", '"""P."""', "author = 'x'"), "no code"),
    ("docstring_rooms", one("suzuri/__init__.py", '"""P."""', "def f(): pass"), "no code"),
    ("docstring_rooms", one("suzuri/model/__init__.py", '"""M."""', LAZY), "no code"),
    (
        "private_access",
        one("suzuri/engine/a.py", "from suzuri.model._layout import split"),
        "private to its room",
    ),
    (
        "private_access",
        one("suzuri/engine/a.py", "from suzuri.model.layout import _split"),
        "private to suzuri.model.layout",
    ),
    (
        "private_access",
        one("suzuri/engine/a.py", "from suzuri.model import layout", "layout._split(1)")
        | one("suzuri/model/layout.py", ""),
        "layout._split",
    ),
    (
        "private_access",
        one("suzuri/engine/a.py", "import suzuri.model.layout", "suzuri.model.layout._split(1)"),
        "suzuri.model.layout._split",
    ),
    (
        "no_type_checking",
        one("suzuri/a.py", "from typing import TYPE_CHECKING"),
        "no TYPE_CHECKING",
    ),
    (
        "no_type_checking",
        one("suzuri/a.py", "import typing", "if typing.TYPE_CHECKING:", "    pass"),
        "no TYPE_CHECKING",
    ),
    ("no_argparse", one("suzuri/cli.py", "import argparse"), "no argparse"),
    ("no_argparse", one("suzuri/cli.py", "from argparse import Namespace"), "no argparse"),
    ("no_environment", one("suzuri/a.py", "import os", "os.environ['X']"), "os.environ"),
    ("no_environment", one("suzuri/a.py", "import os as o", "o.getenv('X')"), "os.getenv"),
    ("no_environment", one("suzuri/a.py", "from os import environ"), "os.environ"),
    ("no_broad_except", one("suzuri/a.py", "try: pass", "except: pass"), "bare"),
    ("no_broad_except", one("suzuri/a.py", "try: pass", "except Exception: pass"), "broad"),
    (
        "no_broad_except",
        one("suzuri/a.py", "try: pass", "except (OSError, BaseException) as e: pass"),
        "broad",
    ),
    ("no_broad_except", one("suzuri/a.py", "contextlib.suppress(Exception)"), "broad suppress"),
    *(("kernel_folders", without(path), f"{path}:1: missing") for path in COMPLETE_OP),
    (
        "kernel_folders",
        COMPLETE_OP | one("suzuri/kernels/op/__init__.py", "def op(x): return x"),
        "needs a docstring",
    ),
    (
        "kernel_folders",
        COMPLETE_OP | one("suzuri/kernels/op/__init__.py", "def _op(x): return x"),
        "public function",
    ),
    ("inexact_operations", one(OP, "import torch", "y = torch.sigmoid(x)"), "'sigmoid'"),
    ("inexact_operations", one(OP, "import torch as t", "f = t.nn.functional.silu"), "'silu'"),
    ("inexact_operations", one(OP, "from torch.nn import functional as fn", "fn.gelu"), "'gelu'"),
    ("inexact_operations", one(OP, "from torch.nn.functional import softplus"), "'softplus'"),
    ("inexact_operations", one(OP, "y = x.softmax(-1)"), "'softmax'"),
    ("inexact_operations", one(OP, "y = f(x)[0].topk(2)"), "'topk'"),
    ("inexact_operations", one(OP, "x.index_add_(0, i, y)"), "'index_add'"),
    ("inexact_operations", one(OP, "y = x @ w  # exact: it is small"), "exact.py only"),
    ("inexact_operations", one(OP, "x @= w"), "exact.py only"),
    ("inexact_operations", one(OP, "y = x.sum(-1)  # exact: it is small"), "exact.py only"),
    ("inexact_operations", one(EXACT, "y = x @ w"), "end the line with"),
    ("inexact_operations", one(EXACT, "y = x.cumsum(0)  # exact:"), "say why"),
    ("inexact_operations", one(EXACT, "y = x.cumsum(0), '# exact: a string'"), "'cumsum'"),
    ("inexact_operations", one("suzuri/kernels/op/cpu.py", "torch.logsumexp(x, 0)"), "'logsumexp'"),
    ("inexact_operations", one(CPU, "import numpy as np", "np.exp(x)"), "'exp'"),
    ("inexact_operations", one(CPU, "import numpy as np", "np.add.reduce(x)"), "'add'"),
    ("inexact_operations", one(CPU, "import numpy as np", "x.sum(-1)"), "'sum'"),
    ("inexact_operations", one(CPU, "import numpy as np", "x @ y"), "'@'"),
    ("inexact_operations", one(CPU, "from numpy import exp"), "'exp'"),
    ("inexact_operations", one(CPU, "import numpy.linalg as la"), "'numpy.linalg'"),
    ("inexact_operations", one(OP, "import numpy as np", "np.where(x, y, z)"), "'numpy'"),
]

GOOD: list[tuple[str, Files]] = [
    (
        "import_order",
        one(
            "suzuri/engine/a.py",
            "import torch",
            "from suzuri import __version__, log",
            "from suzuri.engine.b import c",
            "from suzuri.kernels.rms_norm import rms_norm",
        ),
    ),
    ("import_order", one("suzuri/processing/a.py", "from suzuri.model.config import ModelConfig")),
    ("import_order", one("suzuri/processing/a.py", "from suzuri.model import config")),
    (
        "torch_free",
        one("suzuri/cli.py", "def main():", "    import torch")
        | one("suzuri/model/decoder.py", "import torch"),
    ),
    ("docstring_rooms", one("suzuri/__init__.py", '"""P."""', "__version__ = '1'")),
    ("docstring_rooms", one("suzuri/__init__.py", '"""P."""', LAZY)),
    ("import_order", one("suzuri/__init__.py", '"""P."""', LAZY)),
    ("docstring_rooms", one("suzuri/kernels/op/__init__.py", "import torch")),
    ("private_access", one("suzuri/model/a.py", "from suzuri.model._layout import split")),
    ("private_access", one("suzuri/model/a.py", "class A:", "    def f(self): return self._x")),
    ("no_type_checking", one("suzuri/a.py", "from typing import Literal")),
    ("no_argparse", one("suzuri/a.py", "import tyro")),
    ("no_environment", one("suzuri/log.py", "import os", "os.environ.get('SUZURI_LOG')")),
    ("no_environment", one("suzuri/a.py", "import os", "os.cpu_count()", "env.environ")),
    ("no_broad_except", one("suzuri/a.py", "try: pass", "except (OSError, ValueError): pass")),
    ("kernel_folders", COMPLETE_OP),
    ("kernel_folders", one(EXACT, "")),
    (
        "inexact_operations",
        one(
            OP,
            "import math, torch",
            "from suzuri.kernels import exact",
            "from suzuri.kernels.exact import matmul",
            "y = matmul(x, w) + exact.sum(x, -1) + sum([1, 2]) + math.prod((3, 4))",
            "y = x / (1 + torch.exp(-x))",
            "z = x.cumsum(0)  # exact: counts are integers",
            "z = (",
            "    x.prod(0)  # exact: two factors",
            ")",
        ),
    ),
    ("inexact_operations", one(EXACT, "y = x @ w  # exact: padded, accumulated in fp64")),
    ("inexact_operations", one("suzuri/kernels/op/kernel.py", "y = torch.sigmoid(x)")),
    ("inexact_operations", one(CPU, "import numpy as np", "y = np.where(x > 0, x, -np.inf) * 2")),
    ("inexact_operations", one("suzuri/engine/a.py", "y = torch.sigmoid(x)")),
    (
        "inexact_operations",
        one(
            OP,
            "import torch",
            "from torch.nn.functional import logsigmoid",
            "from torch.utils.checkpoint import checkpoint",
            "from suzuri.kernels.op import reference",
            "y = logsigmoid(x) * 0.5**0.5 * 2.0**-10 * torch.finfo(x.dtype).min",
            "last = int(x.max()) + sum(len(a) for a in xs) + sum(x.shape[0] * 2 for x in xs)",
            "a, b = torch.sort(x, stable=True)",
            "c = torch.sort(x, dim=-1).values",
            "d = x.device.type == 'cpu' and reference.sum(x)",
            "class Select(torch.autograd.Function):",
            "    def forward(ctx, x, i):",
            "        ctx.rows = x.shape[0]",
            "        return x.index_select(0, i)",
            "    def backward(ctx, grad):",
            "        return grad.new_zeros(ctx.rows), None",
            "class Pair:",
            "    order_M: torch.Tensor",
            "def f(pair): return pair.order_M.to(torch.float64)",
            "z = x.sqrt()  # exact: correctly rounded everywhere",
        ),
    ),
    ("inexact_operations", one(EXACT, "y = x.gather(-1, i)", "x.scatter_(-1, i, y)")),
    (
        "inexact_operations",
        one(
            CASES,
            "import torch",
            "g = torch.Generator()",
            "x = torch.randn(sum(rows), k, generator=g) / k**0.5",
            "y = torch.rand(3).argsort(-1).sort(-1).values.view(3, 1)",
        ),
    ),
    (
        "model_operations",
        one(
            MODEL,
            "import math, torch",
            "from torch import Tensor, nn",
            "from suzuri.kernels import matmul",
            "from suzuri.kernels.gelu import gelu",
            "class Layer(nn.Module):",
            "    def __init__(self, widths):",
            "        self.norm = nn.Parameter(torch.empty(sum(widths), max(widths)))",
            "    def forward(self, h):",
            "        return gelu(self.norm(h) + 2 * h) * math.log(math.prod(h.shape))",
            "if int(ids.max()) >= rows or width**-0.5 > 1: raise ValueError",
            "y = torch.cat([matmul.matmul(x, w), x.clamp(min=0)])",
            "starts = lengths.cumsum(0)  # exact: integers",
        ),
    ),
    ("model_operations", one("suzuri/engine/a.py", "y = x.sum(-1)")),
    ("import_order", one("suzuri/model/a.py", "import importlib", "import_module('suzuri.log')")),
    ("import_order", one("suzuri/processing/audio_decoders.py", "import_module(name)")),
    ("no_environment", one("suzuri/a.py", "import os.path", "os.path.join('a', 'b')")),
    (
        "no_broad_except",
        one("suzuri/a.py", "E = (OSError, ValueError)", "e: Exception | None = None"),
    ),
    (
        "private_access",
        one(
            "suzuri/engine/a.py",
            "import os",
            "from suzuri.model.layout import Layout",
            "class A:",
            "    def _f(self, other: 'A'): return other._f(self), self._inherited",
            "os._exit(pair._replace(a=1))",
        ),
    ),
]


@pytest.mark.parametrize(("name", "files", "words"), BAD)
def test_check_finds(name: str, files: Files, words: str):
    complaints = list(CHECKS[name](files))
    assert any(words in complaint for complaint in complaints), complaints


@pytest.mark.parametrize(("name", "files"), GOOD)
def test_check_accepts(name: str, files: Files):
    assert list(CHECKS[name](files)) == []


def test_every_check_is_proven_both_ways():
    assert {name for name, _, _ in BAD} == {name for name, _ in GOOD} == set(CHECKS)


def test_importing_without_torch_finds(tmp_path: Path):
    swallowing = "try:\n    import torch\nexcept ImportError:\n    torch = None\n"
    asking = "import importlib.util\nimportlib.util.find_spec('torch')\n"
    lazy = "def f():\n    import torch\n"
    sources = {"plain": "import torch\n", "swallowing": swallowing, "asking": asking, "lazy": lazy}
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    failed = failed_imports([*sources, "absent"], tmp_path)
    assert failed.keys() == {"plain", "swallowing", "absent"}
    assert "torch is blocked" in failed["plain"]
    assert "tried to import ['torch']" in failed["swallowing"]
