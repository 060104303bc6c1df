"""The table of docs/clients.md: what clients of OpenAI's API gain, from docs/clients.json.

    python -m tools.clients            # writes the table: `make clients` runs the clients first

tests/server/test_clients.py runs each client against stock vLLM and the plugin, and saves the
counts of both servers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from tools.generated import ROOT, GeneratedSection

RESULTS = ROOT / "docs" / "clients.json"

HEADER = (
    "client",
    "version",
    "features",
    "flags",
    "prompt tokens",
    "computed, stock",
    "computed, plugin",
    "output tokens",
    "forced",
    "steps, stock",
    "steps, plugin",
)


def lines() -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(HEADER)} |"
    yield f"|---|---|---|---|{'---:|' * (len(HEADER) - 4)}"
    recorded: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    for client, one in recorded.items():
        stock, plugin = one["stock"], one["plugin"]
        anchor = client.replace(" ", "-")
        cells = [
            f"[{client}](#{anchor})",
            one["version"],
            one["uses"],
            "tools" if "tool" in one["uses"] else "",
            stock["prompt_tokens"],
            stock["prompt_tokens"] - stock["cached_prompt_tokens"],
            plugin["prompt_tokens"] - plugin["cached_prompt_tokens"],
            plugin["output_tokens"],
            plugin["forced_tokens"],
            stock["forward_passes"],
            plugin["forward_passes"],
        ]
        yield f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else cell for cell in cells)} |"


SECTION = GeneratedSection(ROOT / "docs" / "clients.md", "make clients", "client runs", lines)

if __name__ == "__main__":
    sys.exit(SECTION.main())
