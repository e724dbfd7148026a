"""Two tools that really run, declared as the model learned to read them (tool_catalogue.py)."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

from suzuri.envs.generators.tool_catalogue import result_text

_SUM = re.compile(r"\s*(\d{1,9})\s*([-+*/])\s*(\d{1,9})\s*")
MOST_DICE = 1000


def calculate(expression: object) -> dict[str, Any]:
    """The value of two whole numbers with one of + - * / between them."""
    found = _SUM.fullmatch(expression) if isinstance(expression, str) else None
    if found is None:
        return {"error": "no number + - * / number"}
    left, right = int(found[1]), int(found[3])
    match found[2]:
        case "+":
            return {"value": left + right}
        case "-":
            return {"value": left - right}
        case "*":
            return {"value": left * right}
        case _:
            if right == 0:
                return {"error": "division by zero"}
            return {"value": left // right if left % right == 0 else left / right}


def roll_dice(count: object, sides: object) -> dict[str, Any]:
    """The sum of so many rolls."""
    numbers = [n for n in (count, sides) if type(n) is int and 1 <= n <= MOST_DICE]
    if len(numbers) < 2:
        return {"error": f"count and sides must be from 1 to {MOST_DICE}"}
    return {"total": sum(random.randint(1, numbers[1]) for _ in range(numbers[0]))}


def _declared(name: str, text: str, **kinds: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in kinds.items()},
        "required": list(kinds),
    }
    function = {"name": name, "description": text, "parameters": parameters}
    return {"type": "function", "function": function}


DECLARED = [
    _declared("roll_dice", "Roll dice", count="integer", sides="integer"),
    _declared("calculate", "Calculate an expression", expression="string"),
]
"""In OpenAI's form."""
_RUN: dict[str, Callable[..., dict[str, Any]]] = {"calculate": calculate, "roll_dice": roll_dice}


def run_tool(name: str, arguments: str) -> str:
    """The result of a call as JSON; what cannot be run has an `error` in it."""
    if name not in _RUN:
        return result_text({"error": "not found"})
    try:
        return result_text(_RUN[name](**json.loads(arguments)))
    except (TypeError, ValueError):
        return result_text({"error": "wrong arguments"})
