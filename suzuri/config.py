"""Command lines from config dataclasses: one flag per field, typed, help from the field's
docstring.

Nested configs get dotted flags; an unknown flag is refused with the nearest names.
"""

from collections.abc import Sequence
from typing import TypeVar

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
