"""suzuri/log.py: who prints what."""

import logging
from collections.abc import Iterator

import pytest

from suzuri.log import EVERY_RANK, LEVEL_VARIABLE, get_logger, start_logging


@pytest.fixture(autouse=True)
def restored_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    root = logging.getLogger("suzuri")
    before = root.handlers[:], root.level
    yield
    root.handlers[:], level = before
    root.setLevel(level)


def printed(capsys: pytest.CaptureFixture[str], rank: int) -> list[str]:
    """The last word of each line that a process of this rank prints."""
    start_logging(rank)
    start_logging(rank)  # a second call must not print everything twice
    log = get_logger("suzuri.model.weights")
    log.debug("debug")
    log.info("info")
    log.info("everywhere", extra=EVERY_RANK)
    log.warning("warning")
    return [line.split()[-1] for line in capsys.readouterr().err.splitlines()]


def test_rank_zero_prints_from_info_on(capsys: pytest.CaptureFixture[str]):
    assert printed(capsys, rank=0) == ["info", "everywhere", "warning"]


def test_other_ranks_print_what_every_rank_should(capsys: pytest.CaptureFixture[str]):
    assert printed(capsys, rank=3) == ["everywhere", "warning"]


def test_level_comes_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(LEVEL_VARIABLE, "DEBUG")
    assert printed(capsys, rank=0) == ["debug", "info", "everywhere", "warning"]
    monkeypatch.setenv(LEVEL_VARIABLE, "loud")
    with pytest.raises(ValueError, match="SUZURI_LOG='loud' is not one of debug, info"):
        start_logging()
