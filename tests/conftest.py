"""What holds for all tests."""

from __future__ import annotations

import os
import signal

# A shell lets its background jobs ignore SIGINT, and the programs that tests start and interrupt
# would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A parallel loop of numba's, such as that of vLLM's n-grams, gives all OpenMP loops of the thread
# that runs it as many threads as this says, whatever PyTorch was told: by default one per core. Two
# test processes then wait for each other's threads at every layer, and take five times as long.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
