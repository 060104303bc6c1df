"""JSON records: requests for them in chat, and raw sequences of them.

Owns how fields are filled; which there are is in `world.toml`. Records are written as `json.dumps`
writes them by default (", " and ": "). A share of the fields has made-up names, so that the model
also fills fields it has never seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from . import world
from .world import pick, say

Value = str | int | float | bool | list | dict | None
Field = Callable[[Random], Value]

KINDS: dict[str, list[str]] = world.DATA["kinds"]
CARD_KEYS: dict[str, list[str]] = world.DATA["cards"]
_NESTED: dict[str, list[str]] = world.DATA["nested_fields"]
_ALL_NAMES = [*world.NAMES, *world.FIRST_NAMES]


def _full_name(rng: Random) -> str:
    return f"{rng.choice(_ALL_NAMES)} {pick(rng, world.LAST_NAMES)}"


def _date(rng: Random, century: int, low: int, high: int) -> str:
    return f"{century}{rng.randint(low, high)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


_BY_CODE: dict[str, Field] = {
    "name": lambda rng: rng.choice(_ALL_NAMES),
    "first_name": lambda rng: rng.choice(_ALL_NAMES),
    "last_name": lambda rng: pick(rng, world.LAST_NAMES),
    "full_name": _full_name,
    "latitude": lambda rng: round(rng.uniform(-60, 70), 1),
    "longitude": lambda rng: round(rng.uniform(-170, 170), 1),
    "email": lambda rng: f"{rng.choice(_ALL_NAMES).lower()}@example.com",
    "phone": lambda rng: f"555-0{rng.randint(100, 199)}",
    "price": lambda rng: pick(rng, (5, 10, 12, 20, 25, 50)) + pick(rng, (0.5, 0.99, 0.25)),
    "year": lambda rng: 1950 + int(76 * rng.random() ** 0.5),
    "date": lambda rng: _date(rng, 20, 10, 29),
    "birthday": lambda rng: _date(rng, 19, 50, 99),
    "time": lambda rng: f"{rng.randint(0, 23):02d}:{pick(rng, (0, 30, 15, 45)):02d}",
    "author": _full_name,
    "book": lambda rng: f"The {pick(rng, world.COLORS)} {rng.choice(world.WORDS)}".title(),
    "street": lambda rng: f"{pick(rng, world.LAST_NAMES)} Street",
    "zip": lambda rng: f"{rng.randint(10000, 99999)}",
    "team": lambda rng: f"{pick(rng, world.COLORS).capitalize()} Lions",
    "description": lambda rng: f"A {pick(rng, world.COLORS)} {rng.choice(world.WORDS)}.",
    "tags": lambda rng: [pick(rng, world.WORDS) for _ in range(rng.randint(1, 3))],
    "colors": lambda rng: world.COLORS[: rng.randint(2, 3)],
    "languages": lambda rng: rng.sample(
        ["English", "French", "Spanish", "German"], rng.randint(1, 3)
    ),
    "length": lambda rng: pick(rng, (10, 11, 12, 13)) + pick(rng, (0.5, 0.0, 0.25)),
}
_THINGS: dict[str, list[Any]] = {
    "people": world.PEOPLE,
    "countries": world.COUNTRIES,
    "animals": world.ANIMALS,
}


def _number(low: int, high: int) -> Field:
    return lambda rng: low + int((high - low + 1) * rng.random() ** 2)


def _field(name: str, filled: str | list[Value]) -> Field:
    """What fills a field, as `world.toml` says."""
    if filled == "by code":
        return _BY_CODE[name]
    if isinstance(filled, str) and not filled.startswith("from "):
        low, _, high = filled.partition(" to ")
        return _number(int(low), int(high))
    if isinstance(filled, str):
        source, _, attribute = filled.removeprefix("from ").partition(".")
        if attribute:
            filled = [getattr(one, attribute) for one in _THINGS[source]]
        else:
            filled = world.DATA[source]
            filled = [*(filled.split() if isinstance(filled, str) else filled)]
    return lambda rng: pick(rng, filled)


FIELDS = {name: _field(name, filled) for name, filled in world.DATA["fields"].items()}


def fill(rng: Random, key: str) -> Value:
    """A plausible value for the field `key`. Unknown names get a common word or a small number."""
    if key in _NESTED:
        return {inner: fill(rng, inner) for inner in _NESTED[key]}
    if key in FIELDS:
        return FIELDS[key](rng)
    return pick(rng, world.WORDS[::9]) if rng.random() < 0.75 else _number(1, 20)(rng)


def is_known(key: str) -> bool:
    return key in FIELDS or key in _NESTED


def some_keys(rng: Random, kind: str | None = None) -> list[str]:
    """The fields of a record: a kind's own, some of them with others added, or any."""
    keys = KINDS[rng.choice(list(KINDS)) if kind is None else kind]
    change = rng.random()
    if change < 0.35:
        return keys
    if change < 0.6:
        keys = rng.sample(keys, rng.randint(2, len(keys)))
    else:
        keys = rng.sample(list(FIELDS), rng.randint(2, 6))
    if rng.random() < 0.3:
        keys.insert(rng.randint(0, len(keys)), rng.choice(list(_NESTED)))
    if rng.random() < 0.3:
        keys.insert(rng.randint(0, len(keys)), rng.choice(world.WORDS))
    return [*dict.fromkeys(keys)]


def record(rng: Random, keys: list[str]) -> str:
    return json.dumps({key: fill(rng, key) for key in keys})


def _schema(value: Value) -> dict[str, object]:
    if isinstance(value, dict):
        return {"type": "object", "properties": {k: _schema(v) for k, v in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "string"}}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names[type(value)]}


def _card(rng: Random) -> tuple[str, dict[str, Value]]:
    """Something of the world that can be put on a card: its kind and all its fields."""
    kind = rng.choice(list(CARD_KEYS))
    things = {"person": "people", "animal": "animals"}.get(kind, "countries")
    one = rng.choice(_THINGS[things])
    fields = {key: value for key, value in vars(one).items() if key not in ("pronoun", "plural")}
    if kind == "city":
        fields |= {"name": fields.pop("capital"), "country": fields["name"]}
    return kind, fields


def card_request(rng: Random) -> tuple[str, str]:
    """A request for the card of something the model knows."""
    kind, fields = _card(rng)
    if rng.random() < 0.5:
        keys, wording = CARD_KEYS[kind], "card"
    else:
        others = [key for key in fields if key != "name"]
        keys, wording = ["name", *rng.sample(others, rng.randint(1, len(others)))], "card_keys"
    asked = say(rng, wording, kind=kind, name=fields["name"], keys=", ".join(keys))
    return asked, json.dumps({key: fields[key] for key in keys})


def request(rng: Random) -> tuple[str, str]:
    """A turn of chat: a request for JSON and the record."""
    if rng.random() < 0.5:
        return card_request(rng)
    kind = rng.choice(list(KINDS))
    way = rng.random()
    if way < 0.3:
        return say(rng, "record", kind), record(rng, KINDS[kind])
    keys = some_keys(rng, kind)
    answer = record(rng, keys)
    if way < 0.8:
        return say(rng, "record_keys", kind, ", ".join(keys)), answer
    schema = json.dumps(_schema(json.loads(answer)))
    return f"Write a {kind} as JSON that fits this schema: {schema}", answer


def raw_records(rng: Random) -> str:
    """Records of the same fields one after the other, with or without words around them."""
    keys = some_keys(rng)
    count = rng.randint(1, 5)
    layout = rng.randrange(5)
    if layout == 0:
        return "".join(record(rng, keys) + "\n" for _ in range(count))
    if layout == 1:
        records = [record(rng, keys) for _ in range(count)]
        firsts = [next(iter(json.loads(one).values())) for one in records]
        return "".join(
            f"Input: {first}\nOutput: {one}\n\n" for first, one in zip(firsts, records, strict=True)
        )
    if layout == 2:
        kind, fields = _card(rng)
        name = fields["name"]
        shown = json.dumps({key: fields[key] for key in CARD_KEYS[kind]})
        return f"{name} is a {kind}. Please fill in the card of {name} as JSON.\n{shown}\n"
    if layout == 3:
        kind = rng.choice(list(KINDS))
        return f"Here is a {kind} as JSON: {record(rng, KINDS[kind])}\n"
    written = record(rng, keys)
    return f"Schema: {json.dumps(_schema(json.loads(written)))}\nJSON: {written}\n"
