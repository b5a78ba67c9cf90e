"""Holds answers and events against the types of the ``openai`` package, and those of the Open
Responses specification."""

from __future__ import annotations

from typing import Any

import openresponses_types
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

OURS = {
    "store", "seed", "system_fingerprint", "bytes", "presence_penalty", "frequency_penalty",
    "llorch_unmet", "llorch_code", "retriable", "llorch_finish_reason",
    "llorch_generation_config",
}  # fmt: skip
"""Fields that the types do not have. Open Responses requires some of them."""
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

_OPENAIS = {"response.reasoning_text.delta", "response.reasoning_text.done", "error"}
"""Events that Open Responses has under another name, or in another shape."""
_OPEN_EVENTS: dict[str, type[BaseModel]] = {}
for _each in vars(openresponses_types).values():
    if isinstance(_each, type) and _each.__name__.endswith("StreamingEvent"):
        (_kind,) = _each.model_fields["type"].annotation
        _OPEN_EVENTS[_kind.value] = _each

_RESPONSE = TypeAdapter(Response)
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


def check_response(document: dict[str, Any]) -> Response:
    """Fails if a field is missing, of another type, or unknown."""
    response = _RESPONSE.validate_python(document)
    assert set(Response.model_fields) - set(document) == NOT_HERE
    _check_names(response)
    openresponses_types.ResponseResource.model_validate(_without_schema(document))
    return response


def check_event(document: dict[str, Any]) -> Any:
    """The same of one event."""
    event = _EVENT.validate_python(document)
    _check_names(event)
    if document["type"] not in _OPENAIS:
        _OPEN_EVENTS[document["type"]].model_validate(_without_schema(document))
    if "response" in document:
        check_response(document["response"])
    return event


def check_item(document: dict[str, Any]) -> Any:
    """The same of one item of a conversation."""
    item = _ITEM.validate_python(document)
    _check_names(item)
    return item


def _without_schema(value: Any) -> Any:
    """The package has it that a ``schema`` is always null."""
    if isinstance(value, dict):
        return {k: None if k == "schema" else _without_schema(v) for k, v in value.items()}
    return [_without_schema(each) for each in value] if isinstance(value, list) else value


def _check_names(value: Any) -> None:
    if isinstance(value, BaseModel):
        unknown = set(value.model_extra or ()) - OURS
        assert not unknown, f"{type(value).__name__} has no {unknown}"
        for name in type(value).model_fields:
            _check_names(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            _check_names(each)
