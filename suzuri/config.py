"""Command lines from config dataclasses: one flag per field, typed, help from the field's
docstring.

Nested configs get dotted flags; an unknown flag is refused with the nearest names. A recipe is a
Python file that defines `config`, over which the flags are read.
"""

import dataclasses
import functools
import sys
import traceback
import types
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import tyro

Config = TypeVar("Config")


def parse(
    kind: type[Config], *, prog: str, args: Sequence[str], default: Config | None = None
) -> Config:
    """Builds a `kind` from command-line words. Prints help or the error and exits (0 or 2).

    Over a `default`, which may have a switch on, every switch can be set both ways.
    """
    if default is not None:
        return tyro.cli(kind, prog=prog, args=args, default=default)
    return tyro.cli(kind, prog=prog, args=args, config=(tyro.conf.FlagCreatePairsOff,))


def load_recipe(path: str, kind: type[Config]) -> Config:
    """Runs the file and returns its `config`. ValueError for a file that is no recipe of that kind,
    and for a field that there is not; other errors are the file's own and show where they are."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"recipe {path}: no such file; flags begin with --")
    # As a module of that name: dataclasses in it look themselves up there.
    module = types.ModuleType(f"recipe_{file.stem}")
    module.__file__ = str(file.resolve())
    sys.modules[module.__name__] = module
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1].lineno
        raise ValueError(f"recipe {path}, line {where}: {error}") from error
    config = getattr(module, "config", None)
    if not isinstance(config, kind):
        raise ValueError(f"recipe {path}: must define config = {kind.__name__}(...)")
    return config


def document_of(config: Any, named: Collection[str]) -> dict[str, Any]:
    """All fields of a dataclass as JSON values; those in `named` by what they call themselves."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in named:
            value = None if value is None else name_of(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        found[field.name] = value
    return found


def name_of(value: Any) -> str:
    """The same in every process, so without addresses: what a dataclass or a partial function is
    made of, the name of a function or class, the type of anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return f"{type(value).__qualname__}({_arguments((), fields)})"
    if isinstance(value, functools.partial):
        made = cast("functools.partial[Any]", value)
        return f"{name_of(made.func)}({_arguments(made.args, made.keywords.items())})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _arguments(values: Iterable[Any], named: Iterable[tuple[str, Any]]) -> str:
    return ", ".join([*map(_shown, values), *(f"{name}={_shown(x)}" for name, x in named)])


def _shown(value: Any) -> str:
    is_dataclass = dataclasses.is_dataclass(value)
    return name_of(value) if is_dataclass or callable(value) else repr(value)
