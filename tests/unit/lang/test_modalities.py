"""Speech, pictures, transcriptions and audio in prompts, through the official client against a
strict local service."""

from __future__ import annotations

import base64
import contextlib
import re
import struct
import threading
from pathlib import Path

import pytest
from fastapi.responses import JSONResponse

import sgl_vllm as sgl
from sgl_vllm.lang.backends.requests import MediaAnswer, MediaRequest
from sgl_vllm.lang.wav import with_length
from tests.unit.lang.media_server import MediaService, drawn, heard, serving, spoken
from tests.unit.lang.scripted import ScriptedBackend, appending

pytestmark = pytest.mark.timeout(20)

SPEECH, PICTURES = "/v1/audio/speech", "/v1/images/generations"
TRANSCRIPTIONS, CHATS = "/v1/audio/transcriptions", "/v1/chat/completions"


@pytest.fixture
def service():
    with serving(MediaService()) as service:
        yield service


@pytest.fixture
def backend(service):
    return sgl.OpenAI("chatter", base_url=f"{service.url}/v1", timeout_s=10, max_retries=0)


def speaking(name, text, **options):
    return sgl.speech(name, text, voice="alloy", model="speaker", **options)


# --- speech --------------------------------------------------------------------------------------


def test_a_text_is_spoken_and_the_variable_holds_a_wav_file(service, backend, tmp_path: Path):
    program = appending(
        "Hello.", speaking("reply", "Hello, hare.", instructions="cheerfully", speed=1.5), " Bye."
    )
    state = program.run(backend=backend)
    reply = state["reply"]
    assert heard(reply.data) == ("Hello, hare.", 0.12)
    assert (reply.kind, reply.media_type) == ("audio", "audio/wav")
    reply.save(tmp_path / "reply.wav")
    assert (tmp_path / "reply.wav").read_bytes() == spoken("Hello, hare.")
    assert state.text() == "Hello. Bye."
    assert "".join(state.text_iter("reply")) == "Hello, hare."
    assert state.usage == sgl.Usage(prompt_tokens=7, completion_tokens=30, calls=1)  # in headers
    (body,) = service.bodies(SPEECH)
    assert (body["model"], body["input"], body["voice"]) == ("speaker", "Hello, hare.", "alloy")
    assert (body["instructions"], body["speed"]) == ("cheerfully", 1.5)


def test_a_model_answers_aloud_and_the_transcript_is_the_text(service, backend):
    service.answer = "I heard: {said}"
    program = appending(
        sgl.user("say " + sgl.audio(spoken("hare"))),
        sgl.assistant(sgl.speech("reply", voice="alloy", max_tokens=9, temperature=0.5)),
        sgl.user("again"),
        sgl.assistant(sgl.gen("more")),
    )
    state = program.run(backend=backend)
    assert heard(state["reply"].data)[0] == "I heard: say  hare"
    assert state.messages()[1] == {"role": "assistant", "content": "I heard: say  hare"}
    assert state["more"].endswith("I heard: say  hare again")
    first, second = service.bodies(CHATS)
    assert first["modalities"] == ["text", "audio"]
    assert first["audio"] == {"voice": "alloy", "format": "wav"}
    assert (first["max_tokens"], first["temperature"]) == (9, 0.5)
    assert "modalities" not in second
    assert state.get_meta_info("reply")["finish_reason"] == "stop"
    assert state.usage.calls == 2


def test_a_spoken_answer_belongs_into_an_assistant_turn_and_is_not_cut_by_a_pattern(backend):
    with pytest.raises(sgl.ProgramError, match=r"speech 'reply' failed.*put it in assistant"):
        appending("text " + sgl.speech("reply", voice="alloy")).run(backend=backend)
    with pytest.raises(sgl.ProgramError, match="stop_regex cannot cut a spoken answer: use stop"):
        sgl.function(answer).run(backend=backend, stop_regex="x")


# --- pictures ------------------------------------------------------------------------------------


def test_a_picture_is_drawn_and_shown_to_the_model(service, backend):
    @sgl.function
    def program(s):
        s += sgl.user("A hare under a tree.")
        s += sgl.picture("drawing", size="40x24", model="painter", extra_body={"quality": "high"})
        s += sgl.user(sgl.image(s["drawing"]) + "Is this it?")
        s += sgl.assistant(sgl.gen("answer"))

    state = program.run(backend=backend)
    drawing = state["drawing"]
    assert drawing.data == drawn("A hare under a tree.", 40, 24)
    assert struct.unpack(">II", drawing.data[16:24]) == (40, 24)
    assert drawing.media_type == "image/png"
    (body,) = service.bodies(PICTURES)
    assert (body["prompt"], body["quality"]) == ("A hare under a tree.", "high")
    (chat,) = service.bodies(CHATS)
    assert chat["messages"][1]["content"][0]["image_url"]["url"] == drawing.url
    assert state.get_meta_info("drawing")["prompt_tokens"] == 9


# --- transcriptions ------------------------------------------------------------------------------


def test_what_is_said_is_appended_as_text(service, backend, tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(spoken("two hares"))
    program = appending(
        "He said: ",
        sgl.transcribe("words", tmp_path / "a.bin", language="en", hint="hares", model="listener"),
        ".",
    )
    state = program.run(backend=backend)
    assert state["words"] == "two hares"
    assert state.text() == "He said: two hares."
    (body, *_) = service.bodies(TRANSCRIPTIONS)
    assert body["file"] == spoken("two hares")
    assert (body["language"], body["prompt"]) == ("en", "hares")
    assert state.usage == sgl.Usage(calls=1, audio_seconds=0.09)
    service.reports_tokens = True
    usage = program.run(backend=backend).usage
    assert usage == sgl.Usage(prompt_tokens=20, completion_tokens=9, calls=1)


# --- audio in pieces -----------------------------------------------------------------------------


read_aloud = appending("Listen: " + speaking("reply", "one two three"))


answered_aloud = appending(sgl.user("Hi") + sgl.assistant(sgl.speech("reply", voice="alloy")))


@pytest.mark.parametrize("form", ["openai", "bytes"])
@pytest.mark.parametrize("program", [read_aloud, answered_aloud])
def test_each_piece_can_be_heard_before_the_next_is_sent(service, backend, program, form):
    """The service sends a piece only once the one before has been heard."""
    service.gate = threading.Semaphore(1)
    service.form = form
    service.answer = "one two three"
    state = program.run(backend=backend, stream=True)
    pieces = []
    for piece in state.audio_iter("reply"):
        pieces.append(piece)
        assert service.num_sent == len(pieces)
        service.gate.release()
    assert len(pieces) == 4
    header, samples = spoken("one two three")[:44], spoken("one two three")[44:]
    assert b"".join(pieces)[44:] == samples
    assert pieces[0][:4] + pieces[0][8:40] == header[:4] + header[8:40]
    assert state["reply"].data == header + samples
    assert heard(state["reply"].data)[0] == "one two three"


def test_a_complete_wav_file_gets_its_length_wherever_its_samples_begin():
    file = spoken("hare")
    unknown = b"\xff\xff\xff\xff"
    notes = b"LIST\x05\0\0\0INFOx\0"  # of an odd length, so padded
    endless = file[:4] + unknown + file[8:36] + notes + b"data" + unknown + file[44:]
    assert heard(with_length(endless))[0] == "hare"
    assert with_length(endless)[44 + len(notes) :] == file[44:]
    for complete in (file, b"", b"RIFF", file[:40], drawn("a hare", 2, 2)):
        assert with_length(complete) == complete


def test_pieces_in_the_form_of_vllm_omni_become_one_file(service, backend):
    service.form = "omni"
    service.answer = "one two three"
    state = answered_aloud.run(backend=backend, stream=True)
    assert b"".join(state.audio_iter("reply"))[44:] == spoken("one two three")[44:]
    assert (state["reply"].data, state.text()) == (spoken("one two three"), "Hione two three")


def test_text_and_audio_in_a_choice_each_are_one_answer(server):
    """As older versions of vLLM-Omni answer a chat that is not streamed."""

    def answer_twice(path, body):
        if path != CHATS:
            return None
        file = {"data": base64.b64encode(spoken("hare")).decode(), "transcript": ""}
        choices = [
            {"index": 0, "finish_reason": "stop", "message": {"content": "hare"}},
            {"index": 1, "finish_reason": "stop", "message": {"content": None, "audio": file}},
        ]
        return JSONResponse({"id": "c", "choices": choices, "usage": {"prompt_tokens": 1}})

    server.fault = answer_twice
    state = answered_aloud.run(backend=sgl.VLLM(server.url, timeout_s=10, max_retries=0))
    assert (heard(state["reply"].data)[0], state.text()) == ("hare", "Hihare")


def test_without_stream_the_file_is_one_piece(backend):
    state = read_aloud.run(backend=backend)
    assert list(state.audio_iter("reply")) == [spoken("one two three")]


def test_a_variable_without_a_file_has_no_audio(backend):
    state = appending(sgl.user("Hi") + sgl.assistant(sgl.gen("answer"))).run(backend=backend)
    with pytest.raises(TypeError, match="'answer' is of type str: it is no audio"):
        list(state.audio_iter("answer"))
    with pytest.raises(KeyError):
        list(state.audio_iter("other"))


@pytest.mark.parametrize(
    ("program", "reason", "says"),
    [
        (read_aloud, "", "stopped in the middle of an answer"),
        (answered_aloud, "", "stopped in the middle of an answer"),
        (read_aloud, "out of breath", "ended its answer with an error: out of breath"),
    ],
)
def test_speech_that_breaks_off_is_an_error_and_no_short_file(
    service, backend, program, reason, says
):
    service.break_off_after, service.reason = 2, reason
    service.answer = "one two three"
    state = program.run(backend=backend, stream=True)
    with pytest.raises(sgl.ProgramError, match=says):
        list(state.audio_iter("reply"))
    assert isinstance(state.error(), sgl.ProgramError)


def test_a_coroutine_reads_pieces_too(service, backend):
    @sgl.function
    async def program(s):
        s += speaking("reply", "one two three")
        s["pieces"] = [piece async for piece in s.audio_async_iter("reply")]

    state = program.run(backend=backend, stream=True)
    assert b"".join(state["pieces"])[44:] == spoken("one two three")[44:]
    assert state.usage == sgl.Usage(prompt_tokens=8, completion_tokens=31, calls=1)


def test_the_blocks_of_the_documentation_run(service, tmp_path, monkeypatch):
    page = (Path(sgl.__file__).parent.parent / "docs" / "language.md").read_text()
    section = page.split("\n## Audio, speech and pictures\n")[1].split("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{service.url}/v1")
    Path("question.wav").write_bytes(spoken("what is it"))
    names = {"sgl": sgl}
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(blocks[0], names)
    assert Path("reply.wav").read_bytes() == spoken("It is a hare.")
    exec(blocks[1], names)
    assert Path("reply.wav").read_bytes()[44:] == spoken("It is a hare.")[44:]
    assert [path for path, _ in service.requests][:3] == [CHATS, PICTURES, CHATS]


# --- what a service lacks ------------------------------------------------------------------------


def speak(s):
    s += speaking("x", "Hi")


def draw(s):
    s += sgl.picture("x", "A hare", model="painter")


def write_down(s):
    s += sgl.transcribe("x", spoken("Hi"), model="listener")


def answer(s):
    s += sgl.user("Hi") + sgl.assistant(sgl.speech("x", voice="alloy"))


OPERATIONS = {
    "speech": (speak, SPEECH),
    "picture": (draw, PICTURES),
    "transcribe": (write_down, TRANSCRIPTIONS),
    "a spoken answer": (answer, CHATS),
}


@pytest.mark.parametrize("feature", OPERATIONS)
def test_a_route_that_a_server_lacks_is_named(service, backend, feature: str):
    program, route = OPERATIONS[feature]
    service.lacks = (route,)
    with pytest.raises(sgl.ProgramError) as raised:
        sgl.function(program).run(backend=backend)
    cause = raised.value.__cause__
    assert isinstance(cause, sgl.UnsupportedError)
    assert cause.feature == feature
    assert f"answered 404: Not Found; use a server with {route} and a model that" in str(cause)


@pytest.mark.parametrize("feature", OPERATIONS)
@pytest.mark.parametrize(
    "other", [ScriptedBackend(), sgl.Anthropic("claude", api_key="k"), sgl.LiteLLM("m/m")]
)
def test_a_backend_without_the_route_names_it(other, feature: str):
    program, route = OPERATIONS[feature]
    with pytest.raises(sgl.ProgramError, match=f"use a backend for a server that has {route}"):
        sgl.function(program).run(backend=other)


def test_a_misspelled_field_is_the_services_error(backend):
    program = appending(sgl.picture("x", "A hare", model="painter", extra_body={"qualty": "low"}))
    with pytest.raises(sgl.ProgramError, match=r"answered 400: body.qualty: Extra inputs"):
        program.run(backend=backend)


def test_a_chat_model_that_does_not_speak_is_named(server, backend_of_vllm):
    with pytest.raises(sgl.ProgramError, match="answered without audio: use a model that speaks"):
        sgl.function(answer).run(backend=backend_of_vllm)


@pytest.fixture
def backend_of_vllm(server):
    """Of a stock server, which ignores `modalities`."""
    return sgl.VLLM(server.url, timeout_s=10, max_retries=0)


# --- a server for each modality ------------------------------------------------------------------


def test_each_modality_has_a_server_of_its_own_and_all_are_recorded(service, backend, tmp_path):
    names = ("speaker", "painter", "listener")
    with contextlib.ExitStack() as stack:
        services = {name: stack.enter_context(serving(MediaService())) for name in names}
        speaker, painter, listener = (
            sgl.VLLM(one.url, model=name, max_retries=0) for name, one in services.items()
        )
        combined = sgl.Combined(backend, speech=speaker, picture=painter, transcribe=listener)
        with sgl.Recorder(combined, tmp_path / "run.jsonl") as recorder:
            wanted = values_of(storybook.run("hare", backend=recorder))
    asked = {name: {path for path, _ in one.requests} for name, one in services.items()}
    assert asked == {"speaker": {SPEECH}, "painter": {PICTURES}, "listener": {TRANSCRIPTIONS}}
    assert [path for path, _ in service.requests] == [CHATS]
    assert values_of(storybook.run("hare", backend=sgl.Replay(tmp_path / "run.jsonl"))) == wanted


def test_the_keys_of_all_servers_stay_out_of_a_record(backend, tmp_path):
    class Loose(ScriptedBackend):
        secrets = ("sk-of-the-speaker",)

        async def media(self, request: MediaRequest) -> MediaAnswer:
            raise sgl.BackendError("sk-of-the-speaker and sk-of-the-chat are wrong")

    chat = sgl.OpenAI("chatter", api_key="sk-of-the-chat")
    with (
        sgl.Recorder(sgl.Combined(chat, speech=Loose()), tmp_path / "run.jsonl") as recorder,
        pytest.raises(sgl.ProgramError),
    ):
        read_aloud.run(backend=recorder)
    assert "*** and *** are wrong" in (tmp_path / "run.jsonl").read_text()


# --- with the rest of the language ---------------------------------------------------------------


@sgl.function
def storybook(s, animal):
    s += sgl.user(f"Tell me about a {animal}.")
    s += sgl.assistant(sgl.speech("reply", voice="alloy"))
    s += sgl.picture("drawing", f"A {animal}", size="16x8", model="painter")
    s += speaking("again", "Once more") + speaking("aloud", sgl.var("reply"))
    s += sgl.user("He said " + sgl.transcribe("words", sgl.var("again"), model="listener"))


def values_of(state) -> list[object]:
    names = ("reply", "drawing", "again", "aloud", "words")
    return [*(state[name] for name in names), state.text(), state.usage]


def test_a_streamed_run_is_replayed_without_the_service(service, backend, tmp_path):
    path = tmp_path / "run.jsonl"
    with sgl.Recorder(backend, path) as recorder:
        wanted = values_of(storybook.run("hare", backend=recorder, stream=True))
    replayed = storybook.run("hare", backend=sgl.Replay(path), stream=True)
    assert b"".join(replayed.audio_iter("reply")) == replayed["reply"].data
    assert values_of(replayed) == wanted
    assert len(service.requests) == 5
    in_base64 = base64.b64encode(drawn("A hare", 16, 8)).decode()
    assert f"data:image/png;base64,{in_base64}" in path.read_text()


def test_a_compiled_program_makes_the_same(service, backend):
    compiled = storybook.compile()
    assert values_of(compiled.run("hare", backend=backend)) == values_of(
        storybook.run("hare", backend=backend)
    )
    assert "speech 'reply'" in str(compiled.graph)
