"""A story with a picture, and read aloud. Both are made at the same time.

    python examples/storybook.py --model gpt-4o-mini --speaker gpt-4o-mini-tts \\
        --painter gpt-image-1-mini [--url http://127.0.0.1:8000/v1]

It needs a service that has OpenAI's routes for chats, speech and pictures. Where each has a server
of its own, as with vLLM-Omni, use sgl.Combined. It writes the files to --out, and a page that shows
the run.
"""

import argparse
from pathlib import Path

import sgl_vllm as sgl


@sgl.function
def storybook(
    s: sgl.ProgramState, animal: str, *, speaker: str, voice: str, painter: str, size: str
) -> None:
    s += sgl.user(f"Tell a story of two sentences about a {animal}.")
    s += sgl.assistant(sgl.gen("story", max_tokens=80))
    drawer, reader = s.fork(2)
    drawer += sgl.picture("drawing", sgl.var("story"), size=size, model=painter)
    reader += sgl.speech("reading", sgl.var("story"), voice=voice, model=speaker)
    s["drawing"], s["reading"] = drawer["drawing"], reader["reading"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of the service, by default OpenAI's")
    parser.add_argument("--model", required=True, help="for the story")
    parser.add_argument("--speaker", required=True, help="the model that speaks")
    parser.add_argument("--painter", required=True, help="the model that draws")
    parser.add_argument("--voice", default="alloy")
    parser.add_argument("--size", default="1024x1024", help="of the picture, in pixels")
    parser.add_argument("--out", type=Path, default=Path())
    given = parser.parse_args()
    backend = sgl.OpenAI(given.model, base_url=given.url)

    try:
        state = storybook.run(
            "hare",
            speaker=given.speaker,
            voice=given.voice,
            painter=given.painter,
            size=given.size,
            backend=backend,
        )
    except sgl.ProgramError as error:
        raise SystemExit(str(error)) from None
    print(state["story"])
    for name in ("drawing", "reading"):
        media = state[name]
        path = given.out / f"{name}.{media.media_type.partition('/')[2]}"
        media.save(path)
        print(f"{path}: {len(media.data):,} bytes")
    (given.out / "storybook.html").write_text(sgl.to_page(state, "A storybook"), encoding="utf-8")
    print(state.usage)
