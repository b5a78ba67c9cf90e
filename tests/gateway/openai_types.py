"""Holds answers and events against the types of the ``openai`` package."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

OURS = {
    "store", "seed", "system_fingerprint", "bytes",
    "llorch_code", "retriable", "llorch_finish_reason",
}  # fmt: skip
"""Fields that the types do not have."""
NOT_HERE = {
    "access_programs",
    "conversation",
    "image",
    "input_transformations",
    "moderation",
    "prompt",
    "prompt_cache_diagnostics",
    "prompt_cache_options",
    "prompt_cache_retention",
    "tool_usage",
}
"""Optional fields of a response, about what it does not have here."""

_RESPONSE = TypeAdapter(Response)
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


def check_response(document: dict[str, Any]) -> Response:
    """Fails if a field is missing, of another type, or unknown."""
    response = _RESPONSE.validate_python(document)
    assert set(Response.model_fields) - set(document) == NOT_HERE
    _check_names(response)
    return response


def check_event(document: dict[str, Any]) -> Any:
    """The same of one event."""
    event = _EVENT.validate_python(document)
    _check_names(event)
    if "response" in document:
        check_response(document["response"])
    return event


def check_item(document: dict[str, Any]) -> Any:
    """The same of one item of a conversation."""
    item = _ITEM.validate_python(document)
    _check_names(item)
    return item


def _check_names(value: Any) -> None:
    if isinstance(value, BaseModel):
        unknown = set(value.model_extra or ()) - OURS
        assert not unknown, f"{type(value).__name__} has no {unknown}"
        for name in type(value).model_fields:
            _check_names(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            _check_names(each)
