"""Backends under SGLang's names: their arguments, and methods that do not have to be awaited."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import sgl_vllm as core
import sgl_vllm.sglang as sgl
from sgl_vllm.sglang import launch_server
from sgl_vllm.sglang.backends import BaseBackend, get_chat_template
from tests.unit.lang.conftest import FakeServer
from tests.unit.lang.services import ANTHROPIC_ROUTES, OPENAI_ROUTES, Service, serving


@sgl.function
def complete(s):
    s += "Say: " + sgl.gen("word")


@sgl.function
def chat(s):
    s += sgl.user("Hello.")
    s += sgl.assistant(sgl.gen("word"))


# --- a server ------------------------------------------------------------------------------------


def test_an_endpoint_describes_its_server(
    server: FakeServer, endpoint: sgl.RuntimeEndpoint
) -> None:
    server.plugin = True
    assert endpoint.model_info["model_path"] == endpoint.get_model_name() == "fake"
    info = sgl.get_server_info()
    assert info is not None
    assert info["version"] == "0.32.0"
    assert info["internal_states"][0]["hit_tokens"] == 7
    endpoint.flush_cache()
    sgl.flush_cache()
    sgl.set_default_backend(core.VLLM(server.url))  # a backend of the language itself
    sgl.flush_cache()
    assert len(server.bodies("/v1/sgl/flush_cache")) == 3
    info = sgl.get_server_info()
    assert info is not None and info["tokenizer_path"] == "fake"


def test_a_prefix_is_cached(server: FakeServer, endpoint: sgl.RuntimeEndpoint) -> None:
    endpoint.cache_prefix("A long beginning.")
    assert server.hints[0]["prompt"] == "A long beginning."


def test_a_chat_template_is_named_and_has_no_effect(server: FakeServer) -> None:
    with pytest.warns(UserWarning, match="renders chats with its own template"):
        endpoint = sgl.RuntimeEndpoint(server.url, chat_template_name="llama-3-instruct")
    assert endpoint.chat_template.name == endpoint.get_chat_template().name == "llama-3-instruct"
    with pytest.warns(UserWarning, match="chatml has no effect") as warned:
        endpoint.chat_template = get_chat_template("chatml")
    assert [warning.filename for warning in warned] == [__file__]
    assert endpoint.chat_template.name == "chatml"
    assert complete.run_batch([{}], backend=endpoint)[0]["word"] == "[5]"


def test_a_backend_without_a_service_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="BaseBackend has no backend"):
        complete.run(backend=BaseBackend())
    monkeypatch.setattr(sgl.global_config, "default_backend", None)
    assert (sgl.flush_cache(), sgl.get_server_info()) == (False, None)


# --- a server that the program starts -------------------------------------------------------------


def test_an_argument_without_an_option_of_vllms_is_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="no option for schedule_policy, which is ignored$"):
        found = launch_server.model_and_arguments({"model_path": "m", "schedule_policy": "lpm"})
    with pytest.warns(UserWarning, match=r"no option for tp_sise, .*; did you mean tp_size\?$"):
        launch_server.model_and_arguments({"model_path": "m", "tp_sise": 2})
    assert found == ("m", ["--enable-prompt-tokens-details"])


def test_sglangs_command_line_starts_vllms_server() -> None:
    words = "--model-path m --host 0.0.0.0 --port 80 --mem-fraction-static=0.5 --disable-cuda-graph"
    command = launch_server.server_of(words.split()).command
    assert command[command.index("serve") + 1] == "m"
    assert command[command.index("--plugin") :] == [
        *("--plugin", "sgl_vllm", "--enable-prompt-tokens-details"),
        *("--gpu-memory-utilization", "0.5", "--enforce-eager"),
        *("--host", "0.0.0.0", "--port", "80"),
    ]


@pytest.mark.parametrize(
    "make, problem",
    [
        (lambda: sgl.Runtime(tp_size=2), "pass model_path"),
        (lambda: sgl.OpenAI("gpt-4", is_azure=True, api_key="k"), "Azure needs azure_endpoint"),
        (lambda: sgl.VertexAI("gemini-pro"), "GCP_PROJECT_ID or GEMINI_API_KEY"),
    ],
)
def test_what_is_missing_is_named(make: Any, problem: str, monkeypatch: Any) -> None:
    for name in ("AZURE_OPENAI_ENDPOINT", "GCP_PROJECT_ID", "GEMINI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((TypeError, ValueError), match=problem):
        make()


# --- services ------------------------------------------------------------------------------------

DEPLOYMENT = "/openai/deployments/gpt-4"
AZURE_ROUTES = {f"{DEPLOYMENT}/chat/completions": OPENAI_ROUTES["/v1/chat/completions"]}


@pytest.fixture
def openai() -> Iterator[Service]:
    with serving(Service(), OPENAI_ROUTES | AZURE_ROUTES | ANTHROPIC_ROUTES) as service:
        yield service


def test_openai_takes_the_options_of_its_client_and_counts_tokens(openai: Service) -> None:
    backend = sgl.OpenAI(
        model_name="gpt-4",
        api_key="k",
        base_url=f"{openai.url}/v1",
        organization="org-1",
        max_retries=0,
    )
    assert chat.run(backend=backend)["word"] == "fine"
    ((_, body, headers),) = openai.requests
    assert body["model"] == "gpt-4"
    assert headers["openai-organization"] == "org-1"
    assert headers["authorization"] == "Bearer k"
    used = backend.token_usage
    assert used.prompt_tokens > 0 and used.completion_tokens > 0
    used.reset()
    assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (0, 0)


def test_a_misspelled_option_of_openais_client_is_answered_with_the_nearest() -> None:
    backend = sgl.OpenAI("gpt-4", api_key="k", organisation="org-1")
    with pytest.raises(Exception, match="'organisation'; did you mean organization"):
        chat.run(backend=backend)


def test_azure_is_called_at_its_deployment_with_its_key(openai: Service) -> None:
    backend = sgl.OpenAI(
        model_name="gpt-4",
        is_azure=True,
        api_key="k",
        api_version="2024-02-01",
        azure_endpoint=openai.url,
    )
    assert chat.run(backend=backend)["word"] == "fine"
    ((path, body, headers),) = openai.requests
    assert (path, body["model"]) == (f"{DEPLOYMENT}/chat/completions", "gpt-4")
    assert headers["api-key"] == "k" and "authorization" not in headers
    assert backend._openai.new_client().default_query == {"api-version": "2024-02-01"}


@pytest.mark.parametrize(
    "text, made, value",
    [("24 hours", sgl.gen_int("x"), "24"), (' "Paris", France', sgl.gen_string("x"), '"Paris"')],
)
def test_a_completion_models_text_is_cut_to_the_literal(
    openai: Service, text: str, made: Any, value: str
) -> None:
    @sgl.function
    def program(s):
        s += "It is " + made

    openai.reply = lambda body: text
    backend = sgl.OpenAI("gpt-3.5-turbo-instruct", api_key="k", base_url=f"{openai.url}/v1")
    state = program.run(backend=backend)
    assert state["x"] == value
    assert state.text() == f"It is {value}"
    openai.reply = lambda body: "no literal"
    with pytest.raises(core.ProgramError, match="does not begin with a literal"):
        program.run(backend=backend)


def test_a_completion_model_gets_turns_as_text(openai: Service) -> None:
    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        s += sgl.user("Hello.")
        s += sgl.assistant("Well, " + sgl.gen("word"))
        s += sgl.user("True or false?")
        s += sgl.assistant(sgl.gen("last"))

    openai.reply = lambda body: "fine"
    backend = sgl.OpenAI("gpt-3.5-turbo-instruct", api_key="k", base_url=f"{openai.url}/v1")
    state = program.run(backend=backend)
    first = "SYSTEM:Be brief.\nUSER:Hello.\nASSISTANT:Well, "
    second = f"{first}fine\nUSER:True or false?\nASSISTANT:"
    assert [body["prompt"] for body in openai.bodies] == [first, second]
    assert state.messages()[2] == {"role": "assistant", "content": "Well, fine"}


def test_anthropic_gets_a_prompt_without_roles_as_a_user_turn(openai: Service) -> None:
    backend = sgl.Anthropic("claude", api_key="k", base_url=openai.url)
    assert complete.run(backend=backend)["word"] == "fine"
    assert openai.body["messages"] == [{"role": "user", "content": "Say: "}]


def test_vertex_ai_is_called_through_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    class Answer:
        def model_dump(self) -> dict[str, Any]:
            message = {"role": "assistant", "content": "fine"}
            return {"choices": [{"message": message, "finish_reason": "stop"}]}

    async def acompletion(**call: Any) -> Answer:
        calls.append(call)
        return Answer()

    module = types.ModuleType("litellm")
    vars(module)["acompletion"] = acompletion
    monkeypatch.setitem(sys.modules, "litellm", module)
    monkeypatch.setenv("GCP_PROJECT_ID", "p")
    monkeypatch.setenv("GCP_LOCATION", "us-central1")
    assert complete.run(backend=sgl.VertexAI("gemini-pro"))["word"] == "fine"
    (call,) = calls
    assert call["model"] == "vertex_ai/gemini-pro"
    assert (call["vertex_project"], call["vertex_location"]) == ("p", "us-central1")
    assert call["messages"] == [{"role": "user", "content": "Say: "}]
    monkeypatch.delenv("GCP_PROJECT_ID")
    monkeypatch.setenv("GEMINI_API_KEY", "k")
    assert complete.run(backend=sgl.VertexAI("gemini-pro"))["word"] == "fine"
    assert calls[1]["model"] == "gemini/gemini-pro"
    backend = sgl.LiteLLM("mistral/x", organization="o", default_headers={"a": "b"})
    assert complete.run(backend=backend)["word"] == "fine"
    assert (calls[2]["organization"], calls[2]["extra_headers"]) == ("o", {"a": "b"})
