"""Every check can fail: each line is a small tree that breaks one rule, or stays inside it."""

from pathlib import Path

import pytest

from tests.architecture.checks import CHECKS
from tests.architecture.source import Files
from tests.architecture.without_torch import failed_imports

OP = "suzuri/kernels/op/reference.py"
EXACT = "suzuri/kernels/exact.py"
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


BAD: list[tuple[str, Files, str]] = [
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
    ("torch_free", one("suzuri/tools/plan.py", "import safetensors.torch"), "-> safetensors.torch"),
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
    ("inexact_operations", one("suzuri/model/a.py", "y = torch.sigmoid(x)")),
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
