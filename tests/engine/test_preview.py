"""What `sgl-vllm doctor MODEL` foresees is what an engine with the same flags then has.

The outlooks come from a process of their own, as the command's do; it answers for all deployments,
because importing vLLM takes most of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from vllm.config import KVTransferConfig
from vllm.config.kv_events import KVEventsConfig

from sgl_vllm.part import SchedulerFacts
from sgl_vllm.preview.outlook import Outlook, State
from tests.engine.engine import MODEL
from tools.support.__main__ import CONFIGS
from tools.support.outlooks import write_models

pytestmark = pytest.mark.slow
BASE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "block_size": 32,
}
ASK = """
import json, sys
from sgl_vllm.preview.engine import preview
for model, *flags in json.load(open(sys.argv[1])):
    print("outlook " + preview(model, flags).to_json())
"""


@dataclass(frozen=True)
class Case:
    """Arguments of an engine; `model` is one of `tools.support.CONFIGS`, or the demo's."""

    name: str
    plugin: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    model: str | None = None

    @property
    def engine_arguments(self) -> dict[str, Any]:
        without_weights = {"load_format": "dummy", "tokenizer": MODEL}
        return BASE | (without_weights if self.model else {}) | self.arguments

    def flags(self) -> list[str]:
        flags = ["--plugin-config", json.dumps(self.plugin)]
        for name, value in self.engine_arguments.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
        return flags


SPECULATION = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
CONNECTOR = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": tempfile.gettempdir()},
}
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}

CASES = [
    Case("defaults"),
    Case("parts switched off by options", {"select": False, "fsm": False}),
    Case("checked at start", {"self_check": "on"}),
    Case("no prefix caching", arguments={"enable_prefix_caching": False}),
    Case("n-gram speculation", arguments={"speculative_config": SPECULATION}),
    Case("a KV connector", arguments={"kv_transfer_config": CONNECTOR}),
    Case("KV events", {"self_check": "auto"}, {"kv_events_config": EVENTS}),
    Case(
        "another structured-output backend",
        {"jump_mode": "exact"},
        {"structured_outputs_config": {"backend": "outlines"}},
    ),
    Case("sliding window", model="gemma3"),
    Case("recurrent hybrid", model="qwen3_next", arguments={"dtype": "bfloat16"}),
    Case("MLA", model="deepseek_v3", arguments={"attention_backend": "CPU_MLA"}),
]
QUICK = {"defaults", "a KV connector", "sliding window"}
PARAMETERS = [
    pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.nightly)
    for case in CASES
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    vocab_size = json.loads((Path(MODEL) / "config.json").read_text())["vocab_size"]
    configs = {name: {**config, "vocab_size": vocab_size} for name, config in CONFIGS.items()}
    write_models(configs, folder)
    return folder


def model_of(case: Case, models: Path) -> str:
    return str(models / case.model) if case.model else MODEL


@pytest.fixture(scope="module")
def outlooks(
    models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Outlook]:
    """What is foreseen for the cases that run in this session, by their names."""
    ids = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    cases = [case for case in CASES if case.name in ids]
    asked = tmp_path_factory.mktemp("asked") / "asked.json"
    asked.write_text(json.dumps([[model_of(case, models), *case.flags()] for case in cases]))
    command = [sys.executable, "-c", ASK, str(asked)]
    answer = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert answer.returncode == 0, answer.stderr[-3000:]
    marked = [line for line in answer.stdout.splitlines() if line.startswith("outlook ")]
    found = [TypeAdapter(Outlook).validate_json(line.removeprefix("outlook ")) for line in marked]
    return {case.name: outlook for case, outlook in zip(cases, found, strict=True)}


def as_objects(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as `LLM` takes them."""
    kinds = {"kv_transfer_config": KVTransferConfig, "kv_events_config": KVEventsConfig}
    return {
        name: kinds[name](**value) if name in kinds else value for name, value in arguments.items()
    }


def test_offloading_which_needs_a_gpu_is_refused_as_vllm_would_later():
    doctor = [sys.executable, "-m", "sgl_vllm.commands.cli", "doctor", MODEL]
    answer = subprocess.run([*doctor, "--kv-offloading-size", "1"], capture_output=True, text=True)
    assert answer.returncode == 2 and "leave out --kv-offloading-size" in answer.stderr


@pytest.mark.parametrize("case", PARAMETERS)
def test_an_engine_has_the_parts_that_were_foreseen(start, models, outlooks, case):
    from sgl_vllm.preview.engine import facts

    engine = start(case.plugin, model=model_of(case, models), **as_objects(case.engine_arguments))
    parts, foreseen = engine.scheduler.parts, outlooks[case.name]
    if case.model is None:
        of_live = SchedulerFacts.of(engine.scheduler)
        planned = facts(engine.core.vllm_config, engine.scheduler.kv_cache_config)
        for one in fields(SchedulerFacts):
            assert getattr(planned, one.name) == getattr(of_live, one.name), one.name
    has = engine.scheduler.sgl_vllm.stats().parts
    for part in foreseen.parts:
        if part.state is State.OFF:
            assert has[part.name] == part.reason
        else:
            assert has[part.name] == "on"
            assert (part.state is State.CHECKED) == (parts.plan.runs and part.name != "schedule")
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    kinds = {(type(spec).__name__, spec.block_size) for spec in specs}
    assert {(kind.kind, kind.block_size) for kind in foreseen.kv_cache} == kinds
    assert sum(kind.num_groups for kind in foreseen.kv_cache) == len(groups)
    assert foreseen.model_runner == ("V2" if engine.scheduler.use_v2_model_runner else "V1")
