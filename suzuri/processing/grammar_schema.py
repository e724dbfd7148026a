"""JSON schemas of requests, checked before a grammar is made of them: size, shape, and what can be
enforced. Every refusal names the place as a path (schema.properties.a.type). Torch-free.
"""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast
from urllib.parse import unquote

MAX_BYTES: Final = 128 * 1024
"""Of a schema as JSON, and of a regex, grammar or list of choices."""
MAX_DEPTH: Final = 64
"""Nesting of a schema's JSON."""
MAX_PROPERTIES: Final = 400
"""Of one object: with more that may be left out, the parser has too many ways to go on."""
TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
FORMATS: Final = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
WHITE_SPACE: Final = r"[ \n\r\t]{1,64}"
"""What may stand between the parts of an answer in JSON: bounded, or a model can go on for ever."""

_NOTES = {
    "$schema",
    "$id",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "discriminator",
}
"""Keywords that constrain nothing. A discriminator only says which of oneOf to try first."""


def checked_schema(
    schema: object, where: str, *, strict: bool, compact: bool = False, sort: bool = False
) -> str:
    """The schema as JSON for the grammar compiler. ValueError naming the place.

    strict: refuse what cannot be enforced; without, it is ignored. compact: no white space in what
    is written. sort: properties in the order of their names.
    """
    _check_size(schema, where)
    root: object = {} if schema is True else schema
    if not isinstance(root, Mapping):
        raise ValueError(f"{where} = {shortened(schema)}: must be an object")
    root = cast("Mapping[str, Any]", root)
    _Checker(root, strict).schema(root, where)
    options: dict[str, Any] = {"lenient": not strict}
    if compact:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = WHITE_SPACE
    made = _sorted(root) if sort else root
    return json.dumps({**made, "x-guidance": options}, ensure_ascii=False)


def _check_size(schema: object, where: str) -> None:
    _check_nesting(schema, where)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} cannot be written as JSON: {error}") from error
    if len(text) > MAX_BYTES:
        raise ValueError(f"{where} has {len(text)} bytes; at most {MAX_BYTES} are compiled")


def _check_nesting(value: object, where: str) -> None:
    """Level by level, without recursion: what comes here may be nested a million times."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                below += cast("Mapping[object, object]", item).values()
            elif isinstance(item, list | tuple):
                below += cast("Sequence[object]", item)
        if not below:
            return
        level = below
    raise ValueError(f"{where} is nested more than {MAX_DEPTH} deep")


def inner_schemas(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The objects within a checked schema with their paths (.properties.a), the deepest first."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    level: list[tuple[str, Any]] = [("", schema)]
    while level:
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if isinstance(value, Mapping):
                value = cast("Mapping[str, Any]", value)
                found.append((path, value))
                below += [(f"{path}.{key}", item) for key, item in value.items()]
            else:
                below += [(f"{path}[{i}]", item) for i, item in enumerate(items_of(value) or [])]
        level = below
    return found[:0:-1]


class _Checker:
    """Walks one schema. `root` is what #/... refers to."""

    def __init__(self, root: Mapping[str, Any], strict: bool) -> None:
        self._root = root
        self._strict = strict

    def schema(self, value: Any, where: str) -> None:
        if isinstance(value, bool):
            return
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} = {shortened(value)}: must be a schema (an object)")
        for key, item in cast("Mapping[str, Any]", value).items():
            check = _CHECKS.get(key)
            if check is not None:
                check(self, item, f"{where}.{key}")
            elif self._strict and key not in _NOTES:
                raise ValueError(
                    f"{where}.{key}: cannot be enforced; leave it out, or set strict to false to "
                    "have it ignored"
                )

    def schemas(self, value: Any, where: str) -> None:
        items = items_of(value)
        if not items:
            raise ValueError(f"{where} = {shortened(value)}: must be a list of schemas")
        for index, item in enumerate(items):
            self.schema(item, f"{where}[{index}]")

    def named(self, value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} = {shortened(value)}: must be an object of schemas")
        items = cast("Mapping[str, object]", value)
        if len(items) > MAX_PROPERTIES:
            raise ValueError(f"{where} has {len(items)} entries; at most {MAX_PROPERTIES} compile")
        for key, item in items.items():
            self.schema(item, f"{where}.{key}")

    def type(self, value: Any, where: str) -> None:
        items = items_of(value)
        given = [value] if items is None else items
        if not given or any(item not in TYPES for item in given):
            raise ValueError(f"{where} = {shortened(value)}: must be of {', '.join(TYPES)}")

    def ref(self, value: Any, where: str) -> None:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise ValueError(
                f"{where} = {shortened(value)}: must point into this schema, as #/$defs/name; "
                "nothing is fetched"
            )
        target: Any = self._root
        for part in unquote(value).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and name in target:
                target = cast("Mapping[str, Any]", target)[name]
            elif (
                isinstance(target, list)
                and name.isdecimal()
                and int(name) < len(cast("list[Any]", target))
            ):
                target = cast("list[Any]", target)[int(name)]
            else:
                raise ValueError(f"{where} = {shortened(value)}: there is no such place here")

    def names(self, value: Any, where: str) -> None:
        items = items_of(value)
        if items is None or not all(isinstance(item, str) for item in items):
            raise ValueError(f"{where} = {shortened(value)}: must be a list of names")
        if len(items) > MAX_PROPERTIES:
            raise ValueError(f"{where} has {len(items)} entries; at most {MAX_PROPERTIES} compile")

    def values(self, value: Any, where: str) -> None:
        if not items_of(value):
            raise ValueError(f"{where} = {shortened(value)}: must be a list with a value or more")

    def count(self, value: Any, where: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ValueError(f"{where} = {shortened(value)}: must be a count, 0 or more")

    def number(self, value: Any, where: str) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300:
            raise ValueError(f"{where} = {shortened(value)}: must be a number")

    def text(self, value: Any, where: str) -> None:
        if not isinstance(value, str):
            raise ValueError(f"{where} = {shortened(value)}: must be a string")

    def format(self, value: Any, where: str) -> None:
        self.text(value, where)
        if self._strict and value not in FORMATS:
            raise ValueError(
                f"{where} = {shortened(value)}: cannot be enforced (these can: "
                f"{', '.join(FORMATS)}); leave it out, or set strict to false"
            )

    def anything(self, value: Any, where: str) -> None:
        pass


_CHECKS: Mapping[str, Callable[[_Checker, Any, str], None]] = {
    "type": _Checker.type,
    "$ref": _Checker.ref,
    "enum": _Checker.values,
    "const": _Checker.anything,
    "required": _Checker.names,
    "pattern": _Checker.text,
    "format": _Checker.format,
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _Checker.schemas),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _Checker.named),
    **dict.fromkeys(("items", "additionalProperties"), _Checker.schema),
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
        _Checker.count,
    ),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        _Checker.number,
    ),
}


def _sorted(value: Any) -> Any:
    """Properties by name, as the model was shown them and writes them; other order counts."""
    if isinstance(value, list):
        return [_sorted(item) for item in cast("list[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    made = {key: _sorted(item) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(made.get("properties"), dict):
        made["properties"] = dict(sorted(made["properties"].items()))
    return made


def items_of(value: object) -> list[Any] | None:
    """The items of a list of JSON; None for anything else."""
    return list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else None


def shortened(value: object) -> str:
    """A value for an error message; however deep it is."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxtuple = 3, 20, 20, 20
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 90
