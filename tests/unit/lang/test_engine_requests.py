"""What an engine in process answers, as the language has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.backends.engine_requests import raise_if_failed


def ended(finish_reason: str | None, stop_reason: int | str | None = None) -> Any:
    one = SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)
    return SimpleNamespace(outputs=[one])


def test_a_refused_format_is_an_error_with_the_reason() -> None:
    with pytest.raises(sgl.BackendError, match="my engine refused the request: too la") as error:
        raise_if_failed(ended("error", "too large"), "my engine")
    assert error.value.status == 400


def test_a_failure_of_the_engine_has_no_status() -> None:
    with pytest.raises(sgl.BackendError, match="my engine failed") as error:
        raise_if_failed(ended("error"), "my engine")
    assert error.value.status is None


@pytest.mark.parametrize("output", [ended(None), ended("stop", "."), ended("length")])
def test_other_ends_are_none_of_its_business(output) -> None:
    raise_if_failed(output, "my engine")
