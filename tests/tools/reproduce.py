"""The scripts of scripts/reproduce as modules."""

import importlib.util
import sys
from types import ModuleType

from suzuri.tools.bench.shapes import ROOT


def load_script(name: str) -> ModuleType:
    """scripts/reproduce/`name`.py, fresh."""
    path = ROOT / "scripts" / "reproduce" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
