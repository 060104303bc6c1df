"""Which request is preempted, by the blocks that only it has."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sgl_vllm.scheduler.preemption import CheapestVictim


@dataclass(eq=False)
class Request:
    request_id: str
    num_preemptions: int = 0


def order_after_choice(ref_counts: dict[str, list[int]], **num_preemptions: int) -> str:
    """The running requests once a victim is chosen, in a full cache. Each request is one letter,
    and has blocks with these reference counts. vLLM preempts the last one."""
    running = [Request(name, num_preemptions.get(name, 0)) for name in ref_counts]
    blocks = {
        name: [SimpleNamespace(ref_cnt=count) for count in counts]
        for name, counts in ref_counts.items()
    }
    scheduler: Any = SimpleNamespace(running=running)
    radix: Any = SimpleNamespace(
        tree=object(),
        groups=SimpleNamespace(full_blocks=blocks),
        block_pool=SimpleNamespace(get_num_free_blocks=lambda: 0),
    )
    CheapestVictim(scheduler, radix).step_starts()
    return "".join(request.request_id for request in running)


def test_the_request_with_the_fewest_exclusive_blocks_is_preempted() -> None:
    assert order_after_choice({"a": [2, 2, 1], "b": [2, 1, 1]}) == "ba"
    assert order_after_choice({"a": [1, 1, 1], "b": [2, 1, 1]}) == "ab"
    assert order_after_choice({"a": [1, 1], "b": [1, 1]}) == "ab", "the newest of equals"


def test_blocks_that_are_shared_behind_exclusive_ones_are_not_counted() -> None:
    """Two requests computed a prefix in one step, so one has duplicates that are not in the tree. A
    third one shares what follows."""
    assert order_after_choice({"a": [1, 2, 2, 2, 1], "b": [2, 1, 1, 1]}) == "ba"
    assert order_after_choice({"a": [2, 1, 1], "b": [1, 2, 1, 1]}) == "ba"


def test_a_request_that_frees_nothing_or_was_preempted_twice_is_spared() -> None:
    assert order_after_choice({"a": [2, 2], "b": [1, 1]}) == "ab"
    assert order_after_choice({"a": [1], "b": [1, 1]}, a=2) == "ab"
