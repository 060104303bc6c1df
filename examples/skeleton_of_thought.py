"""Skeleton of thought: write the list first, then expand all of its points in parallel.

    python examples/skeleton_of_thought.py [--url http://127.0.0.1:8000]

A long answer takes as long as its longest point instead of as long as all of them.
"""

import argparse

import sgl_vllm as sgl


@sgl.function
def skeleton_of_thought(s: sgl.ProgramState, topic: str) -> str:
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(f"Give three tips for {topic}.")
    s += sgl.assistant(sgl.gen("skeleton", max_tokens=64))
    points = s["skeleton"].splitlines()  # the only place that waits before the fork

    forks = s.fork(len(points))
    forks += lambda i: sgl.user(f"Expand tip {i + 1}.")
    forks += sgl.assistant(sgl.gen("paragraph", max_tokens=48))
    forks.join()
    return "\n".join(f"{i}. {paragraph}" for i, paragraph in enumerate(s["paragraph"], 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    state = skeleton_of_thought.run("staying healthy", temperature=0.0)
    print(state["skeleton"], state.ret_value, state.usage, sep="\n\n")
