"""Counting, sorting, copying, reversing, and the letters of words."""

import random
import string
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from suzuri.envs.generators.wording import ask, assistant, pick_effort, pick_variant, thought, user
from suzuri.envs.generators.words import (
    ANIMALS,
    COLOURS,
    FOODS,
    FOREIGN,
    NAMES,
    NUMBER_WORDS,
    PLAIN,
    SENTENCES,
    THINGS,
    invented,
)
from suzuri.envs.graders import is_text
from suzuri.envs.task import Task

_POOLS = (ANIMALS, COLOURS, THINGS, FOODS, PLAIN, NAMES)
_ORDINALS = ("first", "second", "third", "fourth", "fifth")


class _Question(NamedTuple):
    """`key` without the variant's name. `short` and `full` thoughts may be empty."""

    key: str
    text: str
    answer: str
    short: str = ""
    full: str = ""
    cased: bool = False


def _count_list(rng: random.Random, size: int) -> _Question:
    items = _items(rng, size, repeats=False)
    text = ask(
        rng,
        (
            "How many words are in this list: {0}?",
            "Count the items: {0}",
            "How many things are listed here? {0}",
            "Count these words: {0}.",
            "Number of items in: {0}",
            "How long is the list {0}?",
            "Tell me how many words you see: {0}",
            "Please count: {0}.",
        ),
        ", ".join(items),
    )
    full = " ".join(f"{i + 1} {item}," for i, item in enumerate(items)) + f" so {len(items)}."
    return _Question(",".join(items), text, str(len(items)), f"{len(items)} words.", full)


def _count_word(rng: random.Random, size: int) -> _Question:
    items = _items(rng, size, repeats=True)
    wanted = rng.choice(items)
    text = ask(
        rng,
        (
            'How often does "{1}" appear in: {0}?',
            'Count the word "{1}" in: {0}',
            'How many times is "{1}" in this list? {0}',
            'In the list {0}, how many are "{1}"?',
            'Find how often "{1}" stands here: {0}.',
            'How many "{1}" are there? {0}',
            'Number of "{1}" in {0}',
            'I see {0}. How many times "{1}"?',
        ),
        ", ".join(items),
        wanted,
    )
    count = items.count(wanted)
    seen = 0
    steps: list[str] = []
    for item in items:
        seen += item == wanted
        steps.append(f"{item} {seen}")
    full = f"{', '.join(steps)}. So {count}."
    return _Question(f"{wanted}:{','.join(items)}", text, str(count), f"{count} times.", full)


def _count_letter(rng: random.Random, size: int) -> _Question:
    word = _word(rng, size)
    letter = rng.choice(word) if rng.random() < 0.8 else rng.choice(string.ascii_lowercase)
    text = ask(
        rng,
        (
            'How many "{1}" are in the word "{0}"?',
            'How often does the letter {1} appear in "{0}"?',
            'Count the letter "{1}" in "{0}".',
            'How many times does "{0}" contain {1}?',
            'Number of letters "{1}" in "{0}"?',
            "How many {1}'s does the word {0} have?",
            'The word is "{0}". How many {1} does it have?',
            'Find out how many "{1}" there are in "{0}"',
        ),
        word,
        letter,
    )
    count = word.count(letter)
    full = f"{_spell(word)}: {letter} {count}."
    return _Question(f"{letter}:{word}", text, str(count), full, full)


def _length(rng: random.Random, size: int) -> _Question:
    word = _word(rng, size)
    text = ask(
        rng,
        (
            'How many letters does "{0}" have?',
            'How long is the word "{0}"?',
            'Count the letters of "{0}".',
            'What is the length of "{0}"?',
            "How many letters are in {0}?",
            'Number of letters in the word "{0}"',
            'The word is "{0}". How many letters is that?',
            'Tell me how many letters "{0}" has.',
        ),
        word,
    )
    full = ", ".join(f"{letter} {i + 1}" for i, letter in enumerate(word)) + "."
    return _Question(word, text, str(len(word)), f"{_spell(word)}.", full)


def _sort_words(rng: random.Random, size: int) -> _Question:
    items = _items(rng, size, repeats=False)
    text = ask(
        rng,
        (
            "Sort these words: {0}",
            "Sort alphabetically: {0}.",
            "Put these words in alphabetical order: {0}",
            "Arrange from A to Z: {0}.",
            "Order the words {0} by the alphabet.",
            "What is the alphabetical order of {0}?",
            "Please sort the list: {0}",
            "Bring these into alphabetical order: {0}.",
        ),
        ", ".join(items),
    )
    ordered = ", ".join(sorted(items, key=str.lower))
    initials = " ".join(sorted(item[0].lower() for item in items))
    short = f"First letters: {initials}."
    return _Question(",".join(items), text, ordered, short, short)


def _sort_numbers(rng: random.Random, size: int) -> _Question:
    items = rng.sample(range(100 if size > 3 else 20), size)
    falling = rng.random() < 0.35
    rising = (
        "Sort these numbers: {0}",
        "Put in order: {0}.",
        "Sort from small to large: {0}",
        "Order the numbers {0} from smallest to largest.",
        "Arrange in rising order: {0}.",
        "Please sort: {0}",
        "What is the sorted list of {0}?",
        "Bring these numbers into order: {0}",
    )
    descending = (
        "Sort these numbers from large to small: {0}",
        "Put in falling order: {0}.",
        "Sort in descending order: {0}",
        "Order the numbers {0} from largest to smallest.",
        "Arrange from high to low: {0}.",
        "Please sort, largest first: {0}",
        "What is the list {0} with the largest first?",
        "Sort backwards, from big to small: {0}",
    )
    listed = ", ".join(map(str, items))
    text = ask(rng, descending if falling else rising, listed)
    ordered = sorted(items, reverse=falling)
    steps = f"{'Largest' if falling else 'Smallest'} {ordered[0]}, then {ordered[1]}."
    return _Question(f"{falling}:{listed}", text, ", ".join(map(str, ordered)), steps, steps)


def _extreme(rng: random.Random, size: int) -> _Question:
    items = rng.sample(range(100 if size > 3 else 20), size)
    largest = rng.random() < 0.5
    text = ask(
        rng,
        (
            "What is the {1} of {0}?",
            "Which number is the {1}: {0}?",
            "Find the {1} number: {0}.",
            "Pick the {1} one: {0}",
            "Give me the {1} of these: {0}.",
            "Of the numbers {0}, which is the {1}?",
            "The {1} number in {0}?",
            "Say which of {0} is the {1}.",
        ),
        ", ".join(map(str, items)),
        rng.choice(("largest", "biggest") if largest else ("smallest", "lowest")),
    )
    best = max(items) if largest else min(items)
    steps: list[str] = []
    held = items[0]
    for item in items:
        held = max(held, item) if largest else min(held, item)
        steps.append(f"{item}: {held}")
    return _Question(f"{largest}:{items}", text, str(best), f"{best}.", f"{', '.join(steps)}.")


def _copy(rng: random.Random, size: int) -> _Question:
    match rng.randrange(4):
        case 0:
            payload = rng.choice(SENTENCES)
        case 1:
            payload = " ".join(invented(rng) for _ in range(max(1, size // 2)))
            if rng.random() < 0.15:
                payload += f" {rng.choice(FOREIGN)}"
        case 2:
            payload = " ".join(_items(rng, size, repeats=True))
        case _:
            payload = _code(rng, size + 1)
    text = ask(
        rng,
        (
            'Repeat: "{0}"',
            'Copy this text: "{0}"',
            'Say "{0}"',
            'Write exactly this: "{0}"',
            'Repeat after me: "{0}"',
            'Echo "{0}"',
            'Please copy "{0}" without changes.',
            'Give me back the text "{0}"',
        ),
        payload,
    )
    return _Question(payload, text, payload, "", "", cased=True)


def _reverse_list(rng: random.Random, size: int) -> _Question:
    if rng.random() < 0.3:
        items = [str(rng.randint(0, 99)) for _ in range(size)]
    else:
        items = _items(rng, size, repeats=False)
    text = ask(
        rng,
        (
            "Reverse this list: {0}",
            "Write the list backwards: {0}.",
            "List these from last to first: {0}",
            "Turn the order around: {0}.",
            "Give me {0} in reverse order.",
            "What is the reverse of the list {0}?",
            "Reverse the order of these: {0}",
            "Say these items backwards, last one first: {0}.",
        ),
        ", ".join(items),
    )
    return _Question(",".join(items), text, ", ".join(items[::-1]), f"Last: {items[-1]}.")


def _reverse_word(rng: random.Random, size: int) -> _Question:
    word = _word(rng, size)
    text = ask(
        rng,
        (
            'Reverse the word "{0}".',
            'Write "{0}" backwards.',
            'What is "{0}" spelled backwards?',
            'Spell "{0}" from the end to the start.',
            "Turn the word {0} around.",
            'Give me "{0}" in reverse.',
            'How do you write "{0}" backwards?',
            'Reverse the letters of "{0}"',
        ),
        word,
    )
    steps = f"{_spell(word)}. Backwards: {_spell(word[::-1])}."
    return _Question(word, text, word[::-1], steps, steps)


def _spelling(rng: random.Random, size: int) -> _Question:
    word = _word(rng, size)
    text = ask(
        rng,
        (
            'Spell "{0}".',
            'Spell the word "{0}" letter by letter.',
            "How do you spell {0}?",
            'Write the letters of "{0}" with dashes.',
            'Which letters make up "{0}"?',
            "Take the word {0} apart into letters.",
            'List the letters in "{0}".',
            'Please spell "{0}"',
        ),
        word,
    )
    return _Question(word, text, _spell(word))


def _nth_letter(rng: random.Random, size: int) -> _Question:
    word = _word(rng, size)
    place = rng.choice((*range(min(len(word), len(_ORDINALS))), -1))
    ordinal = "last" if place < 0 else _ORDINALS[place]
    text = ask(
        rng,
        (
            'What is the {1} letter of "{0}"?',
            'Which letter comes {1} in "{0}"?',
            'Give me the {1} letter of the word "{0}".',
            "The {1} letter of {0}?",
            'Find the {1} letter in "{0}".',
            'In the word "{0}", what is the {1} letter?',
            'Say the {1} letter of "{0}"',
            'Tell me which letter is {1} in "{0}".',
        ),
        word,
        ordinal,
    )
    return _Question(f"{place}:{word}", text, word[place], f"{_spell(word)}.", f"{_spell(word)}.")


def _capitals(rng: random.Random, size: int) -> _Question:
    word = _word(rng, size)
    payload = word if rng.random() < 0.6 else " ".join(_items(rng, 2, repeats=False)).lower()
    text = ask(
        rng,
        (
            'Write "{0}" in capital letters.',
            'Put "{0}" in upper case.',
            'Make "{0}" all caps.',
            'Convert "{0}" to capitals.',
            'How does "{0}" look in capital letters?',
            'Change "{0}" to uppercase.',
            'Please write "{0}" in big letters.',
            'Give me "{0}" in upper case',
        ),
        payload,
    )
    return _Question(payload, text, payload.upper(), cased=True)


def _next_number(rng: random.Random, size: int) -> _Question:
    step = rng.choice((1, 2, 5, 10) if size < 5 else (1, 2, 3, 4, 5, 10, 11))
    start = rng.randint(0, 30)
    items = [start + step * i for i in range(4)]
    if rng.random() < 0.3:
        items = items[::-1]
        step = -step
    answer = items[-1] + step
    text = ask(
        rng,
        (
            "What comes next: {0}?",
            "Continue the row: {0}",
            "Which number follows {0}?",
            "Find the next number: {0}, ...",
            "The next number after {0}?",
            "Go on with {0}.",
            "What is the next one in {0}?",
            "Complete the series {0}, ?",
        ),
        ", ".join(map(str, items)),
    )
    sign = "+" if step > 0 else "-"
    steps = f"Each step is {sign}{abs(step)}. {items[-1]}{sign}{abs(step)}={answer}."
    return _Question(f"{items}", text, str(answer), steps, steps)


_MAKERS: dict[str, tuple[float, Callable[[random.Random, int], _Question]]] = {
    "copy": (0.0, _copy),
    "count_list": (0.0, _count_list),
    "spell": (0.1, _spelling),
    "nth_letter": (0.1, _nth_letter),
    "capitals": (0.1, _capitals),
    "extreme": (0.1, _extreme),
    "length": (0.15, _length),
    "next_number": (0.15, _next_number),
    "reverse_list": (0.2, _reverse_list),
    "sort_numbers": (0.2, _sort_numbers),
    "sort_words": (0.3, _sort_words),
    "count_word": (0.3, _count_word),
    "count_letter": (0.35, _count_letter),
    "reverse_word": (0.4, _reverse_word),
}
VARIANTS = {name: least for name, (least, _) in _MAKERS.items()}


def make(rng: random.Random, difficulty: float, variant: str | None = None) -> Task:
    """A question on a list or a word; lists of 3 to 9 items, longer words as it gets harder."""
    variant = pick_variant(rng, VARIANTS, difficulty, variant)
    size = 3 + round(difficulty * rng.uniform(0, 6))
    found = _MAKERS[variant][1](rng, size)
    effort = pick_effort(rng)
    reasoning = thought(rng, effort, found.short, found.full or found.short)
    accepted = (found.answer,)
    if found.answer.isdigit() and len(found.answer) < 3 and int(found.answer) <= 20:
        accepted = (found.answer, NUMBER_WORDS[int(found.answer)])
    return Task(
        kind="strings",
        variant=variant,
        difficulty=difficulty,
        key=f"strings:{variant}:{found.key}",
        messages=(user(found.text),),
        target=(assistant(found.answer, reasoning),),
        grader=partial(is_text, accepted=accepted, cased=found.cased),
        effort=effort,
    )


def _items(rng: random.Random, size: int, *, repeats: bool) -> list[str]:
    pool = rng.choice(_POOLS)
    if not repeats:
        return rng.sample(pool, size)
    few = rng.sample(pool, max(2, size // 2))
    return [rng.choice(few) for _ in range(size)]


def _word(rng: random.Random, size: int) -> str:
    """A lower-case word of at most `size` + 2 letters."""
    if rng.random() < 0.25:
        return invented(rng)[: size + 2]
    while True:
        word = rng.choice(rng.choice(_POOLS)).lower()
        if 3 <= len(word) <= size + 2:
            return word


def _spell(word: str) -> str:
    return "-".join(word)


def _code(rng: random.Random, size: int) -> str:
    return "".join(rng.choice(string.ascii_letters + string.digits) for _ in range(size))
