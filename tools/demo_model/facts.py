"""The world's facts, and how they are asked for: one table, used to teach and to examine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any  # Any: fields of things

from .world import ANIMALS, COUNTRIES, DATA, PEOPLE, Country, a, capitalized


@dataclass(frozen=True)
class Fact:
    """One fact: ways to ask for it, the answer as a sentence, and the answer alone.

    `follow_ups` ask for the same fact after an earlier turn about `context`: the subject itself, or
    the country whose capital the subject is.
    """

    subject: str
    relation: str
    questions: tuple[str, ...]
    follow_ups: tuple[str, ...]
    sentence: str
    short: str
    context: str


def _facts(family: str, things: list[dict[str, Any]]) -> Iterator[Fact]:
    for fields in things:
        for relation, words in DATA["facts"][family].items():
            questions, follow_ups = (
                tuple(text.format(**fields) for text in words[name])
                for name in ("questions", "follow_ups")
            )
            yield Fact(
                fields[words.get("subject", "name")],
                relation,
                questions,
                follow_ups,
                words["sentence"].format(**fields),
                str(fields[words.get("short", relation)]),
                fields["name"],
            )


COUNTRY_FACTS = [*_facts("countries", [vars(one) for one in COUNTRIES])]
PERSON_FACTS = [
    *_facts("people", [{**vars(one), "a_job": a(one.job), "a_pet": a(one.pet)} for one in PEOPLE])
]
ANIMAL_FACTS = [
    *_facts(
        "animals",
        [
            {
                **vars(one),
                "a_name": a(one.name),
                "A_name": capitalized(a(one.name)),
                "a_kind": a(one.kind),
                "some_legs": f"{one.legs or 'no'} legs",
            }
            for one in ANIMALS
        ],
    )
]
ALL_FACTS = COUNTRY_FACTS + PERSON_FACTS + ANIMAL_FACTS


def describe_country(country: Country) -> str:
    return (
        f"{country.name} is a country in {country.continent}. Its capital is {country.capital}. "
        f"People there speak {country.language} and eat {country.dish}."
    )
