"""Recipes: Python files that define `config`, and the command line over them. No torch here."""

import sys
import types
from collections.abc import Sequence
from pathlib import Path

from suzuri.config import parse
from suzuri.training.config import SftConfig


def parse_sft(args: Sequence[str]) -> SftConfig:
    """The config of `suzuri sft [RECIPE] [flags]`. Raises ValueError for a recipe that is none;
    prints help or an error of the flags and exits (0 or 2)."""
    if not args or args[0].startswith("-"):
        return parse(SftConfig, prog="suzuri sft", args=args)
    default = load_recipe(args[0])
    return parse(SftConfig, prog=f"suzuri sft {args[0]}", args=args[1:], default=default)


def load_recipe(path: str) -> SftConfig:
    """Runs the file and returns its `config`. Its errors are its own and show where they are."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"recipe {path}: no such file; flags begin with --")
    # As a module of that name: dataclasses in it look themselves up there.
    module = types.ModuleType(f"recipe_{file.stem}")
    module.__file__ = str(file.resolve())
    sys.modules[module.__name__] = module
    exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    config = getattr(module, "config", None)
    if not isinstance(config, SftConfig):
        raise ValueError(f"recipe {path}: must define config = SftConfig(...)")
    return config
