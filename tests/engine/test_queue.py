"""vLLM's scheduler with our queue in it, without a model: when requests are admitted, and what that
makes the scheduler compute."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator, Sequence

import pytest
from vllm.sampling_params import StructuredOutputsParams

from sgl_vllm.protocol.hints import read_hints
from sgl_vllm.protocol.step_graph import Step, StepGraph, digest_of
from sgl_vllm.scheduler.fairness import DeficitCounters
from sgl_vllm.scheduler.scores import MAX_SCORED, PrefixScores
from sgl_vllm.scheduler.sharing import MIN_SAVED_TOKENS, NUM_STEPS_OVERDUE
from tests.engine.machine import Machine
from tools.engine_harness.scheduler import make_scheduler
from tools.engine_harness.settings import SGL, EngineSettings

_rng = random.Random(0)


def words(count: int) -> list[int]:
    """Tokens that no other prompt has."""
    return [_rng.randrange(10**6) for _ in range(count)]


def count_calls(monkeypatch, owner: type, name: str) -> list[None]:
    """A list that grows by one with every call of a method."""
    calls: list[None] = []
    method = getattr(owner, name)

    def counted(*args, **kwargs):
        calls.append(None)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


class Records(logging.Handler):
    """Collects the records of a logger."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def records_from(level: int, part: str) -> Iterator[list[logging.LogRecord]]:
    handler, logger = Records(level), logging.getLogger(f"vllm.sgl_vllm.{part}")
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)


@pytest.fixture
def warnings_of_hints() -> Iterator[list[logging.LogRecord]]:
    yield from records_from(logging.WARNING, "hints")


@pytest.fixture
def errors_of_queue() -> Iterator[list[logging.LogRecord]]:
    yield from records_from(logging.ERROR, "schedule")


class Anything:
    """A grammar that is ready and allows every token."""

    def accept_tokens(self, request_id, tokens):
        return True

    def is_terminated(self):
        return False


# -- held back ------------------------------------------------------------------------------------


def test_vllm_pops_the_request_that_it_has_given_blocks():
    """Between vLLM's peek and its pop, a constrained request changes its status, and a lookup finds
    what the request itself is about to compute."""
    machine = Machine(block_size=128)
    prompt = words(250)
    grammar = StructuredOutputsParams(regex="a*")
    requests = [machine.add(prompt, 2, structured_outputs=grammar) for _ in range(6)]
    for request in requests:
        request.structured_output_request.grammar = Anything()
    machine.run()
    assert sorted(machine.ended) == sorted(request.request_id for request in requests)
    assert machine.num_tokens_computed == 250 + 5 + 6, "all but the last token is shared"


def test_a_request_that_was_peeked_at_is_popped_whatever_changes_in_between(monkeypatch):
    machine = Machine()
    for name in ("a", "b"):
        machine.add(words(50), name=name)
    queue = machine.queue
    queue.step_starts()
    assert queue and queue.peek_request().request_id == "a"
    monkeypatch.setattr(queue, "_is_held_back", lambda request: request.request_id == "a")
    assert queue and queue.pop_request().request_id == "a"
    assert queue.pop_request().request_id == "b"
    assert not queue


@pytest.mark.parametrize("schedule", [False, True])
def test_a_sibling_of_a_prompt_in_prefill_waits_and_then_shares_it(schedule):
    machine = Machine(
        {"schedule": schedule}, max_num_batched_tokens=512, long_prefill_token_threshold=128
    )
    prefix = words(640)
    first, second = machine.add(prefix + words(9)), machine.add(prefix + words(9))
    for _ in range(3):
        machine.step()
    # Without the plugin it runs one chunk behind, and shares that chunk.
    assert machine.computed[second.request_id] == (0 if schedule else 3 * 128)
    machine.run()
    assert machine.computed[first.request_id] == 649
    if schedule:
        assert machine.computed[second.request_id] < 9 + MIN_SAVED_TOKENS
    else:
        assert machine.computed[second.request_id] == 649 - 128


@pytest.mark.parametrize("schedule", [False, True])
def test_of_equal_prompts_one_is_computed_first(schedule):
    machine = Machine({"schedule": schedule}, block_size=128)
    prompt = words(255)
    for _ in range(3):
        machine.add(prompt)
    machine.run()
    # In one step they share whole blocks only.
    assert machine.num_tokens_computed == (255 + 2 if schedule else 255 + 2 * 127)


def test_an_overdue_request_is_held_back_for_two_more_steps_at_most():
    machine = Machine(
        {"schedule_max_overtakes": 2}, max_num_batched_tokens=512, long_prefill_token_threshold=64
    )
    prefix = words(900)
    machine.add(prefix + words(9))
    sibling = machine.add(prefix + words(9))
    num_steps = 0
    while not machine.computed[sibling.request_id]:
        machine.add(words(20))
        machine.step()
        num_steps += 1
    assert num_steps == 3 + NUM_STEPS_OVERDUE, (
        "two requests have overtaken it; the leader would need 15 steps"
    )
    machine.run()


def test_a_request_does_not_wait_for_a_leader_that_has_passed_what_they_share():
    """In a full cache, the leader's window blocks of its prefix are evicted: it is no hit."""
    machine = Machine(
        {"schedule_max_wait_s": 1e9},
        num_blocks=230,
        block_size=4,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=8,
        sliding_windows=(8,),
    )
    machine.queue.sharing.min_saved_tokens = 16
    for _ in range(12):
        machine.add(words(100))
    machine.run()
    machine.add(words(10), max_tokens=150)  # takes blocks all the time
    document = words(240)
    leader = machine.add(document)
    for _ in range(8):
        machine.step()
    assert 40 < leader.num_computed_tokens < 120
    sibling = machine.add(document[:40] + words(10))
    machine.step()
    assert machine.computed[sibling.request_id]
    assert machine.counters.held_back == 0
    machine.run()


def test_siblings_of_a_request_that_is_held_back_are_held_back_with_it():
    machine = Machine(block_size=128, max_num_batched_tokens=4096, max_num_seqs=200)
    prompt = words(250)
    for _ in range(MAX_SCORED):
        machine.add(prompt)
    assert len(machine.step().scheduled_new_reqs) == 1
    assert machine.queue.sharing.num_comparisons == 1, "of one sibling for all others"
    machine.run()
    assert machine.num_tokens_computed == 250 + MAX_SCORED - 1


def test_no_request_waits_if_that_saves_less_than_a_step_costs():
    machine = Machine(block_size=128)
    machine.queue.sharing.min_saved_tokens = MIN_SAVED_TOKENS  # as on a GPU
    prefix = words(128 + 100)
    for _ in range(2):
        machine.add(prefix + words(5))
    machine.run()
    assert machine.counters.held_back == 0
    assert machine.num_tokens_computed == 233 + 105
    for _ in range(4):  # one request alone would save too little, all of them together would not
        machine.add(words(1) + prefix)
    prefix = words(128 + 100)
    for _ in range(4):
        machine.add(prefix + words(5))
    machine.run()
    assert machine.counters.held_back == 3


def test_requests_that_are_held_back_are_no_sign_of_missing_capacity():
    """With data parallelism, vLLM balances prefills unless requests wait for capacity."""
    machine = Machine(block_size=128, max_num_batched_tokens=4096)
    prompt = words(250)
    for _ in range(4):
        machine.add(prompt)
    machine.step()
    assert machine.counters.held_back == 3
    assert not machine.scheduler.prefill_capacity_bound
    assert not machine.scheduler.deferred_waiting, "they are deferred within the step only"
    machine.run()


def test_a_request_that_does_not_read_the_cache_is_not_held_back():
    machine = Machine(block_size=128)
    prompt = words(250)
    for _ in range(3):
        machine.add(prompt, prompt_logprobs=0)
    assert len(machine.step().scheduled_new_reqs) == 3


def test_tenants_do_not_wait_for_what_they_cannot_share():
    machine = Machine(block_size=128)
    prompt = words(250)
    for salt in ("a", "b", None):
        machine.add(prompt, cache_salt=salt)
    assert len(machine.step().scheduled_new_reqs) == 3


def test_the_next_sibling_leads_if_the_first_is_aborted():
    machine = Machine(max_num_batched_tokens=256)
    prefix = words(640)
    requests = [machine.add(prefix + words(9)) for _ in range(3)]
    machine.step()
    machine.abort(requests[0])
    machine.run()
    assert sorted(machine.ended) == [request.request_id for request in requests[1:]]


# -- aborts ---------------------------------------------------------------------------------------


def test_waiting_held_back_and_running_requests_can_be_aborted():
    machine = Machine(max_num_seqs=4, max_num_batched_tokens=128)
    prefix = words(500)
    held = [machine.add(prefix + words(9), 5) for _ in range(4)]
    waiting = [machine.add(words(60), 5) for _ in range(8)]
    machine.step()
    machine.abort(held[1], waiting[7], waiting[0], held[0])
    machine.step()
    machine.abort(held[2], waiting[3])
    machine.run()
    kept = [request for request in [*held, *waiting] if request.status.name == "FINISHED_ABORTED"]
    assert len(kept) == 6 and len(machine.ended) == 6


def test_every_request_can_be_aborted_at_any_time():
    rng = random.Random(0)
    machine = Machine(max_num_seqs=4, num_blocks=40)
    prefixes = [words(200) for _ in range(3)]
    alive = []
    for step in range(300):
        if rng.random() < 0.6:
            prompt = rng.choice(prefixes)[: rng.randint(1, 200)] + words(rng.randint(1, 40))
            alive.append(machine.add(prompt, rng.randint(1, 30)))
        if alive and rng.random() < 0.4:
            machine.abort(*rng.sample(alive, min(len(alive), 3)))
        if step % 100 == 99:
            machine.abort(*alive)
            machine.check_nothing_is_left()
        machine.step()
    machine.run()


# -- cost -----------------------------------------------------------------------------------------


def test_the_number_of_requests_matched_in_a_step_is_bounded(monkeypatch):
    machine = Machine(max_num_seqs=4, num_blocks=300)
    prefixes = [words(64) for _ in range(10)]
    scored = count_calls(monkeypatch, PrefixScores, "_score_by_tree")
    for number in range(1000):
        machine.add(prefixes[number % 10] + words(5), 3)
    most = 0
    for _ in range(40):
        scored.clear()
        machine.step()
        most = max(most, len(scored))
    assert most == MAX_SCORED
    assert len(machine.ended) > 20


def test_what_was_popped_in_a_step_is_scored_in_a_later_one():
    """Ordering in the middle of a step may score while popped requests are not scored yet."""
    machine = Machine()
    for _ in range(MAX_SCORED + 36):
        machine.add(words(40))
    queue = machine.scheduler.parts.queue
    queue.step_starts()
    popped = [queue.pop_request() for _ in range(MAX_SCORED + 35)]
    queue._scores.refresh()
    assert not queue.num_errors
    queue.prepend_requests(reversed(popped))
    machine.run()
    assert not queue.num_errors and len(machine.ended) == MAX_SCORED + 36


def test_a_request_is_matched_again_only_when_its_match_may_have_changed(monkeypatch):
    machine = Machine(max_num_seqs=1, num_blocks=300)
    scored = count_calls(monkeypatch, PrefixScores, "_score_by_tree")
    for _ in range(30):
        machine.add(words(50), 2)
    machine.run()
    assert len(scored) <= 30


def test_a_request_that_waits_alone_is_neither_scored_nor_ordered(monkeypatch):
    machine = Machine()
    scored = count_calls(monkeypatch, PrefixScores, "refresh")
    for _ in range(5):
        machine.add(words(50), 4)
        machine.run()
    assert not scored and machine.counters.ordered_steps == 0


def test_no_order_is_decided_while_no_seat_is_free():
    machine = Machine(max_num_seqs=2)
    for _ in range(6):
        machine.add(words(50), 20)
    machine.step()
    assert machine.counters.ordered_steps == 1
    for _ in range(15):
        machine.step()
    assert machine.counters.ordered_steps == 1 and len(machine.queue) == 4 and machine.queue


# -- hints ----------------------------------------------------------------------------------------


def in_group(program, group) -> dict:
    return {"extra_args": {"sgl_program": program, "sgl_fork_group": group}}


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "fcfs"])
def test_the_branches_of_a_fork_are_admitted_together(policy):
    machine = Machine(
        {"schedule_policy": policy, "schedule_max_delay": 100.0}, max_num_seqs=1, num_blocks=30
    )
    for number in range(4):
        machine.add(words(300), name=f"before {number}")
        machine.add(words(300), name=f"branch {number}", **in_group("p", 0))
        machine.add(words(300), name=f"other fork {number}", **in_group("p", 1))
    machine.run()
    names = [name.rpartition(" ")[0] for name in machine.admitted]
    assert len([name for name, _ in itertools.groupby(names) if name != "before"]) == 2


def test_a_group_of_one_tenant_is_not_that_of_another():
    machine = Machine({"schedule_policy": "fcfs", "schedule_max_delay": 100.0}, max_num_seqs=1)
    for number in range(3):
        machine.add(words(30), name=f"a{number}", cache_salt="a", **in_group("p", 0))
        machine.add(words(30), name=f"b{number}", cache_salt="b", **in_group("p", 0))
    machine.run()
    assert machine.admitted == ["a0", "a1", "a2", "b0", "b1", "b2"]


@pytest.mark.parametrize(
    "hints",
    [
        {"sgl_fork_group": ["a", "list"]},
        {"sgl_fork_group": {"a": "dict"}},
        {"sgl_fork_group": 1.5},
        {"sgl_fork_group": "x" * 257},
        {"sgl_fork_group": "good", "sgl_program": ["bad"]},
        {"sgl_program": ["bad"]},
    ],
    ids=["list", "dict", "fraction", "long text", "program", "program alone"],
)
def test_a_bad_hint_is_one_warning_and_nothing_else(hints, warnings_of_hints):
    machine = Machine(max_num_seqs=1)
    machine.add(words(30), extra_args=hints)
    machine.add(words(30), **in_group("p", 0))
    assert len(warnings_of_hints) == 1
    assert "are ignored" in warnings_of_hints[0].getMessage()
    assert "x" * 20 not in warnings_of_hints[0].getMessage()
    machine.run()
    assert len(machine.ended) == 2


def test_a_program_alone_does_not_change_the_order(warnings_of_hints):
    """It is for routers in front of several engines."""
    machine = Machine({"schedule_policy": "fcfs", "schedule_max_delay": 100.0}, max_num_seqs=1)
    for number in range(3):
        for program in "pq":
            hint = {"sgl_program": program}
            machine.add(words(30), name=f"{program}{number}", extra_args=hint)
    machine.run()
    assert machine.admitted == ["p0", "q0", "p1", "q1", "p2", "q2"]
    assert not warnings_of_hints


# -- programs ----------------------------------------------------------------------------------


def serve_steps(machine: Machine, graph: StepGraph, sizes: Sequence[int]) -> None:
    """A run whose steps have new prompts of these sizes."""
    for index, size in enumerate(sizes):
        machine.add(words(size), **step(graph, index, sends_graph=index == 0))
        machine.run()


def step(graph: StepGraph, index: int, *, sends_graph: bool = False) -> dict:
    hints = {"sgl_step": f"{graph.digest}/{index}"}
    return {"extra_args": {**hints, **({"sgl_graph": graph.text} if sends_graph else {})}}


LINE = StepGraph((Step(), Step(0, "search"), Step(1, "read")))
PAIR = StepGraph((Step(), Step(0, "build")))


def test_the_program_with_the_least_to_compute_goes_first():
    machine = Machine({"schedule_policy": "program", "schedule_max_delay": 100.0}, max_num_seqs=1)
    serve_steps(machine, LINE, [600, 200, 20])
    serve_steps(machine, PAIR, [100, 100])
    machine.admitted.clear()
    for name, graph, index in (("820", LINE, 0), ("200", PAIR, 0), ("20", LINE, 2)):
        machine.add(words(64), name=name, **step(graph, index))
    machine.run()
    assert machine.admitted == ["20", "200", "820"]


def test_without_a_graph_the_program_that_has_computed_the_least_goes_first():
    machine = Machine({"schedule_policy": "program", "schedule_max_delay": 100.0}, max_num_seqs=1)
    served = {size: words(size) for size in (2000, 400, 100)}
    for prompt in served.values():
        machine.add(prompt)
        machine.run()
    machine.admitted.clear()
    for size, prompt in served.items():
        machine.add([*prompt, *words(8)], name=str(size))
    machine.add(words(500), name="new")
    machine.run()
    assert machine.admitted == ["100", "400", "2000", "new"], "the new one is not cached"


def test_the_branches_of_a_fork_in_a_graph_are_admitted_together():
    fork = StepGraph((Step(), Step(0), Step(0), Step(0)))
    machine = Machine({"schedule_policy": "fcfs", "schedule_max_delay": 100.0}, max_num_seqs=1)
    machine.add(words(30), **step(fork, 0, sends_graph=True))
    machine.run()
    machine.admitted.clear()
    for index in (1, 2, 3):
        for program in ("p", "q"):
            hints = {"sgl_program": program, **step(fork, index)["extra_args"]}
            machine.add(words(30), name=f"{program}{index}", extra_args=hints)
        machine.add(words(30), name=f"alone {index}", **step(fork, index))
    machine.run()
    alone = ["alone 1", "alone 2", "alone 3"]
    assert machine.admitted == ["p1", "p2", "p3", "q1", "q2", "q3", *alone]


def test_branches_from_the_start_of_a_program_are_admitted_together():
    machine = Machine({"schedule_policy": "fcfs", "schedule_max_delay": 100.0}, max_num_seqs=1)
    for index in (0, 1):
        for program in ("p", "q"):
            hints = {"sgl_program": program, **step(TWO, index, sends_graph=True)["extra_args"]}
            machine.add(words(30), name=f"{program}{index}", extra_args=hints)
    machine.run()
    assert machine.admitted == ["p0", "p1", "q0", "q1"]


def test_a_step_of_an_unknown_graph_is_served_as_any_other():
    machine = Machine({"schedule_policy": "program"}, max_num_seqs=1)
    for index in (1, 7):
        machine.add(words(30), **step(LINE, index))
    for text in ("[3]", '[{"tool": "\\ud800"}]', "", "{"):
        hints = {"sgl_step": f"{digest_of(text)}/0", "sgl_graph": text}
        machine.add(words(30), extra_args=hints)
    machine.run()
    assert len(machine.ended) == 6 and not machine.scheduler.parts.radix.failed


TWO = StepGraph((Step(), Step()))


def measured_tokens(machine: Machine, prompt: Sequence[int]) -> int:
    """What the first step of `TWO` has taken in the mean, by what `program` would order by."""
    hints = read_hints(step(TWO, 0)["extra_args"], "")
    request = machine.add(prompt, **step(TWO, 0))
    num_remaining = machine.scheduler.parts.programs.arrived(request, hints).num_remaining
    machine.abort(request)
    return num_remaining // 2  # the other step counts as much


def test_a_step_takes_the_tokens_that_are_not_cached_and_those_of_its_answer():
    machine = Machine()
    prompt = words(320)
    machine.add(prompt)
    machine.run()
    machine.add([*prompt, *words(80)], 20, **step(TWO, 0, sends_graph=True))
    machine.run()
    assert 80 + 19 <= measured_tokens(machine, prompt) <= 81 + 20


def test_what_is_computed_again_after_a_preemption_does_not_count():
    machine = Machine(num_blocks=30)
    machine.add(words(200), 200)
    request = machine.add(words(640), 100, **step(TWO, 0, sends_graph=True))
    machine.run()
    assert request.num_preemptions
    assert 730 <= measured_tokens(machine, words(64)) <= 740


@pytest.mark.parametrize(("num_steps", "num_tokens"), [(1, 0), (3, 2001)])
def test_an_aborted_request_takes_what_was_computed_if_it_has_an_answer(num_steps, num_tokens):
    machine = Machine()
    request = machine.add(words(2000), 100, **step(TWO, 0, sends_graph=True))
    for _ in range(num_steps):
        machine.step()
    machine.abort(request)
    assert num_tokens - 1 <= measured_tokens(machine, words(64)) <= num_tokens + 1


# -- tenants --------------------------------------------------------------------------------------


def test_a_flood_of_one_tenant_does_not_starve_another():
    def place_of_last_modest(quantum: int) -> int:
        machine = Machine({"schedule_fair_quantum": quantum}, max_num_seqs=2, num_blocks=60)
        for number in range(100):
            machine.add(words(200), 4, name=f"flood {number}", cache_salt="flood")
        for number in range(5):
            machine.add(words(200), 4, name=f"modest {number}", cache_salt="modest")
        machine.run()
        return machine.admitted.index("modest 4")

    assert place_of_last_modest(quantum=0) > 90
    assert place_of_last_modest(quantum=400) <= 15


def test_a_tenant_that_was_alone_runs_up_no_debt():
    machine = Machine({"schedule_fair_quantum": 500}, max_num_seqs=1)
    for _ in range(50):
        machine.add(words(500), cache_salt="early")
        machine.run()
    for number in range(20):
        for tenant in ("early", "late"):
            machine.add(words(200), name=f"{tenant} {number}", cache_salt=tenant)
    machine.run()
    first = [name.split()[0] for name in machine.admitted[-40:-20]]
    assert 7 <= first.count("early") <= 13


def test_without_the_option_tenants_are_not_distinguished():
    machine = Machine({"schedule_policy": "fcfs"}, max_num_seqs=1)
    for number in range(6):
        machine.add(words(200), name=str(number), cache_salt="ab"[number < 4])
    machine.run()
    assert machine.admitted == list("012345")


# -- requests ahead of time -----------------------------------------------------------------------

AHEAD = {"sgl_ahead": 1}


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_what_is_computed_ahead_of_time_goes_after_all_that_others_wait_for(policy):
    machine = Machine({"schedule_policy": policy}, max_num_seqs=1)
    cached = words(320)
    machine.add(cached, name="first")
    machine.run()
    machine.add(cached + words(8), name="ahead", extra_args=AHEAD)
    for number in range(3):
        machine.add(words(100), name=str(number))
    machine.step()
    machine.add(words(100), name="late")
    machine.run()
    assert machine.admitted == ["first", *"012", "late", "ahead"]


def test_it_goes_after_those_of_the_least_priority_whatever_its_own_is():
    machine = Machine(policy="priority", max_num_seqs=1)
    machine.add(words(50), name="ahead", extra_args=AHEAD, priority=-5)
    machine.add(words(60), name="low", priority=9)
    machine.run()
    assert machine.admitted == ["low", "ahead"]


def test_it_takes_no_place_of_another_in_the_bound_on_waiting():
    """With a bound of one overtake, the oldest ordinary request is next, however long an ahead one
    has waited."""
    machine = Machine({"schedule_max_overtakes": 1}, max_num_seqs=1)
    machine.add(words(50), name="ahead", extra_args=AHEAD)
    for number in range(8):
        machine.add(words(60), name=str(number))
    machine.run()
    assert machine.admitted == [*"01234567", "ahead"]


# -- vLLM's priorities ----------------------------------------------------------------------------


def test_important_requests_go_first_and_among_equals_the_longest_cached_prefix():
    machine = Machine(policy="priority", max_num_seqs=1, num_blocks=24)
    prefix = words(320)
    machine.add(prefix, name="first")
    machine.run()
    for priority in (1, 0):
        machine.add(words(400), name=f"new {priority}", priority=priority)
        machine.add(prefix + words(80), name=f"cached {priority}", priority=priority)
    machine.run()
    assert machine.admitted == ["first", "cached 0", "new 0", "cached 1", "new 1"]


def test_with_priorities_vllm_preempts_the_least_important_request():
    machine = Machine(policy="priority", num_blocks=12)
    low = machine.add(words(150), 100, priority=5)
    machine.step()
    high = machine.add(words(150), 100, priority=0)
    machine.run()
    assert low.num_preemptions and not high.num_preemptions
    assert machine.ended == [high.request_id, low.request_id]


def test_a_preempted_request_goes_before_others_of_its_priority_only():
    machine = Machine(policy="priority", num_blocks=30)
    waiting = [machine.add(words(30), priority=priority, name=str(priority)) for priority in (0, 1)]
    preempted = machine.add(words(30), priority=1, name="preempted")
    machine.queue.remove_request(preempted)
    machine.queue.prepend_request(preempted)
    assert list(machine.queue) == [waiting[0], preempted, waiting[1]]


# -- preemption -----------------------------------------------------------------------------------


def test_every_request_finishes_under_heavy_preemption():
    machine = Machine(num_blocks=16, block_size=16)
    prompt = words(40)
    for number in range(30):
        machine.add(prompt + words(number % 3), 180)
    machine.run(max_steps=30 * 180 + 1000)
    assert len(machine.ended) == 30
    assert machine.num_preemptions > 10


# -- errors, and missing parts --------------------------------------------------------------------


def test_a_snapshot_of_the_tree_decides_nothing(monkeypatch):
    machine = Machine({"schedule_fair_quantum": 100}, max_num_seqs=1, num_blocks=30)
    prefix = words(320)
    machine.add(prefix, 8)
    for _ in range(2):
        machine.step()
    for _ in range(4):
        machine.add(prefix + words(600))
    matched = count_calls(monkeypatch, PrefixScores, "_score_by_tree")
    refilled = count_calls(monkeypatch, DeficitCounters, "refill_if_due")
    ordered = machine.counters.ordered_steps
    assert machine.scheduler.sgl_vllm.tree()["nodes"]
    assert not matched and not refilled and machine.counters.ordered_steps == ordered
    machine.run()
    assert matched and refilled


def test_blocks_count_once_for_the_tokens_that_all_groups_keep_in_them():
    """A block of full attention has the tokens of two blocks of the window group."""
    settings = EngineSettings(
        num_blocks=90,
        block_size=16,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        sliding_windows=(64,),
        full_block_scale=2,
        plugin={},
    )
    scheduler = make_scheduler(SGL, settings)
    assert scheduler.parts.radix.groups.tokens_in(90) == 30 * 32
    assert scheduler.waiting._room_tokens() == 30 * 32


def test_while_a_pass_is_paused_an_error_leaves_the_running_requests_running():
    machine = Machine()
    request = machine.add(words(40), 5)
    machine.step()
    with pytest.raises(RuntimeError, match="broken"), machine.scheduler._nothing_running():
        assert not machine.scheduler.running
        fail()
    assert machine.scheduler.running == [request]
    machine.run()


# -- a part that is off ---------------------------------------------------------------------------


def test_a_client_that_pins_is_told_why_the_tree_is_off():
    machine = Machine()
    machine.scheduler.parts.switch_off("radix", "the self-check found: a wrong token")
    answer = machine.scheduler.sgl_vllm.pin(words(40))
    assert answer.error == "the radix tree is off: the self-check found: a wrong token"


def test_errors_of_a_part_are_counted_and_being_switched_off_is_none():
    machine = Machine()
    parts = machine.scheduler.parts
    assert [parts.num_errors(name) for name in parts.states()] == [0] * 5
    machine.queue._guard.run(fail)
    assert parts.num_errors("schedule") == 1 and parts.states()["schedule"] == "on"
    parts.switch_off("radix", "the self-check found: a wrong token")
    assert parts.num_errors("radix") == 0
    other = Machine().scheduler.parts
    other.radix.pool.guarded(fail)
    assert other.num_errors("radix") == 1
    other.switch_off("radix", "the self-check found: 1 unexpected errors")
    assert other.num_errors("radix") == 1


def fail(*args, **kwargs):
    raise RuntimeError("broken")


def test_while_its_order_fails_the_queue_is_fcfs_with_few_lines_in_the_log(
    monkeypatch, errors_of_queue
):
    machine = Machine({"schedule_policy": "fcfs"}, max_num_seqs=2, num_blocks=60)

    monkeypatch.setattr(machine.queue._waiting, "order", fail)
    for number in range(12):
        machine.add(words(100), 3, name=f"{number:02}")
    machine.run()
    assert machine.admitted == [f"{number:02}" for number in range(12)]
    assert len(errors_of_queue) <= machine.queue.num_errors.bit_length()


def test_an_error_in_one_step_does_not_change_the_order_of_the_next(monkeypatch):
    machine = Machine(max_num_seqs=1, num_blocks=30)
    prefix = words(320)
    machine.add(prefix, name="first")
    machine.run()
    order = machine.queue._waiting.order
    monkeypatch.setattr(machine.queue._waiting, "order", fail)
    for name, tokens in (("a", words(100)), ("b", words(800)), ("cached", prefix + words(80))):
        machine.add(tokens, name=name)
    machine.step()
    monkeypatch.setattr(machine.queue._waiting, "order", order)
    machine.run()
    assert machine.admitted == ["first", "a", "cached", "b"]


def test_while_the_order_fails_priorities_hold_and_preempted_requests_keep_their_place(monkeypatch):
    machine = Machine(policy="priority", max_num_seqs=1)
    monkeypatch.setattr(machine.queue._waiting, "order", fail)
    for number, priority in enumerate((2, 1, 2, 0)):
        machine.add(words(30), name=str(number), priority=priority)
    preempted = machine.add(words(30), name="preempted", priority=2)
    machine.queue.remove_request(preempted)
    machine.queue.prepend_request(preempted)
    machine.run()
    assert machine.admitted == ["3", "1", "preempted", "0", "2"]


def test_without_the_tree_the_order_follows_vllms_own_cache():
    machine = Machine({"radix": False}, max_num_seqs=1, num_blocks=30)
    prefix = words(320)
    machine.add(prefix, name="first")
    machine.run()
    machine.add(words(800), name="new")
    machine.add(prefix + words(80), name="cached")
    machine.run()
    assert machine.admitted == ["first", "cached", "new"]


def test_an_error_in_the_tree_leaves_the_queue_serving():
    machine = Machine(max_num_seqs=2, num_blocks=60)
    prefix = words(200)
    for number in range(20):
        machine.add(prefix + words(40), 3, name=str(number))
        if number == 10:
            machine.step()
            machine.scheduler.parts.radix.pool.switch_off("off: by this test")
    for _ in range(200):
        machine.step()
    assert len(machine.ended) == 20 and not machine.queue.num_errors
