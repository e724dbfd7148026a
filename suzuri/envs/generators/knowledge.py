"""A few hundred plain facts. Held out are wordings of a fact, never the fact itself."""

import random
from functools import partial

from suzuri.envs.generators.wording import assistant, careless, pick_effort, pick_variant, thought
from suzuri.envs.generators.wording import user as user_message
from suzuri.envs.generators.words import DAYS, MONTHS, NUMBER_WORDS
from suzuri.envs.graders import is_text
from suzuri.envs.task import Task


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((left.strip(), right.strip()) for left, right in _split(text))


def _split(text: str) -> list[list[str]]:
    return [item.split(":") for item in " ".join(text.split()).split(",")]


_CAPITALS = _pairs(
    """France: Paris, England: London, Japan: Tokyo, Germany: Berlin, Italy: Rome, Spain: Madrid,
    Norway: Oslo, Egypt: Cairo, Peru: Lima, India: Delhi, Ireland: Dublin, Austria: Vienna,
    Greece: Athens, Portugal: Lisbon, Russia: Moscow, Kenya: Nairobi, China: Beijing,
    Thailand: Bangkok, Vietnam: Hanoi, Poland: Warsaw, Finland: Helsinki, Sweden: Stockholm,
    Belgium: Brussels, Cuba: Havana, Turkey: Ankara, Canada: Ottawa, Brazil: Brasilia,
    Chile: Santiago, Hungary: Budapest, Denmark: Copenhagen, Switzerland: Bern, Korea: Seoul,
    Mexico: Mexico City, Iceland: Reykjavik, Scotland: Edinburgh, Nepal: Kathmandu"""
)
_OPPOSITES = _pairs(
    """hot: cold, big: small, long: short, fast: slow, old: new, good: bad, happy: sad, up: down,
    open: closed, light: dark, high: low, left: right, wet: dry, full: empty, early: late,
    hard: soft, strong: weak, rich: poor, clean: dirty, day: night, yes: no, black: white,
    first: last, near: far, loud: quiet, win: lose, buy: sell, push: pull, sweet: sour,
    true: false, inside: outside, always: never, more: less, thick: thin, heavy: light"""
)
_SOUNDS = _pairs(
    """dog: woof, cat: meow, cow: moo, sheep: baa, pig: oink, duck: quack, horse: neigh, lion: roar,
    bee: buzz, snake: hiss, frog: croak, crow: caw, mouse: squeak, owl: hoot, bird: tweet"""
)
_LEGS = _pairs(
    """dog: 4, cat: 4, cow: 4, horse: 4, bird: 2, duck: 2, hen: 2, ant: 6, bee: 6, spider: 8,
    fish: 0, snake: 0, frog: 4, lion: 4, owl: 2, pig: 4, sheep: 4, mouse: 4, rabbit: 4"""
)
_THING_COLOURS = _pairs(
    """grass: green, snow: white, blood: red, coal: black, milk: white, a lemon: yellow,
    a banana: yellow, the sky: blue, the sea: blue, the sun: yellow, a carrot: orange,
    a tomato: red, a leaf: green, an elephant: grey, a strawberry: red, chocolate: brown"""
)
_CHILDREN = _pairs(
    """dog: puppy, cat: kitten, cow: calf, horse: foal, sheep: lamb, hen: chick, duck: duckling,
    pig: piglet, bear: cub, goat: kid, frog: tadpole, lion: cub"""
)

_FAMILIES: dict[str, tuple[float, tuple[tuple[str, str], ...], tuple[str, ...], str]] = {
    "capital": (
        0.0,
        _CAPITALS,
        (
            "What is the capital of {0}?",
            "Which city is the capital of {0}?",
            "Name the capital of {0}.",
            "Tell me the capital of {0}.",
            "What's the capital city of {0}?",
            "{0}: what is its capital?",
            "Do you know the capital of {0}?",
            "The capital of {0}?",
            "Capital of {0}",
            "What city is {0} governed from?",
        ),
        "The capital of {0} is {1}.",
    ),
    "opposite": (
        0.0,
        _OPPOSITES + tuple((right, left) for left, right in _OPPOSITES if right != "light"),
        (
            "What is the opposite of {0}?",
            "Name the opposite of {0}.",
            'What is the opposite of "{0}"?',
            "Give me the opposite of {0}.",
            "Which word is the opposite of {0}?",
            "The opposite of {0}?",
            "What word means the contrary of {0}?",
            "Tell me the opposite of {0}",
        ),
        "The opposite of {0} is {1}.",
    ),
    "day_after": (
        0.0,
        tuple(zip(DAYS, (*DAYS[1:], DAYS[0]), strict=True)),
        (
            "Which day comes after {0}?",
            "What day follows {0}?",
            "What is the day after {0}?",
            "If today is {0}, what is tomorrow?",
            "Today is {0}. What day is tomorrow?",
            "Name the day after {0}.",
            "Tell me the day that follows {0}.",
            "After {0} comes which day?",
        ),
        "After {0} comes {1}.",
    ),
    "day_before": (
        0.1,
        tuple(zip(DAYS, (DAYS[-1], *DAYS[:-1]), strict=True)),
        (
            "Which day comes before {0}?",
            "What is the day before {0}?",
            "If today is {0}, what was yesterday?",
            "Today is {0}. What day was yesterday?",
            "Name the day before {0}.",
            "Tell me the day just before {0}.",
            "Before {0} comes which day?",
            "What day precedes {0}?",
        ),
        "Before {0} comes {1}.",
    ),
    "month_after": (
        0.1,
        tuple(zip(MONTHS, (*MONTHS[1:], MONTHS[0]), strict=True)),
        (
            "Which month comes after {0}?",
            "What month follows {0}?",
            "What is the month after {0}?",
            "It is {0}. What is the next month?",
            "Name the month after {0}.",
            "Tell me the month that follows {0}.",
            "After {0} comes which month?",
            "The month after {0}?",
        ),
        "After {0} comes {1}.",
    ),
    "sound": (
        0.1,
        _SOUNDS,
        (
            "What sound does a {0} make?",
            "How does a {0} sound?",
            "What does a {0} say?",
            "What noise does the {0} make?",
            "Tell me the sound of a {0}.",
            "Make the sound of a {0}.",
            "How does the {0} go?",
            "Which sound comes from a {0}?",
        ),
        "A {0} says {1}.",
    ),
    "legs": (
        0.1,
        _LEGS,
        (
            "How many legs does a {0} have?",
            "How many legs has a {0}?",
            "Count the legs of a {0}.",
            "What is the number of legs of a {0}?",
            "Tell me how many legs a {0} has.",
            "On how many legs does a {0} walk?",
            "A {0} has how many legs?",
            "Number of legs of the {0}?",
        ),
        "A {0} has {1} legs.",
    ),
    "colour": (
        0.1,
        _THING_COLOURS,
        (
            "What colour is {0}?",
            "What color is {0}?",
            "Which colour has {0}?",
            "Tell me the colour of {0}.",
            "What is the color of {0}?",
            "Name the colour of {0}.",
            "How is {0} coloured?",
            "Do you know the colour of {0}?",
        ),
        "The colour of {0} is {1}.",
    ),
    "child": (
        0.2,
        _CHILDREN,
        (
            "What is a young {0} called?",
            "What do you call a baby {0}?",
            "Name the child of a {0}.",
            "What is the word for a young {0}?",
            "How is a baby {0} called?",
            "A young {0} is called what?",
            "Tell me the name for a little {0}.",
            "What is a small {0} called?",
        ),
        "A young {0} is a {1}.",
    ),
    "digits": (
        0.1,
        tuple((word, str(value)) for value, word in enumerate(NUMBER_WORDS)),
        (
            "Write {0} as a number.",
            "What is {0} in digits?",
            "Which number is {0}?",
            "Write {0} with digits.",
            "Turn {0} into digits.",
            "How do you write {0} in figures?",
            "Give me the digits of {0}.",
            "The word is {0}. Which number is it?",
        ),
        "{1}",
    ),
}
VARIANTS = {name: family[0] for name, family in _FAMILIES.items()}


def make(rng: random.Random, difficulty: float, variant: str | None = None) -> Task:
    """A question on one fact, answered in one sentence or, when asked so, in one word."""
    variant = pick_variant(rng, VARIANTS, difficulty, variant)
    _, pairs, wordings, sentence = _FAMILIES[variant]
    subject, answer = rng.choice(pairs)
    wording = rng.choice(wordings)
    question = wording.format(subject)
    said = sentence.format(subject, answer)
    accepted = (said, answer)
    text = careless(rng, question) if not wording.startswith("{0}") else question
    if rng.random() < 0.2:
        text = text.rstrip("?.") + "? " + rng.choice(("One word.", "Answer in one word, please."))
        said, accepted = answer, (answer,)
    effort = pick_effort(rng)
    recalled = f"{subject}: {answer}."
    return Task(
        kind="knowledge",
        variant=variant,
        difficulty=difficulty,
        key=f"knowledge:{question}",
        messages=(user_message(text),),
        target=(assistant(said, thought(rng, effort, "", recalled)),),
        grader=partial(is_text, accepted=accepted),
        effort=effort,
    )
