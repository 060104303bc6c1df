"""Which parts an installed vLLM can carry, as its source says."""

from __future__ import annotations

import pytest

from sgl_vllm.vllm_api.probe import PARTS, missing_hooks, missing_in
from sgl_vllm.vllm_api.stub_entries import read_entries
from sgl_vllm.vllm_api.vllm_source import VllmSource
from tests.vllm_copies import Edit, copy_of_vllm

POOL = "v1/core/block_pool.py"
SCHEDULER = "v1/core/sched/scheduler.py"
ASYNC = "v1/core/sched/async_scheduler.py"
LATER = Edit("_version.py", "__version__ = version = '0.32.0'", "__version__ = '0.33.0'")

CHANGES = {
    "a method has another name": (
        Edit(POOL, "def unpin_blocks(", "def release_blocks("),
        *("radix", "BlockPool.unpin_blocks"),
    ),
    "a parameter has another name": (
        Edit(POOL, "def touch(self, blocks:", "def touch(self, kv_blocks:"),
        "radix",
        "BlockPool.touch (there is no parameter 'blocks'; 'kv_blocks' is required)",
    ),
    "an attribute that is only set in __init__ is gone": (
        Edit(SCHEDULER, "self.kv_holding_waiting", "self.waiting_with_kv"),
        *("jump_forward", "Scheduler.kv_holding_waiting"),
    ),
    "a function is gone": (
        Edit("v1/core/sched/utils.py", "def check_stop(", "def stop_reached("),
        *("jump_forward", "check_stop"),
    ),
    "a property has become a method": (
        Edit("v1/request.py", "    @property\n    def num_tokens(", "    def num_tokens("),
        *("jump_forward", "Request.num_tokens (a method, not an attribute)"),
    ),
    "a base class has a new abstract method": (
        Edit(
            "v1/core/sched/request_queue.py",
            "    @abstractmethod\n    def pop_request(",
            "    @abstractmethod\n    def drain(self): ...\n\n"
            "    @abstractmethod\n    def pop_request(",
        ),
        *("schedule", "RequestQueue (also requires drain)"),
    ),
    "a class has another base": (
        Edit(ASYNC, "class AsyncScheduler(Scheduler)", "class AsyncScheduler(object)"),
        *("select", "AsyncScheduler (does not derive from Scheduler)"),
    ),
}


@pytest.fixture(scope="module")
def after_all_changes(tmp_path_factory: pytest.TempPathFactory) -> VllmSource:
    edits = [edit for edit, _, _ in CHANGES.values()]
    return copy_of_vllm(tmp_path_factory.mktemp("vllm"), LATER, *edits)


@pytest.mark.parametrize("part", sorted({part for one in read_entries() for part in one.parts}))
def test_the_installed_vllm_has_all_that_a_part_needs(part: str):
    assert missing_hooks(part) == []


def test_the_stubs_name_every_part():
    assert {*PARTS} <= {part for entry in read_entries() for part in entry.parts}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_part_lacks_is_named(after_all_changes: VllmSource, change: str):
    _, part, says = CHANGES[change]
    assert says in missing_in(after_all_changes, part)


def test_what_a_later_version_adds_is_not_missed_in_an_earlier_one(after_all_changes: VllmSource):
    """`max_cache_hit_length` came with 0.33: there it has to be, before that it need not."""
    assert after_all_changes.release == (0, 33)
    missing = missing_in(after_all_changes, "radix")
    assert any("max_cache_hit_length" in one for one in missing)
