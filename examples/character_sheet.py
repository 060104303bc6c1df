"""JSON by a regular expression, by a pydantic model, and by writing it around typed holes.

    python examples/character_sheet.py [--url http://127.0.0.1:8000]

The server samples only what the form allows, and text that the form leaves no choice about costs
no decoding step on a server with the plugin (`forced_tokens` in the usage).
"""

import argparse
import json

from pydantic import BaseModel, Field

import sgl_vllm as sgl

CHARACTER = (
    r'\{"name": "[A-Z][a-z]{2,10}", "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)", '
    r'"blood status": "(Pure-blood|Half-blood|Muggle-born)", "age": [1-9][0-9], '
    r'"patronus": "[a-z]{3,12}"\}'
)


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=18, le=80)
    job: str = Field(max_length=12)


@sgl.function
def by_regex(s: sgl.ProgramState) -> None:
    s += sgl.user("Fill in a card for the character Harry as JSON.")
    s += sgl.assistant(sgl.gen("character", max_tokens=96, regex=CHARACTER))


@sgl.function
def by_model(s: sgl.ProgramState) -> None:
    s += "A person as JSON: " + sgl.gen("person", max_tokens=96, json_schema=Person)


@sgl.function
def by_holes(s: sgl.ProgramState, animal: str) -> None:
    s += sgl.user(f"Fill in a card for the animal {animal} as JSON.")
    with s.assistant():
        s += f'{{"name": "{animal}", "legs": ' + sgl.gen_int("legs")
        s += ', "kind": "' + sgl.select("kind", ["mammal", "bird", "fish", "insect"]) + '"}'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    state = by_regex.run(temperature=0.0)
    print(json.loads(state["character"]), state.usage, sep="\n")
    print(repr(by_model.run(temperature=0.0)["person"]))
    state = by_holes.run("eagle", temperature=0.0)
    print(state["legs"], state["kind"], state.messages()[-1]["content"])
