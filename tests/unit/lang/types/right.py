"""What type checkers know of correct programs. `test_types.py` runs them over this file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, assert_type

from pydantic import BaseModel

import sgl_vllm as sgl


class Kind(Enum):
    MAMMAL = "mammal"
    BIRD = "bird"


class Person(BaseModel):
    name: str


@dataclass
class Place:
    name: str


def search(question: str) -> list[str]:
    return [question]


async def fetch(url: str) -> bytes:
    return url.encode()


# --- a program's parameters, options and result --------------------------------------------------


@sgl.function
def story(s: sgl.ProgramState, animal: str, length: int = 3) -> str:
    s += f"A story of {length} words about a {animal}:" + sgl.gen("story", max_tokens=64)
    return str(s["story"])


@sgl.function(num_api_spec_tokens=16)
async def capital(s: sgl.AsyncProgramState, country: str) -> int:
    s += f"The capital of {country} is" + sgl.gen("name")
    return len(await s.text())


@sgl.function
def sglangs(s, question, temperature=1):
    s += question + sgl.gen("answer")


def calls(backend: sgl.Backend) -> None:
    assert_type(story.run("hare").ret_value, str)
    assert_type(story.run(animal="hare", length=5).ret_value, str)
    assert_type(story("hare", length=5).ret_value, str)
    assert_type(capital.run("France").ret_value, int)

    # SGLang's form: options among the arguments.
    assert_type(story.run("hare", temperature=0.5, max_new_tokens=16).ret_value, str)
    assert_type(story.run(animal="hare", backend=backend, stream=True).ret_value, str)
    assert_type(capital.run(country="France", timeout_s=None).ret_value, int)
    sglangs.run(question="Why?", stop="\n").text()
    sglangs.run("Why?", top_p=0.9)["answer"].strip()

    # Options first, so that the arguments are checked too.
    greedy = story.with_options(temperature=0, backend=backend, stop=["\n"])
    assert_type(greedy.run("hare", length=5).ret_value, str)
    assert_type(sglangs.with_options(stream=True).run("Why?", temperature=3).text(), str)

    states = story.run_batch([{"animal": "hare"}, ("fox", 5)], temperature=0, num_threads=2)
    assert_type(states[0].ret_value, str)
    items = [story.item("hare"), story.item(animal="fox", length=5)]
    for state in story.run_batch(items, generator_style=True):
        assert_type(state.ret_value, str)

    assert_type(story.bind(length=5).run("hare").ret_value, str)
    assert_type(story.compile(length=5).run("hare").ret_value, str)


def each_option_alone(backend: sgl.Backend) -> None:
    story.run("hare", max_new_tokens=16)
    story.run("hare", stop=".")
    story.run("hare", stop_token_ids=[2])
    story.run("hare", stop_regex="[.!?]")
    story.run("hare", temperature=0)
    story.run("hare", top_p=0.9)
    story.run("hare", top_k=5)
    story.run("hare", min_p=0.1)
    story.run("hare", frequency_penalty=0.5)
    story.run("hare", presence_penalty=0.5)
    story.run("hare", ignore_eos=True)
    story.run("hare", return_logprob=True)
    story.run("hare", logprob_start_len=0)
    story.run("hare", top_logprobs_num=3)
    story.run("hare", return_text_in_logprobs=False)
    story.run("hare", stream=True)
    story.run("hare", backend=backend)
    story.run("hare", use_thread=False)
    story.run("hare", timeout_s=9.5)


async def async_calls() -> None:
    assert_type((await story.run_async("hare")).ret_value, str)
    assert_type((await capital.run_async("France", temperature=0)).ret_value, int)
    assert_type((await capital.with_options(temperature=0).run_async("France")).ret_value, int)
    assert_type((await capital.run_batch_async([("France",)]))[0].ret_value, int)


@sgl.function
def inside(s: sgl.ProgramState) -> None:
    assert_type(story(s, "hare", length=5), str)


@sgl.function
async def async_inside(s: sgl.AsyncProgramState) -> None:
    assert_type(await capital(s, "France"), int)


def shown(state: sgl.ProgramState, program: sgl.Program) -> Any:
    program.run("any", arguments="at all")
    return state.ret_value


# --- variables -----------------------------------------------------------------------------------


@sgl.function
def variables(s: sgl.ProgramState, question: str) -> None:
    legs = sgl.gen("legs", dtype=int)
    kind = sgl.select("kind", Kind)
    s += "Legs: " + legs + "\nKind: " + kind
    assert_type(s[legs], int)
    assert_type(s[kind], Kind)
    assert_type(s["legs"], Any)

    assert_type(s[sgl.gen("text", 16, stop="\n", regex="[a-z]+")], str)
    assert_type(s[sgl.gen("flag", dtype=bool)], bool)
    assert_type(s[sgl.gen("person", json_schema=Person)], Person)
    assert_type(s[sgl.gen("place", json_schema=Place)], Place)
    assert_type(s[sgl.gen("json", json_schema={"type": "object"})], str)
    assert_type(s[sgl.gen("choice", choices=["a", "b"])], str)
    assert_type(s[sgl.gen("choice", choices=Kind)], Kind)
    assert_type(s[sgl.select("choice", ["a", "b"])], str)
    assert_type(s[sgl.gen_int("number")], int)
    assert_type(s[sgl.tool("found", search, question)], list[str])
    assert_type(s[sgl.read_only_tool("page", fetch, sgl.var("url"))], bytes)

    forks = s.fork(2)
    forks += legs
    assert_type([branch[legs] for branch in forks], list[int])


@sgl.function
async def async_variables(s: sgl.AsyncProgramState) -> None:
    legs = sgl.gen("legs", dtype=int)
    s += legs
    assert_type(await s[legs], int)
    assert_type(await s["legs"], Any)
