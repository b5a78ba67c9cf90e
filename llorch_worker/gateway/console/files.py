"""The files of the page, which load nothing from elsewhere."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

FOLDER = Path(__file__).parent / "static"
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # Generated text can only become text: no assignment to innerHTML works in this page.
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}


def policy(**changed: str) -> dict[str, str]:
    """The header of a page that loads nothing from elsewhere. ``changed``: what it may do besides;
    such a page may write HTML."""
    allowed = _POLICY | changed
    if changed:
        del allowed["require-trusted-types-for"], allowed["trusted-types"]
    return {"Content-Security-Policy": "; ".join(map(" ".join, allowed.items()))}


HEADERS = policy() | {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # Asks with the ETag each time, so that a new gateway's page is never mixed with an old one's.
    "Cache-Control": "no-cache",
}


TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
router = APIRouter(include_in_schema=False)


@lru_cache(maxsize=64)
def _read(name: str) -> tuple[bytes, dict[str, str]] | None:
    """The bytes and headers of a file; None if the page has no such file.

    The ETag is of the content, so that all gateways behind a load balancer give the same.
    """
    known = {file.name: file for file in FOLDER.iterdir() if file.suffix in TYPES}
    if name not in known:
        return None
    body = known[name].read_bytes()
    kind = {"Content-Type": TYPES[known[name].suffix]}
    return body, HEADERS | kind | {"ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return await file("index.html", request)


@router.get("/console/{name}")
async def file(name: str, request: Request) -> Response:
    """Raises ``HTTPException`` 404."""
    found = _read(name)
    if found is None:
        raise HTTPException(404)
    body, headers = found
    # A proxy that compresses makes the tag a weak one: W/"...".
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers)
