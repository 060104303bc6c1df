"""Why a request was not a hit (`GET /v1/sgl/why`).

Owns which client gets an answer: a request is found only with its id and its salt, which with
`tenant_from` only its tenant has. The explanations are the engines' (`radix/misses.py`), which
report only whole blocks for a request without a salt, unless an option says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any  # Any: JSON

from fastapi import Header, HTTPException, Query, Request
from vllm.v1.engine.async_llm import AsyncLLM

from sgl_vllm.protocol.quoting import quoted
from sgl_vllm.protocol.request_ids import MAX_ID_CHARS
from sgl_vllm.routes.bodies import check_salt, is_unicode, router
from sgl_vllm.routes.engines import ask_engines
from sgl_vllm.routes.tenants import tenants_of
from sgl_vllm.routes.tree import MAX_TEXT_TOKENS, add_texts


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
    check_salt(x_cache_salt or None)
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
