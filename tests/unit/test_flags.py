"""The plugin's flags on vLLM's command line: what is refused, with which line, and how early."""

from __future__ import annotations

import argparse

import pytest

from sgl_vllm import flags
from sgl_vllm.vllm_api.versions import InstalledVllm


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """A parser like that of `vllm serve`, with what the plugin looks at."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("SGL_VLLM_CONFIG", raising=False)
    monkeypatch.setattr(flags, "installation_problem", lambda: None)
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--additional-config", type=eval)
    parser.add_argument("--scheduler-cls")
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--uds")
    parser.add_argument("--api-key", nargs="*")
    flags.declare(parser)
    return parser


def parse(serve: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    parsed = serve.parse_args(words)
    flags.refuse_early(serve, parsed)
    return parsed


def refusal(
    serve: argparse.ArgumentParser, words: list[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """What is printed, without the name of the command; the exit status is checked."""
    with pytest.raises(SystemExit) as ended:
        parse(serve, words)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("vllm: error: ")
    return printed.err.removeprefix("vllm: error: ").removesuffix("\n")


ON = ["MODEL", "--plugin", "sgl_vllm"]
UNKNOWN = "unknown option jump_foward; did you mean jump_forward?"


def test_a_bad_option_in_the_environment_is_refused_too(serve, capsys, monkeypatch) -> None:
    monkeypatch.setenv("SGL_VLLM_CONFIG", "jump_foward=false")
    assert parse(serve, ["MODEL"]).model_tag == "MODEL"  # the plugin is not requested
    assert refusal(serve, ON, capsys) == UNKNOWN
    monkeypatch.setenv("VLLM_PLUGINS", "sgl_vllm")
    assert refusal(serve, ["MODEL"], capsys) == UNKNOWN


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{bad", "environment variable SGL_VLLM_CONFIG: '{bad' is not valid JSON"),
        ("radix", "environment variable SGL_VLLM_CONFIG takes a JSON object or key=value pairs"),
        ("radix=false select=false", "environment variable SGL_VLLM_CONFIG takes one key=value"),
        ("tenant_from=header:a=b", "tenant_from must be none, api_key or header:NAME, not"),
    ],
)
def test_malformed_text_in_the_environment_is_refused_too(
    serve, capsys, monkeypatch, text, says
) -> None:
    monkeypatch.setenv("SGL_VLLM_CONFIG", text)
    assert refusal(serve, ON, capsys).startswith(says)


@pytest.mark.parametrize(
    "words",
    [
        ["--plugin", "sgl_vllm", "org/model"],
        ["--plugin", "sgl_vllm", "--plugin-config", "radix=true", "org/model"],
        ["--plugin-config", "radix=true", "org/model", "--plugin", "sgl_vllm"],
        ["--plugin", "sgl_vllm", "--plugin-config", '{"radix":true}', "./models/a=b"],
    ],
)
def test_a_model_behind_the_flags_is_told_where_it_belongs(serve, capsys, words) -> None:
    model = next(word for word in words if "/" in word)
    expected = f"write {model} before --plugin: vllm serve {model} --plugin sgl_vllm"
    assert refusal(serve, words, capsys) == expected


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["MODEL", "--plugin", "sglang"], "--plugin sglang: --plugin accepts only sgl_vllm"),
        ([*ON, "other"], "--plugin other: --plugin accepts only sgl_vllm"),
        ([*ON, "radix=false"], "write --plugin-config before radix=false"),
        (["MODEL", "--plugin-config", "radix=false"], "--plugin-config has no effect without"),
        (
            ["--plugin", "sgl_vllm", "--plugin-config", "radix"],  # vLLM has a model by default
            "--plugin-config takes a JSON object or key=value pairs, not 'radix'",
        ),
        (
            ["MODEL", "--plugin", "SGL-vLLM"],
            "--plugin SGL-vLLM: --plugin accepts only sgl_vllm; did",
        ),
        (
            [*ON, "--plugin-config", '{"a":' + "[" * 100_000],
            "--plugin-config: the JSON is nested too",
        ),
        ([*ON, "--scheduler-cls", "my.Scheduler"], "sgl_vllm sets its own scheduler class"),
        (
            ["MODEL", "--additional-config", '{"sgl_vllm": "radix"}'],
            "additional_config: 'sgl_vllm' must be an object",
        ),
    ],
)
def test_other_misuse_is_refused_with_what_to_do(serve, capsys, words, says) -> None:
    printed = refusal(serve, words, capsys)
    assert printed.startswith(says) and "\n" not in printed


def test_an_installation_that_cannot_work_is_refused_before_the_model(
    serve, capsys, monkeypatch
) -> None:
    monkeypatch.undo()
    old = InstalledVllm("vllm", "0.20.1", "cuda")
    monkeypatch.setattr("sgl_vllm.vllm_api.versions.installed_vllm", lambda: old)
    printed = refusal(serve, ON, capsys)
    assert "vllm 0.20.1 is installed, which is not supported; use vLLM 0.31 to 0.33" in printed


def test_flags_of_others_are_left_to_vllm(serve) -> None:
    parsed = parse(serve, ["MODEL", "--additional-config", "[1]"])
    assert parsed.additional_config == [1] and not parsed.enable_prompt_tokens_details


def test_good_flags_are_parsed_and_report_cached_tokens(serve) -> None:
    parsed = parse(serve, [*ON, "--plugin-config", "radix=true"])
    assert parsed.model_tag == "MODEL" and parsed.enable_prompt_tokens_details
    without = ["--plugin-config", "cached_tokens_in_usage=false"]
    assert not parse(serve, [*ON, *without]).enable_prompt_tokens_details


LOCAL = "--host 127.0.0.1"


@pytest.mark.parametrize(
    ("words", "counts_exactly"),
    [
        (LOCAL, True),
        ("--host ::1", True),
        ("--plugin-config why_exact=true", True),
        ("", False),
        ("--host localhost.example.com", False),
        (f"{LOCAL} --api-key k", False),
        (f"{LOCAL} --uds /run/vllm", False),
        (f"{LOCAL} --plugin-config why_exact=false", False),
        (f"{LOCAL} --plugin-config tenant_from=header:X-Tenant", False),
        (f"{LOCAL} --additional-config {{'sgl_vllm':{{'why_exact':False}}}}", False),
    ],
)
def test_numbers_are_exact_by_default_where_all_clients_are_on_this_machine(
    serve, monkeypatch, words, counts_exactly
) -> None:
    for api_key, expected in [("", counts_exactly), ("k", "why_exact=true" in words)]:
        monkeypatch.setenv("VLLM_API_KEY", api_key)
        args = parse(serve, [*ON, *words.split()])
        is_private = flags.serves_this_machine_only(args)
        given = flags.given_options(args)
        options = flags.requested_options(given, args.additional_config, is_private=is_private)
        assert options is not None and options.tells_exactly is expected


@pytest.mark.parametrize(
    ("rust", "flag", "frontend"),
    [
        ("1", "headless", flags.RUST),  # `vllm-rs serve`, if its user says so
        ("0", "headless", flags.HEADLESS),
        ("0", "", None),
        ("1", "grpc", None),
    ],
)
def test_a_frontend_without_the_plugin_is_noticed(rust, flag, frontend, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    assert flags.other_frontend(argparse.Namespace(subparser="serve", **{flag: True})) == frontend


def test_tenants_are_refused_where_nothing_reads_their_names(serve, capsys, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    serve.set_defaults(subparser="serve")
    printed = refusal(serve, [*ON, "--plugin-config", "tenant_from=api_key"], capsys)
    assert printed.startswith("tenant_from=api_key has no effect with VLLM_USE_RUST_FRONTEND: ")
