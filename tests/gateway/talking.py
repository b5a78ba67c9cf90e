"""Requests of responses, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.gateway.openai_types import check_event

MODEL = "stories"
PATH = "/v1/responses"
ASK = {"model": MODEL, "input": "Lily went", "max_output_tokens": 8, "temperature": 0}
TOOL = {
    "type": "function",
    "name": "go",
    "description": "Goes somewhere.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"to": {"enum": ["park", "home"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


class Walk(BaseModel):
    to: Literal["park", "home"]
    happy: bool


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Every event, held against OpenAI's types; each stands under its own name."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            name, data = lines
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            check_event(event)
            events.append(event)
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of events, with neighbours of the same type as one."""
    found: list[str] = []
    for event in events:
        if found[-1:] != [event["type"]]:
            found.append(event["type"])
    return found


def refused(call: Callable[[], object], status: int = 400) -> dict[str, Any]:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    assert caught.value.status_code == status, caught.value
    error = caught.value.body
    assert isinstance(error, dict)
    return error
