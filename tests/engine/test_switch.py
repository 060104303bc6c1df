"""Being installed changes nothing; being named changes the scheduler; bad names are refused."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from sgl_vllm import plugin
from sgl_vllm.flags import ActivationError
from sgl_vllm.kernels import attention_backend
from sgl_vllm.option import OptionError
from sgl_vllm.plugin import allow_in_environment
from sgl_vllm.server_process import free_port
from sgl_vllm.vllm_api import probe
from sgl_vllm.vllm_api.versions import InstalledVllm
from tests.engine.engine import MODEL, Ask
from tests.vllm_copies import Edit, copy_of_vllm


def parse(*words: str) -> EngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(
        parser.parse_args(["--model", MODEL, "--dtype", "float32", *words])
    )


def test_an_unnamed_plugin_changes_nothing(start):
    engine = start()
    assert type(engine.scheduler) is Scheduler
    assert type(engine.scheduler.kv_cache_manager) is KVCacheManager
    assert type(engine.scheduler.kv_cache_manager.block_pool) is BlockPool
    assert not engine.core.vllm_config.additional_config
    prompt = list(range(20, 120))
    engine.run([Ask(prompt, SamplingParams(max_tokens=1))])
    again = engine.run([Ask(prompt, SamplingParams(max_tokens=1))])[0]
    assert again.num_cached_tokens == 96  # stock: full blocks only
    assert engine.core.sgl_vllm_call("stats") is None


def test_the_switch_brings_our_scheduler_and_its_options():
    words = ["--plugin", "sgl_vllm", "--plugin-config", '{"radix": true}', "jump_forward=false"]
    config = parse(*words).create_engine_config()
    assert config.scheduler_config.scheduler_cls == "sgl_vllm.scheduler.scheduler.SglScheduler"
    assert config.additional_config["sgl_vllm"]["jump_forward"] is False
    assert config.additional_config["sgl_vllm"]["radix"] is True


def test_the_environment_names_it_too(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "something,sgl_vllm")
    monkeypatch.setenv("SGL_VLLM_CONFIG", '{"schedule": false}')
    config = parse().create_engine_config()
    assert config.additional_config["sgl_vllm"]["schedule"] is False


class Point:
    def __init__(self, name: str) -> None:
        self.name = name


def install_plugins(monkeypatch, groups: dict[str, list[str]]) -> None:
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group: [Point(name) for name in groups.get(group, [])],
    )


def test_the_switch_keeps_the_other_plugins(monkeypatch):
    """Unset, vLLM's child processes load every plugin; they must go on doing so."""
    names = ["mine", "lora_hf_hub_resolver", "sgl_vllm"]
    install_plugins(monkeypatch, {"vllm.general_plugins": names})
    allow_in_environment()
    assert os.environ["VLLM_PLUGINS"] == "mine,sgl_vllm"


def test_the_switch_turns_on_nobody_elses_routes(monkeypatch):
    groups = {"vllm.general_plugins": ["mine"], "vllm.endpoint_plugins": ["mine", "sgl_vllm"]}
    install_plugins(monkeypatch, groups)
    with pytest.raises(ActivationError, match="VLLM_PLUGINS=mine,sgl_vllm"):
        allow_in_environment()


def test_parts_that_are_off_are_named_with_their_reason(start):
    engine = start(plugin={"radix": False, "jump_forward": False})
    parts = engine.scheduler.sgl_vllm.stats().parts
    assert parts == {
        "radix": "by option",
        "schedule": "on",
        "fsm": "on",
        "jump_forward": "by option",
        "select": "it needs radix",
    }


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"additional_config": {"sgl_vllm": {"jump_foward": True}}}, OptionError, "unknown option"),
        ({"additional_config": {"sgl_vllm": "radix"}}, OptionError, "must be an object"),
        (
            {"additional_config": {"sgl_vllm": {}}, "scheduler_cls": "my.Scheduler"},
            ActivationError,
            "--scheduler-cls my.Scheduler",
        ),
    ],
)
def test_bad_arguments_in_python_raise(arguments, error, says):
    with pytest.raises(error, match=says):
        EngineArgs(model=MODEL, **arguments).create_engine_config()


def test_an_unsupported_vllm_is_refused_by_name(monkeypatch):
    old = InstalledVllm("vllm", "0.20.1", "cuda")
    monkeypatch.setattr("sgl_vllm.vllm_api.versions.installed_vllm", lambda: old)
    with pytest.raises(
        ActivationError, match=r"vllm 0\.20\.1 is installed.*use vLLM 0\.31 to 0\.33"
    ):
        EngineArgs(model=MODEL, additional_config={"sgl_vllm": {}}).create_engine_config()


def test_a_part_whose_hook_is_missing_stays_off_and_says_which(start, monkeypatch, tmp_path):
    edit = Edit("v1/core/block_pool.py", "def unpin_blocks(", "def release_blocks(")
    source = copy_of_vllm(tmp_path, edit)
    monkeypatch.setattr(probe, "installed_source", lambda: source)
    assert [part for part in probe.PARTS if probe.missing_hooks(part)] == ["radix"]
    parts = start(plugin={}).scheduler.sgl_vllm.stats().parts
    assert "BlockPool.unpin_blocks" in parts["radix"]
    assert parts["select"] == "it needs radix"
    assert parts["schedule"] == parts["fsm"] == parts["jump_forward"] == "on"


@pytest.fixture
def registrations(monkeypatch):
    """How often the attention backend was registered."""
    counted = []
    monkeypatch.setattr(attention_backend, "register", lambda: counted.append(1))
    monkeypatch.setenv("SGL_VLLM_PREFIX_ATTENTION", "")
    return counted


def test_prefix_attention_is_chosen_on_a_gpu(monkeypatch, registrations):
    monkeypatch.setattr(CpuPlatform, "is_cuda", lambda self: True)
    asked = SimpleNamespace(attention_backend=None)
    plugin._use_prefix_attention(asked)
    assert asked.attention_backend is AttentionBackendEnum.CUSTOM and len(registrations) == 1
    assert os.environ["SGL_VLLM_PREFIX_ATTENTION"]  # for the workers


@pytest.mark.parametrize("is_cuda, chosen", [(False, None), (True, "TRITON_ATTN")])
def test_prefix_attention_says_where_it_has_no_effect(monkeypatch, registrations, is_cuda, chosen):
    said = []
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *_: said.append(text))
    monkeypatch.setattr(CpuPlatform, "is_cuda", lambda self: is_cuda)
    chosen = chosen and AttentionBackendEnum[chosen]
    asked = SimpleNamespace(attention_backend=chosen)
    plugin._use_prefix_attention(asked)
    assert asked.attention_backend is chosen and not registrations
    assert len(said) == 1 and "prefix_attention has no effect" in said[0]


def test_beside_external_launcher_every_part_is_off_and_says_why(start, monkeypatch):
    """Each rank of torchrun schedules for itself, so that all have to decide the same."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    engine = start(plugin={}, distributed_executor_backend="external_launcher")
    states = engine.scheduler.sgl_vllm.stats().parts
    assert len(states) == 5
    assert set(states.values()) == {"with external_launcher, each rank has a scheduler of its own"}
    (answer,) = engine.run([Ask(list(range(20, 60)), SamplingParams(max_tokens=3))])
    assert len(answer.outputs[0].token_ids) == 3


def test_vllm_gets_its_own_defaults_when_it_asks_for_them(monkeypatch):
    """What differs from them is all that it gives to its Rust frontend."""
    monkeypatch.setenv("VLLM_PLUGINS", "sgl_vllm")
    parser = make_arg_parser(FlexibleArgumentParser())
    assert parser.parse_args(["--model", MODEL]).enable_prompt_tokens_details
    assert not parser.parse_args([]).enable_prompt_tokens_details
