"""A caption for a video, and a title for the caption.

    vllm serve Qwen/Qwen2.5-VL-3B-Instruct --plugin sgl_vllm
    python examples/video_caption.py [--url http://127.0.0.1:8000] [--video PATH_OR_URL]

It needs a vision-language model; the demo's model sees no videos, and says so. Without --video a
second of film is made here (with OpenCV): a white ball that rolls from left to right. A server lets
programs choose --num-frames only if it was started with `--trust-request-mm-kwargs`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import sgl_vllm as sgl


@sgl.function
def caption(s: sgl.ProgramState, film: Any, num_frames: int | None) -> None:
    s += sgl.user(sgl.video(film, num_frames=num_frames) + "Describe this video in a sentence.")
    s += sgl.assistant(sgl.gen("caption", max_tokens=48))
    s += sgl.user("Give it a title.")
    s += sgl.assistant(sgl.gen("title", max_tokens=16, stop="\n"))


def rolling_ball() -> bytes:
    try:
        import cv2
        import numpy as np
    except ImportError:
        raise SystemExit(
            "making the film needs OpenCV: pip install opencv-python, or --video PATH"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ball.mp4"
        size = (112, 112)
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 8, size)
        for step in range(8):
            frame = np.zeros((*size, 3), dtype=np.uint8)
            cv2.circle(frame, (12 + 12 * step, 56), 10, (255, 255, 255), thickness=-1)
            writer.write(frame)
        writer.release()
        return path.read_bytes()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--video", help="a file or an http(s) URL")
    parser.add_argument("--num-frames", type=int, help="frames that the model sees")
    arguments = parser.parse_args()
    sgl.set_default_backend(sgl.VLLM(arguments.url))

    film = arguments.video or rolling_ball()
    try:
        state = caption.run(film, arguments.num_frames, temperature=0.0)
    except sgl.ProgramError as error:
        raise SystemExit(
            f"This example needs a vision-language model that takes videos.\n{error}"
        ) from None
    print("caption:", state["caption"])
    print("title:", state["title"])
    print(state.usage)
