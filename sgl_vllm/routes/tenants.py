"""Tenants: whose cached prefixes a request may find, by its API key or a header.

Owns the option `tenant_from`. With it, the server derives the `cache_salt` of every request from
its tenant, so tenants share no cached tokens, whatever their clients send. A client's own
`cache_salt` divides its tenant further.

    Authorization: Bearer KEY  ->  tenant  ->  cache_salt = hash(tenant, the client's own salt)
"""

from __future__ import annotations

import hashlib
import json
from contextvars import ContextVar
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

NOT_NAMED = "none"
API_KEY = "api_key"
HEADER = "header:"

_tenant: ContextVar[str | None] = ContextVar("sgl_vllm_tenant", default=None)
"""Of the HTTP request that is being answered."""

current_headers: ContextVar[Headers | None] = ContextVar("sgl_vllm_headers", default=None)
"""Of the same request."""


@dataclass(frozen=True, slots=True)
class TenantSource:
    """What names the tenant of a request: a value of the option `tenant_from`."""

    value: str = NOT_NAMED

    def tenant_of(self, headers: Headers) -> str | None:
        """None for a request that names no tenant. All such requests are one tenant."""
        if self.value == API_KEY:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            return key.strip() if scheme.lower() == "bearer" else None
        if self.value.startswith(HEADER):
            return headers.get(self.value.removeprefix(HEADER))
        return None

    def salt(self, own_salt: str | None) -> str | None:
        """The `cache_salt` of a request of the current tenant that came with `own_salt`.

        Does not show the tenant: salts can be seen in KV events. A client cannot make another
        tenant's salt, because its own is always hashed.
        """
        tenant = _tenant.get()
        if self.value == NOT_NAMED or (tenant is None and own_salt is None):
            return own_salt
        text = json.dumps([self.value, tenant, own_salt])
        return f"sgl-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


NO_TENANTS = TenantSource()


def tenants_of(app: FastAPI) -> TenantSource:
    """`app.state.sgl_vllm_tenants`: vLLM reads the options after the middleware is added."""
    source: TenantSource = getattr(app.state, "sgl_vllm_tenants", NO_TENANTS)
    return source


class TenantMiddleware:
    """Notes the tenant and the headers of each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        token = _tenant.set(tenants_of(scope["app"]).tenant_of(headers))
        token_of_headers = current_headers.set(headers)
        try:
            await self._app(scope, receive, send)
        finally:
            _tenant.reset(token)
            current_headers.reset(token_of_headers)
