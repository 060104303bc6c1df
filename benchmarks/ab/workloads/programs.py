"""The programs of `examples/` as one mix: each before any again, in a random order.

Those that need no other model than a language model, and that write the same text in every run:
docs/benchmarks.md names the others. They run as they are; their arguments are words that the demo's
model knows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name: str) -> ModuleType:
    """An example's module. (`examples` is no package.)"""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def each(name: str, *values: str) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


character_sheet, essay_judge = example("character_sheet"), example("essay_judge")

PROGRAMS: Mapping[str, tuple[sgl.Program, Sequence[Mapping[str, Any]]]] = {
    "api_speculation": (
        example("api_speculation").call_by_call,
        each("name", "Emma", "Carlos", "Yara", "Mila", "James", "Nina", "Omar", "Lena"),
    ),
    "character_sheet.by_regex": (character_sheet.by_regex, [{}]),
    "character_sheet.by_model": (character_sheet.by_model, [{}]),
    "character_sheet.by_holes": (
        character_sheet.by_holes,
        each("animal", "eagle", "frog", "goldfish", "dog", "bee", "horse"),
    ),
    "chat": (
        example("chat").conversation,
        [
            {"first": f"What is the capital of {country}?", "second": "And in Japan?"}
            for country in (
                "France",
                "Italy",
                "Egypt",
                "Peru",
                "Kenya",
                "Ghana",
                "Vietnam",
                "Brazil",
            )
        ],
    ),
    "classify": (
        example("classify").classify,
        each(
            "review",
            "I love this book.",
            "The game was boring.",
            "What an excellent trip!",
            "This soup is wonderful.",
            "The hotel was terrible.",
            "I found the film dull.",
        ),
    ),
    "essay_judge": (
        essay_judge.judge,
        each(
            "essay",
            essay_judge.ESSAY,
            "Bread is simple and good. It needs flour, water and time. I bake it on Sunday.",
            "The forest is quiet in the morning. Birds wake first. I like to walk there alone.",
        ),
    ),
    "rag": (
        example("rag").answer,
        each(
            "question",
            "What is the capital of Egypt?",
            "What is the currency of Ghana?",
            "What is the capital of Vietnam?",
            "What is the currency of Vietnam?",
        ),
    ),
    "react_agent": (
        example("react_agent").react,
        each(
            "question",
            "What is the capital of Peru?",
            "Which language do people speak in Kenya?",
            "What do people eat in Japan?",
        ),
    ),
    "skeleton_of_thought": (
        example("skeleton_of_thought").skeleton_of_thought,
        each("topic", "staying healthy", "sleeping better", "saving money"),
    ),
}


@sgl.function
def run_one(s: sgl.ProgramState, name: str, arguments: Mapping[str, Any]) -> object:
    program, _ = PROGRAMS[name]
    return program(s, **arguments)


def items(texts: Texts, num_requests: int) -> list[Item]:
    names = list(PROGRAMS)
    chosen = [names[index] for index in texts.order(num_requests, len(names))]
    return [{"name": name, "arguments": _arguments(texts, name)} for name in chosen]


def _arguments(texts: Texts, name: str) -> Mapping[str, Any]:
    _, known = PROGRAMS[name]
    return known[texts.number(0, len(known) - 1)]


WORKLOAD = Workload(
    name="programs",
    summary="the programs of examples/ that need a language model only, as one mix",
    gain=(
        "The examples, conversations and forks of these programs are short, so that stock finds "
        "less than a block of most prompts. Two of the ten write forced text, and four choose by "
        "select."
    ),
    program=run_one,
    items=items,
    num_requests=60,
    quick_requests=10,
)
