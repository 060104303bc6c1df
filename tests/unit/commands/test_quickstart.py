"""`sgl-vllm quickstart` where it cannot serve, and when it opens a browser.

That it serves is in tests/server/test_quickstart.py.
"""

from __future__ import annotations

import pytest

from sgl_vllm.commands import cli
from sgl_vllm.server_process import reserved_port
from sgl_vllm.vllm_api import versions


def test_without_vllm_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "installed_vllm", lambda: None)
    assert cli.main(["quickstart", "--no-browser"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sgl-vllm quickstart: vLLM is not installed.")


def test_a_taken_port_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with reserved_port() as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["quickstart", "--no-browser", "--port", str(port)]) == 1
    assert f"port {port} cannot be used" in capsys.readouterr().err
