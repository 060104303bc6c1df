"""How the world's facts are asked for and answered: one table, used to teach and to examine.

Owns the wording of questions about countries, people and animals. A question has several wordings,
an answer has one, so that a trained model answers with a clear margin.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .world import ANIMALS, COUNTRIES, PEOPLE, Country


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
    context: str = ""

    def __post_init__(self) -> None:
        if not self.context:
            object.__setattr__(self, "context", self.subject)


def with_article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def capitalized(text: str) -> str:
    """Like str.capitalize, but leaves the rest of the text as it is."""
    return text[0].upper() + text[1:]


# relation: (questions, follow-ups, sentence); fields of Country
_COUNTRY_WORDINGS = {
    "capital": (
        ("What is the capital of {name}?", "Which city is the capital of {name}?",
         "Name the capital of {name}.", "Tell me the capital of {name}."),
        ("What is its capital?", "What is the capital there?"),
        "The capital of {name} is {capital}.",
    ),
    "continent": (
        ("Which continent is {name} in?", "On which continent is {name}?",
         "Which continent is {name} in: Europe, Asia, Africa or America?"),
        ("Which continent is it in?", "On which continent is it?"),
        "{name} is in {continent}.",
    ),
    "language": (
        ("Which language do people speak in {name}?", "What language is spoken in {name}?",
         "What language do they speak in {name}?"),
        ("Which language do people speak there?", "What language do they speak there?"),
        "People in {name} speak {language}.",
    ),
    "currency": (
        ("What is the currency of {name}?", "What money do people use in {name}?",
         "Which currency is used in {name}?"),
        ("What is the currency there?", "What money do people use there?"),
        "The currency of {name} is the {currency}.",
    ),
    "river": (
        ("Name a river in {name}.", "Which river flows through {name}?",
         "What is a river in {name}?"),
        ("Name a river there.", "Which river flows there?"),
        "A river in {name} is the {river}.",
    ),
    "dish": (
        ("What do people eat in {name}?", "Name a dish from {name}.",
         "What is a typical dish in {name}?"),
        ("What do people eat there?", "What is a typical dish there?"),
        "People in {name} eat {dish}.",
    ),
}  # fmt: skip


@cache
def country_facts() -> tuple[Fact, ...]:
    facts = []
    for country in COUNTRIES:
        fields = vars(country)
        for relation, (questions, follow_ups, sentence) in _COUNTRY_WORDINGS.items():
            facts.append(
                Fact(
                    country.name,
                    relation,
                    tuple(question.format(**fields) for question in questions),
                    follow_ups,
                    sentence.format(**fields),
                    fields[relation],
                )
            )
        facts.append(
            Fact(
                country.capital,
                "country",
                (f"In which country is {country.capital}?",
                 f"Which country is {country.capital} in?",
                 f"{country.capital} is the capital of which country?"),
                ("In which country is that city?",),
                f"{country.capital} is the capital of {country.name}.",
                country.name,
                context=country.name,
            )
        )  # fmt: skip
    return tuple(facts)


@cache
def person_facts() -> tuple[Fact, ...]:
    facts = []
    for person in PEOPLE:
        name, pronoun = person.name, person.pronoun
        facts += [
            Fact(name, "age",
                 (f"How old is {name}?", f"What is the age of {name}?", f"Tell me {name}'s age."),
                 (f"How old is {pronoun}?",), f"{name} is {person.age} years old.",
                 str(person.age)),
            Fact(name, "job",
                 (f"What is the job of {name}?", f"What is {name}'s job?",
                  f"What does {name} do for a living?"),
                 (f"What does {pronoun} do for a living?",),
                 f"{name} is {with_article(person.job)}.", person.job),
            Fact(name, "city",
                 (f"Where does {name} live?", f"In which city does {name} live?"),
                 (f"Where does {pronoun} live?",), f"{name} lives in {person.city}.", person.city),
            Fact(name, "pet",
                 (f"What pet does {name} have?", f"Which animal does {name} have?"),
                 (f"What pet does {pronoun} have?",),
                 f"{name} has {with_article(person.pet)}.", person.pet),
        ]  # fmt: skip
    return tuple(facts)


@cache
def animal_facts() -> tuple[Fact, ...]:
    facts = []
    for animal in ANIMALS:
        one = with_article(animal.name)
        the = capitalized(one)
        legs = f"{animal.legs} legs" if animal.legs else "no legs"
        facts += [
            Fact(animal.name, "legs",
                 (f"How many legs does {one} have?", f"How many legs do {animal.plural} have?"),
                 ("How many legs does it have?",), f"{the} has {legs}.", str(animal.legs)),
            Fact(animal.name, "kind",
                 (f"What kind of animal is {one}?", f"What type of animal is {one}?"),
                 ("What kind of animal is it?",), f"{the} is {with_article(animal.kind)}.",
                 animal.kind),
            Fact(animal.name, "home",
                 (f"Where does {one} live?", f"Where do {animal.plural} live?"),
                 ("Where does it live?",), f"{the} lives in the {animal.home}.", animal.home),
        ]  # fmt: skip
    return tuple(facts)


def all_facts() -> tuple[Fact, ...]:
    return country_facts() + person_facts() + animal_facts()


def describe_country(country: Country) -> str:
    return (
        f"{country.name} is a country in {country.continent}. Its capital is {country.capital}. "
        f"People there speak {country.language} and eat {country.dish}."
    )
