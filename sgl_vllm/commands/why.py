"""`sgl-vllm why`: why prompt tokens of a request were not read from a server's cache."""

from __future__ import annotations

import json
from typing import Annotated

from sgl_vllm.commands.arguments import (
    URL_HELP,
    ApiKey,
    PrintsJson,
    argument,
    option,
    server_at,
    url_and,
)
from sgl_vllm.commands.client import Json
from sgl_vllm.commands.terminal import age, plural, printable
from sgl_vllm.protocol.causes import MEANINGS

DESCRIPTION = """\
Prints which tokens of a request's prompt were not read from the prefix cache
when it was first admitted, and why. REQUEST is the "id" of its answer. The
server knows its last 1,000 requests.

For a request without a cache_salt, the answer is in whole blocks and does not
tell why tokens are not cached, unless the server was started with why_exact
or tree_text, or for this machine only. With tree_text, it also shows the text
of the prompt and of the cache where they differ.

Exit status: 1 if the server does not know the request.
"""


def command(
    words: Annotated[
        list[str], argument("[URL] REQUEST", f'The server {URL_HELP}, and the "id" of the answer.')
    ],
    cache_salt: Annotated[str | None, option("SALT", "The cache_salt of the request.")] = None,
    as_json: PrintsJson = False,
    api_key: ApiKey = None,
) -> None:
    url, request = url_and(words, "REQUEST")
    requests = server_at(url, api_key).why(request, cache_salt)
    if as_json:
        print(json.dumps({"requests": requests}))
        return
    for one in requests:
        print("\n".join(lines(one)))


def lines(request: Json) -> list[str]:
    """One explanation for a terminal."""
    loaded = request["num_loaded_tokens"]
    total = plural(request["num_prompt_tokens"], "prompt token")
    facts = [
        f"{request['num_cached_tokens']:,} of {total} cached",
        *([f"{loaded:,} loaded"] if loaded else []),
        f"{request['num_missed_tokens']:,} computed",
    ]
    result = [f"{printable(str(request['request']))}: {', '.join(facts)}"]
    if not request["exact"]:
        result.append(
            f"  This request has no cache_salt, so only whole blocks of {request['block_size']} "
            "tokens are counted, and causes are not shown. For both, start the server with "
            "--plugin-config why_exact=true."
        )
    for one in request["causes"]:
        cause = str(one["cause"])
        meaning = MEANINGS.get(cause, printable(cause))
        when = f", {age(one['before_s'])} before" if "before_s" in one else ""
        span = f"[{one['start']:,}, {one['end']:,})"
        result.append(f"  {span:>16}  {one['end'] - one['start']:>7,}  {meaning}{when}")
    for side in ("cached", "prompt"):
        if side in request:
            result.append(f"  {side}: {printable(request[side].get('text', ''))}")
    return result
