"""The Grafana dashboard: its shape, and that it asks for nothing that is not documented.

That a real server tells all of it is in tests/server/test_server.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

import sgl_vllm

ROOT = Path(sgl_vllm.__file__).parent.parent
DOCS = ROOT / "docs"
FILE = ROOT / "deploy" / "grafana" / "dashboards" / "sgl-vllm.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in GRAPHS for target in panel["targets"]]


def test_it_is_a_dashboard_that_grafana_imports_under_one_name() -> None:
    assert DASHBOARD["title"] and DASHBOARD["uid"]
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert DASHBOARD.get("id") is None  # Grafana gives one
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) - {"__rate_interval"}
    assert used == defined


def alerts() -> list[str]:
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"][0]["rules"]
    return [rule["expr"] for rule in rules]


def test_only_documented_metrics_of_ours_are_asked_for() -> None:
    page = (DOCS / "operations.md").read_text()
    types = dict(re.findall(r"^\| `(\w+)[^|]*\| (\w+) \|", page, re.MULTILINE))
    suffixes = {"counter": ("_total",), "gauge": ("",), "summary": ("_sum", "_count")}
    documented = {name + end for name, kind in types.items() for end in suffixes[kind]}
    texts = [*expressions(), *alerts()]
    asked = {name for text in texts for name in re.findall(r"sgl_vllm:(\w+)", text)}
    assert asked <= documented
