"""Tips on a topic, each worked out on a branch of its own, then gathered.

    python examples/fork_join.py [--url http://127.0.0.1:8000]

The branches share the prompt up to the fork. It is sent to the server once, ahead of them.
"""

import argparse

import sgl_vllm as sgl

TIPS = ["eat well", "sleep enough", "move every day"]


@sgl.function
def advice(s, topic):
    s += f"Here are {len(TIPS)} tips on how to {topic}.\n"
    s += "".join(f"{i}. {tip}\n" for i, tip in enumerate(TIPS, 1))
    forks = s.fork(len(TIPS))
    forks += lambda i: f"More on tip {i + 1}, {TIPS[i]}:"
    forks += sgl.gen("detail", max_tokens=24, stop="\n")
    forks.join()
    for tip, detail in zip(TIPS, s["detail"], strict=True):
        s += f"- {tip}:{detail}\n"
    s += "In one sentence:" + sgl.gen("summary", max_tokens=24, stop="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    state = advice.run("stay healthy", temperature=0.0)
    print(state.text())
    print(state.usage)
