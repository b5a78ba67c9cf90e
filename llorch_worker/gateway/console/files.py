"""The files of the page, which load nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent / "static"
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # Generated text can only become text: no assignment to innerHTML works in this page.
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # Asks with the ETag each time, so that a new gateway's page is never mixed with an old one's.
    "Cache-Control": "no-cache",
}


class _Files(StaticFiles):
    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


FILES = _Files(directory=FOLDER)
router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    return await FILES.get_response("index.html", request.scope)


@router.get("/console/{name}")
async def file(name: str, request: Request) -> Response:
    """Raises ``HTTPException`` 404."""
    return await FILES.get_response(name, request.scope)
