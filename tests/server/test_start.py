"""What `vllm serve` says and does with the switch, from the outside."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from tests.server.conftest import MODEL, serve

pytestmark = pytest.mark.slow


def test_options_of_vllms_config_file_hold_in_an_engine_that_checks_itself(tmp_path, monkeypatch):
    """The check runs before the server is ready, which counts exactly for this machine only."""
    monkeypatch.setenv("SGL_VLLM_CACHE", str(tmp_path))
    config = tmp_path / "serve.yaml"
    options = '{"jump_forward": false, "self_check": "on"}'
    config.write_text(f"plugin: [sgl_vllm]\nplugin-config: ['{options}']\n")
    with serve(extra_args=["--config", str(config)]) as server:
        stats = httpx.get(f"{server.url}/v1/sgl/stats").json()
        log = server.log_path.read_text()
        body = {"model": "demo", "prompt": list(range(100, 190)), "max_tokens": 2}
        answers = [httpx.post(f"{server.url}/v1/completions", json=body).json() for _ in range(2)]
    assert stats["parts"]["jump_forward"] == "by option" and stats["forward_passes"] == 0
    told = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    assert [(one or {}).get("cached_tokens", 0) for one in told] == [0, 89]
    assert "radix agrees; fsm agrees; select agrees" in log
    assert "radix on; schedule on; fsm on; jump_forward off (by option); select on" in log


def test_flags_in_the_wrong_order_end_the_start_with_one_clear_line():
    ended = run_vllm("serve", "--plugin", "sgl_vllm", MODEL)
    assert ended.returncode == 2
    line = f"write {MODEL} before --plugin: vllm serve {MODEL} --plugin sgl_vllm"
    assert ended.stderr.splitlines()[-1].endswith(f": error: {line}")
    assert "Traceback" not in ended.stderr and "non-default args" not in ended.stdout


def run_vllm(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
