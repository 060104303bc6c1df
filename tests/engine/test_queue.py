"""vLLM's scheduler with our queue in it, without a model: who is admitted when, and what that makes
it compute."""

from __future__ import annotations

import random

from vllm.sampling_params import StructuredOutputsParams

from tests.engine.machine import Machine

_rng = random.Random(0)


def words(count: int) -> list[int]:
    """Tokens that no other prompt has."""
    return [_rng.randrange(10**6) for _ in range(count)]


class Anything:
    """A grammar that is ready, and allows everything."""

    def accept_tokens(self, request_id, tokens):
        return True

    def is_terminated(self):
        return False


# -- held back ------------------------------------------------------------------------------------


def test_a_request_that_vllm_has_given_blocks_is_the_one_that_it_pops():
    """A constrained request changes its status, and finds what it is itself about to compute,
    between vLLM's look at it and its pop."""
    machine = Machine(block_size=128)
    prompt = words(250)
    grammar = StructuredOutputsParams(regex="a*")
    requests = [machine.add(prompt, 2, structured_outputs=grammar) for _ in range(6)]
    for request in requests:
        request.structured_output_request.grammar = Anything()
    machine.run()
    assert sorted(machine.ended) == sorted(request.request_id for request in requests)
    assert machine.num_tokens_computed == 250 + 5 + 6, "all but the last token are shared"
