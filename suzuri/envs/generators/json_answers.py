"""Facts out of a sentence, as JSON of a given form."""

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from suzuri.envs.generators.wording import (
    assistant,
    listed,
    pick_effort,
    pick_variant,
    thought,
    user,
    with_article,
)
from suzuri.envs.generators.words import CITIES, COLOURS, COUNTED, DAYS, FOODS, THINGS, name
from suzuri.envs.graders import is_json
from suzuri.envs.task import Task, canonical_json


class _Facts(NamedTuple):
    sentence: str
    value: dict[str, Any]


def _person(rng: random.Random) -> _Facts:
    value = {"name": name(rng), "age": rng.randint(3, 99), "city": rng.choice(CITIES)}
    forms = (
        "{name} is {age} years old and lives in {city}.",
        "My friend {name} from {city} is {age}.",
        "In {city} lives {name}, aged {age}.",
        "I am {name}, {age}, from {city}.",
        "{name} ({age}) comes from {city}.",
        "At the age of {age}, {name} moved to {city}.",
        "This is {name}. Age: {age}. Home: {city}.",
        "Say hello to {name} of {city}, who is {age}.",
    )
    return _Facts(rng.choice(forms).format(**value), value)


def _order(rng: random.Random) -> _Facts:
    value = {"item": rng.choice(FOODS), "count": rng.randint(1, 40), "to_go": rng.random() < 0.5}
    where = "to go" if value["to_go"] else "to eat here"
    forms = (
        "I want {count} {item} {where}.",
        "{count} {item}, please, {where}.",
        "The order is {count} {item} {where}.",
        "Please give me {count} {item}, {where}.",
        "We take {count} {item} {where}.",
        "An order of {count} {item}, {where}.",
        "Can I have {count} {item} {where}?",
        "Make it {count} {item}, {where}.",
    )
    return _Facts(rng.choice(forms).format(where=where, **value), value)


def _event(rng: random.Random) -> _Facts:
    titles = ("meeting", "party", "dinner", "concert", "exam", "lunch", "interview", "match")
    value = {"title": rng.choice(titles), "day": rng.choice(DAYS), "hour": rng.randint(1, 23)}
    forms = (
        "The {title} is on {day} at {hour}.",
        "On {day} at {hour} there is a {title}.",
        "Do not forget the {title} at {hour} on {day}.",
        "We have a {title} on {day}, {hour} o'clock.",
        "Come to the {title} on {day} at {hour}.",
        "{day}, {hour} o'clock: {title}.",
        "The {title} begins at {hour} on {day}.",
        "I will see you at the {title} at {hour} on {day}.",
    )
    return _Facts(rng.choice(forms).format(**value), value)


def _thing(rng: random.Random) -> _Facts:
    thing, colour = rng.choice(THINGS), rng.choice(COLOURS)
    value = {"thing": thing, "color": colour, "price": rng.randint(1, 99)}
    forms = (
        "The {color} {thing} costs {price} dollars.",
        "I sell a {thing}. It is {color} and costs {price}.",
        "For {price} dollars you get {0}.",
        "A {thing} in {color}: {price} dollars.",
        "She paid {price} for {0}.",
        "Look at this {color} {thing} for {price}.",
        "The price of the {color} {thing} is {price}.",
        "My {thing} is {color}. I bought it for {price}.",
    )
    return _Facts(rng.choice(forms).format(with_article(f"{colour} {thing}"), **value), value)


def _list(rng: random.Random) -> _Facts:
    items = rng.sample(FOODS, rng.randint(2, 5))
    value = {"owner": name(rng), "items": items}
    forms = (
        "{owner} buys {0}.",
        "On the list of {owner} are {0}.",
        "{owner} needs {0}.",
        "We get {0} for {owner}.",
        "In the bag of {owner} there are {0}.",
        "{owner} asked for {0}.",
        "Bring {0} to {owner}.",
        "Today {owner} wants {0}.",
    )
    return _Facts(rng.choice(forms).format(listed(items), **value), value)


def _numbers(rng: random.Random) -> _Facts:
    values = [rng.randint(0, 99) for _ in range(rng.randint(2, 5))]
    value = {"player": name(rng), "points": values}
    forms = (
        "{player} scored {0} points.",
        "The scores of {player} are {0}.",
        "{player} got {0}.",
        "In the game {player} made {0}.",
        "Results for {player}: {0}.",
        "The points of {player} were {0}.",
        "We wrote down {0} for {player}.",
        "Player {player} reached {0}.",
    )
    return _Facts(rng.choice(forms).format(listed([str(v) for v in values]), **value), value)


def _nested(rng: random.Random) -> _Facts:
    buyer = {"name": name(rng), "city": rng.choice(CITIES)}
    value: dict[str, Any] = {
        "buyer": buyer,
        "item": rng.choice(COUNTED),
        "count": rng.randint(2, 50),
    }
    forms = (
        "{name} from {city} buys {count} {item}.",
        "{count} {item} go to {name} in {city}.",
        "In {city}, {name} ordered {count} {item}.",
        "Send {count} {item} to {name}, {city}.",
        "The buyer is {name} of {city}: {count} {item}.",
        "{name} ({city}) takes {count} {item}.",
        "We sold {count} {item} to {name} from {city}.",
        "For {name} in {city}: {count} {item}.",
    )
    return _Facts(rng.choice(forms).format(**value, **buyer), value)


_MAKERS: dict[str, tuple[float, Callable[[random.Random], _Facts]]] = {
    "person": (0.0, _person),
    "event": (0.0, _event),
    "thing": (0.05, _thing),
    "order": (0.15, _order),
    "list": (0.3, _list),
    "numbers": (0.4, _numbers),
    "nested": (0.6, _nested),
}
VARIANTS = {name: least for name, (least, _) in _MAKERS.items()}

_ORDERS = (
    "{facts}\nAnswer with JSON: {form}",
    "Read: {facts} Give me JSON of this form: {form}",
    "Extract the facts as JSON {form}: {facts}",
    "Turn this into JSON. Form: {form}\nText: {facts}",
    "{facts}\nReturn only JSON that matches {form}",
    "Write JSON like {form} for this text: {facts}",
    "Text: {facts}\nJSON form: {form}\nAnswer:",
    "Fill this form from the text, as JSON. {form}\n{facts}",
    "What does the text say? Answer in JSON {form}.\n{facts}",
)


def make(rng: random.Random, difficulty: float, variant: str | None = None) -> Task:
    """A sentence and a form; the answer is compact JSON in the order of the form. The form may
    leave fields out, and at times it is a whole JSON schema."""
    variant = pick_variant(rng, VARIANTS, difficulty, variant)
    facts = _MAKERS[variant][1](rng)
    keys = list(facts.value)
    rng.shuffle(keys)
    if rng.random() < 0.3:
        keys = keys[: rng.randint(1, len(keys))]
    value = {key: facts.value[key] for key in keys}
    form = _schema(value) if rng.random() < 0.3 + 0.3 * difficulty else _example(value)
    prompt = rng.choice(_ORDERS).format(facts=facts.sentence, form=json.dumps(form))
    effort = pick_effort(rng)
    short = f"Fields: {', '.join(keys)}."
    full = "; ".join(f"{key} is {_spoken(item)}" for key, item in value.items()) + "."
    return Task(
        kind="json",
        variant=variant,
        difficulty=difficulty,
        key=f"json:{variant}:{canonical_json(facts.value)}",
        messages=(user(prompt),),
        target=(assistant(_compact(value), thought(rng, effort, short, full)),),
        grader=partial(is_json, expected=canonical_json(value)),
        effort=effort,
    )


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _example(value: Any) -> Any:
    """Types in the place of values."""
    if isinstance(value, Mapping):
        return {key: _example(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [_example(value[0])]
    return _type(value)


def _schema(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        properties = {str(key): _schema(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return {"type": "object", "properties": properties, "required": list(properties)}
    if isinstance(value, list):
        return {"type": "array", "items": _schema(value[0])}
    return {"type": _type(value)}


def _type(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case _:
            return "string"


def _spoken(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_spoken(item)}" for key, item in value.items())  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return ", ".join(map(_spoken, value))  # pyright: ignore[reportUnknownArgumentType]
    return _compact(value) if isinstance(value, bool) else str(value)
