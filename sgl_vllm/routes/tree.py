"""The radix tree for programs (`GET /v1/sgl/tree`) and for people (`GET /sgl/tree`), and why a
request was not a hit (`GET /v1/sgl/why`).

Owns the routes, the detokenizing, and which client is told why: a request is found only with its id
and its salt, which with `tenant_from` only its tenant has. Shapes and causes come from the engines;
the page is the template `tree.html`, which holds no data and asks the first route, which
`--api-key` guards.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import Annotated, Any  # Any: JSON

from fastapi import Header, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.inputs import TokensPrompt
from vllm.renderers import TokenizeParams
from vllm.v1.engine.async_llm import AsyncLLM

from sgl_vllm.pages import FOLDER, rendered
from sgl_vllm.protocol.quoting import quoted
from sgl_vllm.protocol.request_ids import MAX_ID_CHARS
from sgl_vllm.routes.bodies import is_unicode, router
from sgl_vllm.routes.coalescing import Coalescer
from sgl_vllm.routes.engines import ask_engines
from sgl_vllm.routes.tenants import tenants_of

SCRIPTS = (
    *("words", "history", "server", "cases", "model"),
    *("panels", "boxes", "strips", "details", "moving"),
)
"""In `pages/tree`: the page's script, in the order in which its parts need each other."""
MAX_NODES = 10_000
MAX_TEXT_TOKENS = 4096

_reads: Coalescer[bytes] = Coalescer(rest=4)
"""A snapshot stops the engine for tens of milliseconds if the cache is large, and needs no key."""


@router.get("/tree")
async def tree(
    request: Request,
    max_nodes: Annotated[int | None, Query(ge=1, le=MAX_NODES)] = None,
    max_text_tokens: Annotated[int, Query(ge=0, le=MAX_TEXT_TOKENS)] = 128,
) -> Response:
    """One entry per engine of a data-parallel server. A browser is redirected to the page.

    `max_nodes`: at most so many nodes per engine. `max_text_tokens`: where the server shows
    text, at most so many tokens of each node.
    """
    if request.headers.get("accept", "").startswith("text/html"):  # as browsers' do
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"../../sgl/tree{query}", 307, headers={"Vary": "Accept"})
    client: AsyncLLM = request.app.state.engine_client
    page = await _reads.call(
        (client, "tree", max_nodes, max_text_tokens),
        lambda: _tree(client, max_nodes, max_text_tokens),
    )
    return Response(page, media_type="application/json", headers={"Vary": "Accept"})


async def _tree(client: AsyncLLM, max_nodes: int | None, max_text_tokens: int) -> bytes:
    arguments = None if max_nodes is None else {"max_nodes": max_nodes}
    answers = await ask_engines(client, dict[str, Any], "tree", arguments)
    engines = [answer or {} for answer in answers]
    for engine in engines:
        await add_texts(client, engine.get("nodes", ()), max_text_tokens)
    return bytes(JSONResponse({"engines": engines}).body)


async def tree_page() -> HTMLResponse:
    page, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(page, headers=headers)


async def add_texts(client: AsyncLLM, nodes: Any, max_tokens: int) -> None:
    """Give every node that has `tokens` its `text`, both cut to the first `max_tokens`.

    A node may begin or end inside a character, which then shows as U+FFFD. Runs in the renderer's
    threads, as vLLM's own `/detokenize` does, because a tokenizer must not be used from others.
    """
    params = TokenizeParams(max_total_tokens=None, max_output_tokens=0, needs_detokenization=True)
    for node in nodes:
        if "tokens" not in node:
            continue
        del node["tokens"][max_tokens:]
        node["text"] = ""
        if node["tokens"]:
            prompt = TokensPrompt(prompt_token_ids=node["tokens"])
            answer = await client.renderer.tokenize_prompt_async(prompt, params)
            node["text"] = answer["prompt"]


@router.get("/why")
async def why(
    request: Request,
    request_id: Annotated[str, Query(alias="request", min_length=1, max_length=MAX_ID_CHARS)],
    x_cache_salt: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    """One entry per prompt and output of the request whose answer has the id `request`.

    A request with a `cache_salt` is found only if the header `X-Cache-Salt` has it; not the query,
    which servers log. 404 if there is none, also if it is another tenant's, or is forgotten.
    """
    validate_cache_salt(x_cache_salt or None)
    client: AsyncLLM = request.app.state.engine_client
    salt = tenants_of(request.app).salt(x_cache_salt or None)
    requests: list[dict[str, Any]] = []
    if is_unicode(request_id):
        arguments = {"request_id": request_id, "cache_salt": salt}
        answers = await ask_engines(client, list[dict[str, Any]], "why", arguments)
        for rank, explanations in enumerate(answers):
            requests += [{"engine": rank, **one} for one in explanations or ()]
    if not requests:
        raise HTTPException(
            404,
            f"no request {quoted(request_id)} is known here: it may be forgotten or not admitted "
            "yet, its cache_salt may be missing (header X-Cache-Salt), or the part `radix` may be "
            "off (see /v1/sgl/stats)",
        )
    sides = [one[side] for one in requests for side in ("prompt", "cached") if side in one]
    await add_texts(client, sides, MAX_TEXT_TOKENS)
    return {"requests": requests}


@cache
def _page() -> tuple[str, str]:
    """The page, and a policy that lets exactly its own script run and reach its own server."""
    files = (FOLDER / "tree" / f"{name}.js" for name in SCRIPTS)
    script = '"use strict";\n' + "\n".join(file.read_text("utf-8") for file in files)
    page = rendered("tree.html", script=script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'self'"
    )
    return page, policy
