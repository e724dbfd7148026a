"""OpenAI messages to blocks, the units of this chat format: one text, thought, call or picture.

Everything a caller can get wrong is refused here with its place (messages[2].content[1]). Read
next: chat.py, which renders the blocks.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from suzuri.processing.errors import MediaError
from suzuri.processing.media import MediaReader, MediaSource, base64_bytes

Role = Literal["system", "user", "assistant", "tool"]
BlockKind = Literal["text", "thinking", "call", "media", "tools", "end"]
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""What OpenAI calls a developer is a system here: the format has no other word for it."""
MAX_DEPTH = 64
"""Nesting of JSON in tools and calls."""

_KNOWN = {"role", "content", "name"}
_ASSISTANT = {"tool_calls", "reasoning_content", "reasoning"}
_WITHOUT_EFFECT = {"name", "detail", "id", "index", "strict", "cache_control"}
"""Keys that clients send as a matter of course and that the format has no words for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """text, thinking: `text`. call: function `name` with `arguments` as (key, JSON) pairs. media:
    `media`. tools: `tools` as (name, description, parameters). end: the model's turn is over.
    `name` is the author of a tool's result."""

    role: Role
    kind: BlockKind
    where: str
    text: str = ""
    name: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    media: MediaSource | None = None
    tools: tuple[tuple[str, str, dict[str, Any]], ...] = ()


def to_blocks(messages: object, reader: MediaReader | None) -> list[Block]:
    """The blocks of a conversation. Raises ValueError naming the message, part and fix.

    Without a reader, pictures and clips are refused.
    """
    items = _list(messages, "messages")
    if not items:
        raise ValueError("messages is empty; give at least one message")
    blocks: list[Block] = []
    called: dict[str, str] = {}
    for index, item in enumerate(items):
        where = f"messages[{index}]"
        message = _mapping(item, where)
        name = message.get("role")
        role = ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise ValueError(f"{where}.role = {name!r}: must be one of {', '.join(ROLES)}")
        known = _KNOWN | {"assistant": _ASSISTANT, "tool": {"tool_call_id"}}.get(role, set())
        _refuse_unknown(message, known, where)
        author = _author(message, called, where) if role == "tool" else ""
        own: list[Block] = []
        if role == "assistant":
            own += _reasoning(message, where)
        own += _content(message.get("content"), role, author, where, reader)
        if role == "assistant":
            calls = _calls(message.get("tool_calls"), where)
            called.update((id, block.name) for id, block in calls if id)
            if calls and message.get("content") == "":
                own = [block for block in own if block.kind != "text"]
            own += [block for _, block in calls]
        if not own:
            raise ValueError(f"{where} has no content; give text, parts or tool calls")
        blocks += own
        if role == "assistant":
            blocks.append(Block(role=role, kind="end", where=where))
    return blocks


def tool_block(tools: object) -> Block | None:
    """The declaration of tools in OpenAI's form; None when there are none."""
    if tools is None:
        return None
    declared: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for index, item in enumerate(_list(tools, "tools")):
        where = f"tools[{index}]"
        tool = _mapping(item, where)
        if tool.get("type") != "function":
            raise ValueError(f"{where}.type = {tool.get('type')!r}: must be 'function'")
        _refuse_unknown(tool, {"type", "function"}, where)
        function = _mapping(tool.get("function"), f"{where}.function")
        where = f"{where}.function"
        _refuse_unknown(function, {"name", "description", "parameters"}, where)
        description = function.get("description")
        parameters = function.get("parameters")
        shape = {} if parameters is None else dict(_mapping(parameters, f"{where}.parameters"))
        _json(shape, f"{where}.parameters")
        name = _function_name(function.get("name"), where)
        if name in declared:
            raise ValueError(f"{where}.name: {name!r} is declared twice")
        text = "" if description is None else _text(description, f"{where}.description")
        declared[name] = (name, text, shape)
    if not declared:
        return None
    return Block(role="system", kind="tools", where="tools", tools=tuple(declared.values()))


def _reasoning(message: Mapping[str, Any], where: str) -> list[Block]:
    texts = {
        key: _text(message[key], f"{where}.{key}")
        for key in ("reasoning_content", "reasoning")
        if message.get(key)
    }
    if len(set(texts.values())) > 1:
        raise ValueError(f"{where}: reasoning and reasoning_content differ; give one")
    return [
        Block(role="assistant", kind="thinking", where=where, text=text)
        for text in list(texts.values())[:1]
    ]


def _content(
    content: object, role: Role, author: str, where: str, reader: MediaReader | None
) -> list[Block]:
    where = f"{where}.content"
    if content is None:
        return []
    if isinstance(content, str):
        text = _text(content, where)
        return [Block(role=role, kind="text", where=where, text=text, name=author)]
    blocks: list[Block] = []
    for index, item in enumerate(_list(content, where)):
        place = f"{where}[{index}]"
        part: Mapping[str, Any] = {"type": "text", "text": item}
        if not isinstance(item, str):
            part = _mapping(item, place)
        kind = part.get("type")
        if kind in ("text", "thinking"):
            if kind == "thinking" and role != "assistant":
                raise ValueError(f"{place}: only the assistant thinks; use a text part")
            _refuse_unknown(part, {"type", kind}, place)
            text = _text(part.get(kind), f"{place}.{kind}")
            blocks.append(Block(role=role, kind=kind, where=place, text=text, name=author))
        elif kind in _MEDIA:
            if role == "assistant":
                raise ValueError(f"{place}: a part of type {kind!r} cannot be the assistant's")
            media = _media(part, str(kind), place, reader)
            blocks.append(Block(role=role, kind="media", where=place, media=media, name=author))
        else:
            raise ValueError(
                f"{place}.type = {kind!r}: must be one of text, thinking, {', '.join(_MEDIA)}"
            )
    return blocks


_MEDIA = ("image_url", "image_pil", "image", "input_audio", "audio_url", "audio")


def _media(
    part: Mapping[str, Any], kind: str, where: str, reader: MediaReader | None
) -> MediaSource:
    """image_url, audio_url: {"url": ...} or the URL; input_audio: {"data": base64, "format"};
    image, image_pil, audio: the thing itself."""
    if reader is None:
        raise ValueError(f"{where}: pictures and clips cannot be used here")
    _refuse_unknown(part, {"type", kind}, where)
    value: Any = part.get(kind)
    place = f"{where}.{kind}"
    if kind in ("image_url", "audio_url"):
        if not isinstance(value, str):
            inner = _mapping(value, place)
            _refuse_unknown(inner, {"url"}, place)
            value, place = inner.get("url"), f"{place}.url"
        if not isinstance(value, str):
            raise ValueError(f"{place} = {value!r}: must be a URL or a path")
    elif kind == "input_audio":
        inner = _mapping(value, place)
        _refuse_unknown(inner, {"data", "format"}, place)
        value, place = inner.get("data"), f"{place}.data"
        if not isinstance(value, str | bytes):
            raise ValueError(f"{place} = {value!r}: must be the file's bytes in base64")
    try:
        if kind == "input_audio" and isinstance(value, str):
            value = base64_bytes(value)
        return reader.source("image" if kind.startswith("image") else "audio", value)
    except MediaError as error:
        raise MediaError(f"{place}: {error}") from error


def _calls(calls: object, where: str) -> list[tuple[str | None, Block]]:
    if calls is None:
        return []
    found: list[tuple[str | None, Block]] = []
    for index, item in enumerate(_list(calls, f"{where}.tool_calls")):
        place = f"{where}.tool_calls[{index}]"
        call = _mapping(item, place)
        if call.get("type", "function") != "function":
            raise ValueError(f"{place}.type = {call.get('type')!r}: must be 'function'")
        _refuse_unknown(call, {"type", "function", "id"}, place)
        id = call.get("id")
        if id is not None and not isinstance(id, str):
            raise ValueError(f"{place}.id = {id!r}: must be a string")
        function = _mapping(call.get("function"), f"{place}.function")
        _refuse_unknown(function, {"name", "arguments"}, f"{place}.function")
        name = _function_name(function.get("name"), f"{place}.function")
        arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
        block = Block(role="assistant", kind="call", where=place, name=name, arguments=arguments)
        found.append((id, block))
    return found


def _arguments(value: object, where: str) -> tuple[tuple[str, str], ...]:
    """Arguments as (key, JSON) pairs; none at all for "" and null."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(_text(value, where))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where} is no JSON ({json_fault(error)}): {_shortened(value)}; send the "
                "arguments as the model wrote them, or leave this call out of the history"
            ) from error
    pairs = _mapping(value, where)
    return tuple((_text(key, where), _json(item, where)) for key, item in pairs.items())


def _author(message: Mapping[str, Any], called: Mapping[str, str], where: str) -> str:
    """The function whose result a message is."""
    id, name = message.get("tool_call_id"), message.get("name")
    if isinstance(id, str) and id in called:
        return called[id]
    if name is not None:
        return _function_name(name, where)
    raise ValueError(
        f"{where}.tool_call_id = {id!r} is no call made before; send the assistant's message "
        "with that call, or give the function as name"
    )


def _function_name(name: object, where: str) -> str:
    text = _text(name, f"{where}.name")
    if not 1 <= len(text) <= 256 or not text.isprintable() or text.strip() != text:
        raise ValueError(
            f"{where}.name = {_shortened(text)}: must be 1 to 256 printable characters"
        )
    return text


def _json(value: object, where: str) -> str:
    """The JSON of a value that came from JSON. Refuses what JSON cannot say."""
    try:
        _check_depth(value, where, MAX_DEPTH)
        return _text(json.dumps(value, ensure_ascii=False, allow_nan=False), where)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON: {json_fault(error)}") from error


def json_fault(error: Exception) -> str:
    """What was wrong with JSON, for whoever sent it."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    # Python's own words name a setting of the process.
    if "integer string conversion" in str(error):
        return f"a number has more than {sys.get_int_max_str_digits()} digits"
    return str(error)


def _check_depth(value: object, where: str, left: int) -> None:
    if left == 0:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    inner: list[object] = []
    if isinstance(value, Mapping):
        inner = list(cast("Mapping[object, object]", value).values())
    elif isinstance(value, list | tuple):
        inner = list(cast("Sequence[object]", value))
    for item in inner:
        _check_depth(item, where, left - 1)


def _refuse_unknown(value: Mapping[str, Any], known: set[str], where: str) -> None:
    """Keys that would be ignored, unless they hold nothing or are known to change nothing."""
    for key, item in value.items():
        if key in known or key in _WITHOUT_EFFECT or item is None or item == []:
            continue
        raise ValueError(f"{where}.{key}: there is no such thing here; leave it out")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} = {_shortened(value)}: must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: character {error.start} is half of a surrogate pair, which is no character; "
            "send valid Unicode"
        ) from error
    return value


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} = {_shortened(value)}: must be an object")
    pairs = cast("Mapping[object, Any]", value)
    if not all(isinstance(key, str) for key in pairs):
        raise ValueError(f"{where}: its keys must be strings")
    return cast("Mapping[str, Any]", value)


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} = {_shortened(value)}: must be a list")
    return list(cast("Sequence[Any]", value))


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
