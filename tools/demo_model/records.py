"""JSON records: requests for them in chat, and raw sequences of them.

Owns the field names the model has seen and the plausible values it fills in. Records are written
as `json.dumps` writes them by default (", " and ": "). A share of the fields has made-up names, so
that the model also fills fields it has never seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from .choice import pick
from .world import (
    ANIMALS,
    COLORS,
    CONTINENTS,
    COUNTRIES,
    FIRST_NAMES,
    LAST_NAMES,
    PEOPLE,
    TOPICS,
    WORDS,
)

Value = str | int | float | bool | list | dict | None
Field = Callable[[Random], Value]

_JOBS = tuple(person.job for person in PEOPLE)
_CITIES = tuple(country.capital for country in COUNTRIES)
_NAMES = tuple(person.name for person in PEOPLE) + FIRST_NAMES


def _one_of(*options: Value) -> Field:
    return lambda rng: pick(rng, options)


def _number(low: int, high: int) -> Field:
    return lambda rng: low + int((high - low + 1) * rng.random() ** 2)


# field name: how it is filled; the kinds of record below draw on these
FIELDS: dict[str, Field] = {
    "name": lambda rng: rng.choice(_NAMES),
    "first_name": lambda rng: rng.choice(_NAMES),
    "last_name": lambda rng: pick(rng, LAST_NAMES),
    "full_name": lambda rng: f"{rng.choice(_NAMES)} {pick(rng, LAST_NAMES)}",
    "age": _number(18, 80),
    "job": _one_of(*_JOBS),
    "occupation": _one_of(*_JOBS),
    "title": _one_of("manager", "assistant", "director", "engineer"),
    "city": _one_of(*_CITIES),
    "country": _one_of(*(country.name for country in COUNTRIES)),
    "capital": _one_of(*_CITIES),
    "continent": _one_of(*CONTINENTS),
    "language": _one_of(*(country.language for country in COUNTRIES)),
    "currency": _one_of(*(country.currency for country in COUNTRIES)),
    "river": _one_of(*(country.river for country in COUNTRIES)),
    "dish": _one_of(*(country.dish for country in COUNTRIES)),
    "population": _number(100000, 9900000),
    "area": _number(100, 9900),
    "latitude": lambda rng: round(rng.uniform(-60, 70), 1),
    "longitude": lambda rng: round(rng.uniform(-170, 170), 1),
    "pet": _one_of(*(person.pet for person in PEOPLE)),
    "color": _one_of(*COLORS),
    "eye_color": _one_of("brown", "blue", "green", "gray"),
    "hair": _one_of("black", "brown", "red", "white"),
    "height": _number(150, 200),
    "weight": _number(40, 110),
    "legs": _one_of(4, 2, 0, 6, 8),
    "kind": _one_of("mammal", "bird", "fish", "reptile", "insect"),
    "animal": _one_of(*(animal.name for animal in ANIMALS)),
    "home": _one_of(*(animal.home for animal in ANIMALS)),
    "alive": _one_of(True, False),
    "active": _one_of(True, False),
    "member": _one_of(True, False),
    "in_stock": _one_of(True, False),
    "available": _one_of(True, False),
    "married": _one_of(False, True),
    "hobby": _one_of(*TOPICS),
    "email": lambda rng: f"{rng.choice(_NAMES).lower()}@example.com",
    "phone": lambda rng: f"555-0{rng.randint(100, 199)}",
    "id": _number(1, 999),
    "price": lambda rng: pick(rng, (5, 10, 12, 20, 25, 50)) + pick(rng, (0.5, 0.99, 0.25)),
    "quantity": _number(1, 20),
    "product": _one_of("lamp", "chair", "table", "coat", "shoe", "camera", "guitar", "watch"),
    "category": _one_of("home", "garden", "music", "food", "sport", "clothes"),
    "rating": _one_of(4, 5, 3, 2, 1),
    "score": _number(1, 10),
    "year": lambda rng: 1950 + int(76 * rng.random() ** 0.5),
    "date": lambda rng: (
        f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    ),
    "birthday": lambda rng: (
        f"19{rng.randint(50, 99)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    ),
    "time": lambda rng: f"{rng.randint(0, 23):02d}:{pick(rng, (0, 30, 15, 45)):02d}",
    "status": _one_of("open", "closed", "done", "new"),
    "type": _one_of("normal", "special", "simple"),
    "level": _one_of("low", "medium", "high"),
    "size": _one_of("small", "medium", "large"),
    "gender": _one_of("female", "male"),
    "author": lambda rng: f"{rng.choice(_NAMES)} {pick(rng, LAST_NAMES)}",
    "book": lambda rng: f"The {pick(rng, COLORS).capitalize()} {rng.choice(WORDS).capitalize()}",
    "pages": _number(80, 600),
    "genre": _one_of("novel", "poem", "story", "drama"),
    "street": lambda rng: f"{pick(rng, LAST_NAMES)} Street",
    "number": _number(1, 99),
    "zip": lambda rng: f"{rng.randint(10000, 99999)}",
    "house": _one_of("Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"),
    "blood status": _one_of("Half-blood", "Pure-blood", "Muggle-born"),
    "patronus": _one_of("stag", "otter", "fox", "swan", "horse"),
    "team": lambda rng: f"{pick(rng, COLORS).capitalize()} Lions",
    "points": _number(0, 99),
    "weather": _one_of("sunny", "rainy", "cloudy", "windy"),
    "temperature": _number(0, 35),
    "unit": _one_of("celsius", "meter", "gram"),
    "description": lambda rng: f"A {pick(rng, COLORS)} {rng.choice(WORDS)}.",
    "comment": _one_of("Very good.", "Not bad.", "Please call again."),
    "tags": lambda rng: [pick(rng, WORDS) for _ in range(rng.randint(1, 3))],
    "colors": lambda rng: list(COLORS[: rng.randint(2, 3)]),
    "languages": lambda rng: rng.sample(
        ["English", "French", "Spanish", "German"], rng.randint(1, 3)
    ),
    "sentiment": _one_of("positive", "negative"),
    "answer": _one_of("yes", "no"),
}

_NESTED: dict[str, tuple[str, ...]] = {
    "address": ("street", "number", "city"),
    "wand": ("wood", "core", "length"),
    "location": ("city", "country"),
    "contact": ("email", "phone"),
    "owner": ("name", "age"),
    "place": ("latitude", "longitude"),
}
FIELDS |= {
    "wood": _one_of("oak", "holly", "willow", "pine", "elm"),
    "core": _one_of("phoenix feather", "dragon heartstring", "unicorn hair"),
    "length": lambda rng: pick(rng, (10, 11, 12, 13)) + pick(rng, (0.5, 0.0, 0.25)),
}

# kind of record: its usual fields in order
KINDS: dict[str, tuple[str, ...]] = {
    "person": ("name", "age", "job", "city"),
    "character": ("name", "house", "blood status", "occupation", "wand", "alive", "patronus"),
    "city": ("name", "country", "latitude", "population", "language"),
    "product": ("product", "price", "color", "in_stock"),
    "user": ("id", "first_name", "last_name", "email", "active"),
    "book": ("book", "author", "year", "pages", "genre"),
    "animal": ("animal", "legs", "kind", "color"),
    "order": ("id", "product", "quantity", "price", "status"),
    "event": ("title", "date", "time", "city"),
    "customer": ("name", "address", "phone", "member"),
    "review": ("product", "rating", "sentiment", "comment"),
    "forecast": ("city", "weather", "temperature", "unit"),
}


def _free_value(rng: Random) -> Value:
    """What fills a field of an unknown name: mostly a common word, else a small number."""
    return pick(rng, WORDS[::9]) if rng.random() < 0.75 else _number(1, 20)(rng)


def fill(rng: Random, key: str) -> Value:
    """A plausible value for the field `key`."""
    if key in _NESTED:
        return {inner: fill(rng, inner) for inner in _NESTED[key]}
    return FIELDS[key](rng) if key in FIELDS else _free_value(rng)


def is_known(key: str) -> bool:
    return key in FIELDS or key in _NESTED


def some_keys(rng: Random, kind: str | None = None) -> tuple[str, ...]:
    """The fields of a record: a kind's own, some of them with others added, or any."""
    if kind is None:
        kind = rng.choice(list(KINDS))
    keys = list(KINDS[kind])
    change = rng.random()
    if change < 0.35:
        return tuple(keys)
    if change < 0.6:
        keys = rng.sample(keys, rng.randint(2, len(keys)))
    else:
        keys = rng.sample(list(FIELDS), rng.randint(2, 6))
    if rng.random() < 0.3:
        keys.insert(rng.randint(0, len(keys)), rng.choice(list(_NESTED)))
    if rng.random() < 0.3:
        keys.insert(rng.randint(0, len(keys)), rng.choice(WORDS))
    return tuple(dict.fromkeys(keys))


def record(rng: Random, keys: tuple[str, ...]) -> str:
    return json.dumps({key: fill(rng, key) for key in keys})


def _json_type(value: Value) -> dict[str, object]:
    if isinstance(value, dict):
        return {"type": "object", "properties": {k: _json_type(v) for k, v in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "string"}}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names[type(value)]}


CARD_KEYS = {
    "country": ("name", "capital", "continent", "language", "currency"),
    "city": ("name", "country", "continent", "language", "river"),
    "person": ("name", "age", "job", "city", "pet"),
    "animal": ("name", "legs", "kind", "home"),
}


def card(rng: Random) -> tuple[str, str, dict[str, Value]]:
    """Something of the world that can be put on a card: its kind, its name, all its fields."""
    kind = rng.choice(list(CARD_KEYS))
    if kind == "country":
        fields = dict(vars(rng.choice(COUNTRIES)))
    elif kind == "city":
        country = rng.choice(COUNTRIES)
        fields = dict(vars(country)) | {"name": country.capital, "country": country.name}
        del fields["capital"]
    elif kind == "person":
        fields = dict(vars(rng.choice(PEOPLE)))
        del fields["pronoun"]
    else:
        fields = dict(vars(rng.choice(ANIMALS)))
        del fields["plural"]
    return kind, str(fields["name"]), fields


def card_request(rng: Random) -> tuple[str, str]:
    """A request for the card of something the model knows."""
    kind, name, fields = card(rng)
    if rng.random() < 0.5:
        keys = CARD_KEYS[kind]
        user = pick(rng, (
            "Fill in a card for the {kind} {name} as JSON.",
            "Write a JSON object about the {kind} {name}.",
            "Describe {name} as JSON.",
            "Give me the facts about {name} as JSON.",
        ))  # fmt: skip
    else:
        others = [key for key in fields if key != "name"]
        keys = ("name", *rng.sample(others, rng.randint(1, len(others))))
        user = pick(rng, (
            "Describe {name} as JSON with the keys {keys}.",
            "Fill in a card for the {kind} {name} as JSON with the fields {keys}.",
        ))  # fmt: skip
    answer = json.dumps({key: fields[key] for key in keys})
    return user.format(kind=kind, name=name, keys=", ".join(keys)), answer


def request(rng: Random) -> tuple[str, str]:
    """A turn of chat: a request for JSON and the record."""
    if rng.random() < 0.5:
        return card_request(rng)
    kind = rng.choice(list(KINDS))
    way = rng.random()
    if way < 0.3:
        user = pick(rng, ("Write a {} as JSON.", "Make up a {} as JSON.", "Give me JSON for a {}."))
        return user.format(kind), record(rng, KINDS[kind])
    keys = some_keys(rng, kind)
    answer = record(rng, keys)
    if way < 0.8:
        user = pick(rng, (
            "Write a {} as JSON with the keys {}.",
            "Make up a {} as JSON with the fields {}.",
            "Output JSON for a {}. Keys: {}",
        ))  # fmt: skip
        return user.format(kind, ", ".join(keys)), answer
    schema = json.dumps(_json_type(json.loads(answer)))
    return f"Write a {kind} as JSON that fits this schema: {schema}", answer


def raw_records(rng: Random) -> str:
    """Records of the same fields one after the other, with or without words around them."""
    keys = some_keys(rng)
    count = rng.randint(1, 5)
    layout = rng.randrange(5)
    if layout == 0:
        return "".join(record(rng, keys) + "\n" for _ in range(count))
    if layout == 1:
        text = ""
        for _ in range(count):
            written = record(rng, keys)
            text += f"Input: {next(iter(json.loads(written).values()))}\nOutput: {written}\n\n"
        return text
    if layout == 2:
        kind, name, fields = card(rng)
        shown = {key: fields[key] for key in CARD_KEYS[kind]}
        return (
            f"{name} is a {kind}. Please fill in the card of {name} as JSON.\n{json.dumps(shown)}\n"
        )
    if layout == 3:
        kind = rng.choice(list(KINDS))
        return f"Here is a {kind} as JSON: {record(rng, KINDS[kind])}\n"
    written = record(rng, keys)
    schema = json.dumps(_json_type(json.loads(written)))
    return f"Schema: {schema}\nJSON: {written}\n"
