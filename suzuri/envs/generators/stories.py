"""Short stories of people, things and places, and questions that the story answers.

story_world.py plays the story and remembers who has what and where everybody is.
"""

import random
from functools import partial
from typing import NamedTuple

from suzuri.envs.generators.story_world import World, play
from suzuri.envs.generators.wording import (
    assistant,
    careless,
    pick_effort,
    pick_variant,
    thought,
    user,
)
from suzuri.envs.graders import is_text
from suzuri.envs.task import Task

VARIANTS = {
    "who_has": 0.0,
    "where_person": 0.0,
    "colour": 0.05,
    "has_it": 0.1,
    "where_thing": 0.2,
    "who_gave": 0.25,
    "how_many": 0.35,
    "what_has": 0.35,
}
LONG_FROM = 0.9
"""From this difficulty on, one story in three fills several hundred tokens."""

_ONE_WORD = (" Answer with one word.", " One word only.", " Just the word, please.")


class _Asked(NamedTuple):
    """A question in several wordings, its answer as a sentence and as a word."""

    key: str
    wordings: tuple[str, ...]
    sentence: str
    word: str
    evidence: list[str]


def make(rng: random.Random, difficulty: float, variant: str | None = None) -> Task:
    """A story of 2 to 14 events (up to 100 in a long one) and one question on it."""
    variant = pick_variant(rng, VARIANTS, difficulty, variant)
    is_long = difficulty >= LONG_FROM and rng.random() < 1 / 3
    num_events = rng.randint(25, 100) if is_long else 2 + round(difficulty * rng.uniform(0, 12))
    num_people = min(2 + round(difficulty * rng.uniform(0, 4)), 6)
    world = play(rng, num_people, num_events)
    while variant == "who_gave" and not world.single_gifts():
        world = play(rng, num_people, num_events + 2)
    asked = _ask(rng, world, variant)
    effort = pick_effort(rng)
    conclusion = f"So: {asked.word}."
    short = f"{asked.evidence[-1]} {conclusion}"
    reasoning = thought(rng, effort, short, f"{' '.join(asked.evidence[-6:])} {conclusion}")
    question = careless(rng, rng.choice(asked.wordings))
    one_word = rng.random() < 0.3
    if one_word:
        question = question.rstrip("?") + "?" + rng.choice(_ONE_WORD)
    story = " ".join(world.sentences)
    layout = rng.randrange(4)
    prompt = (
        f"{story} {question}",
        f"{story}\n{question}",
        f"Read the story: {story}\n{question}",
        f"{question}\n{story}",
    )[layout]
    accepted = (asked.word,) if one_word else (asked.sentence, asked.word)
    return Task(
        kind="stories",
        variant=variant,
        difficulty=difficulty,
        key=f"stories:{variant}:{asked.key}:{story}",
        messages=(user(prompt),),
        target=(assistant(asked.word if one_word else f"{asked.sentence}.", reasoning),),
        grader=partial(is_text, accepted=accepted),
        effort=effort,
    )


def _ask(rng: random.Random, world: World, variant: str) -> _Asked:
    thing = rng.choice(world.things)
    person = rng.choice(world.people)
    match variant:
        case "who_has":
            return _who_has(world, thing)
        case "where_person":
            return _where_person(world, person)
        case "where_thing":
            return _where_thing(world, thing)
        case "who_gave":
            return _who_gave(world, *rng.choice(world.single_gifts()))
        case "how_many":
            return _how_many(world, person)
        case "what_has":
            return _what_has(rng, world)
        case "colour":
            return _colour(world, thing)
        case _:
            return _has_it(rng, world, person, thing)


def _who_has(world: World, thing: str) -> _Asked:
    owner = world.owner[thing]
    return _Asked(
        thing,
        (
            f"Who has the {thing}?",
            f"Who has the {thing} now?",
            f"Who has the {thing} at the end?",
            f"Which person holds the {thing}?",
            f"Tell me who has the {thing}.",
            f"Who is the one with the {thing}?",
            f"Do you know who has the {thing}?",
            f"In whose hands is the {thing}?",
        ),
        f"{owner} has the {thing}",
        owner,
        world.history[thing],
    )


def _where_person(world: World, person: str) -> _Asked:
    room = world.place[person]
    return _Asked(
        person,
        (
            f"Where is {person}?",
            f"Where is {person} now?",
            f"In which place is {person}?",
            f"Tell me where {person} is.",
            f"Where can I find {person}?",
            f"Which place is {person} in at the end?",
            f"Do you know where {person} is?",
            f"Where did {person} end up?",
        ),
        f"{person} is in the {room}",
        room,
        world.history[person],
    )


def _where_thing(world: World, thing: str) -> _Asked:
    owner = world.owner[thing]
    room = world.place[owner]
    return _Asked(
        thing,
        (
            f"Where is the {thing}?",
            f"Where is the {thing} now?",
            f"In which place is the {thing}?",
            f"Where can I find the {thing}?",
            f"Tell me where the {thing} is.",
            f"Which place is the {thing} in?",
            f"Do you know where the {thing} is?",
            f"Where did the {thing} end up?",
        ),
        f"The {thing} is in the {room}",
        room,
        [*world.history[thing][-2:], *world.history[owner][-1:]],
    )


def _who_gave(world: World, thing: str, taker: str) -> _Asked:
    giver, sentence = world.gifts[thing, taker][0]
    return _Asked(
        f"{thing}:{taker}",
        (
            f"Who gave the {thing} to {taker}?",
            f"From whom did {taker} get the {thing}?",
            f"Who handed {taker} the {thing}?",
            f"Which person gave {taker} the {thing}?",
            f"Tell me who gave the {thing} to {taker}.",
            f"By whom was the {thing} given to {taker}?",
            f"Who was it that gave {taker} the {thing}?",
            f"Do you know who gave {taker} the {thing}?",
        ),
        f"{giver} gave the {thing} to {taker}",
        giver,
        [sentence],
    )


def _what_has(rng: random.Random, world: World) -> _Asked:
    """Of somebody with one thing or none: there are no more things than people."""
    counts = {person: len(_held(world, person)) for person in world.people}
    person = rng.choice([person for person, count in counts.items() if count <= 1])
    held = _held(world, person)
    word = held[0] if held else "nothing"
    return _Asked(
        person,
        (
            f"What does {person} have?",
            f"What does {person} have now?",
            f"Which thing does {person} have at the end?",
            f"What is {person} holding?",
            f"Tell me what {person} has.",
            f"What thing is with {person}?",
            f"Do you know what {person} has?",
            f"What did {person} end up with?",
        ),
        f"{person} has {f'the {word}' if held else word}",
        word,
        _how_it_came(world, person),
    )


def _how_many(world: World, person: str) -> _Asked:
    number = str(len(_held(world, person)))
    return _Asked(
        person,
        (
            f"How many things does {person} have?",
            f"How many things does {person} have now?",
            f"How many things are with {person}?",
            f"Count the things that {person} has.",
            f"How many items does {person} hold?",
            f"Tell me how many things {person} has.",
            f"What is the number of things {person} has?",
            f"How many things did {person} end up with?",
        ),
        f"{person} has {number}",
        number,
        _how_it_came(world, person),
    )


def _held(world: World, person: str) -> list[str]:
    return [thing for thing in world.things if world.owner[thing] == person]


def _how_it_came(world: World, person: str) -> list[str]:
    found = [world.history[thing][-1] for thing in _held(world, person)]
    return found or [f"{person} has nothing."]


def _colour(world: World, thing: str) -> _Asked:
    colour = world.colour[thing]
    return _Asked(
        f"colour:{thing}",
        (
            f"What colour is the {thing}?",
            f"What color is the {thing}?",
            f"Which colour does the {thing} have?",
            f"Tell me the colour of the {thing}.",
            f"What is the colour of the {thing}?",
            f"The {thing} has which colour?",
            f"Do you know the colour of the {thing}?",
            f"In the story, what colour is the {thing}?",
        ),
        f"The {thing} is {colour}",
        colour,
        [f"The {thing} is {colour}."],
    )


def _has_it(rng: random.Random, world: World, person: str, thing: str) -> _Asked:
    if rng.random() < 0.5:
        person = world.owner[thing]
    word = "yes" if world.owner[thing] == person else "no"
    return _Asked(
        f"{person}:{thing}",
        (
            f"Does {person} have the {thing}?",
            f"Does {person} have the {thing} now?",
            f"Is the {thing} with {person}?",
            f"Is it true that {person} has the {thing}?",
            f"Has {person} got the {thing}?",
            f"Is {person} the one with the {thing}?",
            f"Tell me, does {person} have the {thing}?",
            f"Does {person} hold the {thing} at the end?",
        ),
        word.capitalize(),
        word,
        world.history[thing],
    )
