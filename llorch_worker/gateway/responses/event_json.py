"""A response's events as they are sent. Long ones are written beside the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llorch_worker.gateway.bodies import SMALL_BYTES, Bodies, compact, in_pieces, scores_bytes
from llorch_worker.gateway.event_source import framed
from llorch_worker.openai_api.responses_events import Event

Sent = TypeVar("Sent")

_LEVELS = 7
"""From an event with a response down to a token with its log probabilities."""


async def written_event(event: Event, bodies: Bodies, write: Callable[[str], Sent]) -> Sent:
    """What ``write`` makes of the event's JSON."""
    size_bytes = _about_bytes(event)

    def written() -> Sent:
        is_small = size_bytes <= SMALL_BYTES
        return write(compact(event) if is_small else in_pieces(event, _LEVELS))

    return await bodies.run(size_bytes, written)


async def sse(event: Event, bodies: Bodies) -> bytes:
    """The event as a server-sent event."""
    return await written_event(event, bodies, lambda text: framed(text, event["type"]))


def _about_bytes(event: Event) -> int:
    """Of its texts and log probabilities, which alone are long. The last events of a response have
    all of them once more."""
    response = event.get("response", {})
    parts = [event, event.get("part", {})]
    for item in (*response.get("output", ()), event.get("item", {})):
        parts += item.get("content") or ()
    return len(response.get("instructions") or "") + sum(map(_about_bytes_of, parts))


def _about_bytes_of(part: dict[str, Any]) -> int:
    text = part.get("text") or part.get("delta") or ""
    scores = part.get("logprobs") or ()
    # All tokens have as many alternatives.
    return len(text) + scores_bytes(len(scores), len(scores[0]["top_logprobs"]) if scores else 0)
