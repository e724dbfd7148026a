"""The command line of `suzuri sft`. No torch here."""

from collections.abc import Sequence

from suzuri.config import load_recipe, parse
from suzuri.training.config import SftConfig


def parse_sft(args: Sequence[str]) -> SftConfig:
    """The config of `suzuri sft [RECIPE] [flags]`. Raises ValueError for a recipe that is none;
    prints help or an error of the flags and exits (0 or 2)."""
    if not args or args[0].startswith("-"):
        return parse(SftConfig, prog="suzuri sft", args=args)
    default = load_recipe(args[0], SftConfig)
    return parse(SftConfig, prog=f"suzuri sft {args[0]}", args=args[1:], default=default)
