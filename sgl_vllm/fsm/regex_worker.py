"""Compiles patterns in a process of its own: `python -m sgl_vllm.fsm.regex_worker MEMORY_BYTES`.

Reads a length and a pattern, writes a status, a length and `regex.build`'s bytes, until its input
ends. Whoever started it kills it when it takes too long; should they be gone, an alarm does.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys

from sgl_vllm.fsm.automaton import TooComplexError
from sgl_vllm.fsm.regex import UnsupportedPatternError, build

ALARM_S = 30


def main() -> None:
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    build("a")  # imports what it needs
    sink.write(b"\n")
    sink.flush()
    while header := source.read(4):
        pattern = source.read(struct.unpack("<I", header)[0]).decode()
        signal.alarm(ALARM_S)
        try:
            status, answer = 0, build(pattern)
        except (TooComplexError, MemoryError) as error:
            status, answer = 1, str(error).encode()
        except UnsupportedPatternError as error:
            status, answer = 2, str(error).encode()
        signal.alarm(0)
        sink.write(struct.pack("<BI", status, len(answer)) + answer)
        sink.flush()


if __name__ == "__main__":
    main()
