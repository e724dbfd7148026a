"""A small world where people pick things up, give them away and walk about, in sentences."""

import dataclasses
import random

from suzuri.envs.generators.wording import with_article
from suzuri.envs.generators.words import COLOURS, ROOMS, THINGS, names

_TAKES = ("{0} takes the {1}.", "{0} picks up the {1}.", "{0} finds the {1}.", "{0} has the {1}.")
_GIVES = (
    "{0} gives the {1} to {2}.",
    "{0} hands the {1} to {2}.",
    "{0} gives {2} the {1}.",
    "{0} passes the {1} to {2}.",
)
_STEALS = ("{2} takes the {1} from {0}.", "{2} gets the {1} from {0}.")
_SWAPS = "{0} and {1} swap: {0} gets the {3} and {1} gets the {2}."
_GOES = (
    "{0} goes to the {1}.",
    "{0} walks to the {1}.",
    "{0} runs to the {1}.",
    "{0} is in the {1}.",
    "{0} moves to the {1}.",
)
_COLOURS = ("The {0} is {1}.", "It is {2}.", "The {0} looks {1}.", "The colour is {1}.")
_FILLERS = (
    "It is a sunny day.",
    "The sky is grey.",
    "A dog barks.",
    "Nobody says a word.",
    "{0} is happy.",
    "{0} sings a song.",
    "{0} is hungry.",
    "The clock strikes nine.",
    "{0} smiles.",
    "It begins to rain.",
    "{0} reads a story.",
    "The wind is cold.",
)


@dataclasses.dataclass
class World:
    """What is so at the end, and what was said. `history` of a person or thing: the sentences that
    moved it. `gifts`: (giver, sentence) of each time that a (thing, taker) was given."""

    people: list[str]
    things: list[str]
    owner: dict[str, str]
    place: dict[str, str]
    colour: dict[str, str]
    history: dict[str, list[str]]
    gifts: dict[tuple[str, str], list[tuple[str, str]]]
    sentences: list[str]

    def single_gifts(self) -> list[tuple[str, str]]:
        """Each (thing, taker) given once, so that who gave it has one answer."""
        return sorted(pair for pair, times in self.gifts.items() if len(times) == 1)


def play(rng: random.Random, num_people: int, num_events: int) -> World:
    """A world after so many events beyond those that tell where everybody and everything is."""
    people = names(rng, num_people)
    things = rng.sample(THINGS, max(2, num_people))
    rooms = rng.sample(ROOMS, num_people + 1)
    colours = rng.sample(COLOURS, len(things))
    world = World(
        people=people,
        things=things,
        owner={},
        place={},
        colour=dict(zip(things, colours, strict=True)),
        history={name: [] for name in (*people, *things)},
        gifts={},
        sentences=[],
    )
    opening = [*people, *things]
    rng.shuffle(opening)
    for name in opening:
        if name in people:
            _go(rng, world, name, rooms)
        else:
            _take(rng, world, name)
    for _ in range(num_events):
        _event(rng, world, rooms)
    return world


def _event(rng: random.Random, world: World, rooms: list[str]) -> None:
    draw = rng.random()
    if draw < 0.15:
        _say(world, rng.choice(_FILLERS).format(rng.choice(world.people)))
    elif draw < 0.45:
        _go(rng, world, rng.choice(world.people), rooms)
    else:
        _hand_over(rng, world, rng.choice(world.things))


def _go(rng: random.Random, world: World, person: str, rooms: list[str]) -> None:
    room = rng.choice([room for room in rooms if room != world.place.get(person)])
    world.place[person] = room
    _say(world, rng.choice(_GOES).format(person, room), person)


def _take(rng: random.Random, world: World, thing: str) -> None:
    person = rng.choice(world.people)
    world.owner[thing] = person
    _say(world, rng.choice(_TAKES).format(person, thing), thing)
    colour = world.colour[thing]
    _say(world, rng.choice(_COLOURS).format(thing, colour, with_article(f"{colour} {thing}")))


def _hand_over(rng: random.Random, world: World, thing: str) -> None:
    giver = world.owner[thing]
    taker = rng.choice([person for person in world.people if person != giver])
    others = [other for other in world.things if world.owner[other] == taker]
    draw = rng.random()
    if others and draw < 0.12:
        other = rng.choice(others)
        world.owner[thing], world.owner[other] = taker, giver
        _say(world, _SWAPS.format(giver, taker, thing, other), thing, other)
        return
    world.owner[thing] = taker
    if draw < 0.25:
        _say(world, rng.choice(_STEALS).format(giver, thing, taker), thing)
        return
    sentence = _say(world, rng.choice(_GIVES).format(giver, thing, taker), thing)
    world.gifts.setdefault((thing, taker), []).append((giver, sentence))


def _say(world: World, sentence: str, *about: str) -> str:
    world.sentences.append(sentence)
    for name in about:
        world.history[name].append(sentence)
    return sentence
