"""Raw-text exercises: few-shot patterns, notes with questions, multiple choice, reasoning in steps.

Owns the documents whose answer must be taken from the context. `few_shot_prompt` is also what the
self-test examines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .choice import pick
from .facts import Fact, all_facts, animal_facts, capitalized, country_facts, with_article
from .world import (
    ANIMALS,
    BLAME,
    COLORS,
    COUNTRIES,
    FIRST_NAMES,
    OPPOSITES,
    PEOPLE,
    PRAISE,
    REVIEWED,
    THINGS,
    TOPICS,
    WORDS,
    YOUNG,
)

SPELLED = tuple(
    sorted({a.name for a in ANIMALS} | {thing for thing, _, _ in THINGS} | set(COLORS))
    + sorted({word for pair in OPPOSITES for word in pair})
)


def _opposite_pairs() -> tuple[tuple[str, str], ...]:
    return tuple((a, b) for a, b in OPPOSITES) + tuple((b, a) for a, b in OPPOSITES)


def _tables() -> dict[str, tuple[tuple[str, str], ...]]:
    return {
        "upper": tuple((word, word.upper()) for word in SPELLED),
        "plural": tuple((thing, plural) for thing, plural, _ in THINGS)
        + tuple((a.name, a.plural) for a in ANIMALS),
        "color": tuple((thing, color) for thing, _, color in THINGS),
        "opposite": _opposite_pairs(),
        "capital": tuple((c.name, c.capital) for c in COUNTRIES),
        "country": tuple((c.capital, c.name) for c in COUNTRIES),
        "continent": tuple((c.name, c.continent) for c in COUNTRIES),
        "language": tuple((c.name, c.language) for c in COUNTRIES),
        "currency": tuple((c.name, c.currency) for c in COUNTRIES),
        "dish": tuple((c.name, c.dish) for c in COUNTRIES),
        "legs": tuple((a.name, str(a.legs)) for a in ANIMALS),
        "kind": tuple((a.name, a.kind) for a in ANIMALS),
        "young": YOUNG,
        "job": tuple((p.name, p.job) for p in PEOPLE),
        "age": tuple((p.name, str(p.age)) for p in PEOPLE),
        "question": tuple((f.questions[0], f.short) for f in all_facts()),
        "category": tuple((w, "color") for w in COLORS)
        + tuple((a.name, "animal") for a in ANIMALS)
        + tuple((c.capital, "city") for c in COUNTRIES)
        + tuple((p.name, "person") for p in PEOPLE),
    }


TABLES = _tables()


def _review(rng: Random) -> tuple[str, str]:
    praise = rng.random() < 0.5
    form = rng.choice(("The {} was {}.", "This {} is {}.", "I found the {} {}."))
    text = form.format(rng.choice(REVIEWED), rng.choice(PRAISE if praise else BLAME))
    return text, "positive" if praise else "negative"


def _sum(rng: Random) -> tuple[str, str]:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return f"{a} + {b}", str(a + b)


def _difference(rng: Random) -> tuple[str, str]:
    a, b = sorted((rng.randint(0, 9), rng.randint(0, 9)))
    return f"{b} - {a}", str(b - a)


def _copy(rng: Random) -> tuple[str, str]:
    words = " ".join(rng.sample(WORDS, rng.randint(1, 3)))
    return words, words


def _last(rng: Random) -> tuple[str, str]:
    words = rng.sample(WORDS, 3)
    return " ".join(words), words[-1]


def _first(rng: Random) -> tuple[str, str]:
    words = rng.sample(WORDS, 3)
    return " ".join(words), words[0]


def _swap(rng: Random) -> tuple[str, str]:
    a, b = rng.sample(WORDS, 2)
    return f"{a} {b}", f"{b} {a}"


def _twice(rng: Random) -> tuple[str, str]:
    word = rng.choice(WORDS)
    return word, f"{word} {word}"


def _next(rng: Random) -> tuple[str, str]:
    number = rng.randint(0, 98)
    return str(number), str(number + 1)


COMPUTED: dict[str, Callable[[Random], tuple[str, str]]] = {
    "sentiment": _review,
    "sum": _sum,
    "difference": _difference,
    "copy": _copy,
    "last": _last,
    "first": _first,
    "swap": _swap,
    "twice": _twice,
    "next": _next,
}
TASKS = (*TABLES, *COMPUTED)


@dataclass(frozen=True)
class Layout:
    """How examples are written: `before` x `between` y `after`."""

    before: str
    between: str
    after: str


LAYOUTS = (
    Layout("Input: ", "\nOutput: ", "\n\n"),
    Layout("Q: ", "\nA: ", "\n"),
    Layout("Input: ", "\nOutput: ", "\n"),
    Layout("Q: ", "\nA: ", "\n\n"),
    Layout("", " -> ", "\n"),
    Layout("", ": ", "\n"),
    Layout("", " = ", "\n"),
    Layout("Word: ", "\nAnswer: ", "\n\n"),
    Layout("Question: ", "\nAnswer: ", "\n\n"),
    Layout("Text: ", "\nLabel: ", "\n\n"),
    Layout("Review: ", "\nSentiment: ", "\n"),
)


def _examples(rng: Random, task: str, count: int) -> list[tuple[str, str]]:
    if task in TABLES:
        return rng.sample(TABLES[task], min(count, len(TABLES[task])))
    return [COMPUTED[task](rng) for _ in range(count)]


def few_shot_prompt(rng: Random, task: str, layout: Layout, *, num_shots: int) -> tuple[str, str]:
    """A prompt of `num_shots` solved examples and one open one, and the open one's answer."""
    *solved, (x, y) = _examples(rng, task, num_shots + 1)
    text = "".join(f"{layout.before}{a}{layout.between}{b}{layout.after}" for a, b in solved)
    return f"{text}{layout.before}{x}{layout.between}".rstrip(" "), y


def few_shot(rng: Random) -> str:
    layout = pick(rng, LAYOUTS)
    if rng.random() < 0.15:  # an arbitrary code, to be read off the examples alone
        keys, values = rng.sample(WORDS, 4), rng.sample(WORDS, 4)
        pairs = list(zip(keys, values, strict=True))
        examples = pairs + rng.choices(pairs, k=rng.randint(3, 8))
    else:
        examples = _examples(rng, rng.choice(TASKS), rng.randint(4, 9))
    text = "".join(f"{layout.before}{x}{layout.between}{y}{layout.after}" for x, y in examples)
    return text.rstrip("\n") + "\n"


# ---- questions whose answer is in the text -----------------------------------------------------


def private_notes(rng: Random) -> tuple[list[str], list[tuple[str, str]]]:
    """Notes about people nobody has heard of, and (question, answer) pairs about them."""
    notes, questions = [], []
    topics = list(TOPICS)
    for name in rng.sample(FIRST_NAMES, rng.randint(2, 5)):
        kind = rng.randrange(5)
        if kind == 0:
            age = rng.randint(18, 80)
            notes.append(f"{name} is {age} years old.")
            questions.append((f"How old is {name}?", f"{name} is {age} years old."))
        elif kind == 1:
            city = rng.choice(COUNTRIES).capital
            notes.append(f"{name} lives in {city}.")
            questions.append((f"Where does {name} live?", f"{name} lives in {city}."))
        elif kind == 2:
            word = with_article(rng.choice(WORDS))
            notes.append(f"{name} has {word}.")
            questions.append((f"What does {name} have?", f"{name} has {word}."))
        elif kind == 3:
            topic = rng.choice(topics)
            notes.append(f"{name} likes {topic}.")
            questions.append((f"What does {name} like?", f"{name} likes {topic}."))
        else:
            job = with_article(rng.choice(PEOPLE).job)
            notes.append(f"{name} is {job}.")
            questions.append((f"What is the job of {name}?", f"{name} is {job}."))
    return notes, questions


def notes_question(rng: Random) -> str:
    notes, questions = private_notes(rng)
    asked = rng.sample(questions, min(2, len(questions)))
    if rng.random() < 0.5:
        head = "Documents:\n" + "".join(f"[{i}] {note}\n" for i, note in enumerate(notes, 1))
    else:
        head = "Context: " + " ".join(notes) + "\n"
    return head + "".join(f"\nQuestion: {q}\nAnswer: {a}\n" for q, a in asked)


def plain_questions(rng: Random) -> str:
    """Questions about the world without examples or chat markers, answered in full sentences."""
    layout = pick(rng, (Layout("Question: ", "\nAnswer: ", "\n\n"), Layout("Q: ", "\nA: ", "\n")))
    facts = rng.choices(all_facts(), k=rng.choice((1, 1, 2, 3)))
    return "".join(
        f"{layout.before}{rng.choice(fact.questions)}{layout.between}{fact.sentence}{layout.after}"
        for fact in facts
    )


def choice_question(rng: Random) -> tuple[str, str]:
    """A question with four lettered choices, up to and including "Answer:", and its letter."""
    facts = [
        f
        for f in (country_facts() if rng.random() < 0.7 else animal_facts())
        if f.relation != "legs"
    ]
    fact: Fact = rng.choice(facts)
    wrong = sorted({f.short for f in facts if f.relation == fact.relation} - {fact.short})
    choices = [*rng.sample(wrong, 3), fact.short]
    rng.shuffle(choices)
    listed = "".join(
        f"{letter}. {choice}\n" for letter, choice in zip("ABCD", choices, strict=True)
    )
    question = f"{fact.questions[0]}\n{listed}Answer:"
    return question, "ABCD"[choices.index(fact.short)]


def multiple_choice(rng: Random) -> str:
    questions = [choice_question(rng) for _ in range(rng.randint(2, 5))]
    head = pick(rng, ("", "The following are multiple choice questions (with answers).\n\n"))
    return head + "".join(f"{question} {letter}\n\n" for question, letter in questions)


def steps(rng: Random) -> str:
    """A reasoned answer: a small word problem, or a search in the style of ReAct."""
    if rng.random() < 0.5:
        name = rng.choice(FIRST_NAMES + tuple(p.name for p in PEOPLE))
        _, things, _ = rng.choice(THINGS)
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        if rng.random() < 0.5:
            told, sign, answer = f"gets {b} more", "+", a + b
        else:
            a, b = max(a, b) + 1, min(a, b)
            told, sign, answer = f"gives away {b}", "-", a - b
        return (
            f"Question: {name} has {a} {things} and {told}. How many {things} does {name} have?\n"
            f"Answer: {a} {sign} {b} = {answer}. The answer is {answer}.\n"
        )
    fact = rng.choice(country_facts())
    return (
        f"Question: {fact.questions[0]}\n"
        f"Thought 1: I need to search {fact.subject} and find its {fact.relation}.\n"
        f"Action 1: Search[{fact.subject}]\n"
        f"Observation 1: {fact.sentence}\n"
        f"Thought 2: {capitalized(fact.short)} is the answer.\n"
        f"Action 2: Finish[{fact.short}]\n"
    )
