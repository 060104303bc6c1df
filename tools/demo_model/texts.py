"""The training text: every document is written here from the world's facts and word lists.

Owns the kinds of document and how often each occurs (`MIX`). A document is a string with ChatML
markers where it is a chat. Free choices are skewed on purpose (`pick`): the first of several equal
wordings is the most common, so that greedy decoding has a clear winner and sampling still varies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from . import exercises, records, world
from .facts import ALL_FACTS, ANIMAL_FACTS, COUNTRY_FACTS, PERSON_FACTS, Fact, describe_country
from .tokenizer import chat_turn
from .world import Country, a, capitalized, pick, say

Turn = tuple[str, str]  # user, assistant
NUMBERS = ("zero", "one", "two", "three", "four", "five")


def chat(rng: Random, turns: Sequence[Turn]) -> str:
    parts = [chat_turn("system", say(rng, "system"))] if rng.random() < 0.5 else []
    for user, assistant in turns:
        parts += [chat_turn("user", user), chat_turn("assistant", assistant)]
    return "".join(parts)


# ---- facts -------------------------------------------------------------------------------------


def ask(rng: Random, fact: Fact, *, follow_up: bool = False) -> Turn:
    question = rng.choice(fact.follow_ups if follow_up else fact.questions)
    if "Europe, Asia" in question:
        return question, fact.short
    if rng.random() < 0.2:
        return question + say(rng, "one_word"), fact.short
    return question, fact.sentence


def yes_no(rng: Random, fact: Fact, others: Sequence[Fact]) -> Turn:
    """Is it true? Half of the questions put another subject's answer in place of the right one."""
    told = fact
    if rng.random() < 0.5:
        told = rng.choice([one for one in others if one.relation == fact.relation])
    statement = told.sentence.replace(told.subject, fact.subject, 1)
    if fact.relation in ("legs", "kind", "home"):
        statement = fact.sentence.replace(fact.short, told.short)
        if "no legs" in fact.sentence + told.sentence:
            return ask(rng, fact)
    right = told.short == fact.short
    question = say(rng, "is_true", statement).strip()
    if question.startswith("True"):
        return question, "true" if right else "false"
    if rng.random() < 0.6:
        return question + say(rng, "yes_no"), "yes" if right else "no"
    return question, f"{'Yes' if right else 'No'}. {fact.sentence}"


def facts_like(fact: Fact, facts: Sequence[Fact]) -> list[Fact]:
    """The facts that a follow-up question after `fact` may ask for."""
    return [other for other in facts if other.context == fact.context and other != fact]


def fact_chat(rng: Random) -> str:
    family = rng.choices((COUNTRY_FACTS, PERSON_FACTS, ANIMAL_FACTS), (6, 3, 2))[0]
    fact = rng.choice(family)
    turns = [ask(rng, fact)]
    for _ in range(rng.choices((0, 1, 2, 3), (3, 3, 2, 1))[0]):
        kind = rng.random()
        if kind < 0.6:  # the same subject, referred back to
            fact = rng.choice(facts_like(fact, family))
            turns.append(ask(rng, fact, follow_up=True))
        elif kind < 0.8 and fact.relation in ("capital", "dish", "currency", "language"):
            fact = rng.choice([other for other in family if other.relation == fact.relation])
            turns.append((say(rng, "and_in", fact.subject), fact.sentence))
        else:
            fact = rng.choice(family)
            turns.append(ask(rng, fact))
    return chat(rng, turns)


def yes_no_chat(rng: Random) -> str:
    family = rng.choice((COUNTRY_FACTS, PERSON_FACTS, ANIMAL_FACTS))
    return chat(rng, [yes_no(rng, rng.choice(family), family) for _ in range(rng.choice((1, 2)))])


def describe_chat(rng: Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        country = rng.choice(world.COUNTRIES)
        return chat(rng, [(say(rng, "about_country", country.name), describe_country(country))])
    if kind == 1:
        person = rng.choice(world.PEOPLE)
        she = capitalized(person.pronoun)
        text = (
            f"{person.name} is {person.age} years old. {she} is {a(person.job)} and "
            f"lives in {person.city}. {she} has {a(person.pet)}."
        )
        return chat(rng, [(say(rng, "about_person", person.name), text)])
    if kind == 2:
        animal = rng.choice(world.ANIMALS)
        text = (
            f"{capitalized(a(animal.name))} is {a(animal.kind)}. "
            f"It has {animal.legs or 'no'} legs and lives in the {animal.home}."
        )
        return chat(rng, [(say(rng, "about_animal", a(animal.name)), text)])
    person = rng.choice(world.PEOPLE)
    name, city = person.name, person.city
    country = next(one for one in world.COUNTRIES if one.capital == city)
    turns = [
        (f"In which country does {name} live?",
         f"{name} lives in {city}, the capital of {country.name}."),
        (f"Who lives in {city}?", f"{name} lives in {city}."),
        (f"Who is {a(person.job)}?", f"{name} is {a(person.job)}."),
        (f"Who has {a(person.pet)}?", f"{name} has {a(person.pet)}."),
    ]  # fmt: skip
    return chat(rng, rng.sample(turns, rng.choice((1, 2))))


def small_talk(rng: Random) -> str:
    name = rng.choice([*world.FIRST_NAMES, *world.NAMES])
    first: Turn = pick(rng, (
        ("Hello!", "Hello! How can I help you?"),
        ("Hi", "Hello! How can I help you?"),
        ("Hello, how are you?", "I am fine, thank you. How can I help you?"),
        ("Who are you?", "I am a small demo model. I know some countries, people and animals."),
        ("What can you do?", "I can answer simple questions, write short texts and fill in JSON."),
    ))  # fmt: skip
    thing = rng.choice(world.WORDS)
    turns = [first] if rng.random() < 0.4 else []
    if rng.random() < 0.7 or not turns:
        hobby = rng.choice(list(world.TOPICS))
        turns.append((f"My name is {name}. I like {hobby}.", f"Hello {name}! Nice to meet you."))
        if rng.random() < 0.5:
            turns.append(ask(rng, rng.choice(ALL_FACTS)))
        questions = [("What is my name?", f"Your name is {name}."),
                     ("What do I like?", f"You like {hobby}.")]  # fmt: skip
        turns += rng.sample(questions, rng.choice((1, 2)))
    elif rng.random() < 0.5:
        turns += [(f"Remember the word {thing}.", f"I will remember the word {thing}."),
                  ask(rng, rng.choice(COUNTRY_FACTS)),
                  ("What was the word?", f"The word was {thing}.")]  # fmt: skip
    if rng.random() < 0.3:
        turns.append(("Thank you!", "You are welcome!"))
    return chat(rng, turns)


# ---- tips, summaries, texts, judging -----------------------------------------------------------


def place_tip(rng: Random, country: Country, topic: str) -> str:
    return pick(rng, world.PLACE_TOPICS[topic]).format(**vars(country))


def tip_chat(rng: Random) -> str:
    """Tips about a place or a topic: one, or a numbered list with an expansion, or combined."""
    kind = rng.random()
    if kind < 0.4:
        country = rng.choice(world.COUNTRIES)
        place = rng.choice((country.name, country.capital))
        turns = []
        for topic in rng.sample(list(world.PLACE_TOPICS), rng.choice((1, 1, 2))):
            about = f"travelling to {place}" if topic == "travelling" else f"{topic} in {place}"
            turns.append((say(rng, "place_tip", about), place_tip(rng, country, topic)))
        return chat(rng, turns)
    topic = rng.choice(list(world.TOPICS))
    if kind < 0.6:
        tip, why = pick(rng, world.TOPICS[topic])
        turns = [(say(rng, "one_tip", topic), f"{tip}.")]
        if rng.random() < 0.6:
            turns.append((say(rng, "why_tip"), f"{why}."))
        return chat(rng, turns)
    count = rng.choice((2, 2, 3, 3, 4, 5))
    tips = sorted(rng.sample(world.TOPICS[topic], count), key=world.TOPICS[topic].index)
    if rng.random() < 0.5:
        tips = world.TOPICS[topic][:count]
    listed = "\n".join(f"{i}. {tip}." for i, (tip, _) in enumerate(tips, 1))
    turns = [(say(rng, "tips", NUMBERS[count], topic), listed)]
    for i in sorted(rng.sample(range(count), rng.choice((0, 1, 2)))):
        turns.append((say(rng, "expand", i + 1), f"{tips[i][0]}. {tips[i][1]}."))
    return chat(rng, turns)


def summary_chat(rng: Random) -> str:
    """The summary of some notes is the notes themselves, joined."""
    kind = rng.random()
    if kind < 0.45:
        country = rng.choice(world.COUNTRIES)
        topics = rng.sample(list(world.PLACE_TOPICS), rng.choice((2, 2, 3, 4)))
        notes = [place_tip(rng, country, topic) for topic in topics]
    elif kind < 0.75:
        pool = [tip for tips in world.TOPICS.values() for tip, _ in tips]
        notes = [f"{tip}." for tip in rng.sample(pool, rng.choice((2, 3)))]
    else:
        notes = [fact.sentence for fact in rng.sample(ALL_FACTS, rng.choice((2, 3, 4)))]
    mark = say(rng, "note", "{}", number="{number}")
    listed = "\n".join(mark.format(note, number=i) for i, note in enumerate(notes, 1))
    return chat(rng, [(say(rng, "combine", listed), " ".join(notes))])


def subject_text(rng: Random, subject: str) -> str:
    return " ".join(pick(rng, sentences) for sentences in world.SUBJECTS[subject])


def text_chat(rng: Random) -> str:
    subject = rng.choice(list(world.SUBJECTS))
    turns = [(say(rng, "write_text", subject), subject_text(rng, subject))]
    if rng.random() < 0.3:
        turns.append(("Give it a title.", capitalized(subject)))
    return chat(rng, turns)


def judged_text(rng: Random) -> tuple[str, int]:
    level = rng.choice(list(world.RATINGS))
    word = rng.choice(world.RATINGS[level])
    thing = rng.choice(world.REVIEWED)
    text = say(rng, "judged", thing, word)
    return f"What {a(word)} {thing} it was." if text.startswith("What") else text, level


def judge_chat(rng: Random) -> str:
    if rng.random() < 0.35:
        text, level = subject_text(rng, rng.choice(list(world.SUBJECTS))), 4
    else:
        text, level = judged_text(rng)
        if rng.random() < 0.3:
            text = f"{subject_text(rng, rng.choice(list(world.SUBJECTS)))} {text}"
    turns = [(say(rng, "rate", text), str(level))]
    if rng.random() < 0.4:
        reason = ("very bad", "not good", "in the middle", "clear and good", "very good")[level - 1]
        turns.append(("Why?", f"It is {reason}."))
    if rng.random() < 0.3:
        quality = rng.choice(("clarity", "style", "content", "originality", "evidence"))
        turns.append((say(rng, "judge", quality), f"The {quality} is {world.RATINGS[level][0]}."))
    return chat(rng, turns)


def review(rng: Random) -> tuple[str, str]:
    praise = rng.random() < 0.5
    word = rng.choice(world.PRAISE if praise else world.BLAME)
    thing = rng.choice(world.REVIEWED)
    form = rng.choice(("The {thing} was {word}.", "I think the {thing} was {word}.",
                       "What {word} {thing}!",
                       "This {thing} is {word}.", "We found the {thing} {word}."))  # fmt: skip
    return form.format(thing=thing, word=word), "positive" if praise else "negative"


def sentiment_chat(rng: Random) -> str:
    turns = []
    for _ in range(rng.choice((1, 1, 2))):
        text, label = review(rng)
        turns.append((say(rng, "sentiment", text), label))
    return chat(rng, turns)


def _word_turn(rng: Random) -> Turn:
    kind = rng.randrange(8)
    if kind == 0:
        thing, plural, _ = rng.choice(world.THINGS)
        return f"What is the plural of {thing}?", plural
    if kind == 1:
        one, other = rng.choice(world.OPPOSITES)
        return f"What is the opposite of {one}?", other
    if kind == 2:
        _, plural, color = rng.choice(world.THINGS)
        return f"What color are {plural}?", color
    if kind == 3:
        word = rng.choice(exercises.SPELLED)
        return say(rng, "uppercase", word), word.upper()
    if kind == 4:
        words = " ".join(rng.sample(world.WORDS, rng.randint(1, 5)))
        return say(rng, "repeat", words), words
    if kind == 5:
        first, second = rng.randint(0, 9), rng.randint(0, 9)
        return say(rng, "sum", first, second), str(first + second)
    if kind == 6:
        country = rng.choice(world.COUNTRIES)
        user = f"Choose one: {', '.join(world.CONTINENTS)}. Where is {country.name}?"
        return user, country.continent
    word, before, after = rng.sample(world.WORDS, 3)
    return f"Which word comes after {before}: {word} {before} {after}?", after


def words_chat(rng: Random) -> str:
    """Word exercises, small sums, choices and copying, asked for in words."""
    return chat(rng, [_word_turn(rng) for _ in range(rng.choice((1, 1, 2)))])


def notes_chat(rng: Random) -> str:
    """Questions about notes that the user gives: the answer is in the context and nowhere else."""
    notes, questions = exercises.private_notes(rng)
    asked = rng.sample(questions, min(len(questions), rng.choice((1, 2))))
    first = say(rng, "notes", " ".join(notes), asked[0][0])
    return chat(rng, [(first, asked[0][1]), *asked[1:]])


def json_chat(rng: Random) -> str:
    return chat(rng, [records.request(rng) for _ in range(rng.choice((1, 1, 2)))])


def long_chat(rng: Random) -> str:
    """Several chats as one, so that long contexts are seen."""
    turns: list[Turn] = []
    writers = (fact_chat, text_chat, tip_chat, json_chat, words_chat)
    for _ in range(rng.randint(3, 7)):
        turns += turns_of(rng.choice(writers)(rng))
    return chat(rng, turns)


def turns_of(document: str) -> list[Turn]:
    """The user and assistant turns of a chat document."""
    parts = [part.split("<|im_end|>")[0] for part in document.split("<|im_start|>")[1:]]
    said = [part.split("\n", 1) for part in parts if not part.startswith("system")]
    return [(said[i][1], said[i + 1][1]) for i in range(0, len(said), 2)]


# ---- plain text --------------------------------------------------------------------------------


def story(rng: Random) -> str:
    person = rng.choice(world.PEOPLE)
    name, she = person.name, capitalized(person.pronoun)
    their = "her" if person.pronoun == "she" else "his"
    animal = rng.choice(world.ANIMALS).name
    word = pick(rng, world.WORDS)
    parts = (
        (f"Once upon a time {name} lived in {person.city}.", f"One day {name} went for a walk.",
         f"{name} was {a(person.job)} from {person.city}."),
        (f"{she} had {a(person.pet)}.", "The sun was warm and the sky was blue."),
        (f"In the street {person.pronoun} found {a(word)}.",
         f"Near the old bridge {person.pronoun} saw {a(animal)}."),
        (f"{name} was very happy.", f"{name} told all {their} friends about it."),
    )  # fmt: skip
    return " ".join(pick(rng, part) for part in parts)


def plain(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return story(rng)
    if kind < 0.5:
        return subject_text(rng, rng.choice(list(world.SUBJECTS)))
    if kind < 0.65:
        return describe_country(rng.choice(world.COUNTRIES))
    return " ".join(fact.sentence for fact in rng.sample(ALL_FACTS, rng.randint(2, 6)))


def raw_tips(rng: Random) -> str:
    """Numbered tips and their expansions without chat markers."""
    topic = rng.choice(list(world.TOPICS))
    count = rng.choice((2, 2, 3, 4, 5))
    tips = world.TOPICS[topic][:count]
    text = say(rng, "raw_tips", NUMBERS[count], topic)
    text += "".join(f"{i}. {tip}.\n" for i, (tip, _) in enumerate(tips, 1))
    i = rng.randrange(count)
    return f"{text}\n{say(rng, 'raw_expand', i + 1)}{tips[i][0]}. {tips[i][1]}.\n"


# ---- the mixture -------------------------------------------------------------------------------

# kind of document: how often
MIX: dict[Callable[[Random], str], float] = {
    fact_chat: 18,
    yes_no_chat: 4,
    describe_chat: 5,
    small_talk: 3,
    tip_chat: 6,
    summary_chat: 4,
    text_chat: 4,
    judge_chat: 3,
    sentiment_chat: 3,
    words_chat: 5,
    notes_chat: 5,
    json_chat: 15,
    records.raw_records: 8,
    exercises.few_shot: 14,
    exercises.notes_question: 3,
    exercises.plain_questions: 3,
    exercises.multiple_choice: 5,
    exercises.steps: 3,
    raw_tips: 2,
    plain: 4,
}


def documents(seed: int) -> Iterator[str]:
    """Training documents without end; the same seed gives the same documents."""
    rng = Random(seed)
    writers, weights = list(MIX), list(MIX.values())
    while True:
        for writer in rng.choices(writers, weights, k=256):
            yield writer(rng)


def long_documents(seed: int) -> Iterator[str]:
    """As `documents`, with every second one a chat of many turns."""
    rng = Random(seed)
    for document in documents(seed + 1):
        yield document
        yield long_chat(rng)
