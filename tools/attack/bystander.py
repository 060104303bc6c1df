"""Another client of the attacked server, in a process of its own: how long its first tokens take.

Owns the measurement of TTFT. Prints a line per request: the moment it was sent, on the machine's
monotonic clock, and the seconds to its first token.

    python -m tools.attack.bystander URL
"""

from __future__ import annotations

import random
import sys
import time

import httpx

PAUSE_S = 0.05
PROMPT_TOKENS = 60


def main() -> None:
    rng = random.Random(1)
    with httpx.Client(base_url=sys.argv[1], timeout=60) as client:
        while True:
            prompt = [rng.randrange(10, 4000) for _ in range(PROMPT_TOKENS)]
            body = {"model": "demo", "prompt": prompt, "max_tokens": 2, "stream": True}
            sent_at = time.monotonic()
            with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                has_begun = False
                for line in answer.iter_lines():
                    if not has_begun and line.startswith("data: {"):
                        has_begun = True
                        print(sent_at, time.monotonic() - sent_at, flush=True)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
