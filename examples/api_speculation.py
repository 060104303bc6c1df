"""API speculative execution: fewer calls where only an API can be had.

    python examples/api_speculation.py [--url http://127.0.0.1:8000]

With `num_api_spec_tokens`, a generation runs on past its end, and what the model has written there
answers the program's next texts and generations, as long as they match. The variables are the
same; the calls are fewer, and each call saved is a whole prompt that is not paid for again.
"""

import argparse

import sgl_vllm as sgl


def describe(s: sgl.ProgramState, name: str) -> None:
    s += sgl.user(f"Tell me about {name}.")
    with s.assistant():
        s += f"{name} is" + sgl.gen("age", max_tokens=8, stop=" years old.")
        s += " years old. She is a" + sgl.gen("job", max_tokens=8, stop=" and")
        s += " and lives in" + sgl.gen("city", max_tokens=8, stop=".")
        s += ". She has a" + sgl.gen("pet", max_tokens=8, stop=".") + "."


call_by_call = sgl.function(describe)
speculating = sgl.function(num_api_spec_tokens=32)(describe)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    for label, program in {"call by call": call_by_call, "speculating": speculating}.items():
        state = program.run("Emma", temperature=0.0)
        usage = state.usage
        print(f"{label:13}", *(state[name].strip() for name in ("age", "job", "city", "pet")))
        print(f"{'':13} {usage.calls} calls, {usage.prompt_tokens} prompt tokens,")
        print(f"{'':13} saved {usage.saved_calls} calls, {usage.saved_prompt_tokens} tokens")
