"""Sums, differences, products, divisions and two steps of them. Thoughts go digit by digit, as on
paper, in digit_steps.py."""

import random
from functools import partial
from typing import NamedTuple

from suzuri.envs.generators.digit_steps import (
    add_steps,
    divide_steps,
    multiply_steps,
    subtract_steps,
)
from suzuri.envs.generators.wording import (
    FULL_THOUGHT,
    assistant,
    careless,
    pick_effort,
    pick_variant,
    thought,
)
from suzuri.envs.generators.wording import user as user_message
from suzuri.envs.generators.words import COUNTED, name
from suzuri.envs.graders import is_text
from suzuri.envs.task import Task

VARIANTS = {
    "add1": 0.0,
    "subtract1": 0.0,
    "add2": 0.1,
    "multiply1": 0.15,
    "subtract2": 0.2,
    "divide": 0.3,
    "add3": 0.4,
    "multiply2": 0.45,
    "subtract3": 0.5,
    "two_steps": 0.55,
    "three_terms": 0.6,
    "negative": 0.65,
    "multiply22": 0.8,
    "add4": 0.85,
}
_RANGES = {1: (0, 9), 2: (10, 99), 3: (100, 999), 4: (1000, 9999)}

_FRAMES = (
    "What is {0}?",
    "What's {0}?",
    "Compute {0}.",
    "Calculate {0}",
    "How much is {0}?",
    "Work out {0}.",
    "Can you tell me what {0} is?",
    "Solve: {0}",
    "Please compute {0}.",
    "Give me the value of {0}.",
    "I need the result of {0}.",
    "The result of {0} is?",
)
_WORDS = {
    "+": (
        "What is {0} plus {1}?",
        "Add {0} and {1}.",
        "What is the sum of {0} and {1}?",
        "How much do {0} and {1} make together?",
        "{who} has {0} {things} and gets {1} more. How many does {who} have now?",
        "A box holds {0} {things}, another holds {1}. How many {things} are there in all?",
        "There were {0} {things} and then {1} more came. How many are there?",
    ),
    "-": (
        "What is {0} minus {1}?",
        "Subtract {1} from {0}.",
        "Take {1} away from {0}.",
        "What is the difference of {0} and {1}?",
        "{who} has {0} {things} and gives {1} away. How many are left?",
        "Of {0} {things}, {1} are lost. How many remain?",
        "How much is left of {0} if you take {1}?",
    ),
    "*": (
        "What is {0} times {1}?",
        "Multiply {0} by {1}.",
        "What is the product of {0} and {1}?",
        "{who} buys {0} bags with {1} {things} each. How many {things} are that?",
        "There are {0} rows of {1} {things}. How many {things} are there?",
    ),
    "/": (
        "What is {0} divided by {1}?",
        "Divide {0} by {1}.",
        "How often does {1} go into {0}?",
        "{who} shares {0} {things} among {1} friends. How many does each get?",
        "Put {0} {things} into {1} equal groups. How big is a group?",
    ),
}
_SIGNS = {"+": ("+",), "-": ("-",), "*": ("*", "x"), "/": ("/", ":")}


class _Sum(NamedTuple):
    """Terms joined by signs, worked from the left after `steps`."""

    terms: tuple[int, ...]
    signs: str
    value: int
    steps: str

    @property
    def key(self) -> str:
        terms = self.terms
        if len(self.signs) == 1 and self.signs in "+*":
            terms = tuple(sorted(terms))
        return f"arithmetic:{self.signs}:{','.join(map(str, terms))}"


def make(rng: random.Random, difficulty: float, variant: str | None = None) -> Task:
    """A calculation with a whole number as its result; the answer is the number alone."""
    variant = pick_variant(rng, VARIANTS, difficulty, variant)
    drawn = _draw(rng, variant)
    spaced = _spelled(drawn, drawn.signs, " ")
    effort = pick_effort(rng)
    if variant == "multiply22" and effort is not None and effort < FULL_THOUGHT:
        # Nobody small does these at a glance: half as many answers without steps.
        effort = pick_effort(rng)
    # The short thought is for one step; more steps are written out, however short.
    short = f"{_spelled(drawn, drawn.signs, '')}={drawn.value}."
    reasoning = thought(rng, effort, short if len(drawn.signs) == 1 else drawn.steps, drawn.steps)
    answer = str(drawn.value)
    return Task(
        kind="arithmetic",
        variant=variant,
        difficulty=difficulty,
        key=drawn.key,
        messages=(user_message(_question(rng, drawn)),),
        target=(assistant(answer, reasoning),),
        grader=partial(is_text, accepted=(answer, f"{spaced} = {answer}")),
        effort=effort,
    )


def _draw(rng: random.Random, variant: str) -> _Sum:
    match variant:
        case "add1" | "add2" | "add3" | "add4":
            digits = int(variant[-1])
            a, b = rng.randint(*_RANGES[digits]), rng.randint(*_RANGES[digits])
            if digits > 1 and rng.random() < 0.25:
                b = rng.randint(*_RANGES[digits - 1])
            if rng.random() < 0.5:
                a, b = b, a
            return _Sum((a, b), "+", a + b, add_steps(a, b))
        case "subtract1" | "subtract2" | "subtract3":
            digits = int(variant[-1])
            a, b = rng.randint(*_RANGES[digits]), rng.randint(*_RANGES[digits])
            if digits > 1 and rng.random() < 0.25:
                b = rng.randint(*_RANGES[digits - 1])
            a, b = max(a, b), min(a, b)
            return _Sum((a, b), "-", a - b, subtract_steps(a, b))
        case "negative":
            a, b = sorted((rng.randint(0, 99), rng.randint(1, 99)))
            b += a == b
            return _Sum((a, b), "-", a - b, subtract_steps(a, b))
        case "multiply1":
            a, b = rng.randint(0, 10), rng.randint(0, 10)
            return _Sum((a, b), "*", a * b, multiply_steps(a, b))
        case "multiply2" | "multiply22":
            a, b = rng.randint(11, 99), rng.randint(2, 9)
            if variant == "multiply22":
                b = rng.randint(11, 99)
            if rng.random() < 0.5:
                a, b = b, a
            return _Sum((a, b), "*", a * b, multiply_steps(a, b))
        case "divide":
            b, result = rng.randint(2, 9), rng.randint(1, 12)
            return _Sum((b * result, b), "/", result, divide_steps(b * result, b))
        case _:
            return _two_steps(rng, variant)


def _two_steps(rng: random.Random, variant: str) -> _Sum:
    a, b, c = (rng.randint(1, 40) for _ in range(3))
    if variant == "three_terms":
        a, b, c = (rng.randint(5, 99) for _ in range(3))
        first = a + b
        steps = f"{add_steps(a, b)} Then {add_steps(first, c)}"
        return _Sum((a, b, c), "++", first + c, steps)
    match rng.choice(("+-", "-+", "*+", "*-")):
        case "+-":
            c = rng.randint(1, a + b)
            steps = f"{add_steps(a, b)} Then {subtract_steps(a + b, c)}"
            return _Sum((a, b, c), "+-", a + b - c, steps)
        case "-+":
            a, b = max(a, b), min(a, b)
            steps = f"{subtract_steps(a, b)} Then {add_steps(a - b, c)}"
            return _Sum((a, b, c), "-+", a - b + c, steps)
        case "*+":
            a, b = rng.randint(2, 9), rng.randint(2, 9)
            steps = f"{multiply_steps(a, b)} Then {add_steps(a * b, c)}"
            return _Sum((a, b, c), "*+", a * b + c, steps)
        case _:
            a, b = rng.randint(2, 9), rng.randint(2, 9)
            c = rng.randint(1, a * b)
            steps = f"{multiply_steps(a, b)} Then {subtract_steps(a * b, c)}"
            return _Sum((a, b, c), "*-", a * b - c, steps)


def _question(rng: random.Random, drawn: _Sum) -> str:
    if len(drawn.signs) == 1 and rng.random() < 0.4:
        slots = {"who": name(rng), "things": rng.choice(COUNTED)}
        wordings = _WORDS[drawn.signs]
        if drawn.value < 0:
            wordings = wordings[:4]
        text = rng.choice(wordings).format(*drawn.terms, **slots)
        # A name at the front keeps its capital.
        return text if text.startswith(slots["who"]) else careless(rng, text)
    signs = "".join(rng.choice(_SIGNS[sign]) for sign in drawn.signs)
    written = _spelled(drawn, signs, rng.choice((" ", " ", "")))
    if rng.random() < 0.2:
        return written + rng.choice(("", " =", "=", " = ?", "?"))
    return careless(rng, rng.choice(_FRAMES).format(written))


def _spelled(drawn: _Sum, signs: str, space: str) -> str:
    text = str(drawn.terms[0])
    for sign, term in zip(signs, drawn.terms[1:], strict=True):
        text += f"{space}{sign}{space}{term}"
    return text
