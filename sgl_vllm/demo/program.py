"""The demo's program: a short guide to a country, written in the SGLang language.

It uses what the plugin accelerates: several turns of one conversation, a fork whose branches share
it, a JSON object that is mostly forced, and a select.
"""

from __future__ import annotations

from dataclasses import dataclass

import sgl_vllm as sgl

FIRST_COUNTRY = "France"
MORE_COUNTRIES = ("Japan", "Egypt", "Brazil")
TOPICS = ("food", "museums", "weather")
CONTINENTS = ("Europe", "Asia", "Africa", "America")

NAME = r'"[A-Z][a-z]+( [A-Z][a-z]+)?"'
WORDS = r'"[a-z]+( [a-z]+)?"'
CARD = (
    rf'\{{"name": {NAME}, "capital": {NAME}, "continent": "({"|".join(CONTINENTS)})", '
    rf'"language": {NAME}, "currency": {WORDS}, "river": {NAME}, "dish": {WORDS}\}}'
)


@dataclass(frozen=True)
class Guide:
    """The program's result for one country."""

    country: str
    capital: str
    dish: str
    tips: tuple[str, ...]
    summary: str
    card: str
    continent: str


@sgl.function
def city_guide(s: sgl.ProgramState, country: str) -> Guide:
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(sgl.gen("capital", max_tokens=24))
    s += sgl.user("What do people eat there?")
    s += sgl.assistant(sgl.gen("dish", max_tokens=24))

    branches = s.fork(len(TOPICS))
    for branch, topic in zip(branches, TOPICS, strict=True):
        branch += sgl.user(f"Give one tip about {topic} in {country}.")
        branch += sgl.assistant(sgl.gen("tip", max_tokens=32))
    tips = tuple(branch["tip"] for branch in branches)
    branches.join()

    s += sgl.user("Combine these tips:\n" + "\n".join(f"- {tip}" for tip in tips))
    s += sgl.assistant(sgl.gen("summary", max_tokens=96))
    s += sgl.user(f"Fill in a card for the country {country} as JSON.")
    s += sgl.assistant(sgl.gen("card", max_tokens=120, regex=CARD))
    s += sgl.user(f"Choose one: {', '.join(CONTINENTS)}. Where is {country}?")
    s += sgl.assistant(sgl.select("continent", choices=list(CONTINENTS)))

    return Guide(country, s["capital"], s["dish"], tips, s["summary"], s["card"], s["continent"])
