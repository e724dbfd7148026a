"""Numbers as people write them. No torch here."""

# pyright: strict

import re
from fractions import Fraction

SPACE = " \t\r\n"
"""What may stand around an answer; other white space, and what cannot be seen, is part of it."""


def as_number(text: str) -> Fraction | None:
    """The number that is written, exactly; None for what is none."""
    text = text.strip(SPACE).removesuffix(".").strip("$€£ ").replace("\N{MINUS SIGN}", "-")
    scale = 1
    if text.endswith("%"):
        text, scale = text[:-1].rstrip(SPACE), 100
    if len(text) > 200:
        return None
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", text, re.ASCII):
        text = text.replace(",", "")
    if not re.fullmatch(r"[+-]?(\d+/\d+|\d+\.?\d*([eE][+-]?\d{1,3})?|\.\d+)", text, re.ASCII):
        return None
    try:
        return Fraction(text) / scale
    except ZeroDivisionError:
        return None
