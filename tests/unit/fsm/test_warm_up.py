"""No request waits for numba: after `compile_loops` no format calls a loop with new types."""

import subprocess
import sys

SCRIPT = """
import random
from sgl_vllm.fsm.warm_up import compile_loops
from sgl_vllm.jit import COMPILED

compile_loops()
before = {loop.py_func.__qualname__: set(loop.signatures) for loop in COMPILED}

import numpy as np
from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.masks import Bitmasks, fill
from sgl_vllm.fsm.vocabulary import Vocabulary
from sgl_vllm.fsm.schema import workspace
from tests.unit.fsm.grammars import GRAMMARS
from tests.unit.fsm.test_masks import PIECES
from tests.unit.fsm.texts import random_walk

workspace.MAX_S = 60  # this machine may be busy
vocabulary = Vocabulary(PIECES, len(PIECES))
masks = Bitmasks(vocabulary)
words = np.zeros(vocabulary.num_words, np.uint32)
for make in GRAMMARS.values():
    for state in random_walk(Automaton(make()).start, random.Random(1), 60):
        fill(masks.of(state), words)

for loop in COMPILED:
    name = loop.py_func.__qualname__
    # A loop that only others call is part of these, which numba's cache holds as a whole.
    if loop.py_func.__module__.startswith("sgl_vllm.fsm.") and loop.signatures:
        print(name, len(before[name]), *(set(loop.signatures) - before[name]))
"""


def test_no_format_needs_a_loop_that_is_not_compiled():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    lines = [line.split(maxsplit=2) for line in ran.stdout.splitlines()]
    assert len(lines) > 12
    assert [line for line in lines if int(line[1]) == 0 or len(line) > 2] == []
