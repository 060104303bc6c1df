"""A pytest plugin with one option: `--vllm-platform`. See `tests/platforms/__init__.py`."""

from __future__ import annotations

import pytest

from tests.platforms.platform import PLATFORMS, VLLMS_CHOICE_ON_A_CPU


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm-platform",
        choices=sorted(PLATFORMS),
        default=VLLMS_CHOICE_ON_A_CPU.name,
        help="vLLM's model runner and scheduling for engines that tests start in this process",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest imports vLLM."""
    name = early_config.known_args_namespace.vllm_platform
    patch = pytest.MonkeyPatch()
    early_config.add_cleanup(patch.undo)
    PLATFORMS[name].set_up(patch)


def pytest_report_header(config: pytest.Config) -> str:
    return f"vLLM platform: {config.getoption('--vllm-platform')}"
