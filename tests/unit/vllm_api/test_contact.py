"""How vLLM calls the methods that we override or wrap, against what ours accept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sgl_vllm.vllm_api.contact import Problem, contact_problems
from sgl_vllm.vllm_api.overrides import UnknownTarget
from sgl_vllm.vllm_api.vllm_source import VllmSource, installed_source
from tests.vllm_copies import Edit, copy_of_vllm

ROOT = Path(__file__).resolve().parents[3]
SCHEDULER = "v1/core/sched/scheduler.py"
POOL = "v1/core/block_pool.py"
MANAGER = "v1/core/kv_cache_manager.py"
GRAMMARS = "v1/structured_output/backend_types.py"

CHANGES = [
    pytest.param(
        Edit(POOL, "def touch(self, blocks:", "def touch(self, kv_blocks:"),
        "RadixBlockPool.touch has no parameter 'kv_blocks'",
        id="a parameter has another name",
    ),
    pytest.param(
        Edit(
            GRAMMARS, "def rollback(self, num_tokens: int)", "def rollback(self, num_tokens, key)"
        ),
        "SglGrammar.rollback takes 1 positional arguments, gets 2",
        id="a method has one more parameter",
    ),
    pytest.param(
        Edit(
            SCHEDULER,
            "self.kv_cache_manager.estimate_cached_tokens(request)",
            "self.kv_cache_manager.estimate_cached_tokens(request, 0)",
        ),
        "RadixKVCacheManager.estimate_cached_tokens takes 1 positional arguments, gets 2",
        id="a call passes one more argument",
    ),
    pytest.param(
        Edit(
            "v1/structured_output/__init__.py",
            "request_type, grammar_spec, stop_token_ids=stop_token_ids",
            "request_type, grammar_spec, stop_tokens=stop_token_ids",
        ),
        "SglBackend.compile_grammar has no parameter 'stop_tokens'",
        id="a call names an argument in another way",
    ),
    pytest.param(
        Edit(
            "v1/core/single_type_kv_cache_manager.py",
            "            num_full_blocks=num_full_blocks,\n            block_size=",
            "            block_size=",
        ),
        "RadixBlockPool.cache_full_blocks gets no 'num_full_blocks'",
        id="a call leaves an argument out",
    ),
    pytest.param(
        Edit(
            SCHEDULER,
            "self.kv_cache_manager.record_prefix_cache_stats(\n"
            "                        request, num_new_local_computed_tokens",
            "self.kv_cache_manager.record_prefix_cache_stats(\n"
            "                        request, num_new_local_computed_tokens or None",
        ),
        "RadixKVCacheManager.record_prefix_cache_stats takes no None as 'num_hits'",
        id="an argument may be None",
    ),
    pytest.param(
        Edit(
            MANAGER,
            "def record_prefix_cache_stats(self, request: Request, num_hits: int)",
            "def record_prefix_cache_stats(self, request: Request, num_hits: int | None)",
        ),
        "RadixKVCacheManager.record_prefix_cache_stats takes no None as 'num_hits'",
        id="a parameter may be None",
    ),
    pytest.param(
        Edit(SCHEDULER, "self.kv_holding_waiting", "self.waiting_with_kv"),
        "Scheduler.kv_holding_waiting: missing",
        id="an attribute is gone",
    ),
    pytest.param(
        Edit(
            "v1/core/sched/request_queue.py",
            "    @abstractmethod\n    def pop_request(",
            "    @abstractmethod\n    def drain(self): ...\n\n"
            "    @abstractmethod\n    def pop_request(",
        ),
        "CacheAwareQueue does not implement RequestQueue.drain",
        id="a base class has a new abstract method",
    ),
    pytest.param(
        Edit(SCHEDULER, "_handle_blocked_waiting_request", "_may_leave_waiting"),
        "there is no Scheduler._handle_blocked_waiting_request that "
        "SglSchedulerMixin._handle_blocked_waiting_request could stand in for",
        id="an overridden method has another name",
    ),
    pytest.param(
        Edit(
            GRAMMARS,
            "    @abstractmethod\n    def is_terminated(",
            "    @property\n    @abstractmethod\n    def is_terminated(",
        ),
        "SglGrammar.is_terminated is not a property, as vLLM's is",
        id="a method has become a property",
    ),
    pytest.param(
        Edit(
            "v1/engine/core_client.py",
            "chosen_engine = self.get_core_engine_for_request(request)",
            "chosen_engine = self.get_core_engine_for_request(request, None)",
        ),
        "_choose_rank takes 1 positional arguments, gets 2",
        id="a call of a wrapped method passes one more argument",
    ),
    pytest.param(
        Edit(
            "v1/engine/core.py",
            "class EngineCore:\n",
            "class EngineCore:\n    def sgl_vllm_call(self): ...\n\n",
        ),
        "vLLM has a EngineCore.sgl_vllm_call of its own now",
        id="vLLM has a method of the name of one that we add",
    ),
    pytest.param(
        Edit(
            "entrypoints/generate/base/protocol.py",
            "        validate_xgrammar_grammar(\n            SamplingParams(\n",
            "        validate_xgrammar_grammar(\n            params=SamplingParams(\n",
        ),
        "_checked_first gets no 'sampling_params'",
        id="a call of a wrapped function names an argument in another way",
    ),
    pytest.param(
        Edit(
            "parser/abstract_parser.py",
            "import json\n",
            "import json\n"
            "from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar\n",
            count=1,
        ),
        "backend_xgrammar.validate_xgrammar_grammar is imported before _checked_first can replace "
        "it",
        id="a wrapped function is imported at the top of a module",
    ),
]


@pytest.fixture(scope="module")
def after_all_changes(tmp_path_factory: pytest.TempPathFactory) -> list[Problem]:
    """The changes touch different methods, so one check of one copy reports each of them."""
    edits = [change.values[0] for change in CHANGES]
    copy = copy_of_vllm(tmp_path_factory.mktemp("vllm"), *edits)  # type: ignore[arg-type]
    return contact_problems(copy)


def test_the_installed_vllm_calls_our_code_as_it_expects():
    source = installed_source()
    assert source is not None
    assert list(map(str, contact_problems(source))) == []


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_so_does_every_other_supported_version(version: str):
    """Downloads the version's wheel (up to 0.34 GB) the first time."""
    command = [sys.executable, "-m", "tools.vllm_versions", "source", version]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    source = VllmSource(Path(done.stdout.strip()))
    assert f"{source.release[0]}.{source.release[1]}.0" == version
    assert list(map(str, contact_problems(source))) == []


@pytest.mark.parametrize(("edit", "says"), CHANGES)
def test_a_change_in_vllm_is_reported(after_all_changes: list[Problem], edit: Edit, says: str):
    reported = [problem for problem in after_all_changes if problem.what == says]
    assert reported, [*map(str, after_all_changes)]
    assert reported[0].ours.startswith(("sgl_vllm/", "vllm/"))


def test_a_report_says_where_in_vllm_and_where_in_our_code(after_all_changes: list[Problem]):
    (call,) = (one for one in after_all_changes if "estimate_cached_tokens takes" in one.what)
    path, _, line = call.vllm.partition(":")
    assert path == f"vllm/{SCHEDULER}"
    source = installed_source()
    assert source is not None
    lines = (source.root / path).read_text().splitlines()
    assert "estimate_cached_tokens(request)" in lines[int(line) - 1]
    path, _, line = call.ours.partition(":")
    assert "def estimate_cached_tokens(" in (ROOT / path).read_text().splitlines()[int(line) - 1]


def test_what_is_not_changed_is_not_reported(after_all_changes: list[Problem]):
    methods = "touch rollback estimate_cached_tokens compile_grammar cache_full_blocks drain"
    methods += " is_terminated record_prefix_cache_stats kv_holding_waiting _choose_rank"
    methods += " _handle_blocked_waiting_request sgl_vllm_call _checked_first"
    changed = methods.split()
    unrelated = [one for one in after_all_changes if not any(name in one.what for name in changed)]
    assert list(map(str, unrelated)) == []


# -- the two calls that stopped the engine on vLLM 0.33 -------------------------------------------

OLD_OVERRIDES = """
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class Schedules(Scheduler):
    def _get_local_prefix_cache_hit(self, request: Request):
        return super()._get_local_prefix_cache_hit(request)


class Caches(KVCacheManager):
    def get_computed_blocks(self, request: Request, *args: Any, **kwargs: Any):
        limit = next(iter((*args, *kwargs.values())), request.num_tokens - 1)
        return min(limit, request.num_prompt_tokens)


class CachesUpToALimit(KVCacheManager):
    def get_computed_blocks(self, request: Request, max_cache_hit_length: int = 0):
        return super().get_computed_blocks(request)
"""

CALLS_OF_0_33 = [
    Edit(
        SCHEDULER,
        "def _get_local_prefix_cache_hit(\n        self, request: Request\n",
        "def _get_local_prefix_cache_hit(\n"
        "        self, request: Request, max_cache_hit_length: int | None = None\n",
    ),
    Edit(
        SCHEDULER,
        "self._get_local_prefix_cache_hit(request)",
        "self._get_local_prefix_cache_hit(request, None if self.use_pp else 1)",
    ),
    Edit(
        SCHEDULER,
        "self.kv_cache_manager.get_computed_blocks(request)",
        "self.kv_cache_manager.get_computed_blocks(request, max_cache_hit_length)",
        count=1,
    ),
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "ours"
    folder.mkdir()
    return folder


def test_the_calls_that_stopped_the_engine_on_0_33_are_reported(tmp_path: Path, package: Path):
    (package / "old.py").write_text(OLD_OVERRIDES)
    copy = copy_of_vllm(tmp_path / "vllm", *CALLS_OF_0_33)
    reported = {one.what for one in contact_problems(copy, {"ours": package})}
    assert {
        "Schedules._get_local_prefix_cache_hit takes 1 positional arguments, gets 2",
        "Caches.get_computed_blocks reads *args or **kwargs, whose meaning is "
        "KVCacheManager.get_computed_blocks's to say",
        "CachesUpToALimit.get_computed_blocks takes no None as 'max_cache_hit_length'",
    } <= reported


# -- our side -------------------------------------------------------------------------------------


def test_a_patch_that_cannot_be_read_is_an_error_and_not_overlooked(package: Path):
    (package / "patches.py").write_text(
        "from sgl_vllm.vllm_api.patching import wrap\n\n\n"
        "def install(anything):\n"
        "    wrap(anything, 'step')(print)\n"
    )
    source = installed_source()
    assert source is not None
    with pytest.raises(UnknownTarget, match=r"ours/patches\.py:5"):
        contact_problems(source, {"ours": package})


def test_an_override_that_the_stubs_do_not_have_is_reported(package: Path):
    (package / "more.py").write_text(
        "from vllm.v1.core.block_pool import BlockPool\n\n\n"
        "class Pool(BlockPool):\n"
        "    def get_usage(self):\n"
        "        return super().get_usage()\n"
    )
    source = installed_source()
    assert source is not None
    assert [one.what for one in contact_problems(source, {"ours": package})] == [
        "the stubs do not have BlockPool.get_usage, which Pool.get_usage changes"
    ]
