"""Raw-text exercises: few-shot patterns, notes with questions, multiple choice, reasoning in steps.

Owns the documents whose answer must be taken from the context. `few_shot_prompt` is also what the
examination asks.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from . import world
from .facts import ALL_FACTS, ANIMAL_FACTS, COUNTRY_FACTS
from .world import a, capitalized, pick, say

Pair = tuple[str, str]  # a question and its answer
Layout = list[str]  # what stands before, between and after the two

LAYOUTS: list[Layout] = world.DATA["layouts"]["few_shot"]
SPELLED = [
    *sorted(
        {one.name for one in world.ANIMALS} | {one[0] for one in world.THINGS} | {*world.COLORS}
    ),
    *sorted({word for pair in world.OPPOSITES for word in pair}),
]

TABLES: dict[str, list[Pair]] = {
    "upper": [(word, word.upper()) for word in SPELLED],
    "plural": [(thing, plural) for thing, plural, _ in world.THINGS]
    + [(one.name, one.plural) for one in world.ANIMALS],
    "color": [(thing, color) for thing, _, color in world.THINGS],
    "opposite": [(one, other) for one, other in world.OPPOSITES]
    + [(other, one) for one, other in world.OPPOSITES],
    "capital": [(one.name, one.capital) for one in world.COUNTRIES],
    "country": [(one.capital, one.name) for one in world.COUNTRIES],
    "continent": [(one.name, one.continent) for one in world.COUNTRIES],
    "language": [(one.name, one.language) for one in world.COUNTRIES],
    "currency": [(one.name, one.currency) for one in world.COUNTRIES],
    "dish": [(one.name, one.dish) for one in world.COUNTRIES],
    "legs": [(one.name, str(one.legs)) for one in world.ANIMALS],
    "kind": [(one.name, one.kind) for one in world.ANIMALS],
    "young": [(word, young) for word, young in world.YOUNG],
    "job": [(one.name, one.job) for one in world.PEOPLE],
    "age": [(one.name, str(one.age)) for one in world.PEOPLE],
    "question": [(fact.questions[0], fact.short) for fact in ALL_FACTS],
    "category": [(color, "color") for color in world.COLORS]
    + [(one.name, "animal") for one in world.ANIMALS]
    + [(one.capital, "city") for one in world.COUNTRIES]
    + [(name, "person") for name in world.NAMES],
}


def _review(rng: Random) -> Pair:
    praise = rng.random() < 0.5
    form = rng.choice(("The {} was {}.", "This {} is {}.", "I found the {} {}."))
    text = form.format(
        rng.choice(world.REVIEWED), rng.choice(world.PRAISE if praise else world.BLAME)
    )
    return text, "positive" if praise else "negative"


def _difference(rng: Random) -> Pair:
    low, high = sorted((rng.randint(0, 9), rng.randint(0, 9)))
    return f"{high} - {low}", str(high - low)


def _of_words(count: int, answer: Callable[[list[str]], str]) -> Callable[[Random], Pair]:
    def made(rng: Random) -> Pair:
        words = rng.sample(world.WORDS, count or rng.randint(1, 3))
        return " ".join(words), answer(words)

    return made


def _sum(rng: Random) -> Pair:
    one, other = rng.randint(0, 9), rng.randint(0, 9)
    return f"{one} + {other}", str(one + other)


def _twice(rng: Random) -> Pair:
    word = rng.choice(world.WORDS)
    return word, f"{word} {word}"


def _next(rng: Random) -> Pair:
    number = rng.randint(0, 98)
    return str(number), str(number + 1)


COMPUTED: dict[str, Callable[[Random], Pair]] = {
    "sentiment": _review,
    "sum": _sum,
    "difference": _difference,
    "copy": _of_words(0, " ".join),
    "last": _of_words(3, lambda words: words[-1]),
    "first": _of_words(3, lambda words: words[0]),
    "swap": _of_words(2, lambda words: " ".join(reversed(words))),
    "twice": _twice,
    "next": _next,
}
TASKS = (*TABLES, *COMPUTED)


def _examples(rng: Random, task: str, count: int) -> list[Pair]:
    if task in TABLES:
        return rng.sample(TABLES[task], min(count, len(TABLES[task])))
    return [COMPUTED[task](rng) for _ in range(count)]


def _written(examples: list[Pair], layout: Layout) -> str:
    before, between, after = layout
    return "".join(f"{before}{asked}{between}{answer}{after}" for asked, answer in examples)


def few_shot_prompt(rng: Random, task: str, layout: Layout, *, num_shots: int) -> Pair:
    """A prompt of `num_shots` solved examples and one open one, and the open one's answer."""
    *solved, (asked, answer) = _examples(rng, task, num_shots + 1)
    return f"{_written(solved, layout)}{layout[0]}{asked}{layout[1]}".rstrip(" "), answer


def few_shot(rng: Random) -> str:
    layout = pick(rng, LAYOUTS)
    if rng.random() < 0.15:  # an arbitrary code, to be read off the examples alone
        pairs = [*zip(rng.sample(world.WORDS, 4), rng.sample(world.WORDS, 4), strict=True)]
        examples = pairs + rng.choices(pairs, k=rng.randint(3, 8))
    else:
        examples = _examples(rng, rng.choice(TASKS), rng.randint(4, 9))
    return _written(examples, layout).rstrip("\n") + "\n"


# ---- questions whose answer is in the text -----------------------------------------------------


def private_notes(rng: Random) -> tuple[list[str], list[Pair]]:
    """Notes about people nobody has heard of, and (question, answer) pairs about them."""
    kinds: list[tuple[str, Callable[[], str]]] = [
        ("How old is {}?", lambda: f"is {rng.randint(18, 80)} years old."),
        ("Where does {} live?", lambda: f"lives in {rng.choice(world.COUNTRIES).capital}."),
        ("What does {} have?", lambda: f"has {a(rng.choice(world.WORDS))}."),
        ("What does {} like?", lambda: f"likes {rng.choice(list(world.TOPICS))}."),
        ("What is the job of {}?", lambda: f"is {a(rng.choice(world.PEOPLE).job)}."),
    ]
    questions = []
    for name in rng.sample(world.FIRST_NAMES, rng.randint(2, 5)):
        question, told = kinds[rng.randrange(5)]
        questions.append((question.format(name), f"{name} {told()}"))
    return [note for _, note in questions], questions


def notes_question(rng: Random) -> str:
    notes, questions = private_notes(rng)
    asked = rng.sample(questions, min(2, len(questions)))
    if rng.random() < 0.5:
        head = "Documents:\n" + "".join(f"[{i}] {note}\n" for i, note in enumerate(notes, 1))
    else:
        head = "Context: " + " ".join(notes) + "\n"
    return head + "".join(f"\nQuestion: {q}\nAnswer: {answer}\n" for q, answer in asked)


def plain_questions(rng: Random) -> str:
    """Questions about the world without examples or chat markers, answered in full sentences."""
    layout = pick(rng, (["Question: ", "\nAnswer: ", "\n\n"], ["Q: ", "\nA: ", "\n"]))
    facts = rng.choices(ALL_FACTS, k=rng.choice((1, 1, 2, 3)))
    return _written([(rng.choice(fact.questions), fact.sentence) for fact in facts], layout)


def choice_question(rng: Random) -> Pair:
    """A question with four lettered choices, up to and including "Answer:", and its letter."""
    family = COUNTRY_FACTS if rng.random() < 0.7 else ANIMAL_FACTS
    facts = [fact for fact in family if fact.relation != "legs"]
    fact = rng.choice(facts)
    wrong = sorted({one.short for one in facts if one.relation == fact.relation} - {fact.short})
    choices = [*rng.sample(wrong, 3), fact.short]
    rng.shuffle(choices)
    listed = "".join(f"{letter}. {one}\n" for letter, one in zip("ABCD", choices, strict=True))
    return f"{fact.questions[0]}\n{listed}Answer:", "ABCD"[choices.index(fact.short)]


def multiple_choice(rng: Random) -> str:
    questions = [choice_question(rng) for _ in range(rng.randint(2, 5))]
    head = say(rng, "choices")
    return head + "".join(f"{question} {letter}\n\n" for question, letter in questions)


def steps(rng: Random) -> str:
    """A reasoned answer: a small word problem, or a search in the style of ReAct."""
    if rng.random() < 0.5:
        name = rng.choice([*world.FIRST_NAMES, *world.NAMES])
        _, things, _ = rng.choice(world.THINGS)
        has, more = rng.randint(1, 9), rng.randint(1, 9)
        if rng.random() < 0.5:
            told, sign, answer = f"gets {more} more", "+", has + more
        else:
            has, more = max(has, more) + 1, min(has, more)
            told, sign, answer = f"gives away {more}", "-", has - more
        return (
            f"Question: {name} has {has} {things} and {told}. How many {things} does {name} have?\n"
            f"Answer: {has} {sign} {more} = {answer}. The answer is {answer}.\n"
        )
    fact = rng.choice(COUNTRY_FACTS)
    return (
        f"Question: {fact.questions[0]}\n"
        f"Thought 1: I need to search {fact.subject} and find its {fact.relation}.\n"
        f"Action 1: Search[{fact.subject}]\n"
        f"Observation 1: {fact.sentence}\n"
        f"Thought 2: {capitalized(fact.short)} is the answer.\n"
        f"Action 2: Finish[{fact.short}]\n"
    )
