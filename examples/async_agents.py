"""Agents as coroutines: several at once, each racing branches and keeping the first that will do.

    python examples/async_agents.py [--url http://127.0.0.1:8000]

In an `async def` program reading is awaited, and `group.first` gives the first finished branch that
a predicate accepts. The others are cancelled at once, their requests on the server included.
"""

import argparse
import asyncio

import sgl_vllm as sgl

WORDINGS = [
    "What is the capital of {country}? Answer in one word.",
    "Name the capital of {country}.",
    "Tell me about {country}.",
]


@sgl.function
async def find_capital(s: sgl.AsyncProgramState, country: str) -> str | None:
    async def is_short(branch: sgl.AsyncProgramState) -> bool:
        return len((await branch["answer"]).split()) <= 3

    s += sgl.system("You are a helpful assistant.")
    forks = s.fork(len(WORDINGS))
    forks += lambda i: sgl.user(WORDINGS[i].format(country=country))
    forks += sgl.assistant(sgl.gen("answer", max_tokens=48))
    winner = await forks.first(is_short)
    return None if winner is None else str(await winner["answer"])


async def main() -> None:
    countries = ["France", "Japan", "Egypt", "Brazil"]
    agents = [find_capital.run_async(country, temperature=0.0) for country in countries]
    for country, state in zip(countries, await asyncio.gather(*agents), strict=True):
        print(f"{country}: {state.ret_value}  ({state.usage.calls} calls)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))
    asyncio.run(main())
