"""Which parts an installed vLLM can carry, as its source says."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_vllm.vllm_api.probe import OPTIONAL_PARTS, PARTS, missing_hooks, missing_in
from tests.vllm_copies import Edit, copy_of_vllm

POOL = "v1/core/block_pool.py"
SCHEDULER = "v1/core/sched/scheduler.py"


@pytest.mark.parametrize("part", [*PARTS, *OPTIONAL_PARTS])
def test_the_installed_vllm_has_all_that_a_part_needs(part: str):
    assert missing_hooks(part) == []


@pytest.mark.parametrize(
    ("edit", "part", "says"),
    [
        pytest.param(
            Edit(POOL, "def unpin_blocks(", "def release_blocks("),
            "radix",
            "BlockPool.unpin_blocks",
            id="a method has another name",
        ),
        pytest.param(
            Edit(POOL, "def touch(self, blocks:", "def touch(self, kv_blocks:"),
            "radix",
            "BlockPool.touch (there is no parameter 'blocks'; 'kv_blocks' is required)",
            id="a parameter has another name",
        ),
        pytest.param(
            Edit(SCHEDULER, "self.kv_holding_waiting", "self.waiting_with_kv"),
            "jump_forward",
            "Scheduler.kv_holding_waiting",
            id="an attribute that is only set in __init__ is gone",
        ),
        pytest.param(
            Edit("v1/core/sched/utils.py", "def check_stop(", "def stop_reached("),
            "jump_forward",
            "check_stop",
            id="a function is gone",
        ),
        pytest.param(
            Edit("v1/request.py", "    @property\n    def num_tokens(", "    def num_tokens("),
            "jump_forward",
            "Request.num_tokens (a method, not an attribute)",
            id="a property has become a method",
        ),
        pytest.param(
            Edit(
                "v1/core/sched/request_queue.py",
                "    @abstractmethod\n    def pop_request(",
                "    @abstractmethod\n    def drain(self): ...\n\n"
                "    @abstractmethod\n    def pop_request(",
            ),
            "schedule",
            "RequestQueue (also requires drain)",
            id="a base class has a new abstract method",
        ),
        pytest.param(
            Edit(
                "v1/core/sched/async_scheduler.py",
                "class AsyncScheduler(Scheduler)",
                "class AsyncScheduler(object)",
            ),
            "select",
            "AsyncScheduler (does not derive from Scheduler)",
            id="a class has another base",
        ),
    ],
)
def test_what_a_part_lacks_is_named(tmp_path: Path, edit: Edit, part: str, says: str):
    assert missing_in(copy_of_vllm(tmp_path, edit), part) == [says]


def test_what_a_later_version_adds_is_not_missed_in_an_earlier_one(tmp_path: Path):
    """`max_cache_hit_length` came with 0.33: there it has to be, before that it need not."""
    edit = Edit("_version.py", "__version__ = version = '0.32.0'", "__version__ = '0.33.0'")
    source = copy_of_vllm(tmp_path, edit)
    assert source.release == (0, 33)
    assert any("max_cache_hit_length" in missing for missing in missing_in(source, "radix"))
    assert missing_hooks("radix") == []
