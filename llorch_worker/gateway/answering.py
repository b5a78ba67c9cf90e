"""From a body to its answer: its jobs, and their results at once or as a stream."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request
from fastapi.responses import Response

from llorch_worker.client import AsyncJob
from llorch_worker.contract import (
    Finished,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Started,
    Tokens,
    Usage,
    request_digest,
    shown,
)
from llorch_worker.contract.token_questions import TokenizeChat, TokenizeText, TokenQuestion
from llorch_worker.gateway.bodies import LongJson, about_bytes
from llorch_worker.gateway.errors import ERRORS, as_shown
from llorch_worker.gateway.event_source import encoded
from llorch_worker.gateway.gateway import Gateway, TheCaller, TheGateway
from llorch_worker.gateway.job_events import PATIENCE_S, OwnClock, Progress, job_events
from llorch_worker.gateway.keys import Caller
from llorch_worker.gateway.waiting import Waiting
from llorch_worker.openai_api.body import Body, Chunks
from llorch_worker.openai_api.errors import nothing_came
from llorch_worker.openai_api.shape import KeyedBody

logger = logging.getLogger(__name__)

IGNORED = "x-llorch-ignored"
"""The header that names what of a request changed nothing."""
GENERATION_CONFIG = "x-llorch-generation-config"
"""The header with what the request did not name and the model's makers have set."""
MOST_NAMED = 20
PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,100}")

IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=200)]
AnyBody = TypeVar("AnyBody", bound=KeyedBody)
WithPromptIds = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Sender:
    """Who sent a body, and waits for the answer."""

    request: Request
    gateway: Gateway
    caller: Caller
    idempotency_key: str | None

    def checked(self, body: AnyBody) -> AnyBody:
        """``body`` with the header's key. Raises like :meth:`Gateway.check`."""
        self.gateway.check(body)
        return body.keyed(self.idempotency_key)


async def _sender(
    request: Request,
    gateway: TheGateway,
    caller: TheCaller,
    idempotency_key: IdempotencyKey = None,
) -> Sender:
    return Sender(request, gateway, caller, idempotency_key)


TheSender = Annotated[Sender, Depends(_sender)]


def answers(document: type[Mapping[str, Any]]) -> dict[int | str, dict[str, Any]]:
    """Documents the answers of an endpoint that gives ``document``, or a stream."""
    return {
        **ERRORS,
        200: {
            "model": document,
            "description": "The answer; with stream, its chunks as server-sent events.",
            "content": {"text/event-stream": {}},
        },
    }


def say_ignored(answer: Response, names: Iterable[str]) -> None:
    """Names in a header what of a request changed nothing."""
    # Quoted where HTTP, or whoever reads the list, could not bear a name.
    shown_names = [
        name if PLAIN.fullmatch(name) else json.dumps(shown(name))
        for name in islice(dict.fromkeys(names), MOST_NAMED)
    ]
    if shown_names:
        answer.headers[IGNORED] = ", ".join(shown_names)


def say_generation_config(answer: Response, jobs: Iterable[AsyncJob]) -> None:
    """Names in a header what the jobs of a request took from the model's files."""
    taken = {name: value for job in jobs for name, value in job.generation_config.items()}
    if taken:
        answer.headers[GENERATION_CONFIG] = ", ".join(
            f"{name}={value}" for name, value in taken.items()
        )


async def answer_body(sender: Sender, body: Body) -> Response:
    """Sends the jobs of ``body`` and answers with what they generate.

    Raises like :meth:`Answering.respond`.
    """
    body = sender.checked(body)
    requests = await sender.gateway.bodies.run_for(sender.request, body.to_requests)
    return await Answering(sender, body, requests).respond()


class Answering:
    """One body and its jobs. Nobody else knows the jobs."""

    def __init__(self, sender: Sender, body: Body, requests: Sequence[GenerationRequest]) -> None:
        self._request, self._gateway = sender.request, sender.gateway
        self._path = sender.request.url.path
        self._body = body
        self._requests = requests
        comes_back = body.idempotency_key is not None
        self._waiting = Waiting(sender.gateway, sender.caller, comes_back=comes_back)
        self._jobs = self._waiting.jobs
        self._clock = OwnClock(self._requests)
        self._created = int(time.time())

    async def respond(self) -> Response:
        """Raises ``LlorchError`` and ``BrokerUnavailable`` until the answer has begun."""
        digest = request_digest(self._requests)
        for request in self._requests:
            await self._waiting.submit(request, stream=self._body.stream, digest=digest)
        if not self._body.stream:
            answer: Response = await self._waiting.answer(self._request, self._whole())
        else:
            answer = await self._waiting.stream(self._request, self._stream(), self._failure)
        say_ignored(answer, self._body.ignored)
        say_generation_config(answer, self._jobs)
        return answer

    async def _prompt_ids(self) -> WithPromptIds:
        """What adds the ids of the prompts to documents, if they are wanted."""
        if not self._body.wants_prompt_ids:
            return lambda document: document
        ids, told = [await self._ids_of(request) for request in self._requests], set[int]()
        return lambda document: self._body.with_prompt_ids(document, ids, told)

    async def _ids_of(self, request: GenerationRequest) -> Sequence[int]:
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        text = request.prompt
        question: TokenQuestion
        if text is None:
            question = TokenizeChat.of(request)
        else:
            question = TokenizeText(
                prompt=text,
                add_special_tokens=request.add_special_tokens,
                # A question's None may parse; a job's never does.
                parse_special=bool(request.parse_special),
            )
        card = await self._gateway.client.model_card(request.model)
        ids: Sequence[int] = (await self._gateway.ask(card, question))["tokens"]
        return ids

    async def _whole(self) -> Response:
        # First, while the jobs run: afterwards, the worker that has answered may be gone.
        with_prompt_ids = await self._prompt_ids()
        results = await self._results()
        return await self._gateway.bodies.run(
            sum(about_bytes(each, ids=self._body.wants_prompt_ids) for each in results),
            lambda: LongJson(with_prompt_ids(self._body.answer(results, self._created))),
        )

    async def _results(self) -> Sequence[GenerationResult]:
        async with self._clock.limiting():
            results = await asyncio.gather(
                *(job.result(patience_s=PATIENCE_S) for job in self._jobs)
            )
        _refuse_nothing((result.ended, result.usage) for result in results)
        return results

    async def _stream(self) -> AsyncGenerator[bytes]:
        """Server-sent events. Raises only before the first; an error after it is one of them."""
        begun = False
        chunks = self._body.chunks(self._requests, self._jobs[0].id, self._created)
        with_prompt_ids = await self._prompt_ids()
        try:
            async with aclosing(job_events(self._jobs, self._clock)) as events:
                async for job, event in events:
                    if not begun and isinstance(event, Finished):
                        _refuse_nothing([(event.finish_reason, event.usage)])
                    for data in await self._encoded(job, event, chunks, with_prompt_ids):
                        begun = True
                        yield data
            for document in chunks.end():
                yield encoded(document, document.get("type"))
            if self._body.done:
                yield self._body.done
        except Exception as error:
            if not begun:
                raise
            self._waiting.broken = True
            yield self._failure(error)

    def _failure(self, error: Exception) -> bytes:
        shown = as_shown(error)
        logger.warning("a stream of %s ends with %s", self._path, shown.code)
        return encoded(self._body.failure(shown), "error")

    async def _encoded(
        self, job: int, event: Progress, chunks: Chunks, with_prompt_ids: WithPromptIds
    ) -> Sequence[bytes]:
        if isinstance(event, Started):
            chunks.started(job, event)
            return ()
        result = None
        if isinstance(event, Finished) and chunks.needs_results:
            result = await self._jobs[job].result(patience_s=PATIENCE_S)

        def made() -> list[bytes]:
            documents = (
                chunks.tokens(job, event)
                if isinstance(event, Tokens)
                else chunks.finished(job, event, result)
            )
            return [
                encoded(document, document.get("type"))
                for document in map(with_prompt_ids, documents)
            ]

        # A job that ended long ago comes in one event.
        return await self._gateway.bodies.run(about_bytes(event), made)


def _refuse_nothing(ends: Iterable[tuple[FinishReason, Usage]]) -> None:
    """Raises ``DeadlineExceeded`` if no job has a token because of its deadline."""
    if (error := nothing_came(ends)) is not None:
        raise error
