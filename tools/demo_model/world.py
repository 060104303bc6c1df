"""The demo model's world (`world.toml`), and how writers of training text choose from it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar  # Any: TOML

T = TypeVar("T")

DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_name("world.toml").read_text())


@dataclass(frozen=True)
class Country:
    name: str
    capital: str
    continent: str
    language: str
    currency: str
    river: str
    dish: str


@dataclass(frozen=True)
class Person:
    name: str
    pronoun: str
    age: int
    job: str
    city: str
    pet: str


@dataclass(frozen=True)
class Animal:
    name: str
    plural: str
    legs: int
    kind: str
    home: str


COUNTRIES = [Country(*row) for row in DATA["countries"]]
PEOPLE = [Person(*row) for row in DATA["people"]]
ANIMALS = [Animal(*row) for row in DATA["animals"]]
THINGS, OPPOSITES, YOUNG = DATA["things"], DATA["opposites"], DATA["young"]
TOPICS, PLACE_TOPICS, SUBJECTS = DATA["topics"], DATA["place_topics"], DATA["subjects"]
RATINGS: dict[int, list[str]] = dict(enumerate(DATA["ratings"], 1))
WORDINGS: dict[str, list[str]] = DATA["wordings"]
CONTINENTS, COLORS, WORDS = (DATA[name].split() for name in ("continents", "colors", "words"))
FIRST_NAMES, LAST_NAMES = (DATA[name].split() for name in ("first_names", "last_names"))
PRAISE, BLAME, REVIEWED = (DATA[name].split() for name in ("praise", "blame", "reviewed"))
NAMES = [person.name for person in PEOPLE]


def pick(rng: Random, options: Sequence[T], skew: float = 2.0) -> T:
    """One of `options`, earlier ones more often: position = length * u ** skew, u uniform."""
    return options[int(len(options) * rng.random() ** skew)]


def say(rng: Random, kind: str, /, *values: object, **named: object) -> str:
    """One of the wordings of a kind, with the values in it."""
    return pick(rng, WORDINGS[kind]).format(*values, **named)


def a(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def capitalized(text: str) -> str:
    """Like str.capitalize, but leaves the rest of the text as it is."""
    return text[0].upper() + text[1:]
