from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from sgl_vllm.commands import cli
from sgl_vllm.routing.ray import app as ray_app

EXAMPLE = Path(__file__).parents[3] / "examples" / "serving" / "ray.yaml"


def of_one(**model) -> dict:
    loading = {"model_id": "demo"}
    return {"llm_configs": [{"model_loading_config": loading, **model}]}


def test_each_model_gets_our_router_and_our_plugin():
    (model,) = ray_app.with_defaults(of_one())["llm_configs"]
    router = model["deployment_config"]["request_router_config"]
    assert router["request_router_class"] == ray_app.ROUTER
    assert model["engine_kwargs"]["additional_config"] == {"sgl_vllm": {}}


def test_the_example_says_what_is_filled_in():
    example = ray_app.read_yaml(EXAMPLE)
    assert ray_app.with_defaults(example) == example


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- a list", "mapping"),
        ("{", "cannot be read"),
        ("applications: []", "llm_configs"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_is_none_is_one_clear_message(tmp_path, capsys, content, said):
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert cli.main(["ray-serve", str(path)]) == 1
    assert said in capsys.readouterr().err


def test_a_wrong_option_of_the_plugin_is_said_before_anything_starts():
    wrong = of_one(engine_kwargs={"additional_config": {"sgl_vllm": {"radixx": True}}})
    with pytest.raises(ray_app.RayServeError, match="did you mean radix\\?"):
        ray_app.build_app(wrong)


def test_a_port_that_is_taken_is_said_before_anything_starts(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["ray-serve", str(EXAMPLE), "--port", str(port)]) == 1
    assert "--port" in capsys.readouterr().err


def test_without_ray_the_message_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    monkeypatch.setitem(sys.modules, "ray.serve.llm", None)
    assert cli.main(["ray-serve", str(EXAMPLE), "--port", "0"]) == 1
    assert "pip install '.[ray]'" in capsys.readouterr().err
