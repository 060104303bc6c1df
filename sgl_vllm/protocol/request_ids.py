"""The ids of requests: the one that a client knows, and those that vLLM makes of it. Pure."""

from __future__ import annotations

import re

MAX_ID_CHARS = 512
"""The longest request id in an engine, including what vLLM adds to the client's. Engines keep ids
after their requests have ended."""

_NUMBER_OF_OUTPUT = re.compile(r"^\d+_")
_NUMBERS = re.compile(r"(-\d+)?(-[0-9a-f]{8})?")


def is_of_client(name: str, request_id: str) -> bool:
    """Whether an engine's request `name` has this id, or was made of the HTTP request or answer
    that has it: vLLM puts the number of the output before it, and those of the prompt and of the
    request after it."""
    if name == request_id:
        return True
    if request_id not in name:
        return False
    name = _NUMBER_OF_OUTPUT.sub("", name)
    return name.startswith(request_id) and bool(_NUMBERS.fullmatch(name, len(request_id)))
