"""Strict reading of JSON documents and typed records: every fault names its field, value and fix.

`parse_object` and `Block` read a file; `check_fields` checks a frozen dataclass against its own
annotations, so a record built in code is held to the same rules. Used by config.py.
"""

# pyright: strict

import dataclasses
import functools
import json
import math
import types
from collections.abc import Mapping
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints


@dataclasses.dataclass(frozen=True)
class Between:
    """Allowed range of a number, ends included. Integers without one must be at least 1."""

    low: float
    high: float = math.inf


@dataclasses.dataclass(frozen=True)
class Above:
    """The number must be greater than `low`. Floats without a range may be any finite number."""

    low: float


def parse_object(data: bytes, source: str) -> dict[str, Any]:
    """Parse UTF-8 JSON whose top level is an object.

    Raises ValueError that starts with `source` and tells the position; a key given twice in one
    object is refused, because readers disagree about which one counts.
    """
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 text at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{source}: not valid JSON at line {error.lineno} column {error.colno}: {error.msg}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{source}: JSON nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{source}: must hold a JSON object, not {type(document).__name__}")
    return cast(dict[str, Any], document)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r} appears twice in one object; keep one")
        values[key] = value
    return values


class Block:
    """One JSON object being read; remembers which keys were asked for."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._known: set[str] = set()

    def name(self, key: str) -> str:
        """The dotted name of a key, as messages show it."""
        return f"{self._path}.{key}" if self._path else key

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` when the key is absent or null."""
        self._known.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        """The value; ValueError when the key is absent or null."""
        value = self.get(key)
        if value is None:
            state = "null" if key in self._values else "missing"
            raise ValueError(f"{self.name(key)} is {state}; the model cannot be built without it")
        return value

    def expect(self, key: str, supported: Any) -> None:
        """Refuse any value of a fixed recipe flag but `supported`; absent counts as supported."""
        self._known.add(key)
        value = self._values.get(key, supported)
        if type(value) is not type(supported) or value != supported:
            raise ValueError(
                f"{self.name(key)} = {json.dumps(value, default=str)} is not implemented; "
                f"supported: {json.dumps(supported)}"
            )

    def child(self, key: str) -> "Block | None":
        """The object under a key as a block; None when absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.name(key)} = {value!r}: must be an object")
        return Block(cast(Mapping[str, Any], value), self.name(key))

    def has(self, key: str) -> bool:
        """Whether the key is there, null or not. Does not mark it as known."""
        return key in self._values

    def unknown(self) -> list[str]:
        """Dotted names of the keys that nobody asked for, in file order."""
        return [self.name(key) for key in self._values if key not in self._known]


@functools.cache
def _hints(record_type: type) -> dict[str, Any]:
    return get_type_hints(record_type, include_extras=True)


def check_fields(record: Any, path: str) -> None:
    """Check the number, text and id fields of a frozen dataclass against its annotations.

    Called from `__post_init__`. Lists become tuples and integers in float fields become floats;
    anything else of the wrong type or outside its range raises ValueError naming
    `path`.field, the value and what is allowed. Fields of other types are left alone.
    """
    record_type: type = record.__class__
    hints = _hints(record_type)
    for field in dataclasses.fields(record):
        hint = hints[field.name]
        marks: tuple[Any, ...] = ()
        if get_origin(hint) is Annotated:
            hint, *rest = get_args(hint)
            marks = tuple(rest)
        name = f"{path}.{field.name}" if path else field.name
        value = getattr(record, field.name)
        options: tuple[Any, ...] = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if value is None and type(None) in options:
            continue
        if int in options:
            _check_int(name, value, marks)
        elif float in options:
            object.__setattr__(record, field.name, _check_float(name, value, marks))
        elif bool in options or str in options:
            wanted = "true or false" if bool in options else "a string"
            if type(value) is not (bool if bool in options else str):
                raise ValueError(f"{name} = {value!r}: must be {wanted}")
        elif tuple[int, ...] in options:
            object.__setattr__(record, field.name, _check_ids(name, value))


def _check_int(name: str, value: object, marks: tuple[Any, ...]) -> None:
    low, high = _range(marks, Between(1))
    wanted = f"an integer >= {low:g}" + (f" and <= {high:g}" if math.isfinite(high) else "")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} = {value!r}: must be {wanted}{_fix(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name} = {value}: must be {wanted}")


def _check_float(name: str, value: object, marks: tuple[Any, ...]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} = {value!r}: must be a number{_fix(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} = {value!r}: must be a finite number")
    low, high = _range(marks, Between(-math.inf))
    if not low <= number <= high:
        raise ValueError(f"{name} = {value!r}: must be >= {low:g}")
    for mark in marks:
        if isinstance(mark, Above) and number <= mark.low:
            raise ValueError(f"{name} = {value!r}: must be greater than {mark.low:g}")
    return number


def _check_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} = {value!r}: must be a list of integers")
    ids = tuple(cast(list[object], value))
    for i, one in enumerate(ids):
        _check_int(f"{name}[{i}]", one, (Between(0),))
    seen: set[object] = set()
    for one in ids:
        if one in seen:
            raise ValueError(f"{name}: {one} is listed twice; keep one")
        seen.add(one)
    return cast(tuple[int, ...], ids)


def _range(marks: tuple[Any, ...], default: Between) -> tuple[float, float]:
    for mark in marks:
        if isinstance(mark, Between):
            return mark.low, mark.high
    return default.low, default.high


def _fix(value: object) -> str:
    if isinstance(value, str):
        return "; write it without quotes"
    if isinstance(value, bool):
        return ", not true or false"
    if isinstance(value, float) and value.is_integer():
        return "; write it without a decimal point"
    return ""
