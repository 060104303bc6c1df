"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell lets its background jobs ignore SIGINT, and the programs that tests start and interrupt
# would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
