"""vLLM's definitions of the methods that we override or wrap, against what ours accept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.vllm_copies import Edit, copy_of_vllm, source_of
from tools.vllm_contact.__main__ import main
from tools.vllm_contact.contact import Problem, contact_problems

pytestmark = pytest.mark.slow

POOL = "v1/core/block_pool.py"
MANAGER = "v1/core/kv_cache_manager.py"

CHANGES = [
    pytest.param(
        Edit(POOL, "def touch(self, blocks:", "def touch(self, kv_blocks:"),
        "RadixBlockPool.touch: there is no parameter 'kv_blocks'",
        id="a parameter has another name",
    ),
    pytest.param(
        Edit(
            "v1/core/sched/request_queue.py",
            "    @abstractmethod\n    def pop_request(",
            "    @abstractmethod\n    def drain(self): ...\n\n"
            "    @abstractmethod\n    def pop_request(",
        ),
        "CacheAwareQueue does not implement drain",
        id="a base class has a new abstract method",
    ),
    pytest.param(
        Edit(
            "v1/engine/core.py",
            "class EngineCore:\n",
            "class EngineCore:\n    def sgl_vllm_call(self): ...\n\n",
        ),
        "_engine_call: is added to a class that has a EngineCore.sgl_vllm_call of its own now",
        id="vLLM has a method of the name of one that we add",
    ),
    pytest.param(
        Edit(
            "parser/abstract_parser.py",
            "import json\n",
            "import json\n"
            "from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar\n",
            count=1,
        ),
        "_checked_first: comes after vllm/parser/abstract_parser.py:6 has imported "
        "validate_xgrammar_grammar",
        id="a wrapped function is imported at the top of a module",
    ),
]


@pytest.fixture(scope="module")
def after_all_changes(tmp_path_factory: pytest.TempPathFactory) -> list[Problem]:
    """The changes touch different methods, so one check of one copy reports each of them."""
    edits = [change.values[0] for change in CHANGES]
    copy = copy_of_vllm(tmp_path_factory.mktemp("vllm"), *edits)  # type: ignore[arg-type]
    return contact_problems(copy)


def test_the_installed_vllm_calls_our_code_as_it_expects(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vllm_contact", "--json"])
    status, printed = main(), capsys.readouterr().out
    assert (status, json.loads(printed)[0]["hooks"]) == (0, [])


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_so_does_every_other_supported_version(version: str):
    source = source_of(version)
    assert f"{source.release[0]}.{source.release[1]}.0" == version
    assert list(map(str, contact_problems(source))) == []


@pytest.mark.parametrize(("edit", "says"), CHANGES)
def test_a_change_in_vllm_is_reported(after_all_changes: list[Problem], edit: Edit, says: str):
    reported = [problem for problem in after_all_changes if problem.what == says]
    assert reported, [*map(str, after_all_changes)]


# -- an override that stopped the engine on vLLM 0.33 ---------------------------------------------

OLD_OVERRIDE = """
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request


class Caches(KVCacheManager):
    def get_computed_blocks(self, request: Request, *args: Any, **kwargs: Any):
        limit = next(iter((*args, *kwargs.values())), request.num_tokens - 1)
        return min(limit, request.num_prompt_tokens)
"""

METHOD_OF_0_33 = Edit(
    MANAGER,
    "def get_computed_blocks(self, request: Request)",
    "def get_computed_blocks(self, request: Request, max_cache_hit_length: int | None = None)",
)


def test_the_override_that_stopped_the_engine_on_0_33_is_reported(tmp_path: Path):
    package = tmp_path / "ours"
    package.mkdir()
    (package / "old.py").write_text(OLD_OVERRIDE)
    copy = copy_of_vllm(tmp_path / "vllm", METHOD_OF_0_33)
    assert (
        "Caches.get_computed_blocks: reads *args or **kwargs, whose meaning is "
        "KVCacheManager.get_computed_blocks's to say"
    ) in {one.what for one in contact_problems(copy, {"ours": package})}
