"""Requests whose text must fit a grammar, and their results."""

from __future__ import annotations

import json
from typing import Any

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine.generation import Generation

TIMEOUT_S = 120
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
AS_RECORD = {"structured_outputs": {"json": RECORD}}


def asking(**fields: Any) -> GenerationRequest:
    """A request with a seed and room for short records."""
    given = {"prompt": "Once upon a time", "max_tokens": 120, "seed": 5, **fields}
    return GenerationRequest(**given)


def is_record(text: str) -> bool:
    record = json.loads(text)
    return set(record) == set(RECORD["properties"]) and 0 <= record["age"] <= 120


def generated(generation: Generation) -> list[tuple[tuple[int, ...], str, str]]:
    """Ids, text and finish reason of each choice."""
    choices = generation.result(TIMEOUT_S).choices
    return [(choice.token_ids, choice.text, choice.finish_reason) for choice in choices]


def answer(engine: Engine, **fields: Any) -> list[tuple[tuple[int, ...], str, str]]:
    return generated(engine.submit(asking(**fields)))
