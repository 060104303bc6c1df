"""Runs one command and ends it, with all it started, when the process that asked for it is gone.

    python _guard.py STOP_TIMEOUT_S COMMAND...

The asker holds the other end of standard input. When that closes, because it was closed on purpose
or because the asker ended in whatever way (SIGKILL too), the command gets SIGTERM, STOP_TIMEOUT_S
seconds to leave in good order, and then its process group gets SIGKILL. If the command ends by
itself, what it left behind in the group is ended likewise. Run as a file, in a session of its own,
with the standard library only: it must start in milliseconds and depend on nothing.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

POLL_S = 0.1


def main() -> None:
    stop_timeout_s, command = float(sys.argv[1]), sys.argv[2:]
    asker = os.getppid()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # A signal to the guard itself (a shutdown of the machine) ends the command too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: child.terminate())
    while child.poll() is None and os.getppid() == asker:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    if child.poll() is None:
        child.terminate()
        deadline = time.monotonic() + stop_timeout_s
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
    os.killpg(0, signal.SIGKILL)  # workers that outlived the command, and this process


if __name__ == "__main__":
    main()
