"""Images and videos: reading them, their place in a prompt, and sending them."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from fastapi.responses import JSONResponse

import sgl_vllm as sgl
from sgl_vllm.lang.media import Media
from tests.unit.lang.conftest import BEGIN, render
from tests.unit.lang.media_server import drawn, spoken
from tests.unit.lang.scripted import ScriptedBackend, appending

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(20)]

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
JPEG = b"\xff\xd8\xff\xe0" + bytes(8)
MP4 = b"\x00\x00\x00\x18ftypmp42" + bytes(8)


def source_of(expr) -> Media:
    return expr.media


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (PNG, "image/png"),
        (JPEG, "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"BM1234", "image/bmp"),
        (b"RIFF0000WEBPVP8 ", "image/webp"),
        (b"\x00\x00\x00\x1cftypavif", "image/avif"),
        (b"\x00\x00\x00\x1cftypheic", "image/heic"),
        (b"II*\x00", "image/tiff"),
        (b"<svg/>", "image/svg+xml"),  # by the name of the file
    ],
)
def test_a_file_is_sent_with_the_type_of_its_beginning_whatever_its_name(tmp_path, data, kind):
    path = tmp_path / ("a.svg" if kind == "image/svg+xml" else "a.png")
    path.write_bytes(data)
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    for source in (path, str(path), url, *([data] if "svg" not in kind else [])):
        assert source_of(sgl.image(source)).url == url


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_a_pil_image_is_sent_as_png(mode):
    PIL = pytest.importorskip("PIL.Image")
    shown = source_of(sgl.image(PIL.new(mode, (2, 2))))
    assert base64.b64decode(shown.url.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")


def test_a_video_is_no_image_and_an_image_no_video(tmp_path):
    assert source_of(sgl.video(MP4)).url.startswith("data:video/mp4;base64,")
    for make, data in ((sgl.image, MP4), (sgl.video, PNG), (sgl.image, b"\x1a\x45\xdf\xa3")):
        with pytest.raises(ValueError, match="in a known format"):
            make(data)
    (tmp_path / "a.png").write_bytes(MP4)
    with pytest.raises(ValueError, match=r"the 20 bytes of a\.png are not an image"):
        sgl.image(tmp_path / "a.png")


def test_what_cannot_be_read_is_an_error_where_the_program_says_it(tmp_path):
    with pytest.raises(FileNotFoundError):
        sgl.image(str(tmp_path / "nothing.png"))
    for wrong in (None, 3, ["a"]):
        with pytest.raises(ValueError, match="takes a path, a URL or bytes"):
            sgl.image(wrong)
    with pytest.raises(ValueError, match="at least 1"):
        sgl.video(MP4, num_frames=0)


def urls(body):
    return [
        part[part["type"]]["url"]
        for message in body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] != "text"
    ]


def test_several_in_one_turn_and_in_several_turns_stand_where_they_were_put(server):
    """SGLang accepts one image per program (its issue 1708)."""

    @sgl.function
    def program(s):
        s += sgl.user("one " + sgl.image("http://h/1") + " two " + sgl.image("http://h/2"))
        s += sgl.assistant(sgl.gen("a"))
        with s.user():
            s += sgl.image("http://h/3")
            s += " three"
        s += sgl.assistant("I see " + sgl.gen("b"))

    state = program.run()
    first, second = server.calls
    assert first["messages"][0]["content"] == [
        {"type": "text", "text": "one "},
        {"type": "image_url", "image_url": {"url": "http://h/1"}},
        {"type": "text", "text": " two "},
        {"type": "image_url", "image_url": {"url": "http://h/2"}},
    ]
    assert urls(second) == ["http://h/1", "http://h/2", "http://h/3"]
    assert state.messages()[2]["content"][1] == {"type": "text", "text": " three"}
    assert state.text().startswith("one  two [")
    assert second["messages"][3] == {"role": "assistant", "content": "I see "}


@pytest.mark.parametrize("plugin", [False, True])
def test_a_select_after_an_image_sends_each_choice_with_the_image(server, plugin):
    server.plugin = plugin
    server.logprob = lambda token, position: -0.1 if chr(token) in "cat" else -3.0
    program = appending(
        sgl.user(sgl.image("http://h/1") + "what?"),
        sgl.assistant("a " + sgl.select("a", ["dog", "cat"])),
    )
    state = program.run()
    assert state["a"] == "cat"
    assert state.get_meta_info("a")["scores"] == pytest.approx([-3.0, -0.1])
    paths = {path for path, _ in server.requests}
    assert not paths & {"/v1/completions", "/v1/sgl/score"}
    chats = [body for path, body in server.requests if path.endswith("/chat/completions")]
    for body in chats:
        assert body["messages"][0]["content"][0]["image_url"] == {"url": "http://h/1"}
    ends = [(body["messages"][-1]["content"], body.get("prompt_logprobs")) for body in chats]
    assert sorted(ends[-2:]) == [("a cat", 0), ("a dog", 0)]
    # With the plugin, the prompt is computed once, and both are scored from its end on.
    assert [end for end in ends[:-2] if end == ("a ", None)] == [("a ", None)] * plugin
    starts = {body.get("vllm_xargs", {}).get("sgl_score_from") for body in chats[-2:]}
    assert starts == ({len(render(chats[0]))} if plugin else {None})


def test_a_select_after_an_image_by_likelihood_without_the_prompt_asks_for_the_text_alone(server):
    server.logprob = lambda token, position: -3.0 if position > 2 else -1.0

    @sgl.function
    def program(s):
        s += sgl.user(sgl.image("http://h/1") + "what?")
        method = sgl.unconditional_likelihood_normalized
        s += sgl.assistant(sgl.select("a", ["dog", "cat"], choices_method=method))

    program.run()
    alone = [body["prompt"] for path, body in server.requests if path.endswith("v1/completions")]
    assert alone == [[[BEGIN, *map(ord, "dog")], [BEGIN, *map(ord, "cat")]]]


def test_frames_of_a_video_are_asked_for_and_must_be_the_same_for_all(server):
    @sgl.function
    def program(s, other):
        s += sgl.user(sgl.video("http://h/1", 8) + sgl.video("http://h/2", other) + "what?")
        s += sgl.assistant(sgl.gen("a"))

    program.run(None)
    assert server.calls[0]["media_io_kwargs"] == {"video": {"num_frames": 8}}
    assert server.calls[0]["messages"][0]["content"][0]["type"] == "video_url"
    with pytest.raises(sgl.ProgramError, match="different num_frames"):
        program.run(4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_lets_no_client_choose_the_frames_is_named_with_the_flag(server, stream):
    """The words of vLLM 0.32, which name none of the program's."""
    refusal = JSONResponse(
        {
            "error": {
                "message": "Per-request media_io_kwargs are disabled by default because they can "
                "change multimodal media loading resource usage. Start the server with "
                "--trust-request-mm-kwargs only when clients are trusted."
            }
        },
        400,
    )
    server.fault = lambda path, body: refusal if "media_io_kwargs" in body else None

    @sgl.function
    def program(s, num_frames):
        s += sgl.user(sgl.video("http://h/1", num_frames) + "what?")
        s += sgl.assistant(sgl.gen("a"))

    with pytest.raises(sgl.ProgramError, match=r"num_frames of a video is not .*--trust-req") as e:
        program.run(8, stream=stream).sync()
    assert isinstance(e.value.__cause__, sgl.UnsupportedError)
    assert program.run(None, stream=stream)["a"]


def test_an_image_outside_of_a_turn_is_an_error_that_says_where_it_belongs():
    with pytest.raises(sgl.ProgramError, match=r"outside of a turn: put it in user\(\.\.\.\)"):
        appending("see " + sgl.image("http://h/1") + sgl.gen("a")).run()


# --- audio in ------------------------------------------------------------------------------------


def audio_part(source) -> dict[str, object]:
    program = appending(sgl.user(sgl.audio(source)))
    (part,) = program.run(backend=ScriptedBackend()).messages()[0]["content"]
    return part


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"RIFF\x24\0\0\0WAVEfmt ", "wav"),
        (b"ID3\x04\0\0\0\0\0\0", "mp3"),
        (b"\xff\xfb\x90\x64", "mp3"),
        (b"fLaC\0\0\0\x22", "flac"),
        (b"OggS\0\x02\0\0", "ogg"),
    ],
)
def test_the_format_of_audio_is_that_of_its_bytes(tmp_path: Path, data: bytes, name: str):
    wrong_name = tmp_path / ("a.mp3" if name == "wav" else "a.wav")
    wrong_name.write_bytes(data)
    in_base64 = base64.b64encode(data).decode()
    wanted = {"type": "input_audio", "input_audio": {"data": in_base64, "format": name}}
    for source in (data, wrong_name, str(wrong_name), f"data:audio/basic;base64,{in_base64}"):
        assert audio_part(source) == wanted
    url = "https://example.org/hare.wav"
    assert audio_part(url) == {"type": "audio_url", "audio_url": {"url": url}}


NO_AUDIO = "not audio in a known format: convert them to WAV, MP3"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: sgl.audio(b""), NO_AUDIO),
        (lambda: sgl.audio(drawn("a hare", 1, 1)), NO_AUDIO),
        (lambda: sgl.audio(b"\0\0\0\x18ftypmp42"), NO_AUDIO),
        (lambda: sgl.audio(3), "audio takes a path, a URL or bytes, not int"),  # type: ignore[arg-type]
        (lambda: sgl.audio(sgl.Media.of(drawn("a hare", 1, 1), "image")), r"not image\("),
        (lambda: sgl.audio("data:audio/wav;base64,!!"), "is not base64"),
        (lambda: sgl.transcribe("words", "https://h/a.wav"), "h/a.wav is not downloaded: pass the"),
        (lambda: sgl.speech("reply", "Hi", max_tokens=3), "leave out the text"),
        (lambda: sgl.speech("reply", speed=2.0), "are for a text"),
        (lambda: sgl.speech("reply", "Hi", format="pcm"), "wav, mp3, flac, opus, aac, not 'pcm'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_errors_where_the_program_has_them(make, says: str):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("backend", "source", "named"),
    [
        ("openai", b"fLaC\0\0\0\x22", "audio in audio/flac"),
        ("openai", "https://h/a.wav", "audio at a URL"),
        ("anthropic", spoken("hare"), "audio"),
    ],
)
def test_a_service_is_sent_only_audio_that_it_takes(backend, source, named: str):
    program = appending(sgl.user(sgl.audio(source)) + sgl.assistant(sgl.gen("answer")))
    backends = {
        "openai": sgl.OpenAI("gpt-audio", base_url="https://api.openai.com/v1"),
        "anthropic": sgl.Anthropic("claude", api_key="k"),
    }
    with pytest.raises(sgl.ProgramError, match=f"{named} is not supported") as raised:
        program.run(backend=backends[backend])
    assert isinstance(raised.value.__cause__, sgl.UnsupportedError)
