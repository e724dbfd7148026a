"""Which tool, with which JSON: calls, two at a time, exchanges with results, and no call at all."""

import dataclasses
import random
from functools import partial
from typing import Any

from suzuri.envs.generators import arithmetic, small_talk
from suzuri.envs.generators.tool_catalogue import TOOLS, Tool, result_text
from suzuri.envs.generators.wording import (
    assistant,
    calling,
    careless,
    pick_effort,
    pick_variant,
    thought,
    user,
)
from suzuri.envs.graders import is_calls, is_exchange, is_text
from suzuri.envs.task import Message, Task, call_key

VARIANTS = {"call": 0.0, "none": 0.1, "result": 0.15, "exchange": 0.25, "two_calls": 0.4}

_JOINTS = (" And ", " Also: ", " Then: ", " And then: ", "\n", " ")
_FAILURES = ("not available", "try again later", "no connection", "not allowed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Offer:
    """A tool under the names of this task: `slots` from the first names of arguments to values,
    `arguments` under the names declared."""

    tool: Tool
    name: str
    declared: Message
    slots: dict[str, Any]
    arguments: dict[str, Any]

    @property
    def key(self) -> str:
        values = ",".join(str(value) for value in self.slots.values())
        return f"{self.tool.names[0]}({values})"

    @property
    def call(self) -> str:
        return call_key(self.name, self.arguments)


def make(rng: random.Random, difficulty: float, variant: str | None = None) -> Task:
    """Two to five tools are offered; one or two are needed, or none."""
    variant = pick_variant(rng, VARIANTS, difficulty, variant)
    offers = _offers(rng, difficulty)
    declared = tuple(offer.declared for offer in offers)
    effort = pick_effort(rng)
    if variant == "none":
        return _without_call(rng, difficulty, declared)
    wanted = rng.sample(offers, 2 if variant == "two_calls" else 1)
    requests = [rng.choice(offer.tool.requests).format(**offer.slots) for offer in wanted]
    question = rng.choice(_JOINTS).join(requests)
    # A person's name in front keeps its capital, so only questions that start otherwise vary.
    if rng.random() < 0.5:
        question = careless(rng, question)
    common: dict[str, Any] = {
        "kind": "tools",
        "variant": variant,
        "difficulty": difficulty,
        "key": f"tools:{'&'.join(sorted(offer.key for offer in wanted))}",
        "effort": effort,
        "tools": declared,
    }
    plan = f"I need {' and '.join(offer.name for offer in wanted)}."
    values = "; ".join(_listed(offer) for offer in wanted)
    made = calling(
        [(offer.name, offer.arguments) for offer in wanted],
        thought(rng, effort, plan, f"{plan} {values}."),
    )
    if variant in ("call", "two_calls"):
        return Task(
            **common,
            messages=(user(question),),
            target=(made,),
            grader=partial(is_calls, expected=tuple(offer.call for offer in wanted)),
        )
    offer = wanted[0]
    result, report = _outcome(rng, offer)
    answered: Message = {
        "role": "tool",
        "tool_call_id": "call_0",
        "name": offer.name,
        "content": result,
    }
    final = assistant(report, thought(rng, effort, "", "Now I can answer."))
    if variant == "result":
        past = {key: value for key, value in made.items() if key != "reasoning_content"}
        return Task(
            **common,
            messages=(user(question), past, answered),
            target=(final,),
            grader=partial(is_text, accepted=(report,)),
        )
    return Task(
        **common,
        messages=(user(question),),
        target=(made, answered, final),
        grader=partial(is_exchange, rounds=((offer.call,),), accepted=(report,)),
        replies={offer.call: result},
    )


def _offers(rng: random.Random, difficulty: float) -> list[_Offer]:
    """Different tools with different names, more of them as it gets harder."""
    count = rng.randint(2, 3 + round(difficulty * 2))
    offers: list[_Offer] = []
    taken: set[str] = set()
    for tool in rng.sample(TOOLS, count):
        name = tool.names[0] if rng.random() < 0.6 else rng.choice(tool.names)
        if name not in taken:
            taken.add(name)
            offers.append(_offer(rng, tool, name))
    return offers if len(offers) > 1 else _offers(rng, difficulty)


def _offer(rng: random.Random, tool: Tool, name: str) -> _Offer:
    slots: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    for argument in tool.arguments:
        first = argument.names[0]
        own = first if rng.random() < 0.6 else rng.choice(argument.names)
        if own in properties:
            own = first
        slots[first] = arguments[own] = argument.draw(rng)
        properties[own] = {"type": argument.kind}
        if argument.choices:
            properties[own]["enum"] = list(argument.choices)
    declared = {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.text,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        },
    }
    return _Offer(tool=tool, name=name, declared=declared, slots=slots, arguments=arguments)


def _outcome(rng: random.Random, offer: _Offer) -> tuple[str, str]:
    """(what the tool returns, what is said of it); one call in ten fails."""
    if rng.random() < 0.1:
        reason = rng.choice(_FAILURES)
        return result_text({"error": reason}), f"Sorry, {offer.name} failed: {reason}."
    facts = offer.tool.facts(rng)
    return result_text(facts), offer.tool.report.format(**{**offer.slots, **facts})


def _listed(offer: _Offer) -> str:
    return ", ".join(f"{key} is {value}" for key, value in offer.arguments.items())


def _without_call(rng: random.Random, difficulty: float, declared: tuple[Message, ...]) -> Task:
    """Tools are there and the question needs none of them. Its key stays: it is on the same side
    of the split wherever it is asked."""
    if rng.random() < 0.5:
        inner = small_talk.make(rng, difficulty, "chat")
    else:
        inner = arithmetic.make(rng, 0.0, rng.choice(("add1", "add2", "subtract1")))
    return dataclasses.replace(
        inner,
        kind="tools",
        variant="none",
        difficulty=difficulty,
        tools=declared,
    )
