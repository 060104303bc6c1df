"""A ReAct agent: thoughts, actions, and what a tool answers, until it says that it is done.

    python examples/react_agent.py [--url http://127.0.0.1:8000]

`sgl.tool` runs a Python function with variables of the program as arguments and puts its result
into the prompt. The kind of action is a select, so that it can be nothing but one of the two.
"""

import argparse

import sgl_vllm as sgl

FACTS = {
    "Peru": "The capital of Peru is Lima.",
    "Kenya": "People in Kenya speak Swahili.",
    "Japan": "People in Japan eat sushi.",
}
SOLVED = """\
Question: What is the capital of France?
Thought 1: I need to search France and find its capital.
Action 1: Search[France]
Observation 1: The capital of France is Paris.
Thought 2: Paris is the answer.
Action 2: Finish[Paris]

"""


def search(subject: str) -> str:
    return FACTS.get(subject, f"Nothing is known about {subject}.")


@sgl.function
def react(s: sgl.ProgramState, question: str, max_steps: int = 4) -> str | None:
    s += SOLVED + f"Question: {question}\n"
    for step in range(1, max_steps + 1):
        s += f"Thought {step}:" + sgl.gen("thought", max_tokens=32, stop="\n")
        s += f"\nAction {step}:" + sgl.select("action", [" Search", " Finish"])
        s += "[" + sgl.gen("argument", max_tokens=16, stop="]") + "]\n"
        if s["action"] == " Finish":
            return str(s["argument"])
        s += f"Observation {step}: " + sgl.tool("found", search, sgl.var("argument")) + "\n"
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    questions = ["What is the capital of Peru?", "Which language do people speak in Kenya?"]
    for state in react.run_batch([(q,) for q in questions], temperature=0.0):
        print(state.text().removeprefix(SOLVED))
        print(f"answer: {state.ret_value}\n{state.usage}\n")
