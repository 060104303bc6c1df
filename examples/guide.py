"""A guide to a country: turns of one conversation, a fork whose branches share it, and a select.

    python examples/guide.py [--url http://127.0.0.1:8000]

The program of the README. It prints what the server found in its cache and what it did not have to
decode. A server may tell its clients of cached tokens in whole blocks only; the line then says so.
"""

import argparse

import sgl_vllm as sgl

CARD = r'\{"name": "[A-Z][a-z]+", "capital": "[A-Z][a-z]+"\}'


@sgl.function
def guide(s: sgl.ProgramState, country: str) -> None:
    s += sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(sgl.gen("capital", max_tokens=24))

    branches = s.fork(2)  # both share the conversation so far, in the server's cache too
    for branch, topic in zip(branches, ("food", "weather"), strict=True):
        branch += sgl.user(f"Give one tip about {topic} in {country}.")
        branch += sgl.assistant(sgl.gen("tip", max_tokens=32))
    branches.join()  # s["tip"] is the list of both

    s += sgl.user(f"Fill in a card for the country {country} as JSON.")
    s += sgl.assistant(sgl.gen("card", max_tokens=64, regex=CARD))  # what is forced is not decoded
    s += sgl.user(f"Choose one: Europe, Asia, Africa, America. Where is {country}?")
    s += sgl.assistant(sgl.select("continent", ["Europe", "Asia", "Africa", "America"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    for country in ("Peru", "Kenya"):
        state = guide.run(country, temperature=0)
        print(state["capital"], "|", state["card"], "|", state["continent"])
        print(state.usage)


if __name__ == "__main__":
    main()
