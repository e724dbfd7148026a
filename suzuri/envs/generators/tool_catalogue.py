"""Functions to offer, ways to ask for them, what they return. tool_use.py makes tasks of them."""

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

from suzuri.envs.generators.words import CITIES, DAYS, FOODS, PLAIN, ROOMS, invented, name

Draw = Callable[[random.Random], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """A parameter: the names it may go by, its JSON type, and how a value is drawn."""

    names: tuple[str, ...]
    draw: Draw
    kind: str = "string"
    choices: tuple[str, ...] = ()
    text: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
    """`names` it may go by; `requests` with the arguments' first names as slots; `facts`: what it
    returns; `report`: the sentence said of arguments and facts together."""

    names: tuple[str, ...]
    text: str
    arguments: tuple[Argument, ...]
    requests: tuple[str, ...]
    report: str
    facts: Callable[[random.Random], dict[str, Any]]


def _city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.85 else invented(rng).capitalize()


def _done(rng: random.Random) -> dict[str, Any]:
    return {"ok": True}


_CITY = Argument(names=("city", "location", "place", "town"), draw=_city)
_DAY = Argument(names=("day", "weekday", "date"), draw=lambda rng: rng.choice(DAYS))
_HOUR = Argument(names=("hour", "time", "at"), draw=lambda rng: rng.randint(1, 23), kind="integer")
_ROOM = Argument(names=("room", "where"), draw=lambda rng: rng.choice(ROOMS[:9]))
_PERSON = Argument(names=("person", "name", "to", "contact"), draw=name)
_WORD = Argument(names=("word", "text", "term"), draw=lambda rng: rng.choice(PLAIN))


def _integer(*names: str, low: int, high: int) -> Argument:
    return Argument(names=names, draw=lambda rng: rng.randint(low, high), kind="integer")


def _one_of(*names: str, choices: str) -> Argument:
    words = tuple(choices.split())
    return Argument(names=names, draw=lambda rng: rng.choice(words), choices=words)


TOOLS = (
    Tool(
        names=("get_weather", "weather", "fetch_weather"),
        text="Weather in a city",
        arguments=(_CITY,),
        requests=(
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "Is it nice outside in {city}?",
            "Tell me the weather for {city}.",
            "I travel to {city}. What is the weather there?",
            "Weather in {city}?",
            "Do I need an umbrella in {city}?",
            "Check the weather in {city}.",
        ),
        report="It is {sky} in {city}, {degrees} degrees.",
        facts=lambda rng: {
            "sky": rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "clear")),
            "degrees": rng.randint(1, 35),
        },
    ),
    Tool(
        names=("get_time", "local_time", "clock"),
        text="Local time in a city",
        arguments=(_CITY,),
        requests=(
            "What time is it in {city}?",
            "Tell me the time in {city}.",
            "How late is it in {city}?",
            "What does the clock say in {city}?",
            "I want to know the time in {city}.",
            "Current time in {city}?",
            "Is it late in {city} now? What time?",
            "Give me the local time of {city}.",
        ),
        report="It is {time} in {city}.",
        facts=lambda rng: {"time": f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"},
    ),
    Tool(
        names=("set_alarm", "alarm", "add_alarm"),
        text="Set an alarm",
        arguments=(_HOUR,),
        requests=(
            "Set an alarm for {hour} o'clock.",
            "Wake me at {hour}.",
            "I have to get up at {hour}. Set the alarm.",
            "Please set my alarm to {hour}.",
            "Alarm at {hour}, please.",
            "Can you wake me up at {hour} o'clock?",
            "Make the alarm ring at {hour}.",
            "I need an alarm for {hour}.",
        ),
        report="The alarm is set for {hour} o'clock.",
        facts=_done,
    ),
    Tool(
        names=("set_timer", "timer", "start_timer"),
        text="Start a timer",
        arguments=(_integer("minutes", "duration", "length", low=1, high=90),),
        requests=(
            "Set a timer for {minutes} minutes.",
            "Start a timer of {minutes} minutes.",
            "Tell me when {minutes} minutes are over.",
            "Count down {minutes} minutes.",
            "I need a {minutes} minute timer.",
            "Timer, {minutes} minutes.",
            "The cake needs {minutes} minutes. Set a timer.",
            "Please time {minutes} minutes for me.",
        ),
        report="The timer runs for {minutes} minutes.",
        facts=_done,
    ),
    Tool(
        names=("set_light", "light", "switch_light"),
        text="Turn a light on or off",
        arguments=(_ROOM, _one_of("state", "mode", choices="on off")),
        requests=(
            "Turn {state} the light in the {room}.",
            "Switch {state} the lamp in the {room}.",
            "Light {state} in the {room}, please.",
            "Please turn the {room} light {state}.",
            "Can you switch the light in the {room} {state}?",
            "I want the light {state} in the {room}.",
            "Make the {room} light go {state}.",
            "The light in the {room} should be {state}.",
        ),
        report="The light in the {room} is {state}.",
        facts=_done,
    ),
    Tool(
        names=("set_heating", "heating", "set_temperature"),
        text="Set the heating of a room",
        arguments=(_ROOM, _integer("degrees", "temperature", "level", low=10, high=30)),
        requests=(
            "Heat the {room} to {degrees} degrees.",
            "Set the {room} to {degrees} degrees.",
            "Make it {degrees} degrees in the {room}.",
            "I want {degrees} degrees in the {room}.",
            "Please warm the {room} to {degrees}.",
            "The {room} should be at {degrees} degrees.",
            "Turn the heating in the {room} to {degrees}.",
            "Can you set {degrees} degrees for the {room}?",
        ),
        report="The {room} will be at {degrees} degrees.",
        facts=_done,
    ),
    Tool(
        names=("send_message", "message", "text_to"),
        text="Send a message to a person",
        arguments=(
            _PERSON,
            Argument(
                names=("text", "body", "content"),
                draw=lambda rng: rng.choice(
                    (
                        *("see you soon", "I am late", "happy birthday", "call me", "thank you"),
                        *("dinner is ready", "where are you", "good night", "the train is late"),
                        *("I miss you", "come home", "bring some milk", "well done"),
                    )
                ),
            ),
        ),
        requests=(
            'Send {person} the message "{text}".',
            'Write "{text}" to {person}.',
            'Tell {person}: "{text}".',
            'Message {person}: "{text}"',
            'Please send "{text}" to {person}.',
            'Can you text {person} "{text}"?',
            'Let {person} know: "{text}".',
            'I want to say "{text}" to {person}. Send it.',
        ),
        report="I sent the message to {person}.",
        facts=_done,
    ),
    Tool(
        names=("call", "phone", "call_person"),
        text="Call a person",
        arguments=(_PERSON,),
        requests=(
            "Call {person}.",
            "Phone {person}, please.",
            "I want to talk to {person}. Call now.",
            "Give {person} a call.",
            "Can you ring {person}?",
            "Start a call with {person}.",
            "Please call {person} for me.",
            "Dial {person}.",
        ),
        report="I am calling {person}.",
        facts=_done,
    ),
    Tool(
        names=("book_table", "reserve", "table"),
        text="Book a table",
        arguments=(_DAY, _integer("people", "guests", "count", low=1, high=12)),
        requests=(
            "Book a table for {people} on {day}.",
            "Reserve a table on {day} for {people} people.",
            "I need a table for {people} guests on {day}.",
            "Table for {people}, {day}, please.",
            "We are {people} people on {day}. Book a table.",
            "Can you get us a table for {people} on {day}?",
            "Please reserve for {people} on {day}.",
            "On {day} we want to eat out, {people} people. Reserve a table.",
        ),
        report="The table for {people} is booked for {day}.",
        facts=_done,
    ),
    Tool(
        names=("order_food", "order", "buy_food"),
        text="Order food",
        arguments=(
            Argument(
                names=("food", "dish", "item"),
                draw=lambda rng: rng.choice(FOODS),
            ),
            _integer("count", "number", "quantity", low=1, high=20),
        ),
        requests=(
            "Order {count} {food}.",
            "I want {count} {food}, please.",
            "Get me {count} {food}.",
            "Please order {count} {food} for us.",
            "Can you buy {count} {food}?",
            "We need {count} {food}. Order them.",
            "An order of {count} {food}.",
            "Buy {count} {food} for the party.",
        ),
        report="I ordered {count} {food}.",
        facts=lambda rng: {"price": rng.randint(2, 99)},
    ),
    Tool(
        names=("add_event", "calendar", "schedule"),
        text="Put an event into the calendar",
        arguments=(
            Argument(
                names=("title", "event", "subject"),
                draw=lambda rng: rng.choice(
                    (
                        *("dentist", "meeting", "party", "dinner", "lunch", "concert", "exam"),
                        *("football", "piano", "swimming", "birthday", "interview"),
                    )
                ),
            ),
            _DAY,
            _HOUR,
        ),
        requests=(
            "Add {title} on {day} at {hour}.",
            "Put {title} into my calendar, {day} at {hour} o'clock.",
            "I have {title} on {day} at {hour}. Note it.",
            "Schedule {title} for {day}, {hour} o'clock.",
            "Please enter {title} on {day} at {hour}.",
            "Calendar: {title}, {day}, {hour}.",
            "Can you plan {title} for {day} at {hour}?",
            "Make an entry for {title} at {hour} on {day}.",
        ),
        report="{title} is in the calendar on {day} at {hour}.",
        facts=_done,
    ),
    Tool(
        names=("translate", "translate_word", "dictionary"),
        text="Translate a word",
        arguments=(
            _WORD,
            _one_of("language", "target", "into", choices="German French Spanish Italian Japanese"),
        ),
        requests=(
            'Translate "{word}" into {language}.',
            'What is "{word}" in {language}?',
            'How do you say "{word}" in {language}?',
            'Give me the {language} word for "{word}".',
            'I need "{word}" in {language}.',
            'Say "{word}" in {language}.',
            'Please translate "{word}" to {language}.',
            'The {language} for "{word}"?',
        ),
        report='In {language} "{word}" is "{result}".',
        facts=lambda rng: {"result": invented(rng)},
    ),
    Tool(
        names=("calculate", "calculator", "compute"),
        text="Calculate an expression",
        arguments=(
            Argument(
                names=("expression", "formula", "input"),
                draw=lambda rng: (
                    f"{rng.randint(100, 9999)}{rng.choice('+-*/')}{rng.randint(11, 999)}"
                ),
            ),
        ),
        requests=(
            "Use the calculator for {expression}.",
            "What does the calculator say to {expression}?",
            "Calculate {expression} exactly.",
            "I need the exact value of {expression}.",
            "Compute {expression} with a tool.",
            "Please work out {expression}.",
            "How much is {expression}?",
            "Find {expression}.",
        ),
        report="{expression} is {value}.",
        facts=lambda rng: {"value": rng.randint(10, 99999)},
    ),
    Tool(
        names=("play_music", "music", "play"),
        text="Play music of a style",
        arguments=(
            _one_of("style", "genre", "kind", choices="jazz rock pop folk soul blues techno opera"),
        ),
        requests=(
            "Play some {style}.",
            "I want to hear {style}.",
            "Put on {style} music.",
            "Music, please: {style}.",
            "Can you play {style} for me?",
            "Start a {style} playlist.",
            "Let us listen to {style}.",
            "Some {style} music would be nice.",
        ),
        report="Now playing {style}.",
        facts=_done,
    ),
    Tool(
        names=("get_news", "news", "headlines"),
        text="Latest news on a topic",
        arguments=(
            _one_of(
                "topic", "about", "subject", choices="sports science music politics business travel"
            ),
        ),
        requests=(
            "What is new in {topic}?",
            "Get me the news about {topic}.",
            "Any news on {topic}?",
            "Read me the {topic} headlines.",
            "I want the latest {topic} news.",
            "News: {topic}.",
            "Tell me what happened in {topic}.",
            "Show the newest stories on {topic}.",
        ),
        report="There are {count} new stories about {topic}.",
        facts=lambda rng: {"count": rng.randint(1, 40)},
    ),
    Tool(
        names=("find_route", "route", "directions"),
        text="Way from one city to another",
        arguments=(
            Argument(names=("start", "origin", "source"), draw=_city),
            Argument(names=("goal", "destination", "end"), draw=_city),
        ),
        requests=(
            "How do I get from {start} to {goal}?",
            "Find the way from {start} to {goal}.",
            "Route from {start} to {goal}, please.",
            "I am in {start} and want to go to {goal}. Which way?",
            "Show me the road from {start} to {goal}.",
            "How far is it from {start} to {goal}?",
            "Plan a trip from {start} to {goal}.",
            "To {goal} from {start}: which way do I take?",
        ),
        report="From {start} to {goal} it is {hours} hours.",
        facts=lambda rng: {"hours": rng.randint(1, 30)},
    ),
    Tool(
        names=("buy_ticket", "ticket", "book_trip"),
        text="Buy a ticket to a city",
        arguments=(_CITY, _DAY),
        requests=(
            "Buy a ticket to {city} for {day}.",
            "I want to travel to {city} on {day}. Get a ticket.",
            "One ticket to {city} on {day}, please.",
            "Book me a trip to {city} on {day}.",
            "Get me to {city} on {day}.",
            "Ticket: {city}, {day}.",
            "Please buy a {day} ticket to {city}.",
            "Can you book {city} for {day}?",
        ),
        report="Your ticket to {city} on {day} costs {price}.",
        facts=lambda rng: {"price": rng.randint(10, 400)},
    ),
    Tool(
        names=("roll_dice", "dice", "roll"),
        text="Roll dice",
        arguments=(
            _integer("count", "number", "dice", low=1, high=9),
            _integer("sides", "faces", low=4, high=20),
        ),
        requests=(
            "Roll {count} dice with {sides} sides.",
            "Throw {count} dice, {sides} sides each.",
            "I need {count} rolls of a die with {sides} sides.",
            "Roll {count} times with {sides} faces.",
            "Dice: {count} of them, {sides} sides.",
            "Please roll {count} dice of {sides} sides.",
            "Can you throw {count} dice with {sides} sides?",
            "Let the dice roll: {count} with {sides} sides.",
        ),
        report="The dice show {total}.",
        facts=lambda rng: {"total": rng.randint(4, 120)},
    ),
    Tool(
        names=("make_note", "note", "remember"),
        text="Write a note",
        arguments=(
            Argument(
                names=("text", "note", "content"),
                draw=lambda rng: rng.choice(
                    (
                        *("buy bread", "water the plants", "feed the cat", "pay the rent"),
                        *("clean the car", "read chapter two", "fix the lamp", "visit grandma"),
                        *("find my keys", "learn Spanish", "bake a cake", "call the school"),
                    )
                ),
            ),
        ),
        requests=(
            'Note: "{text}".',
            'Write down "{text}".',
            'Remember "{text}" for me.',
            'Make a note that says "{text}".',
            'Put "{text}" on my list.',
            'Please note "{text}".',
            'Save the note "{text}".',
            'Can you remember "{text}"?',
        ),
        report="I noted it: {text}.",
        facts=_done,
    ),
    Tool(
        names=("convert_money", "exchange", "currency"),
        text="Convert money",
        arguments=(
            _integer("amount", "value", "sum", low=1, high=900),
            _one_of("source", "from", "base", choices="euros dollars pounds yen francs"),
            _one_of("target", "to", "into", choices="rupees pesos kronor lira won"),
        ),
        requests=(
            "How much are {amount} {source} in {target}?",
            "Convert {amount} {source} to {target}.",
            "Change {amount} {source} into {target}.",
            "What are {amount} {source} worth in {target}?",
            "I have {amount} {source}. How many {target} is that?",
            "Exchange {amount} {source} for {target}.",
            "Please turn {amount} {source} into {target}.",
            "In {target}, how much is {amount} {source}?",
        ),
        report="{amount} {source} are {result} {target}.",
        facts=lambda rng: {"result": rng.randint(2, 9999)},
    ),
)


def result_text(facts: dict[str, Any]) -> str:
    """A tool's result as it is sent."""
    return json.dumps(facts, separators=(",", ":"), ensure_ascii=False)
