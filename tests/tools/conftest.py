"""The hub that a test of this room talks to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from suzuri.tools.pull import fetch
from tests.tools.fake_hub import FakeHub, running
from tests.tools.hub_settings import connect


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A fake hub on this machine, connected, with an empty cache; it is retried without a wait."""
    monkeypatch.setattr(fetch, "WAIT_SECONDS", 0.01)
    with running() as server:
        connect(monkeypatch, server, tmp_path / "home")
        yield server
