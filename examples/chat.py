"""A conversation of two turns. The chat template is the server's.

python examples/chat.py [--url http://127.0.0.1:8000]
"""

import argparse

import sgl_vllm as sgl


@sgl.function
def conversation(s: sgl.ProgramState, first: str, second: str) -> None:
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("first_answer", max_tokens=32))
    s += sgl.user(second)
    with s.assistant():  # a turn in pieces: the model goes on after these words
        s += "The capital of Japan is" + sgl.gen("second_answer", max_tokens=16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sgl.set_default_backend(sgl.VLLM(parser.parse_args().url))

    state = conversation.run("What is the capital of France?", "And in Japan?", temperature=0.0)
    for message in state.messages():
        print(f"{message['role']}: {message['content']}")
    print(state.usage)
