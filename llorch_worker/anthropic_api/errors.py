"""Errors in Anthropic's shape, with our code, hint and faults beside it."""

from __future__ import annotations

from typing import Any

from llorch_worker.openai_api.errors import ErrorDetail

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_document(status: int, detail: ErrorDetail) -> dict[str, Any]:
    """``detail`` as Anthropic's client reads it."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {**detail.model_dump(mode="json"), "type": kind}}
