"""What `suzuri chat` can be asked. No torch here."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from tyro.conf import Positional

from suzuri.engine.config import EngineConfig
from suzuri.engine.sampling_params import SamplingParams
from suzuri.processing.chat import effort_level
from suzuri.processing.chat_blocks import tool_block

MAX_SEED = 2**62
MOST_BYTES = 64 << 20
"""Of a file of tools or keys."""
OF_SERVERS = ("api_key", "api_key_file")
OF_LOADING = ("random_weights", "text_only", "dtype", "device", "max_context", "memory_gb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Talk to a model in the terminal: one in this process, or with --url a server's.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves. When input comes from a pipe, a
    line is a turn. Exit code 0, 1 when a turn of a pipe failed, 2 when the command line, the model
    or the server cannot be used, 130 after two Ctrl-C.
    """

    model: Positional[str | None] = None
    """A model folder or a hub id; a preset or config.json with --random-weights. The default is the
    small model that comes with this package; nano is its short name. With --url: which of the
    server's models (default: its first)."""

    url: str | None = None
    """Server to talk to, such as http://127.0.0.1:8000."""

    api_key: str | None = None
    """Key to send to the server (everybody on this machine can read a command line: see
    --api-key-file)."""

    api_key_file: str | None = None
    """File whose first line is the key."""

    system: str | None = None
    """What the model is told before the conversation."""

    effort: str = "high"
    """How hard the model thinks: none, minimal, low, medium, high, xhigh, max, or a number from 0
    to 0.99."""

    tools: str | None = None
    """JSON file with a list of tools in OpenAI's form. You type the results of their calls."""

    max_tokens: int | None = None
    """Tokens of an answer at most, thoughts included (default: what the context holds)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    seed: int | None = None
    """Makes every answer repeatable; also that of random weights."""

    stop: tuple[str, ...] = ()
    """Texts that end an answer."""

    random_weights: bool = False
    """Take only the shape of the model and draw its weights."""

    text_only: bool = False
    """Leave the towers out, whether or not the files hold them; pictures and clips are refused."""

    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Arithmetic."""

    device: str = "cpu"
    """cpu or cuda."""

    max_context: int | None = None
    """Longest conversation (default: the model's, or what memory holds)."""

    memory_gb: float | None = None
    """Memory for weights and state, in GB (default: what is free)."""

    def resolve(self) -> "ChatConfig":
        """Checks the fields. Raises ValueError naming the flag and the fix."""
        if self.url is None:
            self._refuse(OF_SERVERS, "goes with --url; leave it out, or give the server's URL")
        else:
            self.server_url()
            self._refuse(OF_LOADING, "is for a model in this process; the server chose its own")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {MAX_SEED}")
        try:
            parse_effort(self.effort)
        except ValueError as error:
            raise ValueError(f"--effort: {error}") from error
        self.key()
        self.tool_list()
        self.sampling()
        self.engine()
        return self

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        for field in dataclasses.fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise ValueError(f"--{field.name.replace('_', '-')} {why}")

    def server_url(self) -> str:
        """The server's root, without /v1. Raises ValueError for what is no URL."""
        url = (self.url or "").strip()
        url = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(url)
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_good = is_good and parts.port != 0 and not (parts.query or parts.fragment)
        except ValueError:  # a port that is none
            is_good = False
        if not is_good or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError(f"--url {self.url!r}: write it as http://127.0.0.1:8000")
        if "@" in urlsplit(url).netloc:
            raise ValueError("--url: no name and password in it; a key goes into --api-key-file")
        return url.rstrip("/").removesuffix("/v1").rstrip("/")

    def key(self) -> str | None:
        """The server's key. Raises ValueError naming the flag."""
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("--api-key and --api-key-file: give one")
        flag, key = "--api-key", self.api_key
        if self.api_key_file is not None:
            flag = f"--api-key-file {self.api_key_file}"
            lines = _read(flag, self.api_key_file).decode("utf-8", "replace").splitlines()
            key = next((line.strip() for line in lines if line.strip()), "")
        if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
            raise ValueError(f"{flag}: a key must be ASCII text and not empty")
        return key

    def tool_list(self) -> list[dict[str, Any]]:
        """The tools, none without --tools. Raises ValueError naming the file and the place."""
        if self.tools is None:
            return []
        flag = f"--tools {self.tools}"
        data = _read(flag, self.tools)
        try:
            found: object = json.loads(data.decode())
            if not isinstance(found, list):
                raise ValueError("it must hold a list of tools")
            tool_block(cast("object", found))
        except UnicodeDecodeError as error:
            raise ValueError(f"{flag}: it is not UTF-8 (byte {error.start})") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{flag}: it is no JSON ({error or 'too deep'})") from error
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from error
        return cast("list[dict[str, Any]]", found)

    def sampling(self) -> SamplingParams:
        """Of every answer. Raises ValueError naming the field."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
        )

    def engine(self) -> EngineConfig:
        """The engine's part. Raises ValueError naming the field."""
        return EngineConfig(
            dtype=self.dtype,
            max_context=self.max_context,
            max_running=1,
            memory_gb=self.memory_gb,
        )


def parse_effort(text: str) -> str | float:
    """A name or a number, as the chat format has them. Raises ValueError with the list."""
    try:
        value: str | float = float(text)
    except ValueError:
        value = text
    effort_level(value)
    return value


def _read(flag: str, name: str) -> bytes:
    path = Path(name).expanduser()
    if path.is_dir():
        raise ValueError(f"{flag} is a folder; give a file")
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)  # a device may never end
        if len(data) > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
        return data
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{flag}: cannot be read ({reason})") from error
