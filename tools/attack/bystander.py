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
            while not _first_token(client, body, sent_at):
                pass
            time.sleep(PAUSE_S)


def _first_token(client: httpx.Client, body: dict[str, object], sent_at: float) -> bool:
    """Print when the request was sent and how long its first token took. False if the server closed
    the connection before it saw the request, which it does with one that has been idle for 5 s."""
    has_begun = False
    try:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not has_begun and line.startswith("data: {"):
                    has_begun = True
                    print(sent_at, time.monotonic() - sent_at, flush=True)
    except httpx.RemoteProtocolError:
        if has_begun:
            raise
    return has_begun


if __name__ == "__main__":
    main()
