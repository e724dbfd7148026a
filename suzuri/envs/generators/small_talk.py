"""Chat: greetings, who the model is, thanks, and friendly refusals. Texts: small_talk_texts.py,
refusal_texts.py."""

import random
from functools import partial

from suzuri.envs.generators.refusal_texts import REFUSALS
from suzuri.envs.generators.small_talk_texts import INTENTS, TOLD, Intent
from suzuri.envs.generators.wording import (
    assistant,
    careless,
    pick_effort,
    pick_variant,
    thought,
    user,
)
from suzuri.envs.generators.words import ANIMALS, CITIES, FOREIGN, PLAIN, THINGS, invented, name
from suzuri.envs.graders import is_text
from suzuri.envs.task import Message, Task

VARIANTS = {"chat": 0.0, "refusal": 0.0, "name": 0.0, "persona": 0.2}

_PERSONAS = (
    "You are {0}, a helpful assistant.",
    "Your name is {0}.",
    "You are called {0}. Be friendly.",
    "Act as {0}.",
    "You are a robot with the name {0}.",
    "Call yourself {0}.",
    "From now on your name is {0}.",
    "You are the assistant {0} of a small shop.",
)
_PLAIN_SYSTEM = (
    "You are a helpful assistant.",
    "Be friendly and short.",
    "You are a chat assistant.",
    "Answer briefly.",
)
_ASK_NAME = (
    "What is your name?",
    "Who are you?",
    "What are you called?",
    "Tell me your name.",
    "How may I call you?",
    "May I know your name?",
    "Do you have a name?",
    "Say who you are.",
    "What's your name?",
)
_ASK_MINE = (
    "What is my name?",
    "Do you remember my name?",
    "Who am I?",
    "What was my name again?",
    "Tell me my name.",
    "What am I called?",
    "Can you say my name?",
    "Do you still know who I am?",
)


def make(rng: random.Random, difficulty: float, variant: str | None = None) -> Task:
    """One turn. An answer is right if it is one of the intent's own."""
    variant = pick_variant(rng, VARIANTS, difficulty, variant)
    if variant == "persona":
        return _persona(rng, difficulty)
    if variant == "name":
        return name_told(rng, difficulty, name(rng))
    if variant == "refusal":
        intent = rng.choice(REFUSALS)
        slot = rng.choice((invented(rng), *(rng.choice(p) for p in (PLAIN, THINGS, CITIES))))
        if rng.random() < 0.05:
            slot = rng.choice(FOREIGN)
    else:
        intent = rng.choice(INTENTS)
        slot = rng.choice(ANIMALS)
    return _task(rng, difficulty, variant, intent, slot)


def name_told(rng: random.Random, difficulty: float, who: str) -> Task:
    """Somebody tells a name and is greeted by it."""
    return _task(rng, difficulty, "name", TOLD, who)


def name_told_and_asked(rng: random.Random, difficulty: float) -> tuple[Task, Task]:
    """A turn that tells a name, and one that asks for it later."""
    who = name(rng)
    question = rng.choice(_ASK_MINE)
    effort = pick_effort(rng)
    answer = f"Your name is {who}."
    asked = Task(
        kind="small_talk",
        variant="recall",
        difficulty=difficulty,
        key=f"small_talk:recall:{question}:{who}",
        messages=(user(careless(rng, question)),),
        target=(assistant(answer, thought(rng, effort, "", f"The user said: {who}.")),),
        grader=partial(is_text, accepted=(answer, who)),
        effort=effort,
    )
    return name_told(rng, difficulty, who), asked


def _task(rng: random.Random, difficulty: float, variant: str, intent: Intent, slot: str) -> Task:
    wording = rng.choice(intent.asked)
    question = wording.format(slot)
    # Told names keep their capital, wherever they stand.
    text = question if wording.startswith("{0}") else careless(rng, question)
    answers = tuple(answer.format(slot) for answer in intent.answers)
    effort = pick_effort(rng)
    messages: tuple[Message, ...] = (user(text),)
    if rng.random() < 0.15:
        messages = ({"role": "system", "content": rng.choice(_PLAIN_SYSTEM)}, *messages)
    thinking = thought(rng, effort, intent.short, f"{intent.short} {intent.plan}")
    return Task(
        kind="small_talk",
        variant=variant,
        difficulty=difficulty,
        key=f"small_talk:{question}",
        messages=messages,
        target=(assistant(rng.choice(answers), thinking),),
        grader=partial(is_text, accepted=answers),
        effort=effort,
    )


def _persona(rng: random.Random, difficulty: float) -> Task:
    who = name(rng)
    system = rng.choice(_PERSONAS).format(who)
    question = rng.choice(_ASK_NAME)
    answers = (f"I am {who}.", f"My name is {who}.")
    effort = pick_effort(rng)
    thinking = thought(rng, effort, f"I am {who}.", f"The system says that I am {who}.")
    return Task(
        kind="small_talk",
        variant="persona",
        difficulty=difficulty,
        key=f"small_talk:persona:{question}:{who}",
        messages=({"role": "system", "content": system}, user(careless(rng, question))),
        target=(assistant(rng.choice(answers), thinking),),
        grader=partial(is_text, accepted=(*answers, who)),
        effort=effort,
    )
