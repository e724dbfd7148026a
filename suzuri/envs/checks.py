"""When a text is the answer that was asked for: graders of prompts from files, by name in `CHECKS`.

Pure functions of the text and the expected answer. They look at all of the text and search for
nothing in it, so that repeating, listing and hiding earn nothing. No torch here.
"""

# pyright: strict

import importlib.util
import re
from collections.abc import Callable
from typing import Any

from suzuri.envs import math_answers
from suzuri.envs.numbers import SPACE, as_number
from suzuri.envs.task import canonical_json, strict_json

Check = Callable[[str, Any], bool]


def exact(text: str, expected: Any) -> bool:
    """The text, white space around it aside."""
    return text.strip(SPACE) == str(expected).strip(SPACE)


def number(text: str, expected: Any) -> bool:
    """The same number however it is written: 1,200 and 1200.0, 1/2 and 0.5, 50%. Nothing else may
    stand beside it but a sign of currency or a full stop."""
    found, wanted = as_number(text), as_number(str(expected))
    return found is not None and found == wanted


def regex(text: str, expected: Any) -> bool:
    r"""All of the text matches the expression. Of digits and letters \d and \w know the ASCII ones
    alone, for others look alike."""
    return re.fullmatch(str(expected), text.strip(SPACE), re.DOTALL | re.ASCII) is not None


def json_value(text: str, expected: Any) -> bool:
    """JSON of that value and nothing else."""
    value = strict_json(text.strip(SPACE))
    return value is not NotImplemented and canonical_json(value) == canonical_json(expected)


def json_schema(text: str, expected: Any) -> bool:
    """JSON that the schema allows (its formats included) and nothing else."""
    value = strict_json(text.strip(SPACE))
    return value is not NotImplemented and bool(_validator(expected).is_valid(value))


CHECKS: dict[str, Check] = {
    "exact": exact,
    "number": number,
    "regex": regex,
    "json": json_value,
    "json_schema": json_schema,
    "math": math_answers.math,
}
MAY_NOT_END = ("regex", "json_schema", "math")
"""To be called where they can be ended (workers.py): a text that takes too long is no answer."""


def is_answer(grader: str, text: str, expected: Any) -> bool:
    """For calls by name."""
    return CHECKS[grader](text, expected)


def refusal(grader: str, expected: Any) -> str | None:
    """Why there is nothing to check against, or None."""
    match grader:
        case "exact" if not str(expected).strip(SPACE):
            return "answer is empty"
        case "number" if as_number(str(expected)) is None:
            return f"answer {expected!r} is no number"
        case "regex":
            try:
                re.compile(str(expected), re.ASCII)
            except re.error as error:
                return f"answer {expected!r} is no regular expression ({error})"
        case "json_schema":
            return _missing(grader, "jsonschema_rs", "jsonschema-rs") or _schema_refusal(expected)
        case "math":
            return _missing(grader, "math_verify", "math-verify") or (
                math_answers.refusal(str(expected))
            )
        case _:
            pass
    return None


def _missing(grader: str, module: str, package: str) -> str | None:
    if importlib.util.find_spec(module) is not None:
        return None
    return f"grader {grader} needs the package {package}: pip install 'suzuri[rl]'"


def _schema_refusal(expected: Any) -> str | None:
    if expected is True or expected == {}:
        return "answer, a JSON schema, allows everything"
    if not isinstance(expected, dict) and expected is not False:
        return "answer must be a JSON schema, an object"
    try:
        _validator(expected)
    except ValueError as error:
        return f"answer is no JSON schema that can be used ({str(error).splitlines()[0]})"
    return None


def _validator(schema: Any) -> Any:
    """Raises ValueError. Nothing is fetched for it, and its expressions do not backtrack long."""
    import jsonschema_rs

    found: Any = jsonschema_rs.validator_for(schema, offline=True, validate_formats=True)
    return found
