"""The command line of `suzuri rl`. No torch here."""

from collections.abc import Sequence

from suzuri.config import load_recipe, parse
from suzuri.rl.config import RlConfig

HELP = """usage: suzuri rl RECIPE [flags]

RECIPE is a Python file that defines config = RlConfig(...), for instance
recipes/nano_arithmetic.py. suzuri rl RECIPE --help shows the flags over it.
"""


def parse_rl(args: Sequence[str]) -> RlConfig | None:
    """The config of `suzuri rl RECIPE [flags]`; None where help was asked for, and printed. Raises
    ValueError for no recipe; prints an error of the flags and exits (2)."""
    if list(args) in (["-h"], ["--help"]):
        print(HELP)
        return None
    if not args or args[0].startswith("-"):
        raise ValueError("give a recipe first, such as recipes/nano_arithmetic.py")
    default = load_recipe(args[0], RlConfig)
    return parse(RlConfig, prog=f"suzuri rl {args[0]}", args=args[1:], default=default)
