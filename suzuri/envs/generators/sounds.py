"""Questions on short clips: how high a tone is, how it moves, how many beeps, which digits."""

import random
from functools import partial
from typing import NamedTuple

import numpy as np

from suzuri.envs.generators.synthesis import PITCHES, Wave, digit, glide, silence, tone, wav_data
from suzuri.envs.generators.wording import (
    assistant,
    careless,
    pick_effort,
    pick_variant,
    thought,
    user,
)
from suzuri.envs.generators.words import NUMBER_WORDS
from suzuri.envs.graders import is_text
from suzuri.envs.task import Message, Task

VARIANTS = {
    "pitch": 0.0,
    "beeps": 0.1,
    "direction": 0.1,
    "digit": 0.2,
    "compare": 0.35,
    "digits": 0.6,
}

_WORDINGS = {
    "pitch": (
        "Is the tone low, middle or high?",
        "How high is this tone?",
        "What pitch do you hear?",
        "Low, middle or high?",
        "Tell me the pitch of the sound.",
        "Is this sound low, middle or high?",
        "Which pitch does the tone have?",
        "Listen. How high is it?",
    ),
    "beeps": (
        "How many beeps do you hear?",
        "Count the beeps.",
        "How many tones are there?",
        "How often does it beep?",
        "Tell me the number of beeps.",
        "Number of beeps?",
        "How many sounds are in the clip?",
        "Listen and count the beeps.",
    ),
    "direction": (
        "Does the tone rise or fall?",
        "Is the tone rising, falling or steady?",
        "Which way does the pitch go?",
        "Does it go up or down?",
        "How does the pitch change?",
        "Tell me if the tone rises or falls.",
        "Rising, falling or steady?",
        "Listen. How does the tone move?",
    ),
    "digit": (
        "Which digit is this?",
        "What digit do you hear?",
        "Which number is spoken?",
        "What number is said?",
        "Tell me the digit.",
        "Write down the digit you hear.",
        "Listen. Which digit is it?",
        "Name the spoken digit.",
    ),
    "compare": (
        "Which tone is higher, the first or the second?",
        "Is the first or the second tone higher?",
        "You hear two tones. Which is the higher one?",
        "Which of the two is higher?",
        "First or second: which is higher?",
        "Tell me which tone is the higher one.",
        "Listen to both. Which one is higher?",
        "Of the two sounds, which has the higher pitch?",
    ),
    "digits": (
        "Which digits do you hear?",
        "Write down the digits.",
        "What number is spoken?",
        "Which numbers are said?",
        "Tell me the digits in order.",
        "Listen and write the digits.",
        "What are the spoken digits?",
        "Note the digits you hear.",
    ),
}


class _Heard(NamedTuple):
    """`key`: what was played, up to what every playing varies."""

    key: str
    sound: Wave
    answer: str
    others: tuple[str, ...] = ()


def make(rng: random.Random, difficulty: float, variant: str | None = None) -> Task:
    """A clip of 0.2 to 2.5 s (4 to 50 tokens) and a question, in either order.

    The split goes by pitches and lengths in steps, so the same kind of sound, never the same sound,
    is on both sides.
    """
    variant = pick_variant(rng, VARIANTS, difficulty, variant)
    heard = _play(rng, variant)
    clip: Message = {
        "type": "input_audio",
        "input_audio": {"data": wav_data(rng, heard.sound), "format": "wav"},
    }
    text: Message = {"type": "text", "text": careless(rng, rng.choice(_WORDINGS[variant]))}
    effort = pick_effort(rng)
    return Task(
        kind="sounds",
        variant=variant,
        difficulty=difficulty,
        key=f"sounds:{variant}:{heard.key}",
        messages=(user([clip, text] if rng.random() < 0.7 else [text, clip]),),
        target=(assistant(heard.answer, thought(rng, effort, "", f"I hear: {heard.answer}.")),),
        grader=partial(is_text, accepted=(heard.answer, *heard.others)),
        effort=effort,
    )


def _play(rng: random.Random, variant: str) -> _Heard:
    match variant:
        case "pitch":
            name = rng.choice(tuple(PITCHES))
            hertz, seconds = _pitch(rng, name), rng.uniform(0.25, 0.9)
            return _Heard(_key(hertz, seconds), tone(rng, hertz, seconds), name)
        case "beeps":
            return _beeps(rng)
        case "direction":
            return _direction(rng)
        case "compare":
            return _compare(rng)
        case _:
            return _digits(rng, 1 if variant == "digit" else rng.randint(2, 4))


def _beeps(rng: random.Random) -> _Heard:
    count = rng.randint(1, 5)
    hertz = rng.uniform(250, 2500)
    length, gap = rng.uniform(0.1, 0.22), rng.uniform(0.12, 0.25)
    parts = [silence(rng.uniform(0, 0.1))]
    for _ in range(count):
        parts += [tone(rng, hertz, length), silence(gap)]
    sound = np.concatenate(parts[:-1])
    return _Heard(f"{count}:{_key(hertz, length, gap)}", sound, str(count), (NUMBER_WORDS[count],))


def _direction(rng: random.Random) -> _Heard:
    name = rng.choice(("rising", "falling", "steady"))
    start = rng.uniform(250, 900)
    ratio = rng.uniform(1.7, 3.5)
    seconds = rng.uniform(0.4, 1.0)
    ends = {
        "rising": (start, start * ratio),
        "falling": (start * ratio, start),
        "steady": (start * ratio, start * ratio),
    }
    sound = glide(rng, *ends[name], seconds)
    return _Heard(f"{name}:{_key(*ends[name], seconds)}", sound, name)


def _compare(rng: random.Random) -> _Heard:
    lower = rng.uniform(200, 1000)
    higher = lower * rng.uniform(1.6, 3.0)
    first = rng.random() < 0.5
    pair = (higher, lower) if first else (lower, higher)
    length, gap = rng.uniform(0.25, 0.5), rng.uniform(0.1, 0.3)
    sound = np.concatenate([tone(rng, pair[0], length), silence(gap), tone(rng, pair[1], length)])
    answer = "the first" if first else "the second"
    return _Heard(_key(*pair, length), sound, answer, (answer.removeprefix("the "),))


def _digits(rng: random.Random, count: int) -> _Heard:
    values = [rng.randrange(10) for _ in range(count)]
    voice = rng.uniform(95, 230)
    parts: list[Wave] = []
    for value in values:
        parts += [digit(rng, value, voice), silence(rng.uniform(0.08, 0.16))]
    written = " ".join(map(str, values))
    others = ("".join(map(str, values)),) if count > 1 else (NUMBER_WORDS[values[0]],)
    return _Heard(f"{written}:{round(voice)}", np.concatenate(parts[:-1]), written, others)


def _pitch(rng: random.Random, name: str) -> float:
    low, high = PITCHES[name]
    return low * (high / low) ** rng.random()


def _key(*measures: float) -> str:
    """Hertz to the nearest one, seconds to the nearest hundredth."""
    return ",".join(str(round(m)) if m > 10 else f"{m:.2f}" for m in measures)
