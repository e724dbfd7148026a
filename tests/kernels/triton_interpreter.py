"""Lets Triton 3.6 interpret loops with bounds known at run time beside NumPy 2.4 and later, which
no longer turns an array of one element into a Python integer.
"""

import importlib
from typing import Any

import pytest


def patch_loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the duration of a test (the interpreter patches its tensors anew in every launch)."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    name = "_patch_lang_tensor"
    patch_tensor = vars(interpreter)[name]

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, name, patched)
