"""vLLM's scheduler with our queue in it, without a model: when requests are admitted, and what that
makes the scheduler compute."""

from __future__ import annotations

import random

import pytest
from vllm.sampling_params import StructuredOutputsParams

from sgl_vllm.jump.jump import nothing_running
from sgl_vllm.scheduler.fairness import DeficitCounters
from sgl_vllm.scheduler.scores import MAX_SCORED, PrefixScores
from sgl_vllm.scheduler.sharing import MIN_SAVED_TOKENS, NUM_STEPS_OVERDUE
from tests.engine.machine import Machine

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


@pytest.mark.parametrize(
    "options", [{"cache_salt": "abc"}, {"prompt_logprobs": 6}], ids=["tenants", "no reading"]
)
def test_nobody_waits_for_what_it_cannot_share(options):
    machine = Machine(block_size=128)
    prompt = words(250)
    for number in range(3):
        salts = {name: value[number] for name, value in options.items() if name == "cache_salt"}
        machine.add(prompt, **{**options, **salts})
    assert len(machine.step().scheduled_new_reqs) == 3


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


# -- preemption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_aborted", [False, True])
def test_nothing_is_evicted_last_for_a_request_that_waits_no_longer(is_aborted):
    machine = Machine(max_num_seqs=1, num_blocks=16, block_size=16)
    prefix = words(64)
    machine.add(prefix)
    machine.run()
    machine.add(words(100), 60)
    waiting = machine.add(prefix + words(60))
    for _ in range(2):
        machine.step()
    pool = machine.scheduler.parts.radix.pool
    assert pool.wanted
    if is_aborted:
        machine.abort(waiting)
    machine.run()
    assert not pool.wanted


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


def test_while_a_pass_is_paused_an_error_leaves_the_running_requests_running():
    machine = Machine()
    request = machine.add(words(40), 5)
    machine.step()
    with pytest.raises(RuntimeError, match="broken"), nothing_running(machine.scheduler):
        assert not machine.scheduler.running
        fail()
    assert machine.scheduler.running == [request]
    machine.run()


# -- a part that is off ---------------------------------------------------------------------------


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


def test_while_its_order_fails_the_queue_is_fcfs_with_few_lines_in_the_log(monkeypatch, caplog):
    machine = Machine({"schedule_policy": "fcfs"}, max_num_seqs=2, num_blocks=60)
    monkeypatch.setattr(machine.queue._waiting, "order", fail)
    for number in range(12):
        machine.add(words(100), 3, name=f"{number:02}")
    machine.run()
    assert machine.admitted == [f"{number:02}" for number in range(12)]
    num_lines = sum("the order of the queue failed" in message for message in caplog.messages)
    assert 0 < num_lines <= machine.queue.num_errors.bit_length()


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
