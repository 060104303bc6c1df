"""What `vllm serve` says and does with the switch, from the outside."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from tests.server.conftest import MODEL, serve

pytestmark = pytest.mark.slow


def test_options_may_come_from_vllms_config_file(tmp_path):
    config = tmp_path / "serve.yaml"
    config.write_text("plugin: [sgl_vllm]\nplugin-config: ['{\"jump_forward\": false}']\n")
    with serve(extra_args=["--config", str(config)]) as server:
        parts = httpx.get(f"{server.url}/v1/sgl/stats").json()["parts"]
        log = server.log_path.read_text()
    assert parts["jump_forward"] == "by option"
    assert parts["radix"] == "on"
    assert "radix on; schedule on; fsm on; jump_forward off (by option); select on" in log


def test_unnamed_it_is_stock_and_has_none_of_our_routes():
    with serve() as server:
        assert httpx.get(f"{server.url}/v1/sgl/stats").status_code == 404
        assert not any(name.startswith("sgl_vllm") for name in server.metrics())
        log = server.log_path.read_text().replace(MODEL, "")  # its path may have the name
    assert "sgl-vllm" not in log and "SglScheduler" not in log


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            [MODEL, "--plugin", "sgl_vllm", "--plugin-config", "jump_foward=false"],
            "unknown option jump_foward; did you mean jump_forward?",
        ),
        (
            ["--plugin", "sgl_vllm", MODEL],
            f"write {MODEL} before --plugin: vllm serve {MODEL} --plugin sgl_vllm",
        ),
    ],
)
def test_bad_flags_end_the_start_with_one_clear_line(words, line):
    ended = run_vllm("serve", *words)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].endswith(f": error: {line}")
    assert "Traceback" not in ended.stderr and "non-default args" not in ended.stdout


def test_the_help_lists_the_switch():
    shown = run_vllm("serve", MODEL, "--help=sgl-vllm")
    assert "--plugin NAME" in shown.stdout and "--plugin-config" in shown.stdout


def run_vllm(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_check_runs_in_the_engines_own_process_before_the_server_is_ready(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SGL_VLLM_CACHE", str(tmp_path))
    with serve(plugin=True, plugin_config={"self_check": "on"}) as server:
        parts = httpx.get(f"{server.url}/v1/sgl/stats").json()
        log = server.log_path.read_text()
    assert set(parts["parts"].values()) == {"on"} and parts["forward_passes"] == 0
    assert "radix agrees; fsm agrees; jump_forward agrees; select agrees" in log
    assert "radix on; schedule on; fsm on; jump_forward on; select on" in log
