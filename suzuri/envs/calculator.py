"""A calculator that a model may call. No torch here."""

# pyright: strict

import ast
import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from suzuri.envs.generators.tool_catalogue import result_text
from suzuri.envs.task import Message
from suzuri.envs.tools import of_one_text, one_text

MOST_LETTERS = 200
MOST_BITS = 4096
"""Of the parts of a result."""
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calculator:
    """Reckons exactly: + - * / // % ** and brackets, over numbers."""

    name: str = "calculate"

    @property
    def declaration(self) -> Message:
        return of_one_text(self.name, "Calculate an expression", "expression")

    async def run(self, arguments: Mapping[str, Any]) -> str:
        return result_text({"value": written(value_of(one_text(arguments, "expression")))})


def value_of(expression: str) -> Fraction:
    """Raises ValueError for what is no such expression, or too large."""
    if len(expression) > MOST_LETTERS:
        raise ValueError(f"more than {MOST_LETTERS} letters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by 0") from error


def written(value: Fraction) -> int | float:
    """A whole number, or twelve digits of another."""
    return value.numerator if value.denominator == 1 else float(f"{float(value):.12g}")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return _bounded(Fraction(OPERATORS[type(sign)](_value(left), _value(right))))
        case _:
            raise ValueError("only numbers, + - * / // % ** and brackets")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or size * abs(exponent) > MOST_BITS:
        raise ValueError("a power that is too large, or not whole")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ValueError("too large")
    return value
