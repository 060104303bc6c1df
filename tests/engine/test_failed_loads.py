"""Loads of a KV connector within a pass that fail, and requests that come before that is known."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from benchmarks.schedulers import runner_output
from sgl_vllm.radix.invariants import check_pool
from sgl_vllm.radix.node import Node
from sgl_vllm.radix.tokens import pack, unpack
from tests.engine import memory_connector
from tests.engine.machine import Machine
from tests.engine.memory_connector import STORE, behave

SIZE = 16
STORED = list(range(4 * SIZE))
"""What the connector has, in whole blocks."""
SAMPLED = 5000
"""Every token that is sampled."""

IS_ASYNC = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
POLICY = pytest.mark.parametrize("policy", ["fail", "recompute"])


def store(tokens: list[int]) -> None:
    for end in range(SIZE, len(tokens) + 1, SIZE):
        STORE[(0, *tokens[:end])] = []


@pytest.fixture(autouse=True)
def stored() -> Iterator[None]:
    behave()
    store(STORED)
    yield
    STORE.clear()


class Loading(Machine):
    """A scheduler over a connector that loads within the pass, and what each slot then holds.

    Attributes:
        slots: by block, for each slot the tokens up to its own; None where the KV is wrong.
    """

    def __init__(self, policy: str, is_async: bool, **options: Any) -> None:
        config = KVTransferConfig(**memory_connector.CONFIG, kv_load_failure_policy=policy)
        super().__init__(
            {"tier_rule": "always"},
            block_size=SIZE,
            async_scheduling=is_async,
            kv_transfer_config=config,
            **options,
        )
        self.is_async = is_async
        self.manager = self.scheduler.parts.radix
        self.slots: dict[int, list[tuple[int, ...] | None]] = {}
        self._in_flight: deque[tuple[SchedulerOutput, set[int]]] = deque()

    def begin(self, num_valid: int | None = None) -> SchedulerOutput:
        """Schedule a pass and run it. Of each load, `num_valid` blocks come, or all."""
        scheduled = self.scheduler.schedule()
        for copy in scheduled.kv_cache_block_copies or ():
            self.slots[copy.dst_block_id] = list(self._slots(copy.src_block_id))
        invalid: set[int] = set()
        for load in scheduled.kv_connector_metadata.loads:
            for number, (block_id, key) in enumerate(zip(load.block_ids, load.keys, strict=True)):
                is_valid = num_valid is None or number < num_valid
                tokens = key[1:]  # the first one is the group
                ends = range(len(tokens) - SIZE + 1, len(tokens) + 1)
                self.slots[block_id] = [tokens[:end] if is_valid else None for end in ends]
                if not is_valid:
                    invalid.add(block_id)
        self._compute(scheduled)
        self._in_flight.append((scheduled, invalid))
        return scheduled

    def _slots(self, block_id: int) -> list[tuple[int, ...] | None]:
        return self.slots.setdefault(block_id, [None] * SIZE)

    def _compute(self, scheduled: SchedulerOutput) -> None:
        """As a model does it: layer by layer, so a token reads what others compute in this pass."""
        positions = []
        for name, num_tokens in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            tokens = (*request.all_token_ids, *[SAMPLED] * end)[:end]
            positions += [(place, name, tokens) for place in range(end - num_tokens, end)]
        for place, name, tokens in sorted(positions):
            (blocks,) = self.manager.get_block_ids(name)
            is_right = all(
                self._slots(blocks[before // SIZE])[before % SIZE] == tokens[: before + 1]
                for before in range(place)
            )
            right = tokens[: place + 1] if is_right else None
            self._slots(blocks[place // SIZE])[place % SIZE] = right

    def report(self) -> None:
        """The outcome of the pass that was begun first."""
        scheduled, invalid = self._in_flight.popleft()
        ids = list(scheduled.num_scheduled_tokens)
        requests = self.scheduler.requests
        is_done = [n in requests and not requests[n].is_prefill_chunk for n in ids]
        output = runner_output(ids, [[SAMPLED] if done else [] for done in is_done])
        output.kv_connector_output = KVConnectorOutput(invalid_block_ids=invalid)
        self.scheduler.update_from_output(scheduled, output)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def check_copies(self, scheduled: SchedulerOutput) -> None:
        """What a hit inside a block reads from its copy must be right."""
        copies = {copy.dst_block_id for copy in scheduled.kv_cache_block_copies or ()}
        for new in scheduled.scheduled_new_reqs:
            number, num_inside = divmod(new.num_computed_tokens, SIZE)
            if num_inside and new.block_ids[0][number] in copies:
                held = self.slots[new.block_ids[0][number]][:num_inside]
                tokens = tuple(new.prompt_token_ids)
                assert held == [tokens[: number * SIZE + i + 1] for i in range(num_inside)]

    def check_tree(self) -> None:
        """The tree holds right KV only."""
        check_pool(self.manager.pool)
        tree = self.manager.tree
        for root in tree.roots.values():
            pending: list[tuple[Node, tuple[int, ...]]]
            pending = [(child, ()) for child in root.children.values()]
            while pending:
                node, before = pending.pop()
                tokens = before + tuple(unpack(node.tokens))
                pending += [(child, tokens) for child in node.children.values()]
                if node.children:
                    continue
                match = tree.match_prefix(self._namespace(root), pack(tokens))
                block_ids = tree.block_ids(match, match.num_tokens)
                held = [slot for block_id in block_ids for slot in self.slots[block_id]]
                for place in range(len(tokens)):
                    assert held[place] == tokens[: place + 1], (place, len(tokens))

    def _namespace(self, root):
        (name,) = [name for name, one in self.manager.tree.roots.items() if one is root]
        return name


def fail_before(machine: Loading, num_valid: int, later: list[int]) -> SchedulerOutput:
    """Load `STORED` for a request, of which only `num_valid` blocks come, and send the `later` one
    as soon as it can find the blocks, before the failure is repaired. Returns its first pass."""
    machine.add([*STORED, *[7] * 6], max_tokens=4)
    machine.begin(num_valid)
    STORE.clear()
    if not machine.is_async:
        machine.report()
    machine.add(later)
    scheduled = machine.begin()
    if machine.is_async:
        machine.report()
    return scheduled


def finish(machine: Loading) -> None:
    for _ in range(12):
        machine.begin()
        machine.report()
    while machine.num_in_flight:
        machine.report()
    # With asynchronous scheduling, vLLM does not go on with some requests whose load has failed.
    machine.abort(*machine.scheduler.requests.values())
    machine.scheduler.schedule()
    machine.check_nothing_is_left()


@POLICY
@IS_ASYNC
@pytest.mark.parametrize(
    ("num_valid", "num_shared"), [(0, 40), (1, 40), (2, 40), (3, 40), (2, len(STORED))]
)
def test_a_failed_load_gives_no_later_request_wrong_kv_and_leaves_none(
    policy, is_async, num_valid, num_shared
):
    """Nor does what those that share its blocks have computed from it stay."""
    machine = Loading(policy, is_async)
    machine.check_copies(fail_before(machine, num_valid, [*STORED[:num_shared], *[9] * 20]))
    machine.add([*STORED, *[9] * 12, *[8] * 9])
    machine.check_copies(machine.begin())
    finish(machine)
    machine.check_tree()


@POLICY
@IS_ASYNC
@pytest.mark.parametrize("seed", [1, 4])
def test_random_loads_of_which_some_fail(policy, is_async, seed):
    rng = random.Random(seed)
    machine = Loading(policy, is_async, num_blocks=60, max_num_batched_tokens=64, max_num_seqs=6)
    trunks = [[rng.randrange(1000) for _ in range(90)] for _ in range(3)]
    for trunk in trunks:
        store(trunk[: rng.randrange(30, 90)])
    for _ in range(40):
        if rng.random() < 0.6:
            trunk = rng.choice(trunks)[: rng.randrange(5, 90)]
            prompt = trunk + [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
            machine.add(prompt, max_tokens=rng.randrange(1, 6))
        machine.check_copies(machine.begin(rng.randrange(4) if rng.random() < 0.4 else None))
        if rng.random() < 0.05 and machine.scheduler.requests:
            machine.abort(rng.choice([*machine.scheduler.requests.values()]))
        while machine.num_in_flight > is_async:
            machine.report()
    finish(machine)
    machine.check_tree()
