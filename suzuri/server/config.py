"""What `suzuri serve` can be asked. No torch here."""

import dataclasses
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from suzuri.engine.config import EngineConfig
from suzuri.model.presets import DEFAULT_MODEL

MAX_SEED = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve a model over HTTP with OpenAI's API.

    Exit code 0 after SIGTERM or Ctrl-C, 1 when the engine cannot be kept running, 2 when the
    command line or the model cannot be used.
    """

    model: Positional[str] = DEFAULT_MODEL
    """A model folder or a hub id; a preset or config.json with --random-weights. The default is the
    small model that comes with this package; nano is its short name."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one of this machine."""

    port: int = 8000
    """Port to listen on; 0 takes a free one."""

    api_key: tuple[str, ...] = ()
    """Keys that clients must send one of (everybody on this machine can read a command line: see
    --api-key-file)."""

    api_key_file: str | None = None
    """File with one key per line; lines that begin with # are comments."""

    served_model_name: tuple[str, ...] = ()
    """Names by which clients may ask for the model (default: MODEL)."""

    random_weights: bool = False
    """Take only the shape of the model and draw its weights."""

    text_only: bool = False
    """Leave the towers out, whether or not the files hold them; pictures and clips are refused."""

    seed: int = 0
    """Of random weights."""

    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Arithmetic."""

    device: str = "cpu"
    """cpu or cuda."""

    max_context: int | None = None
    """Longest prompt and answer together (default: the model's, or what memory holds)."""

    max_running: int = 64
    """Answers that are written at once."""

    page_size: int = 128
    """Tokens per page of keys and values."""

    memory_gb: float | None = None
    """Memory for weights and state, in GB (default: what is free)."""

    max_queue: int = 1024
    """Answers that may wait beyond those that are written; more get 429."""

    max_body_mb: float = 64.0
    """Largest request in MB; larger ones get 413."""

    body_seconds: float = 60.0
    """Time to send a request; longer gets 408."""

    request_seconds: float = 3600.0
    """Time for an answer, waiting included; longer gets 504."""

    reader_seconds: float = 60.0
    """Time for a reader to take what waits for it, 1.5 times as long for a whole answer; a slower
    one is cut off."""

    stuck_seconds: float = 120.0
    """An engine whose step takes longer is killed and started again."""

    drain_seconds: float = 30.0
    """After SIGTERM, time for running answers to end."""

    text_workers: int = 1
    """Processes that encode texts and render conversations."""

    allow_weight_updates: bool = False
    """Let clients replace the weights with those of a folder on this machine (for RL; whoever may
    ask the server may do it)."""

    def resolve(self) -> "ServeConfig":
        """Checks the fields. Raises ValueError naming the flag and the fix."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port {self.port}: must be from 0 to 65535")
        for name in ("max_body_mb", "body_seconds", "request_seconds", "reader_seconds"):
            self._positive(name)
        for name in ("stuck_seconds", "drain_seconds"):
            self._positive(name)
        if self.max_queue < 0:
            raise ValueError(f"--max-queue {self.max_queue}: must be 0 or more")
        if not 1 <= self.text_workers <= 64:
            raise ValueError(f"--text-workers {self.text_workers}: must be from 1 to 64")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {MAX_SEED}")
        self.keys()
        self.engine()
        return self

    def _positive(self, name: str) -> None:
        value: float = getattr(self, name)
        if not 0 < value < 1e9:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {value}: must be a positive number")

    def names(self) -> tuple[str, ...]:
        """By which clients may ask for the model, the one in answers first."""
        return self.served_model_name or (self.model,)

    def keys(self) -> tuple[str, ...]:
        """All keys. Raises ValueError for an empty one, and for a file without any."""
        keys = list(self.api_key)
        if self.api_key_file is not None:
            path = Path(self.api_key_file)
            if not path.is_file():
                raise ValueError(f"--api-key-file {path}: there is no such file")
            keys += _keys_of(path)
        if not all(key.strip() and key.isascii() for key in self.api_key):
            raise ValueError("--api-key: a key must be ASCII text and not empty")
        return tuple(keys)

    def engine(self) -> EngineConfig:
        """The engine's part. Raises ValueError naming the field."""
        return EngineConfig(
            dtype=self.dtype,
            max_context=self.max_context,
            max_running=self.max_running,
            max_waiting=10**9,  # the server counts, refusals included
            page_size=self.page_size,
            memory_gb=self.memory_gb,
            token_budget=max(EngineConfig().token_budget, self.max_running),
        )


def _keys_of(path: Path) -> list[str]:
    """One key per line, but for empty lines and comments. ValueError, which never shows a key."""
    found: list[str] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if not key.isascii():
            raise ValueError(f"--api-key-file {path}: line {number} is not ASCII text")
        found.append(key.decode())
    if not found:
        raise ValueError(f"--api-key-file {path}: there is no key in it")
    return found
