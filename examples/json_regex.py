"""A JSON object whose form is fixed by a regular expression, and one fixed by a pydantic model.

python examples/json_regex.py [--url http://127.0.0.1:8000]
"""

import argparse
import json

from pydantic import BaseModel, Field

import sgl_vllm as sgl

CHARACTER = (
    r'\{"name": "[A-Z][a-z]{2,10}", "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)", '
    r'"age": [1-9][0-9]\}'
)


class Weather(BaseModel):
    city: str = Field(max_length=20)
    celsius: int = Field(ge=-50, le=50)


@sgl.function
def character(s):
    s += "A character as JSON: " + sgl.gen("json", max_tokens=64, regex=CHARACTER)


@sgl.function
def weather(s, city):
    s += f"The weather in {city} as JSON: "
    s += sgl.gen("weather", max_tokens=96, json_schema=Weather)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    print(json.loads(character.run(temperature=0.0)["json"]))
    print(weather.run("Paris", temperature=0.0)["weather"])
