"""Importing modules in a fresh process where torch refuses to load."""

import json
import subprocess
import sys
from pathlib import Path

# A library that merely asks whether torch is installed is left in peace; one that tries to load it
# is caught even if it swallows the error.
IMPORT_ALL = """
import importlib, importlib.machinery, json, sys

BLOCKED = {"torch", "triton", "torchvision", "tml_renderers"}
asked_for = []

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED:
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        asked_for.append(spec.name)
        raise ImportError(f"{spec.name} is blocked")
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Refuse())
failed = {}
for name in json.load(sys.stdin):
    asked_for.clear()
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = repr(error)
    else:
        if asked_for:
            failed[name] = f"tried to import {asked_for}"
print(json.dumps(failed))
"""


def failed_imports(modules: list[str], folder: Path) -> dict[str, str]:
    """Module name to what went wrong, for those that do not import from `folder`."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        input=json.dumps(modules),
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])
