"""What tools there are in the conversations: their names, parameters, requests, results and answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from . import words
from .facts import draw_name, invented_name

Value = str | int

CITIES: Final = (
    "Oslo", "Bergen", "Paris", "Berlin", "London", "Rome", "Madrid", "Lisbon", "Vienna", "Prague", "Dublin", "Cairo",
    "Tokyo", "Delhi", "Lima", "Boston", "Chicago", "Seattle", "Denver", "Dallas", "Miami", "Toronto", "Sydney",
    "Munich", "Hamburg", "Zurich", "Geneva", "Milan", "Naples", "Athens", "Helsinki", "Stockholm", "Copenhagen",
    "Warsaw", "Budapest", "Kyoto", "Osaka", "Seoul", "Beijing", "Mumbai", "Nairobi", "Lagos", "Accra", "Havana",
    "New York", "San Francisco", "Cape Town", "Rio", "Brussels", "Amsterdam", "Moscow", "Istanbul", "Porto", "Leeds",
)  # fmt: skip
SKIES: Final = ("rain", "snow", "sun", "fog", "clouds", "wind", "light rain", "clear sky", "storm", *words.WEATHER)
SUBJECTS: Final = (
    "dragons", "the sea", "cooking", "trains", "the stars", "old castles", "robots", "gardens", "kites", "winter",
    "whales", "music", "chess", "the moon", "bread", "bicycles", "rivers", "birds", "maps", "honey",
)  # fmt: skip
LANGUAGES: Final = words._words("German French Spanish Italian Norwegian Polish Dutch Greek Latin Japanese")
ROOMS: Final = words._words("kitchen hall bedroom garden bathroom office cellar attic garage")
MONTHS: Final = words._words("January February March April May June July August September October November December")


def draw_city(rng: random.Random) -> str:
    """A real one, or an invented one that must be copied."""
    return rng.choice(CITIES) if rng.random() < 0.6 else invented_name(rng, rng.random() < 0.5)


def draw_person(rng: random.Random) -> str:
    return draw_name(rng, rng.random() < 0.5)


def draw_title(rng: random.Random) -> str:
    return f"The {rng.choice(words.TRAITS).capitalize()} {rng.choice(words.ANIMALS).capitalize()}"


def one_of(values: tuple[str, ...]) -> Callable[[random.Random], Value]:
    return lambda rng: rng.choice(values)


def number(low: int, high: int) -> Callable[[random.Random], Value]:
    return lambda rng: rng.randint(low, high)


@dataclass(frozen=True)
class Slot:
    """What a request, a call or a result names. names: what a schema or a result may call it."""

    names: tuple[str, ...]
    draw: Callable[[random.Random], Value]
    about: str = ""


SLOTS: Final[dict[str, Slot]] = {
    "city": Slot(("city", "city", "place", "town", "location"), draw_city, "[name of the city|the city|which city]"),
    "from": Slot(("from", "origin", "start", "city_a"), draw_city, "[where it starts|first city]"),
    "to": Slot(("to", "destination", "end", "city_b"), draw_city, "[where it ends|second city]"),
    "day": Slot(("day", "weekday", "date"), one_of(words.DAYS), "[day of the week|which day]"),
    "a": Slot(("a", "x", "first", "left"), number(2, 99), "first number"),
    "b": Slot(("b", "y", "second", "right"), number(2, 99), "second number"),
    "item": Slot(("item", "product", "what", "name"), one_of(words.GOODS), "[what to look for|name of the product]"),
    "count": Slot(("count", "amount", "number", "quantity"), number(2, 99), "how many"),
    "person": Slot(("person", "name", "who", "contact"), draw_person, "[name of the person|who it is]"),
    "hour": Slot(("hour", "time", "at"), number(1, 23), "[hour of the day|the hour]"),
    "sides": Slot(("sides", "faces", "n"), number(4, 30), "how many sides"),
    "room": Slot(("room", "where", "place"), one_of(ROOMS), "which room"),
    "color": Slot(("color", "colour", "to"), one_of(words.COLORS), "the new color"),
    "place": Slot(("place", "shop", "where"), lambda rng: rng.choice(words.PLACES)[0], "[which place|where]"),
    "subject": Slot(("query", "subject", "topic", "about", "q"), one_of(SUBJECTS), "[what to find|the subject]"),
    "word": Slot(("word", "text", "noun"), one_of(words.OBJECTS), "the word"),
    "language": Slot(("language", "to", "into"), one_of(LANGUAGES), "[the language|into which language]"),
    "sky": Slot(("weather", "sky", "conditions"), one_of(SKIES)),
    "degrees": Slot(("degrees", "temperature", "celsius"), number(1, 39)),
    "clock": Slot(("time", "clock", "now"), lambda rng: f"{rng.randint(1, 23)}:{rng.randint(10, 59)}"),
    "price": Slot(("price", "cost", "total"), number(2, 199)),
    "code": Slot(("number", "id", "code"), number(1000, 9999)),
    "title": Slot(("title", "name", "found"), draw_title),
    "roll": Slot(("roll", "value", "result"), number(1, 30)),
    "km": Slot(("km", "distance", "kilometers"), number(20, 999)),
    "foreign": Slot(("translation", "result", "word"), lambda rng: invented_name(rng, rng.random() < 0.5).lower()),
    "date": Slot(("date", "birthday", "day"), lambda rng: f"{rng.choice(MONTHS)} {rng.randint(1, 28)}"),
    "sum": Slot(("sum", "result", "value"), number(0, 0)),
    "product": Slot(("product", "result", "value"), number(0, 0)),
    "answer": Slot(("answer", "result", "value"), lambda rng: rng.choice((rng.randint(2, 999), draw_person(rng)))),
}


@dataclass(frozen=True)
class Topic:
    """A kind of tool.

    takes: slots of a call. may: slots that a request may name, and leave out. gives: slots of the result; where there
    are none the result says that it was done. `{on_day}` in a text is " on Friday", or nothing.
    """

    names: str
    about: str
    takes: tuple[str, ...]
    requests: tuple[str, ...]
    gives: tuple[str, ...]
    result: str
    answer: str
    may: tuple[str, ...] = ()


TOPICS: Final = (
    Topic(
        "get_weather weather weather_in current_weather get_current_weather find_weather forecast",
        "[The|Get the|Tells the] [current |]weather [in|of|for] a [city|town].",
        ("city",),
        (
            "[What is|How is|Tell me|I want to know] the weather [|like ]in {city}{on_day}[?|, please.]",
            "[Does it rain|Is it raining|Is it cold|Is it warm|Will it snow] in {city}{on_day}?",
            "[What will the weather be in|Weather in|The weather in] {city}{on_day}[?|, please.]",
        ),
        ("sky", "degrees"),
        "{sky}, {degrees} [C|degrees]",
        "The weather in {city}{on_day}: {sky}, {degrees} degrees.",
        may=("day",),
    ),
    Topic(
        "get_time time_in current_time clock local_time what_time",
        "[The|Get the|Tells the] [current |local |]time in a city.",
        ("city",),
        (
            "What time is it in {city}[| now]?",
            "[Tell me|What is] the time in {city}[.|, please.]",
            "How late is it in {city}?",
        ),
        ("clock",),
        "[|It is ]{clock}",
        "It is {clock} in {city}.",
    ),
    Topic(
        "add add_numbers plus calculate_sum sum",
        "[Adds|Add] two numbers.",
        ("a", "b"),
        (
            "What is {a} plus {b}?",
            "How much is {a} plus {b}?",
            "[Add|Please add] {a} and {b}.",
            "[Calculate|Compute] {a} + {b}.",
        ),
        ("sum",),
        "{sum}",
        "{a} plus {b} is {sum}.",
    ),
    Topic(
        "multiply multiply_numbers times product mul",
        "[Multiplies|Multiply] two numbers.",
        ("a", "b"),
        (
            "What is {a} times {b}?",
            "How much is {a} times {b}?",
            "[Multiply|Please multiply] {a} and {b}.",
            "Calculate {a} * {b}.",
        ),
        ("product",),
        "{product}",
        "{a} times {b} is {product}.",
    ),
    Topic(
        "get_price price price_of find_price check_price",
        "[The|Get the|Finds the] price of a product.",
        ("item",),
        (
            "[What|How much] do [the |]{item} cost?",
            "What is the price of [the |]{item}?",
            "How much are [the |]{item}?",
        ),
        ("price",),
        "{price}[| coins]",
        "The {item} cost {price} coins.",
    ),
    Topic(
        "order buy order_item buy_item place_order",
        "[Orders|Buys] a number of things.",
        ("item", "count"),
        (
            "[Order|Buy|Please order|Please buy] {count} {item}[.| for me.|, please.]",
            "I [need|want|would like] {count} {item}.",
        ),
        ("code",),
        "order {code}",
        "I ordered {count} {item}. The order number is {code}.",
    ),
    Topic(
        "set_alarm alarm wake_up set_timer create_alarm",
        "[Sets|Creates] an alarm[| for an hour of the day].",
        ("hour",),
        (
            "[Wake me|Please wake me] at {hour}{on_day}.",
            "Set an alarm for {hour}{on_day}[.|, please.]",
            "I want to get up at {hour}{on_day}.",
        ),
        (),
        "",
        "The alarm is set for {hour}{on_day}.",
        may=("day",),
    ),
    Topic(
        "get_phone phone_number find_number phone_book look_up_number",
        "[The|Finds the|Get the] phone number of a person.",
        ("person",),
        (
            "What is the [phone |]number of {person}?",
            "[Find|Give me] the phone number of {person}.",
            "I want to call {person}.",
        ),
        ("code",),
        "{code}",
        "The number of {person} is {code}.",
    ),
    Topic(
        "find_book search_books library book_search get_book",
        "[Finds|Searches for] a book[| in the library].",
        ("subject",),
        (
            "[Find|Find me|I want to read|Is there] a book about {subject}.",
            "[Do you have|Which] books about {subject}?",
        ),
        ("title",),
        "{title}",
        'There is a book about {subject}: "{title}".',
    ),
    Topic(
        "book_ticket buy_ticket book_train tickets reserve",
        "[Books|Buys] tickets to a city.",
        ("city", "count", "day"),
        ("[Book|Buy|I need|Get me|Please book] {count} tickets to {city} [on|for] {day}.",),
        ("price",),
        "booked, {price} coins",
        "I booked {count} tickets to {city} on {day}. They cost {price} coins.",
    ),
    Topic(
        "roll_dice roll dice random_number roll_die",
        "[Rolls|Throws] a die.",
        ("sides",),
        ("[Roll|Throw|Please roll] a die with {sides} sides.", "Roll a {sides} sided die[.| for me.]"),
        ("roll",),
        "{roll}",
        "You rolled {roll}.",
    ),
    Topic(
        "set_light light change_light lamp set_lamp",
        "[Changes|Sets] the color of a light.",
        ("room", "color"),
        (
            "[Make|Turn|Please make] the light in the {room} {color}.",
            "Set the {room} light to {color}.",
            "I want {color} light in the {room}.",
        ),
        (),
        "",
        "The light in the {room} is {color} now.",
    ),
    Topic(
        "get_distance distance how_far route measure_distance",
        "[The|Finds the|Get the] distance between two cities.",
        ("from", "to"),
        (
            "How far is it from {from} to {to}?",
            "What is the distance from {from} to {to}?",
            "[I go|I want to go|I travel] from {from} to {to}. How far is it?",
        ),
        ("km",),
        "{km} km",
        "It is {km} km from {from} to {to}.",
    ),
    Topic(
        "get_stock stock count_items in_stock inventory",
        "How many [things|pieces] there are [at|in] a place.",
        ("item", "place"),
        (
            "How many {item} are [|there ]at the {place}?",
            "How many {item} does the {place} have?",
            "Are there {item} at the {place}?",
        ),
        ("price",),
        "{price}",
        "There are {price} {item} at the {place}.",
    ),
    Topic(
        "get_birthday birthday find_birthday birthday_of",
        "[The|Finds the] birthday of a person.",
        ("person",),
        ("When is the birthday of {person}?", "[Tell me|Find] the birthday of {person}.", "When was {person} born?"),
        ("date",),
        "{date}",
        "The birthday of {person} is {date}.",
    ),
    Topic(
        "translate translate_word translation dictionary",
        "[Translates|Translate] a word.",
        ("word", "language"),
        (
            "What is the {language} word for {word}?",
            "Translate {word} [in|]to {language}.",
            "How do you say {word} in {language}?",
        ),
        ("foreign",),
        "{foreign}",
        'The {language} word for {word} is "{foreign}".',
    ),
    Topic(
        "search web_search look_up google find search_web",
        "[Searches|Search] the [web|internet].",
        ("subject",),
        (
            "[Search|Search the web|Look|Please search] for {subject}.",
            "[Look up|Google] {subject}[.| for me.]",
            "What can you find about {subject}?",
        ),
        ("title",),
        "{title}",
        'I found "{title}".',
    ),
    Topic(
        "play_music play play_song music start_song",
        "[Plays|Starts] a song.",
        ("person",),
        (
            "[Play|Please play] [a song|music|something] by {person}.",
            "I want to hear {person}.",
            "Play {person}[.|, please.]",
        ),
        ("title",),
        "{title}",
        'Now you hear "{title}" by {person}.',
    ),
)

# Tools of made-up names: what they are for is known from their names alone, so these must be read.
VERBS: Final = words._words("get find check read show fetch look_up load query give")
NOUNS: Final = words._words(
    """
    score age height email size speed weight address status owner level rank hobby salary grade balance team job
    password nickname car pet shoe_size mood plan room desk badge boss school temperature humidity
    """
)


def made_up_topic(rng: random.Random) -> Topic:
    """A tool that tells something about someone; its name is put together."""
    noun = rng.choice(NOUNS)
    said = noun.replace("_", " ")
    name = rng.choice((f"{rng.choice(VERBS)}_{noun}", f"{noun}_of", f"{noun}", f"user_{noun}"))
    slot = rng.choice(("person", "person", "city", "place"))
    of = f"the {{{slot}}}" if slot == "place" else f"{{{slot}}}"
    return Topic(
        name,
        f"[The|Finds the|Get the] {said} of a {slot}.",
        (slot,),
        (
            f"What is the {said} of {of}?",
            f"[Tell me|Find|Check|I need] the {said} of {of}[.|, please.]",
            f"Use {name} for {of}.",
        ),
        ("answer",),
        "{answer}",
        f"The {said} of {of} is {{answer}}.",
    )
