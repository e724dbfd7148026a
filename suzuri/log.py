"""Logging for the whole package: one stream to stderr, from rank 0 unless a record asks otherwise.

`get_logger(__name__)` at the top of a file; a program calls `start_logging()` once. Until it does,
only warnings and errors appear, as for any library.
"""

import logging
import os
import sys

LEVEL_VARIABLE = "SUZURI_LOG"
LEVELS = ("debug", "info", "warning", "error")
EVERY_RANK = {"every_rank": True}
"""Pass as `extra=EVERY_RANK` for a record that each rank should print."""


def get_logger(name: str) -> logging.Logger:
    """The logger of one file; pass `__name__`."""
    return logging.getLogger(name)


def start_logging(rank: int = 0) -> None:
    """Send this process's records to stderr. Calling it again replaces the earlier setting.

    The level is SUZURI_LOG (debug, info, warning or error; info when unset). Ranks other than 0
    print warnings, errors and records marked EVERY_RANK.
    """
    level = os.environ.get(LEVEL_VARIABLE, "info").lower()
    if level not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE}={level!r} is not one of {', '.join(LEVELS)}")

    def belongs_here(record: logging.LogRecord) -> bool:
        return rank == 0 or record.levelno >= logging.WARNING or hasattr(record, "every_rank")

    place = "" if rank == 0 else f" rank {rank}"
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(belongs_here)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname).1s{place} %(name)s: %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger("suzuri")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
