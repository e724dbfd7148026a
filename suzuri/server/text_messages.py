"""What the server and a text process say to each other: msgpack with its length before it."""

import json

import msgspec

from suzuri.engine.messages import MediaInput
from suzuri.model.config import ModelConfig

LENGTH_BYTES = 4


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first message: the model's shape, and the tokens of a prompt at most."""

    config: ModelConfig
    max_tokens: int


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Texts to ids; markup in them is text."""

    texts: list[str]


class Render(msgspec.Struct, frozen=True, tag="render"):
    """A conversation to ids; fields as those of ChatRenderer.render, what clients sent as JSON: it
    may hold numbers and texts that msgpack cannot say."""

    messages: bytes
    tools: bytes = b"null"
    effort: str | float | None = None
    add_generation_prompt: bool = True


Question = Setup | Encode | Render


def render(
    messages: object, tools: object, effort: str | float | None, add_generation_prompt: bool
) -> Render:
    """Raises ValueError for what is nested too deep."""
    try:
        return Render(
            messages=json.dumps(messages).encode(),
            tools=json.dumps(tools).encode(),
            effort=effort,
            add_generation_prompt=add_generation_prompt,
        )
    except RecursionError as error:
        raise ValueError("messages: nested too deep") from error


class Table(msgspec.Struct, frozen=True, tag="table"):
    """The answer to Setup: the bytes of every id."""

    token_bytes: list[bytes]


class Prompts(msgspec.Struct, frozen=True, tag="prompts"):
    """The ids of each text, or of the conversation, as the model reads them, and its media."""

    ids: list[list[int]]
    media: list[MediaInput] = []


class Wrong(msgspec.Struct, frozen=True, tag="wrong"):
    """The text cannot be used; what to change."""

    error: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The process lives; several a second, between the answers."""


Answer = Table | Prompts | Wrong
Said = Answer | Beat


def framed(message: Question | Said) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data
