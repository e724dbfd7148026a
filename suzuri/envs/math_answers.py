r"""Mathematical answers, compared by math-verify: \frac{1}{2} is 0.5, {1, 2} is {2, 1}.

math-verify looks for expressions in a text and reads them kindly ("7 8" is 15 to it, and of
"8 = 7" the last counts); what is passed to it here is one expression, and nothing besides. Where
the answer is a number the text must be one too, for 2 + 5, the question itself, is 7 as well. Call
it where it can be ended (workers.py): its own time limit needs the main thread, and none bounds
memory. No torch here.
"""

# pyright: strict

import logging
import re
from fractions import Fraction
from typing import Any

from suzuri.envs.numbers import SPACE, as_number

MOST = 500
"""Characters of an expression."""
FENCES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
KNOWN_WORDS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh",
     "log", "exp", "sqrt", "and", "max", "min", "gcd", "lcm", "inf", "sup", "det")
)  # fmt: skip
ENVIRONMENTS = frozenset(("pmatrix", "bmatrix", "vmatrix", "matrix", "array", "cases"))
TEXTS = re.compile(r"\\(text|mbox|mathrm|textbf|textit|mathbf|operatorname)\b")
ASSIGNED = re.compile(r"\s*\\?[A-Za-z]+(_\{?\w+\}?)?(\([A-Za-z]\))?\s*")
FRACTION = re.compile(r"\\[dt]?frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|\s*(\d))")
AROUND_NUMBERS = (("{,}", ","), (r"\!", ""), (r"\,", ""), (r"\%", "%"), (r"\$", "$"))
DEGREES = re.compile(r"\^(\\circ|\{\\circ\})$")


def math(text: str, expected: Any) -> bool:
    """Whether the text is one expression that equals the expected one. Numbers are compared
    exactly, other expressions by math-verify (to six decimals where there is no other way)."""
    said, wanted = _bare(text), _bare(str(expected))
    number = _number(wanted)
    if number is not None:
        return _number(_value(said)) == number
    if said == wanted:
        return bool(said)
    if not _is_one_expression(said, wanted):
        return False
    from math_verify import verify  # pyright: ignore[reportMissingTypeStubs]

    left, right = _parsed(wanted), _parsed(said)
    return bool(left and right) and bool(verify(left, right, timeout_seconds=None))


def refusal(expected: str) -> str | None:
    """Why nothing can be compared with `expected`, or None."""
    wanted = _bare(expected)
    if is_plain(expected):
        return None
    words = set(WORDS.findall(re.sub(TEXTS.pattern + r"\s*\{[^{}]*\}", "", wanted))) - KNOWN_WORDS
    if words - ENVIRONMENTS or not 0 < len(wanted) <= MOST or not _parsed(wanted):
        return f"answer {expected[:60]!r} is no mathematical expression"
    return None


def is_plain(expected: str) -> bool:
    """Whether `refusal` is sure to be quick."""
    return _number(_bare(expected)) is not None


def _number(text: str) -> Fraction | None:
    """The number that is written, in LaTeX or without."""
    if len(text) > MOST:
        return None
    for sign, plain in AROUND_NUMBERS:
        text = text.replace(sign, plain)
    text = DEGREES.sub("", text)
    minus, text = (-1, text[1:].lstrip(SPACE)) if text.startswith("-") else (1, text)
    found = FRACTION.search(text)
    if found is None:
        value = as_number(text)
    elif found.end() == len(text):  # a whole number may stand before it: 3 1/2
        above, below = (int(found[i] or found[i + 1]) for i in (1, 3))
        whole = as_number(text[: found.start()] or "0")
        value = None if whole is None or not below else whole + Fraction(above, below)
    else:
        value = None
    return None if value is None else minus * value


def _value(text: str) -> str:
    """What comes after x =."""
    name, sign, value = text.partition("=")
    return value.strip(SPACE) if sign and ASSIGNED.fullmatch(name) else text


def _bare(text: str) -> str:
    text = text.strip(SPACE).removesuffix(".").strip(SPACE).replace("\N{MINUS SIGN}", "-")
    for start, end in FENCES:
        if len(text) > len(start + end) and text.startswith(start) and text.endswith(end):
            return text[len(start) : -len(end)].strip(SPACE)
    return text


def _is_one_expression(said: str, wanted: str) -> bool:
    """Not so: what is too long, has signs that only look like others, words, or numbers side by
    side, or sets things equal that are none that the expected answer sets equal."""
    if not said or len(said) > MOST or not said.isascii() or not said.isprintable():
        return False
    if "$" in said or r"\boxed" in said or re.search(r"\d\s+[.\d]", said):
        return False
    if r"\\" in said and r"\\" not in wanted:
        return False
    if bool(TEXTS.search(said)) != bool(TEXTS.search(wanted)):
        return False
    if set(WORDS.findall(said)) - KNOWN_WORDS - set(WORDS.findall(wanted)):
        return False
    signs = re.findall(r"(?<![<>!])=", said)
    if len(signs) == len(re.findall(r"(?<![<>!])=", wanted)):
        return True
    return len(signs) == 1 and ASSIGNED.fullmatch(said.partition("=")[0]) is not None


def _parsed(text: str) -> list[Any]:
    from math_verify import (  # pyright: ignore[reportMissingTypeStubs]
        LatexExtractionConfig,
        parse,
    )

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    found: Any = parse(  # pyright: ignore[reportUnknownVariableType]
        f"${text}$",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )
    return found
