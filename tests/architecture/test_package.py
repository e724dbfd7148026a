"""The rules of docs/style.md, checked on the package as it stands."""

import tomllib

import pytest

from tests.architecture.checks import CHECKS, LEVEL_OF, torch_free_paths
from tests.architecture.source import ROOT, module_name, read_tree
from tests.architecture.without_torch import failed_imports

LOOSELY_TYPED = {"kernels", "model"}


@pytest.mark.parametrize("name", CHECKS)
def test_rule(name: str):
    complaints = list(CHECKS[name](read_tree()))
    assert not complaints, "\n" + "\n".join(complaints)


def test_torch_free_files_import_without_torch():
    modules = [module_name(path) for path in torch_free_paths(read_tree())]
    assert "suzuri.log" in modules
    assert failed_imports(modules, ROOT) == {}


def test_every_other_room_is_checked_strictly():
    pyright = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pyright"]
    rooms = {room for room in LEVEL_OF if (ROOT / "suzuri" / room).is_dir()} - LOOSELY_TYPED
    assert {f"suzuri/{room}" for room in rooms} | {"suzuri/*.py"} <= set(pyright["strict"])
