"""Where things that can always be made again are kept between runs."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """$XDG_CACHE_HOME or ~/.cache, suzuri/`name`; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "suzuri" / name
    except RuntimeError:
        return None
