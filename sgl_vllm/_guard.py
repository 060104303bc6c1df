"""Runs a command, and ends it and everything it started when the parent process ends.

    python _guard.py STOP_TIMEOUT_S COMMAND...

The parent holds the other end of standard input. When it closes, on purpose or because the parent
ended in any way (even by SIGKILL), the command gets SIGTERM and STOP_TIMEOUT_S seconds to stop, and
then its process group gets SIGKILL. If the command ends by itself, processes that it left in the
group are ended too. Run it as a file, in a session of its own. It uses only the standard library,
so that it starts in milliseconds.
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
    parent = os.getppid()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # A signal to the guard itself, as at shutdown, ends the command too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: child.terminate())
    while child.poll() is None and os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    if child.poll() is None:
        child.terminate()
        deadline = time.monotonic() + stop_timeout_s
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
    os.killpg(0, signal.SIGKILL)  # workers that outlived the command, and the guard itself


if __name__ == "__main__":
    main()
