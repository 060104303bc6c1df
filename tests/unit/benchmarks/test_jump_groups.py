"""The model of steps in which jumps wait for each other, against steps counted by hand."""

from __future__ import annotations

from benchmarks.jump_groups import decoded, passes_of, simulate


def test_a_jump_is_one_pass_outside_full_graphs_and_with_a_step_in_flight_a_stale_row_too():
    answer = [-3, 2, -4, 1, -2]
    assert passes_of(answer, has_step_in_flight=False) == [True, False, True]
    assert passes_of(answer, has_step_in_flight=True) == [True, False, False, True]
    assert passes_of([-9], has_step_in_flight=False) == [True]


def test_a_jump_that_waits_goes_with_the_next_one():
    # Prompts in the first step; one jumps in the third, the other in the fourth.
    answers = [[2, -5, 3], [3, -5, 3]]
    now, waiting = (
        simulate(answers, 2, waits=waits, has_step_in_flight=False) for waits in (False, True)
    )
    assert (now.steps, now.mixed_steps, now.waits) == (6, 3, 0)
    assert (waiting.steps, waiting.mixed_steps, waiting.waits) == (6, 2, 1)
    assert sorted(now.steps_of_requests) == [5, 6]
    assert sorted(waiting.steps_of_requests) == [6, 6]
    assert now.cost(0.5) - waiting.cost(0.5) == 0.5


def test_a_jump_waits_one_step_only():
    answers = [[1, -5, 4], [9]]
    waiting = simulate(answers, 2, waits=True, has_step_in_flight=False)
    assert (waiting.mixed_steps, waiting.waits) == (2, 1)
    assert sorted(waiting.steps_of_requests) == [6, 9]


def test_short_runs_are_decoded_but_for_the_one_that_the_prompts_pass_computes():
    answer = [-1, 2, -2, 4, -3, 1, -1]
    assert decoded(answer, 1) == answer
    assert decoded(answer, 3) == [-1, 8, -3, 2]
    assert decoded(answer, 99) == [-1, 13]
    steps = simulate([decoded(answer, 3)], 1, waits=False, has_step_in_flight=True)
    assert (steps.steps, steps.mixed_steps) == (8 + 1 + 2, 2)  # a stale row before the jump
