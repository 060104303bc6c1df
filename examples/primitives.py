"""What programs are often made of: a tool loop, votes, grades, many documents, and retries.

    vllm serve MODEL --plugin sgl_vllm \\
        --structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'
    python examples/primitives.py [--url http://127.0.0.1:8000]

Each is one expression. The option of the server makes JSON compact, so that all of a tool call but
its arguments is forced text.
"""

import argparse
from typing import Literal

import sgl_vllm as sgl

FACTS = {
    "Peru": "The capital of Peru is Lima.",
    "Kenya": "People in Kenya speak Swahili.",
    "Japan": "People in Japan eat sushi.",
}


def look_up(country: Literal["Peru", "Kenya", "Japan"]) -> str:
    """A fact about a country."""
    return FACTS[country]


@sgl.function
def research(s: sgl.ProgramState, question: str) -> None:
    answer = sgl.gen("answer", max_tokens=32, stop="\n")
    s += sgl.agent(answer, question, [look_up], max_turns=2, max_parallel=2)


@sgl.function
def elect(s: sgl.ProgramState, country: str) -> None:
    s += sgl.user(f"What is the capital of {country}? Answer in one word.")
    s += sgl.assistant(sgl.vote(sgl.gen("city", regex="[A-Z][a-z]+"), 5, at_once=3))


@sgl.function
def write(s: sgl.ProgramState, topic: str) -> None:
    s += sgl.user(f"Give one tip for {topic}.")
    grade = sgl.judge("grade", "Rate this text from 1 to 5.")
    s += sgl.assistant(sgl.best_of(sgl.gen("tip", max_tokens=24), 3, score=grade))


@sgl.function
def collect(s: sgl.ProgramState, countries: list[str]) -> None:
    s += sgl.map_reduce(
        "summary",
        countries,
        map=lambda country: (
            sgl.user(f"What is the capital of {country}? Answer in one word.")
            + sgl.assistant(sgl.gen("capital", max_tokens=12))
        ),
        reduce=lambda capitals: (
            sgl.user(f"Sort these words:\n{capitals}")
            + sgl.assistant(sgl.gen("sorted", max_tokens=24))
        ),
        separator="\n",
    )


def is_one_word(text: str) -> str | None:
    count = len(text.split())
    return None if count == 1 else f"it has {count} words, not one"


@sgl.function
def insist(s: sgl.ProgramState, country: str) -> None:
    question = f"What is the capital of {country}?"
    s += sgl.user(question)
    again = f"{question} Answer in one word."
    answer = sgl.gen("city", max_tokens=16)
    s += sgl.assistant(sgl.retry_until(answer, is_one_word, feedback=again))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    state = research.run("What is the capital of Peru?", temperature=0.0)
    meta = state.get_meta_info("answer")
    print(f"agent: {state['answer']!r} after {meta['turns']} turns, ended by {meta['ended_by']}")
    for call in meta["tool_calls"]:
        print(f"    {call.tool}{call.arguments} -> {call.result}")

    state = elect.run("Kenya", temperature=0.8)
    votes = state.get_meta_info("city")["votes"]
    print(f"vote: {state['city']} of {votes}, {state.usage.saved_calls} calls saved")

    state = write.run("staying healthy", temperature=0.8)
    print(f"best_of: {state['tip']!r} of {state.get_meta_info('tip')['scores']}")

    state = collect.run(["Peru", "Kenya", "France", "Egypt"], temperature=0.0)
    print(f"map_reduce: {state['summary']!r} of {state.get_meta_info('summary')['parts']}")

    state = insist.run("Kenya", temperature=0.0)
    print(f"retry_until: {state['city']!r} after {state.get_meta_info('city')['errors']}")
