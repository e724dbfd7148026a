"""What the checks read: the package as a map from path to source text. Next: checks.py.

Every check takes this map, so a bad snippet is tested exactly like the real tree.
"""

import ast
import io
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]

Files = dict[str, str]
"""Path from the repository root ("suzuri/model/config.py") to source text."""


@cache
def read_tree() -> Files:
    """The whole package, and the kernel tests (a kernel folder is complete only with its test)."""
    paths = [*ROOT.glob("suzuri/**/*.py"), *ROOT.glob("tests/kernels/test_*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(paths)}


@dataclass(frozen=True)
class Import:
    """One imported thing: `from a.b import c as d` is module "a.b", name "c", bound as "d"."""

    module: str
    name: str | None
    bound: str
    line: int


@cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Every node of a file."""
    return tuple(ast.walk(parse(text)))


def package_files(files: Files) -> Files:
    return {path: text for path, text in files.items() if path.startswith("suzuri/")}


def module_name(path: str) -> str:
    """suzuri/model/config.py -> suzuri.model.config; suzuri/model/__init__.py -> suzuri.model"""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_paths(files: Files) -> dict[str, str]:
    return {module_name(path): path for path in package_files(files)}


def room_of(module: str) -> str:
    """suzuri.model.config -> model; suzuri.cli -> cli; suzuri -> "" (the package itself)."""
    return module.split(".")[1] if "." in module else ""


@cache
def imports(path: str, text: str, *, at_load: bool = False) -> list[Import]:
    """Every import in a file, calls of `import_module` included; with `at_load`, those that run
    when the file is imported."""
    found: list[Import] = []
    for node in _nodes_at_load(parse(text)) if at_load else nodes(text):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                found.append(Import(alias.name, None, bound, node.lineno))
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(path, node)
            for alias in node.names:
                found.append(Import(source, alias.name, alias.asname or alias.name, alias.lineno))
        elif isinstance(node, ast.Call) and (module := dynamic_import(node)):
            found.append(Import(module, None, "", node.lineno))
    return found


def dynamic_import(node: ast.Call) -> str | None:
    """The module that `import_module(...)` or `__import__(...)` loads, "" if only running the code
    would tell; None for any other call."""
    match node:
        case ast.Call(
            ast.Name("import_module" | "__import__")
            | ast.Attribute(attr="import_module" | "__import__"),
            args,
        ):
            match args:
                case [ast.Constant(str() as module), *_] if not module.startswith("."):
                    return module
                case _:
                    return ""
        case _:
            return None


def imported_modules(item: Import, known: dict[str, str]) -> list[str]:
    """The modules of the package that an import loads, innermost first: c in `from a.b import c`
    is one of them when it is a file rather than a name."""
    if not (item.module == "suzuri" or item.module.startswith("suzuri.")):
        return []
    full = f"{item.module}.{item.name}"
    is_file = full in known or (item.module == "suzuri" and item.name != "__version__")
    return [full, item.module] if item.name and is_file else [item.module]


def comments(text: str) -> dict[int, str]:
    """Line number to the comment that ends that line."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}


def _absolute(path: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = PurePosixPath(path).parent.parts
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _nodes_at_load(tree: ast.Module) -> list[ast.AST]:
    """All nodes outside function bodies."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))
    return found
