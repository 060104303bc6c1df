"""Which model runner an engine has, by its configuration and in its workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_vllm.vllm_api.runners import kind_of, runner_in, take_forced


@pytest.mark.parametrize(("name", "method"), [("V2", "update_requests"), ("V1", "_update_states")])
def test_the_kind_of_a_runner_is_known(name, method):
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(**{method: None}))
    config: Any = SimpleNamespace(use_v2_model_runner=name == "V2")
    assert type(runner_in(worker)) is kind_of(config) and kind_of(config).name == name


def test_a_runner_of_another_kind_takes_no_forced_tokens():
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace())
    assert "no known method that updates requests" in str(take_forced(worker))
