"""Essays are judged in three dimensions in parallel, then graded: in the language."""

import sys

import sgl_vllm as sgl

ESSAYS = ["The sea is wide and blue. The trip was wonderful.", "The film was dull."]
DIMENSIONS = ["clarity", "style", "content"]


@sgl.function
def judge(s, essay):
    s += sgl.system("You are an expert.")
    s += sgl.user(f"Give this text a score from 1 to 5.\n\n{essay}")
    s += sgl.assistant("The score is " + sgl.gen("score", regex="[1-5]"))
    forks = s.fork(len(DIMENSIONS))
    forks += lambda i: sgl.user(f"Judge the {DIMENSIONS[i]} of the text.")
    forks += sgl.assistant(sgl.gen("judgment", max_tokens=24))
    forks.join()
    s += sgl.user("\n".join(s["judgment"]) + "\nWhy?")
    s += sgl.assistant(sgl.gen("reason", max_tokens=32))


sgl.set_default_backend(sgl.VLLM(sys.argv[1]))
for state in judge.run_batch([(essay,) for essay in ESSAYS], temperature=0, num_threads=8):
    print(state["score"], state["judgment"], state["reason"])
