"""The files in `deploy/` agree with each other, with the package and with what their readers ask.

That the steps of `deploy/Dockerfile` install a working plugin is in test_installation.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from sgl_vllm.version import __version__
from sgl_vllm.vllm_api.versions import Support, support_of
from tests.dockerfiles import arguments_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def read(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def test_the_image_is_of_a_supported_vllm() -> None:
    (version,) = arguments_of(DEPLOY / "Dockerfile").values()
    assert support_of(version) is Support.SUPPORTED
    assert version in json.loads((ROOT / "docs" / "versions.json").read_text())


def test_images_have_the_version_of_the_package() -> None:
    text = "".join(file.read_text() for file in DEPLOY.rglob("*") if file.is_file())
    text += (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"sgl-vllm:(\d[\w.]*)", text)) == {__version__}
    (model,) = read("production-stack.yaml")["servingEngineSpec"]["modelSpec"]
    assert model["tag"] == __version__


def test_prometheus_scrapes_the_server_and_grafana_asks_prometheus() -> None:
    (job,) = read("prometheus.yml")["scrape_configs"]
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    addresses = [*job["static_configs"][0]["targets"], source["url"].removeprefix("http://")]
    for address, service in zip(addresses, ("vllm", "prometheus"), strict=True):
        port = COMPOSE["services"][service]["ports"][0].rpartition(":")[2]
        assert address == f"{service}:{port}"


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


def test_only_this_machine_reaches_the_services() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service["ports"]]
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)
