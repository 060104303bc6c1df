"""An essay judge: branch into several dimensions, judge each, merge into a grade.

    python examples/essay_judge.py [--url http://127.0.0.1:8000]

The branches share the conversation up to the fork, the essay included. It is sent to the server
once, ahead of them, and every branch finds it in the prefix cache.
"""

import argparse

import sgl_vllm as sgl

ESSAY = (
    "The sea is wide and blue. Small boats sail across the waves. In the evening the water turns "
    "gold. I think the sea is wonderful."
)
DIMENSIONS = ["clarity", "style", "content", "originality", "evidence"]


@sgl.function
def judge(s: sgl.ProgramState, essay: str) -> None:
    s += sgl.system("You are an expert.")
    s += sgl.user(f"Rate this text from 1 to 5.\n{essay}")
    s += sgl.assistant(sgl.select("impression", ["1", "2", "3", "4", "5"]))

    forks = s.fork(len(DIMENSIONS))
    forks += lambda i: sgl.user(f"Judge the {DIMENSIONS[i]} of the text.")
    forks += sgl.assistant(sgl.gen("judgment", max_tokens=24))
    forks.join()  # s["judgment"] is now the list of all five

    s += sgl.user("These are the judgments:\n" + "\n".join(s["judgment"]) + "\nWhy?")
    s += sgl.assistant(sgl.gen("reason", max_tokens=32))
    s += sgl.user(f"Give this text a score from 1 to 5.\n\n{essay}")
    s += sgl.assistant(sgl.gen("grade", max_tokens=1, regex="[1-5]"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    state = judge.run(ESSAY, temperature=0.0)
    for dimension, judgment in zip(DIMENSIONS, state["judgment"], strict=True):
        print(f"{dimension:12} {judgment}")
    print(f"first impression {state['impression']}, grade {state['grade']}: {state['reason']}")
    print(state.usage)
