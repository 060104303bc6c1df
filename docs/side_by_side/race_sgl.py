"""One question in three wordings; the first short answer ends the others: in the language."""

import sys

import sgl_vllm as sgl

WORDINGS = ["What is the capital of {}? One word, please.", "Describe {}.", "Tell me about {}."]


@sgl.function
def capital(s, country):
    s += sgl.system("You are a helpful assistant.")
    forks = s.fork(len(WORDINGS))
    forks += lambda i: sgl.user(WORDINGS[i].format(country))
    forks += sgl.assistant(sgl.gen("answer", max_tokens=48))
    winner = forks.first(lambda branch: len(branch["answer"].split()) <= 3)
    winner += sgl.user("What do people eat there?") + sgl.assistant(sgl.gen("dish", max_tokens=24))
    return winner["answer"], winner["dish"]


sgl.set_default_backend(sgl.VLLM(sys.argv[1]))
for state in capital.run_batch([("France",), ("Japan",)], temperature=0, num_threads=8):
    print(*state.ret_value)
