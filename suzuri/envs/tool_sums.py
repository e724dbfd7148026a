"""Questions for tools that run: sums for a calculator or for Python, and prices to be asked for
first. Read `ToolSums`, then `_make`. No torch here.
"""

# pyright: strict

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from suzuri.envs.calculator import Calculator
from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.generators.tool_catalogue import result_text
from suzuri.envs.generators.wording import careless, user
from suzuri.envs.generators.words import THINGS
from suzuri.envs.graders import calls_until_last, is_text
from suzuri.envs.mixture import place_seed
from suzuri.envs.task import Message, Split, split_of
from suzuri.envs.task_env import TaskGroup
from suzuri.envs.tools import PythonTool, Tool, Toolbox, of_one_text, one_text

VARIANTS = ("product", "two_steps", "price", "bill")
MOST_DRAWS = 2000
_PRODUCTS = (
    "What is {0} times {1}?",
    "Multiply {0} by {1}.",
    "How much is {0} * {1}?",
    "Calculate {0} * {1} exactly.",
    "I need the product of {0} and {1}.",
    "Work out {0} times {1}.",
    "Please compute {0} * {1}.",
    "Tell me {0} times {1}.",
)
_TWO_STEPS = (
    "What is {0} times {1}, plus {2}?",
    "Multiply {0} by {1} and add {2}.",
    "How much is {0} * {1} + {2}?",
    "Add {2} to the product of {0} and {1}.",
    "Calculate {0} * {1} + {2} exactly.",
    "Work out {0} times {1}, and then {2} more.",
    "Take {0} times {1} and add {2} to it.",
    "Please compute {0} * {1} + {2}.",
)
_PRICES = (
    "What does the {0} cost?",
    "How much is the {0}?",
    "Tell me the price of the {0}.",
    "What is the price of the {0}?",
    "Find out what the {0} costs.",
    "I need the price of the {0}.",
    "Please look up what the {0} costs.",
    "For how much is the {0} sold?",
)
_BILLS = (
    "What do {1} pieces of the {0} cost?",
    "I buy the {0} {1} times. What do I pay?",
    "How much is {1} times the price of the {0}?",
    "Someone orders {1} of the {0}. What is the bill?",
    "Tell me what {1} of the {0} cost together.",
    "Find out what {1} pieces of the {0} cost.",
    "What is the price of {1} pieces of the {0}?",
    "We need {1} of the {0}. How much is that?",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolSums:
    """Which questions, and what reckons. Raises ValueError naming the field.

    One question in ten is held out, whatever the seed; place i is the same question everywhere.
    """

    variants: tuple[str, ...] = VARIANTS
    tool: Literal["calculator", "python"] = "calculator"
    seed: int = 0
    split: Split = "train"
    effort: float | None = 0.0

    def __post_init__(self) -> None:
        if not self.variants or not set(self.variants) <= set(VARIANTS):
            raise ValueError(f"variants = {self.variants}: there are {', '.join(VARIANTS)}")
        if self.tool not in ("calculator", "python"):
            raise ValueError(f"tool = {self.tool!r}: must be calculator or python")
        if self.split not in ("train", "held_out"):
            raise ValueError(f"split = {self.split!r}: must be train or held_out")

    def question(self, place: int) -> "ToolQuestion":
        """The one at a place from 0 on."""
        rng = random.Random(place_seed(self.seed, self.split, place))
        variant = rng.choice(self.variants)
        for _ in range(MOST_DRAWS):
            made = _make(rng, variant)
            if split_of(made.key) == self.split:
                return dataclasses.replace(made, effort=self.effort)
        raise ValueError(f"no {self.split} question in {MOST_DRAWS} draws")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolQuestion:
    """What environments need of a `Task`. `prices`: what the tool for them knows, if there is one;
    `steps`: (tool, arguments) that lead to the answer."""

    variant: str
    key: str
    messages: tuple[Message, ...]
    accepted: tuple[str, ...]
    steps: tuple[tuple[str, Mapping[str, Any]], ...]
    prices: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    effort: float | None = None
    kind: str = "tool_sums"
    tools: tuple[Message, ...] = ()

    def reply(self, answer: Message) -> tuple[Message, ...]:
        """Its tools run (`ToolSumProblems`)."""
        del answer
        return ()

    def grade(self, answer: Sequence[Message]) -> float:
        """1.0 where the last message says the result, and all before it called tools. Whether any
        was called does not matter: right is right."""
        return is_text(answer, self.accepted) if calls_until_last(answer) else 0.0


@dataclasses.dataclass(frozen=True)
class PriceTool:
    """Knows what things cost."""

    prices: Mapping[str, int]

    @property
    def declaration(self) -> Message:
        return of_one_text("get_price", "Find a price", "thing")

    async def run(self, arguments: Mapping[str, Any]) -> str:
        thing = one_text(arguments, "thing")
        if thing not in self.prices:
            raise ValueError(f"no price of {thing[:40]!r}")
        return result_text({"price": self.prices[thing]})


class ToolSumProblems:
    """Without end."""

    size: int | None = None

    def __init__(self, sums: ToolSums, prompts: ChatPrompts) -> None:
        self._sums, self._prompts = sums, prompts
        self._reckoner: Tool = Calculator() if sums.tool == "calculator" else PythonTool()

    def group(self, index: int) -> TaskGroup:
        question = self._sums.question(index)
        tools: list[Tool] = [self._reckoner]
        if question.prices:
            tools.append(PriceTool(question.prices))
        return TaskGroup(question, self._prompts, Toolbox(tools))


def _make(rng: random.Random, variant: str) -> ToolQuestion:
    if variant in ("price", "bill"):
        return _shopping(rng, variant)
    a, b, c = rng.randint(100, 9999), rng.randint(11, 999), rng.randint(11, 9999)
    expression, value, wordings = f"{a}*{b}", a * b, _PRODUCTS
    if variant == "two_steps":
        expression, value, wordings = f"{expression}+{c}", value + c, _TWO_STEPS
    return ToolQuestion(
        variant=variant,
        key=f"tool_sums:{expression}",
        messages=(user(careless(rng, rng.choice(wordings).format(a, b, c))),),
        accepted=(str(value), f"{expression} is {value}", f"{expression} = {value}"),
        steps=(("calculate", {"expression": expression}),),
    )


def _shopping(rng: random.Random, variant: str) -> ToolQuestion:
    things = rng.sample(THINGS, 4)
    prices = {thing: rng.randint(11, 999) for thing in things}
    thing, count = things[0], rng.randint(12, 99)
    price = prices[thing]
    looked_up = ("get_price", {"thing": thing})
    if variant == "price":
        value, wordings, key = price, _PRICES, f"{price}"
        steps: tuple[tuple[str, Mapping[str, Any]], ...] = (looked_up,)
    else:
        value, wordings, key = price * count, _BILLS, f"{count}*{price}"
        steps = (looked_up, ("calculate", {"expression": f"{count}*{price}"}))
    return ToolQuestion(
        variant=variant,
        key=f"tool_sums:{thing}:{key}",
        messages=(user(careless(rng, rng.choice(wordings).format(thing, count))),),
        accepted=(str(value), f"The price is {value}", f"{thing} costs {value}"),
        steps=steps,
        prices=prices,
    )
