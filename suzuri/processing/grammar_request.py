"""What a request asks of the form of its output, as one checked value: `GrammarSpec`.

`chat_grammar` and `text_grammar` take the fields of OpenAI's API as they are; grammar.py compiles
the result. Torch-free, and without llguidance.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from suzuri.processing.grammar_schema import MAX_BYTES, checked_schema, items_of, shortened
from suzuri.processing.tool_calls import is_function_name

MAX_CHOICES: Final = 10_000
CHOICES: Final = ("none", "auto", "required")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextShape:
    """What a text must be. json_schema: `text` is a checked schema as JSON; regex, grammar: the
    thing itself; choice: a list of strings as JSON. `where`: the field, for error messages."""

    kind: Literal["json_schema", "regex", "grammar", "choice"]
    text: str
    where: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolShape:
    """A function that may be called, with a checked schema of its arguments as JSON."""

    name: str
    parameters: str
    where: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    """The form of one output; equal specs share a compiled grammar.

    chat: the output is a turn of blocks, thoughts first, and only what comes after them is bound;
    without, it is one text. role_given: whether the prompt ends with message_model. answer: the
    shape of the text, None for any. tools: what may be called; must_call: calls are all that may
    come; parallel: more than one.
    """

    chat: bool
    role_given: bool = True
    answer: TextShape | None = None
    tools: tuple[ToolShape, ...] = ()
    must_call: bool = False
    parallel: bool = True


def text_grammar(
    response_format: object = None,
    *,
    regex: object = None,
    grammar: object = None,
    choice: object = None,
) -> GrammarSpec | None:
    """The form of a completion, which has no blocks; None where nothing is asked. ValueError."""
    answer = text_shape(response_format, regex=regex, grammar=grammar, choice=choice)
    return None if answer is None else GrammarSpec(chat=False, answer=answer)


def chat_grammar(
    response_format: object = None,
    tools: object = None,
    tool_choice: object = None,
    parallel_tool_calls: bool | None = None,
    *,
    regex: object = None,
    grammar: object = None,
    choice: object = None,
    add_generation_prompt: bool = True,
) -> GrammarSpec | None:
    """The form of a turn in OpenAI's fields, None where the model is free. ValueError naming the
    field.

    Tools that are only offered (auto) bind nothing, unless one is strict or parallel_tool_calls is
    false: then the calls are held to the declared functions and their schemas. A required or named
    call leaves no room for text, so an answer's form beside it is refused.
    """
    answer = text_shape(response_format, regex=regex, grammar=grammar, choice=choice)
    shapes, any_strict = _tool_shapes(tools)
    parallel = True if parallel_tool_calls is None else parallel_tool_calls
    must_call, named = _choice(tool_choice, shapes)
    if tool_choice == "none":
        shapes = ()
    if must_call and answer is not None:
        raise ValueError(
            f"{answer.where} and tool_choice = {shortened(tool_choice)}: a turn that must call a "
            "tool has no text; leave one of them out"
        )
    if named is not None:
        shapes, parallel = (named,), False
    if not must_call and answer is None and not (shapes and (any_strict or not parallel)):
        return None
    return GrammarSpec(
        chat=True,
        role_given=add_generation_prompt,
        answer=answer,
        tools=shapes,
        must_call=must_call,
        parallel=parallel,
    )


def text_shape(
    response_format: object = None,
    *,
    regex: object = None,
    grammar: object = None,
    choice: object = None,
) -> TextShape | None:
    """At most one of the four; None for none of them and for {"type": "text"}. ValueError."""
    shapes = [
        _response_format(response_format),
        None
        if regex is None
        else TextShape(kind="regex", text=_text(regex, "regex"), where="regex"),
        None if grammar is None else _grammar(grammar),
        None if choice is None else _list_of_choices(choice),
    ]
    given = [shape for shape in shapes if shape is not None]
    if len(given) > 1:
        names = " and ".join(shape.where.split(".")[0] for shape in given)
        raise ValueError(f"{names}: only one of them can bind the output; leave the others out")
    return given[0] if given else None


def _response_format(value: object) -> TextShape | None:
    if value is None:
        return None
    where = "response_format"
    given = _mapping(value, where)
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            text = checked_schema({"type": "object"}, where, strict=True)
            return TextShape(kind="json_schema", text=text, where=where)
        case "json_schema":
            inner = _mapping(given.get("json_schema"), f"{where}.json_schema")
            where = f"{where}.json_schema.schema"
            if "schema" not in inner:
                raise ValueError(f"{where} is missing; give the schema")
            strict = _flag(inner.get("strict"), "response_format.json_schema.strict")
            text = checked_schema(inner["schema"], where, strict=strict)
            return TextShape(kind="json_schema", text=text, where=where)
        case other:
            raise ValueError(
                f"{where}.type = {shortened(other)}: must be one of text, json_object, json_schema"
            )


def _grammar(value: object) -> TextShape:
    return TextShape(kind="grammar", text=_text(value, "grammar"), where="grammar")


def _list_of_choices(value: Any) -> TextShape:
    items = items_of(value)
    if items is None or not 1 <= len(items) <= MAX_CHOICES:
        raise ValueError(
            f"choice = {shortened(value)}: must be a list of 1 to {MAX_CHOICES} strings"
        )
    for index, item in enumerate(items):
        _text(item, f"choice[{index}]")
    text = _text(json.dumps(items, ensure_ascii=False), "choice")
    return TextShape(kind="choice", text=text, where="choice")


def _tool_shapes(tools: object) -> tuple[tuple[ToolShape, ...], bool]:
    """And whether one of them is strict."""
    if tools is None:
        return (), False
    items = items_of(tools)
    if items is None:
        raise ValueError(f"tools = {shortened(tools)}: must be a list")
    shapes: list[ToolShape] = []
    any_strict = False
    for index, item in enumerate(items):
        where = f"tools[{index}].function"
        function = _mapping(_mapping(item, f"tools[{index}]").get("function"), where)
        name = function.get("name")
        if not isinstance(name, str) or not is_function_name(name):
            raise ValueError(
                f"{where}.name = {shortened(name)}: must be 1 to 256 printable characters"
            )
        strict = _flag(function.get("strict"), f"{where}.strict")
        any_strict = any_strict or strict
        place = f"{where}.parameters"
        given = function.get("parameters")
        # No parameters at all means a function without any (OpenAI).
        schema = {"additionalProperties": False} if given is None else _mapping(given, place)
        if schema.get("type", "object") != "object":
            raise ValueError(
                f"{place}.type = {shortened(schema['type'])}: must be 'object', since arguments "
                "have names"
            )
        text = checked_schema(
            {**schema, "type": "object"}, place, strict=strict, compact=True, sort=True
        )
        shapes.append(ToolShape(name=name, parameters=text, where=place))
    return tuple(shapes), any_strict


def _choice(choice: object, shapes: tuple[ToolShape, ...]) -> tuple[bool, ToolShape | None]:
    """Whether a call must come, and of which function if one is named."""
    if choice is None:
        return False, None
    if isinstance(choice, str) and choice in CHOICES:
        if choice != "required":
            return False, None
        if not shapes:
            raise ValueError("tool_choice = 'required': needs tools")
        return True, None
    wrong = (
        f"tool_choice = {shortened(choice)}: must be one of {', '.join(CHOICES)}, or "
        '{"type": "function", "function": {"name": ...}}'
    )
    if not isinstance(choice, Mapping):
        raise ValueError(wrong)
    given = cast("Mapping[str, object]", choice)
    function = given.get("function")
    if given.get("type") != "function" or not isinstance(function, Mapping):
        raise ValueError(wrong)
    name = cast("Mapping[str, object]", function).get("name")
    for shape in shapes:
        if shape.name == name:
            return True, shape
    names = ", ".join(shape.name for shape in shapes) or "none"
    raise ValueError(
        f"tool_choice.function.name = {shortened(name)}: is not among the tools ({names})"
    )


def _flag(value: object, where: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where} = {shortened(value)}: must be true or false")
    return bool(value)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} = {shortened(value)}: must be a string")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: character {error.start} is half of a surrogate pair; send valid Unicode"
        ) from error
    if size > MAX_BYTES:
        raise ValueError(f"{where} has {size} bytes; at most {MAX_BYTES} are compiled")
    return value


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} = {shortened(value)}: must be an object")
    return cast("Mapping[str, Any]", value)
