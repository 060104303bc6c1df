"""Two questions about an image, asked on branches that share it.

    vllm serve Qwen/Qwen2.5-VL-3B-Instruct --plugin sgl_vllm
    python examples/image_question.py [--url http://127.0.0.1:8000] [--image PATH_OR_URL]

It needs a vision-language model; the demo's model reads no images, and says so. Without --image the
picture is drawn here (with Pillow): a red circle in a white square.
"""

import argparse
from typing import Any

import sgl_vllm as sgl

QUESTIONS = ["Which shape is in the image?", "Which color has it?"]


@sgl.function
def ask(s: sgl.ProgramState, picture: Any) -> None:
    s += sgl.user(sgl.image(picture) + "Look at this image.")
    forks = s.fork(len(QUESTIONS))
    forks += lambda i: sgl.user(QUESTIONS[i])
    forks += sgl.assistant(sgl.gen("answer", max_tokens=32))
    forks.join()


def red_circle() -> Any:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise SystemExit(
            "drawing the picture needs Pillow: pip install pillow, or --image PATH"
        ) from None
    picture = Image.new("RGB", (112, 112), "white")
    ImageDraw.Draw(picture).ellipse((16, 16, 96, 96), fill="red")
    return picture


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--image", help="a file or an http(s) URL")
    arguments = parser.parse_args()
    sgl.set_default_backend(sgl.VLLM(arguments.url))

    try:
        state = ask.run(arguments.image or red_circle(), temperature=0.0)
    except sgl.ProgramError as error:
        raise SystemExit(f"{error}\nThis example needs a vision-language model.") from None
    for question, answer in zip(QUESTIONS, state["answer"], strict=True):
        print(f"{question} {answer}")
    print(state.usage)
