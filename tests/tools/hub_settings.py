"""Points huggingface_hub, in this process or another, at a fake hub and at an empty cache."""

import os
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from suzuri.config import parse
from suzuri.tools.pull.config import PullConfig
from suzuri.tools.pull.run import run_pull
from tests.tools.fake_hub import FakeHub, Repo

GOLDEN = Path(__file__).parent.parent / "golden"
BASE = GOLDEN / "base" / "original"
SHARD = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
OWN = ("HF_", "HUGGING", "TRANSFORMERS_OFFLINE", "XDG_CACHE")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def model_files() -> dict[str, bytes]:
    """A small, complete model, with what a repository has beside it."""
    files = {path.name: path.read_bytes() for path in sorted(BASE.iterdir())}
    return files | {"README.md": b"# a model\n", "tokenizer_config.json": b"{}", "empty.txt": b""}


def connect(monkeypatch: pytest.MonkeyPatch, hub: FakeHub, home: Path) -> Path:
    """Settings as if HF_ENDPOINT and HF_HOME had been set at the start. Returns the cache."""
    for name in os.environ:
        if name.startswith(OWN) or name in PROXIES:
            monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(home / "stored_tokens"))
    huggingface_hub.close_session()
    hub.repos["ink/small"] = Repo(model_files())
    return home / "hub"


def environment(hub: FakeHub, home: Path, **more: str) -> dict[str, str]:
    """The environment of another process that uses the fake hub."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OWN) and name not in PROXIES
    }
    root = str(Path(__file__).parent.parent.parent)
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": root}
    return kept | settings | more


def program(code: str) -> list[str]:
    """The words of another process that runs `code`."""
    return [sys.executable, "-c", code]


def pull(*words: str) -> int:
    """`suzuri pull` in this process; its errors are raised."""
    return run_pull(parse(PullConfig, prog="suzuri pull", args=words).resolve())
