"""Events of responses as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator

from sse_starlette import EventSourceResponse

from llorch_worker.gateway.answering import DRAIN_S, SEND_TIMEOUT_S
from llorch_worker.openai_api.responses_events import Event


def event_source(stream: AsyncGenerator[bytes]) -> EventSourceResponse:
    return EventSourceResponse(stream, send_timeout=SEND_TIMEOUT_S, shutdown_grace_period=DRAIN_S)


async def sse(events: AsyncIterator[Event]) -> AsyncGenerator[bytes]:
    async for event in events:
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), text.encode())
