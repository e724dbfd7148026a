"""The rules of docs/style.md that a machine can check. Each takes a map from path to source text
and returns complaints, "path:line: what and what to do". Rules on arithmetic: exact_ops.py.
"""

import ast
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from tests.architecture.exact_ops import inexact_operations, model_operations
from tests.architecture.source import (
    Files,
    Import,
    dynamic_import,
    imported_modules,
    imports,
    module_name,
    module_paths,
    nodes,
    package_files,
    parse,
    room_of,
)

LEVELS = (
    {"config", "types", "log", "interrupts"},
    {"kernels"},
    {"distributed"},
    {"model"},
    {"processing"},
    {"engine", "training", "envs"},
    {"rl", "evals", "server", "tools"},
    {"cli"},
    {"__main__"},
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

TORCH_FREE = (
    "suzuri/cli.py",
    "suzuri/interrupts.py",
    "suzuri/**/config.py",
    "suzuri/**/types.py",
    "suzuri/**/log.py",
    "suzuri/model/checkpoint_files.py",
    "suzuri/model/config*.py",
    "suzuri/model/hub*.py",
    "suzuri/model/locate.py",
    "suzuri/model/reconcile.py",
    "suzuri/model/sizes*.py",
    "suzuri/model/tensor_*.py",
    "suzuri/processing/**/*.py",
    "suzuri/server/**/*.py",
    "suzuri/envs/**/*.py",
    *(f"suzuri/evals/{name}.py" for name in ("exchange", "report")),
    "suzuri/rl/algorithms/**/*.py",
    *(
        f"suzuri/tools/chat/{name}.py"
        for name in (
            *("run", "loop", "commands", "conversation", "backend", "remote", "http"),
            *("display", "lines"),
        )
    ),
    *(f"suzuri/tools/{name}/**/*.py" for name in ("doctor", "inspect", "plan", "pull")),
    "suzuri/tools/*_config.py",
    *(f"suzuri/tools/bench/{name}.py" for name in ("cells", "floors", "shapes", "card", "peers")),
    *(
        f"suzuri/engine/{name}.py"
        for name in (
            *("scheduler", "pages", "radix", "prefix_cache", "request", "plan", "capacity"),
            *("sampling_params", "stopping", "messages", "client", "chat_stops"),
        )
    ),
)
# tml_renderers and safetensors.torch load torch themselves.
LOADS_TORCH = {"torch", "triton", "torchvision", "torchaudio", "transformers", "tml_renderers"}

READS_ENVIRONMENT = {
    "suzuri/cli.py",
    "suzuri/log.py",
    "suzuri/tools/doctor/host.py",
    "suzuri/kernels/cache_folder.py",
    "suzuri/kernels/matmul/buckets.py",
    "suzuri/training/data_workers.py",
}
"""Files that may read the environment: how threads of torch wait, the log level, what a report on
the machine shows, the cache folder, the vendor library's own variables, under which the results of
its test are stored, and what processes of few threads are started with."""

ENVIRONMENT_NAMES = {
    *("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"),
    *("expandvars", "__dict__", "*"),
}
ENVIRONMENT_MODULES = {"os", "posix", "nt", "posixpath", "ntpath"}

PACKAGE = "suzuri/__init__.py"

IMPORTS_BY_NAME = {"suzuri/processing/audio_decoders.py", "suzuri/engine/compile_server.py"}
"""Files that may import a module by a name they are given: optional decoders; those of kernels that
another process asks for."""

BROAD = {"Exception", "BaseException"}
PUBLIC_AFTER_ALL = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"} | {
    "_foreach_copy_",
    "_foreach_div_",
    "_foreach_mul_",
}
"""The documented names of a NamedTuple, and torch's operations on lists of tensors: all parameters
in a few launches."""


def import_order(files: Files) -> Iterator[str]:
    """Imports point down the list of rooms, never up and never sideways."""
    known = module_paths(files)
    for path, text in package_files(files).items():
        room = room_of(module_name(path))
        if room and room not in LEVEL_OF:
            yield f"{path}:1: room {room!r} is not in the list of docs/style.md section 3"
            continue
        # What the package offers to scripts it imports when asked, and nothing before.
        for item in imports(path, text, at_load=path == PACKAGE):
            for target in imported_modules(item, known)[:1]:
                if complaint := _import_complaint(room, target, item):
                    yield f"{path}:{item.line}: {complaint}"
        for node in nodes(text):
            if not isinstance(node, ast.Call) or path in IMPORTS_BY_NAME:
                continue
            if dynamic_import(node) == "":
                yield f"{path}:{node.lineno}: a module is imported by a literal, absolute name"


def _import_complaint(room: str, target: str, item: Import) -> str | None:
    other = room_of(target)
    if other in ("", room):
        return None
    if other not in LEVEL_OF:
        return f"imports unknown room {other!r}"
    if room == "":
        return f"the package itself imports {target}; it does so in __getattr__ only"
    if LEVEL_OF[other] > LEVEL_OF[room]:
        return f"{room} may not import {target}: imports point down the list"
    if LEVEL_OF[other] == LEVEL_OF[room]:
        return f"{room} may not import {target}: they stand side by side"
    if room == "kernels" and other in ("config", "types"):
        return f"kernels take tensors and numbers only, not {target}"
    allowed = target == "suzuri.model.config" or (target, item.name) == ("suzuri.model", "config")
    if room == "processing" and other == "model" and not allowed:
        return f"processing may import suzuri.model.config and nothing else of model, not {target}"
    return None


def torch_free_paths(files: Files) -> list[str]:
    return [path for path in package_files(files) if any(_match(path, p) for p in TORCH_FREE)]


def torch_free(files: Files) -> Iterator[str]:
    """Torch-free files reach torch neither themselves nor through what they import at load."""
    for path in torch_free_paths(files):
        if chain := _way_to_torch(path, files):
            yield f"{path}:1: must load without torch, but {' -> '.join(chain)}"


def _way_to_torch(start: str, files: Files) -> list[str] | None:
    known = module_paths(files)
    came_from: dict[str, str | None] = {start: None}
    waiting = [start]
    while waiting:
        path = waiting.pop(0)
        for item in imports(path, files[path], at_load=True):
            if item.module.split(".")[0] in LOADS_TORCH or item.module == "safetensors.torch":
                chain: list[str] = [item.module]
                step: str | None = path
                while step is not None:
                    chain.insert(0, step)
                    step = came_from[step]
                return chain
            for target in imported_modules(item, known):
                for module in _with_parents(target):
                    if module in known and known[module] not in came_from:
                        came_from[known[module]] = path
                        waiting.append(known[module])
    return None


def _with_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def docstring_rooms(files: Files) -> Iterator[str]:
    """Room `__init__.py` files hold a docstring and no code; a kernel's is the op itself."""
    for path, text in package_files(files).items():
        if not path.endswith("/__init__.py") or _kernel_of(path):
            continue
        tree = parse(text)
        if ast.get_docstring(tree) is None:
            yield f"{path}:1: needs a docstring: what the room is for, its reading order"
        for node in tree.body:
            if not (_is_text(node) or (path == PACKAGE and _is_of_package(node))):
                yield f"{path}:{node.lineno}: a room's __init__.py holds a docstring and no code"


def _is_text(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(ast.Constant(str())):
            return True
        case _:
            return False


def _is_of_package(node: ast.stmt) -> bool:
    """A version, and the function that finds what scripts ask the package for."""
    match node:
        case ast.Assign([ast.Name("__version__")], ast.Constant(str())):
            return True
        case ast.FunctionDef("__getattr__") | ast.ImportFrom("typing"):
            return True
        case _:
            return False


def private_access(files: Files) -> Iterator[str]:
    """`_module` is private to its room; `_name` is private to its file."""
    known = module_paths(files)
    for path, text in package_files(files).items():
        room = room_of(module_name(path))
        modules: set[str] = set()  # local names that are files or rooms of this package
        for item in imports(path, text):
            targets = imported_modules(item, known)
            if not targets:
                continue
            is_module = item.name is None or len(targets) == 2
            if room_of(targets[0]) != room and any(map(_is_private, targets[0].split("."))):
                yield f"{path}:{item.line}: {targets[0]} is private to its room"
            elif not is_module and item.name and _is_private(item.name):
                yield f"{path}:{item.line}: {item.name} is private to {item.module}"
            if is_module:
                modules.add(item.bound)
        foreign = {i.bound for i in imports(path, text) if i.module.split(".")[0] != "suzuri"}
        own = set(_defined_privately(text)) | PUBLIC_AFTER_ALL
        for node in nodes(text):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                dotted = _dotted(node.value) or "..."
                root = dotted.split(".")[0]
                inherited = dotted in ("self", "cls") or root in foreign
                if root in modules or not (node.attr in own or inherited):
                    yield f"{path}:{node.lineno}: {dotted}.{node.attr} is private"


def _defined_privately(text: str) -> Iterator[str]:
    """Names with an underscore that a file itself gives to functions, fields and attributes."""
    for node in nodes(text):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Name(name, ast.Store()):
                yield name
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                yield name
            case _:
                pass


def no_type_checking(files: Files) -> Iterator[str]:
    """No `TYPE_CHECKING`: with imports pointing down there is no cycle to hide."""
    for path, text in package_files(files).items():
        for node in nodes(text):
            match node:
                case ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
                    yield f"{path}:{node.lineno}: no TYPE_CHECKING; import from the file itself"
                case ast.ImportFrom(names=names) if any(n.name == "TYPE_CHECKING" for n in names):
                    yield f"{path}:{node.lineno}: no TYPE_CHECKING; import from the file itself"
                case _:
                    pass


def no_argparse(files: Files) -> Iterator[str]:
    """The command line is derived from dataclasses, never written by hand."""
    for path, text in package_files(files).items():
        for item in imports(path, text):
            if item.module.split(".")[0] in ("argparse", "optparse", "getopt"):
                yield f"{path}:{item.line}: no {item.module}; suzuri/config.py derives the flags"


def no_environment(files: Files) -> Iterator[str]:
    """Behaviour never depends on the environment."""
    for path, text in package_files(files).items():
        if path in READS_ENVIRONMENT:
            continue
        names_of_os: set[str] = set()
        for item in imports(path, text):
            from_os = item.module.split(".")[0] in ENVIRONMENT_MODULES
            if from_os and item.name in ENVIRONMENT_NAMES:
                yield f"{path}:{item.line}: os.{item.name}; pass a config field instead"
            elif from_os and item.bound == "":
                yield f"{path}:{item.line}: {item.module} by name; use an import statement"
            elif from_os and item.name is None:
                names_of_os.add(item.bound)
        bases = {id(node.value) for node in nodes(text) if isinstance(node, ast.Attribute)}
        for node in nodes(text):
            match node:
                case ast.Attribute(value, name) if name in ENVIRONMENT_NAMES:
                    dotted = (_dotted(value) or "").split(".")
                    if dotted[0] in names_of_os or dotted[-1] in ENVIRONMENT_MODULES | {"path"}:
                        yield f"{path}:{node.lineno}: os.{name}; pass a config field instead"
                case ast.Name(name, ast.Load()) if name in names_of_os and id(node) not in bases:
                    yield f"{path}:{node.lineno}: {name} passed on; call its functions by name"
                case _:
                    pass


def no_broad_except(files: Files) -> Iterator[str]:
    """An `except` names what it expects."""
    for path, text in package_files(files).items():
        for item in imports(path, text):
            if item.name in BROAD:
                yield f"{path}:{item.line}: {item.name} under another name hides a broad except"
        for node in nodes(text):
            match node:
                case ast.ExceptHandler(None):
                    yield f"{path}:{node.lineno}: bare except; name the errors you expect"
                case ast.ExceptHandler(caught) if caught and _is_broad(caught):
                    yield f"{path}:{node.lineno}: broad except; name the errors you expect"
                case ast.Call(func=ast.Name("suppress") | ast.Attribute(attr="suppress")):
                    if any(_is_broad(caught) for caught in node.args):
                        yield f"{path}:{node.lineno}: broad suppress; name the errors you expect"
                case (
                    ast.Assign(value=value)
                    | ast.AnnAssign(value=ast.expr() as value)
                    | ast.NamedExpr(value=value)
                ) if _is_broad(value):
                    yield f"{path}:{node.lineno}: a name for Exception hides a broad except"
                case _:
                    pass


def _is_broad(caught: ast.expr) -> bool:
    """Exception itself, or among what a tuple or a list holds."""
    match caught:
        case ast.Tuple(elts) | ast.List(elts):
            return any(map(_is_broad, elts))
        case ast.Starred(value):
            return _is_broad(value)
        case ast.IfExp(_, body, orelse):
            return _is_broad(body) or _is_broad(orelse)
        case _:
            return (_dotted(caught) or "").split(".")[-1] in BROAD


def kernel_folders(files: Files) -> Iterator[str]:
    """Every kernel folder has its contract, reference, cases and test, also of its gradient."""
    folders = {kernel for path in package_files(files) if (kernel := _kernel_of(path))}
    for kernel in sorted(folders):
        folder = f"suzuri/kernels/{kernel}"
        wanted = [f"{folder}/{name}" for name in ("__init__.py", "reference.py", "cases.py")]
        wanted.append(f"tests/kernels/test_{kernel}.py")
        if f"{folder}/gradient.py" in files:
            wanted.append(f"tests/kernels/test_{kernel}_gradient.py")
        for path in wanted:
            if path not in files:
                yield f"{path}:1: missing; every kernel folder is complete"
        if wanted[0] in files:
            yield from _contract(wanted[0], files[wanted[0]])


def _contract(path: str, text: str) -> Iterator[str]:
    functions = [
        node
        for node in parse(text).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_"
    ]
    if not functions:
        yield f"{path}:1: needs the op's public function"
    for node in functions:
        if ast.get_docstring(node) is None:
            yield f"{path}:{node.lineno}: {node.name} needs a docstring: it is the contract"


def _kernel_of(path: str) -> str | None:
    """The op's name for a path inside suzuri/kernels/<op>/."""
    parts = PurePosixPath(path).parts
    return parts[2] if parts[:2] == ("suzuri", "kernels") and len(parts) > 3 else None


def _match(path: str, pattern: str) -> bool:
    """Like a shell pattern, where `**` stands for any number of folders, none included."""
    return _match_parts(PurePosixPath(path).parts, PurePosixPath(pattern).parts)


def _match_parts(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    if not path or not pattern:
        return path == pattern
    if pattern[0] == "**":
        return _match_parts(path, pattern[1:]) or _match_parts(path[1:], pattern)
    return fnmatchcase(path[0], pattern[0]) and _match_parts(path[1:], pattern[1:])


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _dotted(node: ast.expr) -> str | None:
    """`a.b.c` as text; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := _dotted(node.value)):
        return f"{inner}.{node.attr}"
    return None


CHECKS: dict[str, Callable[[Files], Iterator[str]]] = {
    check.__name__: check
    for check in (
        import_order,
        torch_free,
        docstring_rooms,
        private_access,
        no_type_checking,
        no_argparse,
        no_environment,
        no_broad_except,
        kernel_folders,
        inexact_operations,
        model_operations,
    )
}
