"""``/v1/responses`` as a WebSocket: a client that asks again and again on one connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import TypeAdapter
from starlette.websockets import WebSocketState

from llorch_worker.client.cancelling import beside
from llorch_worker.contract import InvalidRequest, QueueFull, describe
from llorch_worker.gateway.bodies import document_of
from llorch_worker.gateway.errors import HttpError, error_answer, error_body
from llorch_worker.gateway.gateway import Gateway
from llorch_worker.gateway.responding import Creation, Kept
from llorch_worker.gateway.responses.event_json import written_event
from llorch_worker.openai_api.responses import ResponseRecord
from llorch_worker.openai_api.responses_events import ResponseEvents
from llorch_worker.openai_api.responses_items import Item
from llorch_worker.openai_api.responses_request import ResponseRequest
from llorch_worker.openai_api.shape import read_as
from llorch_worker.telemetry.metrics.gateway_metrics import SOCKET, Answer, GatewayMetrics

logger = logging.getLogger(__name__)

_ASK = "response.create"
_MOST_WAITING = 8
"""Messages that may wait while one is answered."""
_OF_HTTP = frozenset(("type", "generate", "stream", "stream_options"))
"""Fields of a message that say nothing to a response."""
_OUTPUT: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class ResponseSocket:
    """One connection. It answers one message at a time, refuses more than a few that wait, and
    remembers its last conversation, so that this goes on also if it is not stored."""

    def __init__(self, socket: WebSocket, gateway: Gateway, metrics: GatewayMetrics) -> None:
        self._socket = socket
        self._gateway = gateway
        self._metrics = metrics
        self._asked: asyncio.Queue[str | bytes] = asyncio.Queue(_MOST_WAITING)
        self._recent: dict[str, Kept] = {}

    async def serve(self) -> None:
        """Until the client hangs up, which cancels what it waits for."""
        try:
            self._gateway.caller(self._socket.headers)
        except HttpError as error:
            with self._counted() as counted:
                counted.status = error.status
                await self._socket.send_denial_response(error_answer(error))
            return
        await self._socket.accept()
        async with beside(self._answer(), "llorch-responses"):
            await self._read()

    async def _read(self) -> None:
        """Never waits for an answer: nobody else would notice that the client hangs up."""
        with suppress(WebSocketDisconnect):
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                if self._socket.application_state is not WebSocketState.CONNECTED:
                    return
                if self._asked.full():
                    with self._counted() as counted:
                        full = QueueFull("too many messages of this connection wait")
                        counted.status = await self._fail(full)
                else:
                    self._asked.put_nowait(message.get("text") or message.get("bytes") or "")

    async def _answer(self) -> None:
        with suppress(WebSocketDisconnect):
            while True:
                message = await self._asked.get()
                with self._counted() as counted:
                    try:
                        await self._respond(message)
                        counted.status = 200
                    except WebSocketDisconnect:
                        raise
                    except Exception as error:  # noqa: BLE001 - the only way to say it
                        counted.status = await self._fail(error)

    @contextmanager
    def _counted(self) -> Iterator[Answer]:
        """A request for the metrics."""
        with self._metrics.request(SOCKET) as answer:
            answer.route = self._socket.url.path
            yield answer

    async def _respond(self, message: str | bytes) -> None:
        # The key may have been revoked since.
        caller = self._gateway.caller(self._socket.headers)
        bodies = self._gateway.bodies
        asked, body = await bodies.run(len(message), lambda: _read(message))
        creation = Creation(self._gateway, caller, body, len(message), self._recent)
        if asked.get("generate") is False:
            record = await creation.warmed()
            events = ResponseEvents(record)
            for event in (*events.begin(), events.nothing()):
                await self._send(event)
            self._remember(record, Kept([], creation.whole_bytes))
            return
        async with aclosing(creation.events()) as made:
            async for record, event in made:
                if event["type"] == "error":
                    # HTTP's has another shape.
                    detail = {name: event[name] for name in ("code", "message", "param")}
                    event = {**event, "status": 500, "error": detail}
                sent = await self._send(event)
                if event["type"] in ("response.completed", "response.incomplete"):
                    output = map(_spoken, event["response"]["output"])
                    size_bytes = creation.whole_bytes + sent
                    self._remember(record, Kept(_OUTPUT.validate_python([*output]), size_bytes))

    def _remember(self, record: ResponseRecord, output: Kept) -> None:
        self._recent.clear()
        items = [*record.conversation, *output.items]
        self._recent[record.response.id] = Kept(items, output.size_bytes)

    async def _fail(self, error: Exception) -> int:
        """Says it. Returns its status."""
        status, body = error_body(error)
        logger.info("%s: a message of a WebSocket: %s", status, body.error.code)
        await self._send({"type": "error", "status": status, **body.model_dump(mode="json")})
        return status

    async def _send(self, event: Mapping[str, Any]) -> int:
        """Returns its characters."""
        text = await written_event({**event}, self._gateway.bodies, str)
        await self._socket.send_text(text)
        return len(text)


def _read(message: str | bytes) -> tuple[dict[str, Any], ResponseRequest]:
    """What is not said to a response, and what is."""
    document = document_of(message if isinstance(message, bytes) else message.encode())
    if document.get("type") != _ASK:
        raise InvalidRequest.from_fault("type", f"must be {_ASK}", describe(document.get("type")))
    fields = {name: value for name, value in document.items() if name not in _OF_HTTP}
    request = read_as(ResponseRequest, fields)
    if request.background:
        raise InvalidRequest.from_fault("background", "not on a WebSocket", "True")
    return document, request


def _spoken(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """An item of an answer without its log probabilities, which say nothing to the model."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
