"""Plain words to fill questions with."""

import random
import string


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines())


NAMES = _words(
    """Anna Ben Carla David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Quinn Rosa
    Sam Tina Uma Victor Wendy Xavier Yara Zoe Adam Bella Carl Diana Eric Fiona George Hanna Ivan
    Julia Kevin Laura Max Nina Oscar Petra Ray Sara Tom Vera Will Amy Bob Clara Dan Eva Frank Gina
    Hugo Iris Jim Karl Lily Mark Nora Otto Peter Ruth Simon Tara Alice Bruno Chloe Dora Eli Finn
    Greta Harry Ian Jane Kim Lucy Mary Nick Omar Pia Rita Steve Theo Viola Walter Yuki Kenji Aiko
    Hiro Mei Chen Ali Fatima Ravi Priya Igor Sofia Diego Lena"""
)
THINGS = _words(
    """key ball book cup hat coin map ring lamp box pen bag clock rope stone letter apple bell brush
    candle card chair comb drum flag flute fork glass glove hammer jar kite knife leaf mirror nail
    needle paper phone photo picture plate pot purse radio ribbon rose scarf shell shirt shoe spoon
    stamp stick ticket torch towel toy umbrella vase watch wheel whistle"""
)
ROOMS = _words(
    """kitchen garden garage hall attic cellar office bedroom bathroom library park school shop
    station market barn tower church museum bakery"""
)
COLOURS = _words("red blue green yellow black white brown pink orange purple grey golden")
CITIES = _words(
    """Paris London Tokyo Berlin Rome Madrid Oslo Cairo Lima Delhi Boston Chicago Dublin Vienna
    Prague Athens Lisbon Moscow Sydney Toronto Seoul Osaka Kyoto Munich Milan Geneva Zurich Denver
    Dallas Austin Miami Seattle Nairobi Lagos Mumbai Beijing Bangkok Hanoi Jakarta Manila Warsaw
    Helsinki Stockholm Brussels Amsterdam Barcelona Istanbul Houston Montreal Quito"""
)
ANIMALS = _words(
    """cat dog bird fish horse cow pig sheep goat duck hen mouse rabbit fox wolf bear lion tiger
    monkey snake frog bee ant spider owl crow whale shark camel donkey"""
)
FOODS = _words(
    """apples pears plums oranges lemons cookies cakes eggs carrots onions tomatoes potatoes grapes
    cherries nuts beans pizza soup salad rice pasta bread cheese curry noodles sandwich burger
    pancake toast tea coffee milk juice water"""
)
COUNTED = _words(
    """apples pears books coins cards stamps shells stones pens cups balls eggs cookies oranges
    flowers stickers marbles candles tickets buttons"""
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    """January February March April May June July August September October November
    December"""
)
NUMBER_WORDS = _words(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty"""
)
PLAIN = _words(
    """water house tree river mountain summer winter morning evening music story friend family
    window door table garden street bridge island forest ocean planet rocket engine train ship
    bicycle paper pencil school teacher doctor farmer king queen castle dragon magic secret answer
    question letter number silver iron butter sugar pepper orange banana cherry kitten puppy turtle
    cloud storm thunder snow rain wind sun moon star light shadow dream sleep smile heart hand foot
    head eye ear nose mouth finger happy sad big small fast slow old new good bad hot cold long
    short open close start stop run walk jump swim read write sing dance play work help give take
    make find keep tell ask show blue green yellow seven eleven twenty"""
)
SENTENCES = _lines(
    """The cat sleeps on the warm mat
    Our train leaves at noon
    She likes green tea with milk
    The old bridge is closed today
    We saw two owls in the forest
    He forgot his hat at school
    Snow fell all night long
    The baker opens the shop at six
    My friend lives near the river
    They sing a quiet song
    The moon is bright tonight
    A small boat crossed the lake
    The teacher reads a long story
    Rain is good for the garden
    I keep my secret in a box
    The dog runs after the ball
    Fresh bread smells wonderful
    The king lost his golden ring
    Children play in the park
    The wind shakes the tall trees
    Her brother builds model ships
    The clock stopped at midnight
    We walk to the market on Friday
    The farmer feeds the sheep
    A red kite flies over the hill
    The library is open on Sunday
    Stars shine above the sea
    The engine makes a strange noise
    He writes a letter to his mother
    The door opens slowly"""
)

FOREIGN = _words(
    """café Größe naïve señor jalapeño crêpe Über smörgåsbord Ærø Łódź привет спасибо γεια 日本 墨
    硯 東京 こんにちは ありがとう 你好 谢谢 안녕 שלום مرحبا नमस्ते ✓ → € 😀 🎉 🖋"""
)
"""Words that a small vocabulary has no tokens for."""

_SYLLABLES = tuple(f"{first}{vowel}" for first in "bdfghklmnprstvwz" for vowel in "aeiou")


def invented(rng: random.Random, longest: int = 3) -> str:
    """A word that is none, or none of ours, so that it can only be copied."""
    if rng.random() < 0.06:
        return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(3, 7)))
    body = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, longest)))
    return body + rng.choice(("", "", "n", "s", "r", "x"))


def name(rng: random.Random) -> str:
    """A name, in one case of twelve one that nobody has."""
    return invented(rng).capitalize() if rng.random() < 1 / 12 else rng.choice(NAMES)


def names(rng: random.Random, count: int) -> list[str]:
    """Different names."""
    found: list[str] = []
    while len(found) < count:
        new = name(rng)
        if new not in found:
            found.append(new)
    return found
