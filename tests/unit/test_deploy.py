"""The files in `deploy/` agree with each other, with the package and with what their readers ask.

That the steps of `deploy/Dockerfile` install a working plugin is in test_installation.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.version import __version__
from sgl_vllm.vllm_api.versions import Support, support_of
from tests.dockerfiles import arguments_of, instructions_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
GPU: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())


def read(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


@pytest.mark.parametrize("name", ["Dockerfile", "cpu.Dockerfile"])
def test_what_an_image_copies_exists_or_is_built_first(name: str) -> None:
    instructions = instructions_of(DEPLOY / name)
    copied = [words.split()[0] for kind, words in instructions if kind == "COPY"]
    assert "dist/*.whl" in copied
    assert all((ROOT / path).exists() for path in copied if not path.startswith("dist/"))
    assert dict(instructions)["ENTRYPOINT"] == '["vllm", "serve"]'


def test_the_image_is_of_a_supported_vllm() -> None:
    (version,) = arguments_of(DEPLOY / "Dockerfile").values()
    assert support_of(version) is Support.SUPPORTED
    assert version in json.loads((ROOT / "docs" / "versions.json").read_text())


def test_the_cpu_image_serves_the_demo_model_of_the_wheel() -> None:
    command = json.loads(dict(instructions_of(DEPLOY / "cpu.Dockerfile"))["CMD"])
    model = MODEL_PATH.relative_to(ROOT).as_posix()
    assert command[0] == f"/usr/local/lib/python3.11/site-packages/{model}"
    assert command[-2:] == ["--plugin", "sgl_vllm"]


def test_images_have_the_version_of_the_package() -> None:
    text = "".join(file.read_text() for file in DEPLOY.rglob("*") if file.is_file())
    text += (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"sgl-vllm:(\d[\w.]*)", text)) == {__version__}
    (model,) = read("production-stack.yaml")["servingEngineSpec"]["modelSpec"]
    assert model["tag"] == __version__


def test_only_this_machine_reaches_the_services() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service["ports"]]
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)


def test_prometheus_scrapes_the_server_and_grafana_asks_prometheus() -> None:
    (job,) = read("prometheus.yml")["scrape_configs"]
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    addresses = [*job["static_configs"][0]["targets"], source["url"].removeprefix("http://")]
    for address, service in zip(addresses, ("vllm", "prometheus"), strict=True):
        port = COMPOSE["services"][service]["ports"][0].rpartition(":")[2]
        assert address == f"{service}:{port}"


def test_grafana_finds_the_dashboard() -> None:
    (provider,) = read("grafana/provisioning/dashboards/sgl-vllm.yaml")["providers"]
    grafana = COMPOSE["services"]["grafana"]
    folder = provider["options"]["path"]
    (source,) = [one.split(":")[0] for one in grafana["volumes"] if one.split(":")[1] == folder]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads((DEPLOY / source / Path(home).name).read_text())["uid"] == "sgl-vllm"


def test_kubernetes_serves_with_the_plugin_and_its_cache() -> None:
    (model,) = read("production-stack.yaml")["servingEngineSpec"]["modelSpec"]
    assert model["vllmConfig"]["enablePrefixCaching"] is True  # off, the chart disables the cache
    assert model["vllmConfig"]["extraArgs"] == ["--plugin", "sgl_vllm"]
    # What the chart's schema requires.
    required = "name repository tag modelURL replicaCount requestCPU requestMemory requestGPU"
    assert {*required.split(), "pvcStorage"} <= set(model)
    (container,) = read("kserve.yaml")["spec"]["predictor"]["containers"]
    assert container["args"][-2:] == ["--plugin", "sgl_vllm"]
    port = container["ports"][0]["containerPort"]
    assert container["args"][container["args"].index("--port") + 1] == str(port)
    assert container["readinessProbe"]["httpGet"]["port"] == port
