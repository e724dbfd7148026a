"""Questions on small pictures of one to three coloured shapes (drawing.py)."""

import random
from functools import partial
from typing import NamedTuple

from suzuri.envs.generators.drawing import COLOURS, SHAPES, Placed, Scene, draw_scene, png_url
from suzuri.envs.generators.wording import (
    assistant,
    careless,
    listed,
    pick_effort,
    pick_variant,
    thought,
    user,
    with_article,
)
from suzuri.envs.generators.words import NUMBER_WORDS
from suzuri.envs.graders import is_text
from suzuri.envs.task import Message, Task

VARIANTS = {
    "colour": 0.0,
    "shape": 0.0,
    "describe": 0.1,
    "count": 0.2,
    "yes_no": 0.2,
    "where": 0.3,
    "colour_of": 0.3,
    "shape_of": 0.35,
    "count_of": 0.5,
    "at": 0.5,
}
_ALONE = ("colour", "shape")

_WORDINGS = {
    "colour": (
        "What colour is the shape?",
        "What color is this?",
        "Which colour do you see?",
        "Name the colour of the shape.",
        "What is the color of the shape in the picture?",
        "Tell me the colour.",
        "The shape has which colour?",
        "Which color is it?",
        "What colour is the thing in the image?",
    ),
    "shape": (
        "What shape is this?",
        "Which shape do you see?",
        "What is in the picture?",
        "Name the shape.",
        "What shape is in the image?",
        "Tell me the shape.",
        "Is it a circle, a square, a triangle or a cross?",
        "What form does this have?",
        "Which shape is drawn here?",
    ),
    "describe": (
        "Describe the picture.",
        "What do you see?",
        "What is in this image?",
        "Tell me what is in the picture.",
        "List the shapes and their colours.",
        "What can you see here?",
        "Say what the picture shows.",
        "Describe this image.",
        "What does the picture show?",
    ),
    "count": (
        "How many shapes are there?",
        "Count the shapes.",
        "How many shapes do you see?",
        "What is the number of shapes?",
        "How many things are in the picture?",
        "Tell me how many shapes there are.",
        "Number of shapes?",
        "How many figures are drawn?",
    ),
    "yes_no": (
        "Is there {0}?",
        "Do you see {0}?",
        "Does the picture show {0}?",
        "Can you find {0}?",
        "Is {0} in the picture?",
        "Tell me if there is {0}.",
        "Is {0} here?",
        "Does this image have {0}?",
    ),
    "where": (
        "Where is the {0}?",
        "In which place is the {0}?",
        "Where do you see the {0}?",
        "Tell me where the {0} is.",
        "What is the position of the {0}?",
        "Which part of the picture has the {0}?",
        "Find the {0}. Where is it?",
        "Where in the image is the {0}?",
    ),
    "colour_of": (
        "What colour is the {0}?",
        "What color is the {0}?",
        "Which colour does the {0} have?",
        "Name the colour of the {0}.",
        "Tell me the color of the {0}.",
        "The {0} has which colour?",
        "What is the colour of the {0}?",
        "Look at the {0}. What colour is it?",
    ),
    "shape_of": (
        "What shape is {0}?",
        "Which shape is {0}?",
        "What is the {0} thing?",
        "Name the shape that is {0}.",
        "Tell me which shape is {0}.",
        "The {0} one has what shape?",
        "What form has the {0} shape?",
        "Look at the {0} shape. What is it?",
    ),
    "count_of": (
        "How many {0} are there?",
        "Count the {0}.",
        "How many {0} do you see?",
        "What is the number of {0}?",
        "How many {0} are in the picture?",
        "Tell me how many {0} there are.",
        "Number of {0}?",
        "How many {0} can you find?",
    ),
    "at": (
        "What is in the {0} part?",
        "What do you see at the {0}?",
        "Which shape is at the {0}?",
        "Tell me what is at the {0}.",
        "What is drawn at the {0}?",
        "Describe the shape at the {0}.",
        "Look at the {0}. What is there?",
        "Name the shape at the {0}, with its colour.",
    ),
}


class _Asked(NamedTuple):
    """What fills the wording, the answer as said, and other right ones."""

    slot: str
    answer: str
    others: tuple[str, ...] = ()


def make(rng: random.Random, difficulty: float, variant: str | None = None) -> Task:
    """A picture of 1 to 12 tokens and a question, in either order."""
    variant = pick_variant(rng, VARIANTS, difficulty, variant)
    scene = _scene(rng, difficulty, variant)
    while (asked := _ask(rng, scene, variant)) is None:
        scene = _scene(rng, difficulty, variant)
    wording = rng.choice(_WORDINGS[variant]).format(asked.slot)
    picture: Message = {"type": "image_url", "image_url": {"url": png_url(scene, rng)}}
    text: Message = {"type": "text", "text": careless(rng, wording)}
    effort = pick_effort(rng)
    seen = f"I see {_seen(scene)}."
    return Task(
        kind="pictures",
        variant=variant,
        difficulty=difficulty,
        key=f"pictures:{scene.key}",
        messages=(user([picture, text] if rng.random() < 0.7 else [text, picture]),),
        target=(assistant(asked.answer, thought(rng, effort, "", seen)),),
        grader=partial(is_text, accepted=(asked.answer, *asked.others)),
        effort=effort,
    )


def _scene(rng: random.Random, difficulty: float, variant: str) -> Scene:
    if variant in _ALONE:
        return draw_scene(rng, 1, big=difficulty > 0.4 and rng.random() < 0.25)
    most = 1 + round(2 * min(1.0, difficulty * 1.5 + 0.2))
    return draw_scene(rng, rng.randint(1, most), apart=variant in ("where", "at"))


def _ask(rng: random.Random, scene: Scene, variant: str) -> _Asked | None:
    """None: this scene leaves the question without one answer."""
    one = rng.choice(scene.shapes)
    shapes = [placed.shape for placed in scene.shapes]
    colours = [placed.colour for placed in scene.shapes]
    match variant:
        case "colour":
            return _Asked("", one.colour)
        case "shape":
            return _Asked("", f"a {one.shape}", (one.shape,))
        case "describe":
            whole = listed([with_article(placed.words) for placed in scene.shapes])
            return _Asked("", whole, tuple(_orders(scene)))
        case "count":
            return _counted("", len(scene.shapes))
        case "count_of":
            if rng.random() < 0.5:
                wanted = rng.choice((*shapes, rng.choice(SHAPES)))
                return _counted(f"{wanted}{'e' * (wanted == 'cross')}s", shapes.count(wanted))
            wanted = rng.choice((*colours, rng.choice(tuple(COLOURS))))
            return _counted(f"{wanted} shapes", colours.count(wanted))
        case "yes_no":
            return _yes_no(rng, scene, one)
        case "where":
            return _Asked(one.words, scene.where(one))
        case "at":
            return _Asked(scene.where(one), with_article(one.words), (one.words,))
        case "colour_of":
            return _Asked(one.shape, one.colour) if shapes.count(one.shape) == 1 else None
        case _:
            if colours.count(one.colour) > 1:
                return None
            return _Asked(one.colour, f"a {one.shape}", (one.shape,))


def _counted(slot: str, count: int) -> _Asked:
    return _Asked(slot, str(count), (NUMBER_WORDS[count],))


def _yes_no(rng: random.Random, scene: Scene, one: Placed) -> _Asked:
    there = {(placed.shape, placed.colour) for placed in scene.shapes}
    shape, colour = one.shape, one.colour
    if rng.random() < 0.5:
        while (shape, colour) in there:
            shape, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
    slot = with_article(f"{colour} {shape}")
    return _Asked(slot, "yes" if (shape, colour) in there else "no")


def _seen(scene: Scene) -> str:
    return listed(
        [f"{with_article(placed.words)} {scene.where(placed)}".strip() for placed in scene.shapes]
    )


def _orders(scene: Scene) -> list[str]:
    """The same list begun elsewhere, of at most three shapes: each one is as right."""
    words = [with_article(placed.words) for placed in scene.shapes]
    turned = [words[i:] + words[:i] for i in range(len(words))]
    return [listed(order) for start in turned for order in (start, start[::-1])]
