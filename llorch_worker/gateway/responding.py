"""From a request to its response: at once, as a stream, or in the background."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from celery.utils import uuid
from fastapi import Request
from fastapi import Response as PlainResponse

from llorch_worker.broker.fleet.registry import ModelCard
from llorch_worker.client import AsyncJob
from llorch_worker.contract import (
    TERMINAL_EVENTS,
    GenerationRequest,
    InvalidRequest,
    LlorchError,
    Restarted,
    Started,
    request_digest,
)
from llorch_worker.contract.token_questions import TokenizeChat
from llorch_worker.gateway.bodies import about_bytes, scores_bytes
from llorch_worker.gateway.errors import HttpError, as_shown
from llorch_worker.gateway.event_source import EventSource, encoded
from llorch_worker.gateway.gateway import Gateway
from llorch_worker.gateway.job_events import PATIENCE_S, OwnClock
from llorch_worker.gateway.keys import Caller
from llorch_worker.gateway.responses.event_json import sse
from llorch_worker.gateway.responses.progress import (
    end_if_ended,
    end_of,
    response_events,
    response_now,
)
from llorch_worker.gateway.responses.store import NotKept
from llorch_worker.gateway.waiting import Waiting
from llorch_worker.openai_api.errors import body_of
from llorch_worker.openai_api.responses import (
    PREFIX,
    End,
    InputTokens,
    Response,
    ResponseRecord,
    failure_of,
    new_record,
    output_of,
    response_of,
)
from llorch_worker.openai_api.responses_compaction import Compacted, compacted
from llorch_worker.openai_api.responses_events import Event, ResponseEvents
from llorch_worker.openai_api.responses_items import (
    Item,
    ItemReference,
    MessageItem,
    OutputText,
    Read,
    job_of,
)
from llorch_worker.openai_api.responses_request import ResponseRequest

SYSTEM = ("system", "developer")
Made = TypeVar("Made")


class Kept(NamedTuple):
    """A conversation that may go on."""

    items: Sequence[Item]
    size_bytes: int
    """About how many bytes of JSON it is."""


@dataclass
class Creation:
    """One request. A job in the background goes on without its client."""

    gateway: Gateway
    caller: Caller
    body: ResponseRequest
    size_bytes: int
    """Of the body."""
    recent: Mapping[str, Kept] = field(default_factory=dict)
    """Conversations that need not be stored to go on, by the ids of their last responses."""

    def __post_init__(self) -> None:
        self._earlier_bytes = 0
        """Of the items that other responses have, as JSON."""
        self.store = self.gateway.responses(self.caller)
        self._waiting = Waiting(
            self.gateway,
            self.caller,
            comes_back=self.body.idempotency_key is not None,
            private=not self.body.stored,
        )

    @property
    def jobs(self) -> Sequence[AsyncJob]:
        """The one that was sent, or found."""
        return self._waiting.jobs

    async def respond(self, request: Request) -> PlainResponse:
        """Raises ``LlorchError``, ``HttpError`` and ``BrokerUnavailable`` until it has begun."""
        record, job = await self._begin(stream=bool(self.body.stream))
        if self.body.background:
            if self.body.stream:
                entries = job.stream(patience_s=PATIENCE_S)
                events = response_events(record, job, entries, self.gateway.bodies)
                return EventSource(await sse(each, self.gateway.bodies) async for each in events)
            return await written(self.gateway, await response_now(record, job, self.gateway.bodies))
        if not self.body.stream:
            response = await self._waiting.answer(request, self._result(record, job))
            return await written(self.gateway, response)
        return await self._waiting.stream(
            request, self._stream(record, job), lambda error: _failed(record, error)
        )

    async def events(self) -> AsyncGenerator[tuple[ResponseRecord, Event]]:
        """The response's events, for a client that hangs up by closing this. Raises like
        :meth:`respond`."""
        record, job = await self._begin(stream=True)
        async with self._waiting, aclosing(self._events(record, job)) as events:
            async for event in events:
                yield record, event

    async def warmed(self) -> ResponseRecord:
        """A response that nothing is generated for. It is not stored."""
        conversation, generation = await self._understood()
        return await self._beside(
            lambda: new_record(
                self.body, conversation, generation, job_id=uuid(), created_at=int(time.time())
            )
        )

    async def count(self) -> InputTokens:
        """How long its prompt would be. Raises ``LlorchError``."""
        _, generation = await self._understood()
        card = await self.gateway.client.model_card(generation.model)
        return InputTokens(input_tokens=await self._length(card, generation))

    async def compact(self, request: Request) -> Compacted:
        """``body`` is :func:`summarising`. Raises ``LlorchError`` if there is no summary."""
        record, job = await self._begin()
        return compacted(record, await self._waiting.answer(request, self._result(record, job)))

    async def _understood(self) -> tuple[list[Read], GenerationRequest]:
        """The conversation, and the request for its next turn, with a model."""
        self.gateway.check(self.body)
        conversation = await self._conversation()
        generation = await self._beside(lambda: self.body.to_generation(conversation))
        if generation.model is None:
            card = await self.gateway.client.model_card()
            generation = generation.model_copy(update={"model": card.name})
        return conversation, generation

    async def _length(self, card: ModelCard, request: GenerationRequest) -> int:
        prompt = await self.gateway.ask(card, TokenizeChat.of(request))
        return len(prompt["tokens"])

    async def _begin(self, *, stream: bool = False) -> tuple[ResponseRecord, AsyncJob]:
        """Enqueues the job. What belongs to it is stored before, so that no job lacks it."""
        conversation, generation = await self._understood()
        if self.body.truncation == "auto":
            generation = await self._fitted(conversation, generation)
        digest = await self._beside(lambda: request_digest([generation]))
        # Now, because the response shows it.
        generation = await self.gateway.with_generation_config(generation)
        self._clock = OwnClock([generation])
        created_at = int(time.time())

        def record_of(job_id: str) -> ResponseRecord:
            return new_record(
                self.body, conversation, generation, job_id=job_id, created_at=created_at
            )

        record = await self._beside(lambda: record_of(uuid()))
        url = self.body.callback_url
        if url is not None:
            await self.gateway.webhooks.expect(record.job_id, url, self.caller, "response")
        try:
            if self.body.stored:
                await self.store.put(record, self.whole_bytes)
            job = await self._waiting.submit(
                generation,
                waits=not self.body.background,
                job_id=record.job_id,
                stream=stream,
                digest=digest,
            )
        except LlorchError:
            # After any other error the job may be enqueued all the same.
            await self._forget(record)
            raise
        if job.id != record.job_id:
            # An earlier request had the same idempotency key.
            await self._forget(record)
            earlier = await self.store.find(job.id)
            if earlier is None:
                earlier = await self._beside(lambda: record_of(job.id))
                if self.body.stored:
                    await self.store.put(earlier, self.whole_bytes)
            record = earlier
        elif url is not None:
            self.gateway.webhooks.watch(job)
        return record, job

    async def _forget(self, record: ResponseRecord) -> None:
        if self.body.callback_url is not None:
            await self.gateway.webhooks.forget(record.job_id)
        if self.body.stored:
            await self.store.delete(record)

    @property
    def whole_bytes(self) -> int:
        """About how many bytes of JSON its conversation is, without an answer."""
        return self.size_bytes + self._earlier_bytes

    async def _beside(self, do: Callable[[], Made]) -> Made:
        return await self.gateway.bodies.run(self.whole_bytes, do)

    async def _conversation(self) -> list[Read]:
        """What the request continues, then its own items."""
        earlier = Kept((), 0)
        if self.body.previous_response_id is not None:
            earlier = await self._kept(self.body.previous_response_id)
            continued = [("previous_response_id", item) for item in earlier.items]
            await self._count(continued, earlier.size_bytes)
        found = await self._found(earlier)
        own = (found.get(number, item) for number, item in enumerate(self.body.input))
        return [*earlier.items, *(item for item in own if not isinstance(item, ItemReference))]

    async def _count(self, continued: Sequence[tuple[str, Item]], size_bytes: int) -> None:
        """Counts what other responses have, each with the field that continues it. Raises
        ``InvalidRequest`` if no body could hold all: each response keeps its whole conversation,
        and so that would have no bound. ``size_bytes``: about how much it is."""
        most = self.gateway.own.max_body_bytes

        def too_much() -> str | None:
            for field, item in continued:
                self._earlier_bytes += len(item.model_dump_json().encode())
                if self._earlier_bytes > most:
                    return field
            return None

        field = await self.gateway.bodies.run(size_bytes, too_much)
        if field is not None:
            rule = (
                f"the conversation that this continues must be at most {most} bytes of JSON; "
                "send a shorter one as input"
            )
            raise InvalidRequest.from_fault(field, rule, f"over {most} bytes")

    async def _kept(self, response_id: str) -> Kept:
        """The conversation of a response, with its output."""
        if response_id in self.recent:
            return self.recent[response_id]
        try:
            record, size_bytes = await self.store.get_sized(response_id)
            end = await end_if_ended(self.gateway.client.job(record.job_id, known=True))
        except NotKept as error:
            raise _refused("PREVIOUS_RESPONSE_NOT_FOUND", error.message) from None
        if isinstance(end, str):
            still_made = "it is still being made"
            raise _refused("PREVIOUS_RESPONSE_NOT_READY", still_made, status=409, retriable=True)
        if isinstance(end, LlorchError) or failure_of(end):
            raise _refused("PREVIOUS_RESPONSE_FAILED", "the previous response failed")
        # Log probabilities are many, and say nothing to the model.
        spoken = [choice.model_copy(update={"logprobs": None}) for choice in end.choices]
        end = end.model_copy(update={"choices": tuple(spoken)})
        items = [*record.conversation, *output_of(record, end)]
        return Kept(items, size_bytes + about_bytes(end))

    async def _found(self, earlier: Kept) -> dict[int, Item]:
        """The items that ``input`` refers to, by the numbers of the references there."""
        near = {item.id for item in earlier.items}
        wanted: dict[str | None, list[tuple[int, str]]] = {}
        for number, item in enumerate(self.body.input):
            if isinstance(item, ItemReference):
                response_id = None if item.id in near else f"{PREFIX}{job_of(item.id)}"
                wanted.setdefault(response_id, []).append((number, item.id))
        found: dict[int, Item] = {}
        # Each response is read once, however many of its items are wanted.
        for response_id, references in wanted.items():
            try:
                kept = earlier if response_id is None else await self._kept(response_id)
            except HttpError:
                kept = Kept((), 0)
            # The first of an id counts.
            items = {item.id: item for item in reversed(kept.items)}
            for number, id_ in references:
                if id_ not in items:
                    message = "no such item; those of responses with store: false are not kept"
                    raise HttpError(404, "NOT_FOUND", message, param=f"input.{number}.id")
                found[number] = items[id_]
            continued = [(f"input.{number}.id", found[number]) for number, _ in references]
            await self._count(continued, kept.size_bytes * len(references))
        return found

    async def _fitted(
        self, conversation: Sequence[Read], generation: GenerationRequest
    ) -> GenerationRequest:
        """Without as many of the oldest turns as the context has no room for. What is left begins
        with a user's message, behind the system's that come first."""
        card = await self.gateway.client.model_card(generation.model)
        roles = [getattr(item, "role", None) for item in conversation]
        head = next((i for i, role in enumerate(roles) if role not in SYSTEM), len(roles))
        begins = [head, *(i for i, role in enumerate(roles) if role == "user" and i > head)]

        async def cut(begin: int) -> GenerationRequest:
            kept = [*conversation[:head], *conversation[begin:]]
            request = await self._beside(lambda: self.body.to_generation(kept))
            return request.model_copy(update={"model": generation.model})

        # An answer needs room too, but not as much as it might be allowed.
        room = card.max_context // 4
        if generation.max_tokens is not None:
            room = min(generation.max_tokens, room)
        # The last turn stays in any case: the worker refuses it if it is too long alone.
        low, high, middle = 0, len(begins) - 1, 0
        while low < high:
            request = await cut(begins[middle])
            if await self._length(card, request) + room <= card.max_context:
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return await cut(begins[low])

    async def _result(self, record: ResponseRecord, job: AsyncJob) -> Response:
        """Raises ``LlorchError`` if the job fails."""
        async with self._clock.limiting():
            end = await end_of(job)
        _check(end)
        return await self.gateway.bodies.run(about_bytes(end), lambda: response_of(record, end))

    async def _stream(self, record: ResponseRecord, job: AsyncJob) -> AsyncGenerator[bytes]:
        async with aclosing(self._events(record, job)) as events:
            async for event in events:
                yield await sse(event, self.gateway.bodies)

    async def _events(self, record: ResponseRecord, job: AsyncJob) -> AsyncGenerator[Event]:
        """Raises ``LlorchError`` if the job fails before its first token: that is an answer of its
        own."""
        entries = self._clock.each(job.stream(patience_s=PATIENCE_S))
        first = [await anext(entries)]
        while isinstance(first[-1].event, Started | Restarted):
            first.append(await anext(entries))
        if isinstance(first[-1].event, TERMINAL_EVENTS):
            _check(await end_of(job))
        async for event in response_events(record, job, entries, self.gateway.bodies, first):
            self._waiting.broken = event["type"] == "error"
            yield event


async def written(gateway: Gateway, response: Response) -> PlainResponse:
    """``response`` as an answer."""
    size = sum(
        len(part.text) + scores_bytes(len(part.logprobs), response.top_logprobs)
        for item in response.output
        if isinstance(item, MessageItem)
        for part in item.content
        if isinstance(part, OutputText)
    )
    body = await gateway.bodies.run(size, lambda: response.model_dump_json(by_alias=True).encode())
    return PlainResponse(body, media_type="application/json")


def _failed(record: ResponseRecord, error: Exception) -> bytes:
    detail = body_of(as_shown(error)).error
    event = ResponseEvents(record).error(detail.code, detail.message)
    return encoded(event, event["type"])


def _check(end: End) -> None:
    """Raises ``LlorchError`` if nothing came of the job."""
    failure = failure_of(end)
    if failure is not None:
        raise failure


def _refused(code: str, message: str, *, status: int = 400, retriable: bool = False) -> HttpError:
    return HttpError(status, code, message, param="previous_response_id", retriable=retriable)
