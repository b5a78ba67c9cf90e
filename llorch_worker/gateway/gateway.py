"""What all routes share: the client of the queue, the callers and the settings."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, cast

import anyio
from celery.utils import uuid
from fastapi import Depends, Request
from redis.exceptions import RedisError

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import broker_errors
from llorch_worker.broker.fleet.registry import ModelCard
from llorch_worker.broker.scripts import run_script_async
from llorch_worker.client import AsyncClient, AsyncJob
from llorch_worker.contract import (
    GenerationRequest,
    IdempotencyKeyReused,
    JobRequest,
    LlorchError,
    request_digest,
)
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.contract.generation_config import with_generation_config
from llorch_worker.contract.kinds import Asked
from llorch_worker.contract.token_questions import TokenQuestion
from llorch_worker.gateway.access_log import note_job
from llorch_worker.gateway.batches.record import BatchRecord
from llorch_worker.gateway.batches.run import BatchRun
from llorch_worker.gateway.batches.store import BatchStore
from llorch_worker.gateway.bodies import Bodies
from llorch_worker.gateway.errors import HttpError
from llorch_worker.gateway.files.record import FileRecord, FileRecords
from llorch_worker.gateway.files.store import FileStore
from llorch_worker.gateway.job_document import job_event
from llorch_worker.gateway.keys import Caller, KeyRing
from llorch_worker.gateway.limits import Limits
from llorch_worker.gateway.ownership import NOBODY, may
from llorch_worker.gateway.responses.progress import response_event
from llorch_worker.gateway.responses.store import ResponseStore
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.gateway.tokenizers import Tokenizers
from llorch_worker.gateway.webhooks.webhooks import EventOf, Webhooks
from llorch_worker.openai_api.errors import NoWorker
from llorch_worker.openai_api.shape import WholeBody
from llorch_worker.settings import Settings

logger = logging.getLogger(__name__)

WORKERS_FRESH_S = 2.0
FORGET_WAIT_S = 5.0
"""How long a job that is to be forgotten may take to end."""


class Gateway:
    """One gateway. It keeps nothing that another gateway would need."""

    def __init__(self, settings: Settings, own: GatewaySettings) -> None:
        """Raises ``CommandError`` if the file of keys cannot be read, or files cannot be kept."""
        self.settings = settings
        self.own = own
        self.client = AsyncClient(settings)
        self.redis = self.client.redis
        self.file_store = FileStore(own.files)
        self.files = FileRecords(self.redis, settings.redis_url, "file", FileRecord)
        self.batches = BatchStore(self.redis, settings.redis_url, "batch", BatchRecord)
        self._refuse_unknown = own.unknown_fields == "refuse"
        self.bodies = Bodies()
        self._keys = None if own.keys is None else KeyRing(own.keys)
        self._limits = Limits(self.redis)
        events: dict[str, EventOf] = {
            "job": lambda webhook: job_event(self.client, webhook.id),
            "response": lambda webhook: response_event(
                self.responses(Caller(webhook.caller)), self.client.job(webhook.id)
            ),
            "batch": lambda webhook: self.batches.event(webhook.id),
        }
        self.webhooks = Webhooks(self.client, own, self.webhook_secret, events)
        self._tokenizers = Tokenizers(settings, self.redis)
        self._served: frozenset[str] = frozenset()
        self._served_at_s = float("-inf")

    def new_run(self, record: BatchRecord, token: str) -> BatchRun:
        """Drives a batch whose lease has this ``token``."""
        return BatchRun(
            self.client,
            self.batches,
            self.file_store,
            record,
            token,
            adapt=partial(self._of_batch, record.owner),
            window=self.own.batch_window,
            refuse_unknown=self._refuse_unknown,
            keep_s=self.own.response_ttl_s,
            on_end=self.webhooks.due,
        )

    async def _of_batch(self, owner: str, request: Asked, job_id: str) -> Asked:
        """A line of a batch. Those in flight are bounded by the batch's window instead."""
        request = self._bounded(await self.with_generation_config(request))
        caller = None if self._keys is None else self._keys.named(owner)
        if caller is not None:
            with broker_errors(self.settings.redis_url):
                request = await self._limits.admit(request, caller, job_id, counts=False)
        return owned(request, owner)

    async def with_generation_config(self, request: Asked) -> Asked:
        """As :meth:`Client.submit` would send it, which then changes it no more.

        Raises ``LlorchError`` if the model is unknown.
        """
        if self.settings.generation_config == "none" or not isinstance(request, GenerationRequest):
            return request
        card = await self.client.model_card(request.model)
        return cast("Asked", with_generation_config(request, card.generation_config))

    def _bounded(self, request: Asked) -> Asked:
        if not isinstance(request, GenerationRequest) or not request.cut_max_tokens:
            return request
        wanted, most = request.max_tokens, self.own.max_tokens
        if wanted is None:
            wanted = max(self.own.default_max_tokens, request.min_tokens)
        if most is not None:
            wanted = min(wanted, most)
        return request.model_copy(update={"max_tokens": wanted})

    def responses(self, caller: Caller) -> ResponseStore:
        """The responses that this caller may see."""
        return ResponseStore(
            self.redis,
            self.settings.redis_url,
            caller,
            self.bodies,
            ttl_s=self.own.response_ttl_s,
        )

    async def close(self) -> None:
        self._tokenizers.close()
        await self.client.close()

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who sent a request with these. Raises ``HttpError`` 401."""
        if self._keys is None:
            return Caller(operator=True)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [key.strip()] if scheme.lower() == "bearer" else []
        # Anthropic's clients send it, perhaps beside another key of theirs.
        given += [headers["x-api-key"]] if "x-api-key" in headers else []
        found = next(filter(None, map(self._keys.caller, given)), None)
        if found is None:
            message = "this gateway needs a key: send `Authorization: Bearer <key>`"
            if given or "authorization" in headers:
                message = "this key is unknown here, or was revoked"
            raise HttpError(401, "INVALID_API_KEY", message)
        return found

    def name_of(self, headers: Mapping[str, str]) -> str:
        """Whose key these hold; "" if none that is known."""
        with suppress(HttpError):
            return self.caller(headers).name
        return ""

    def check(self, body: WholeBody) -> None:
        """Raises ``InvalidRequest`` for fields that nobody here knows, if the settings say so."""
        if self._refuse_unknown:
            body.refuse_unknown()

    def webhook_secret(self, name: str) -> str | None:
        """What signs the webhooks of the key with this name."""
        found = None if self._keys is None else self._keys.webhook_secret(name)
        if found is None and self.own.webhook_secret is not None:
            return self.own.webhook_secret.get_secret_value()
        return found

    async def submit(
        self,
        request: JobRequest,
        caller: Caller,
        *,
        waits: bool = True,
        job_id: str | None = None,
        private: bool = False,
        stream: bool = False,
        digest: str | None = None,
    ) -> AsyncJob[Any]:
        """Enqueues a job of ``caller``, or finds the first with the same idempotency key.

        ``waits``: a client waits for the answer, so a live worker must serve the model;
        ``private``: nobody else is to read it; ``stream`` and ``digest``: see
        :meth:`Client.submit`.

        Raises:
            LlorchError: see :meth:`Client.submit`; also NoWorker, TooManyJobs and RateLimited.
        """
        # Of what the client sent: our settings and its key's may change until it comes back.
        digest = digest or request_digest([request])
        if caller.priority is not None and "priority" not in request.model_fields_set:
            request = request.model_copy(update={"priority": caller.priority})
        request = owned(request, caller.name)
        earlier = await self._earlier(request, digest)
        if earlier is not None:
            note_job(earlier.id)
            return earlier
        if waits:
            await self.require_worker(request.model)
        request = self._bounded(await self.with_generation_config(request))
        job_id = job_id or uuid()
        with broker_errors(self.settings.redis_url):
            request = await self._limits.admit(request, caller, job_id)
        enqueued = None
        try:
            owner = NOBODY if private else caller.name
            enqueued = await self.client.submit(
                request, job_id=job_id, owner=owner, stream=stream, digest=digest
            )
            note_job(enqueued.id)
            return enqueued
        finally:
            # It failed, or an earlier job has the same idempotency key.
            if enqueued is None or enqueued.id != job_id:
                await self._leave(caller, job_id, self._limits.withdraw)

    async def _earlier(self, request: JobRequest, digest: str) -> AsyncJob[Any] | None:
        """The job with this request's idempotency key: its answer is due whatever else holds.

        Raises ``IdempotencyKeyReused``.
        """
        if request.idempotency_key is None:
            return None
        model = request.model or (await self.client.model_card()).name
        key = keys.idempotency(model, request.idempotency_key)
        with broker_errors(self.settings.redis_url):
            found = await run_script_async(self.redis, "gateway/earlier", [digest], [key])
        if not found:
            return None
        outcome, job_id = found
        if outcome == "other":
            raise IdempotencyKeyReused.by(job_id)
        return self.client.job(job_id, known=True)

    async def owned_job(self, caller: Caller, job_id: str) -> AsyncJob | None:
        """The job with this id, if ``caller`` may see it."""
        redis: Any = self.redis
        with broker_errors(self.settings.redis_url):
            owner = await redis.hget(keys.job(job_id), "owner")
        return self.client.job(job_id, known=True) if may(caller, owner) else None

    async def forget(self, job: AsyncJob) -> None:
        """Deletes the text of a job, and cancels it if it has not ended. If it does not end soon,
        its text is only hidden until it expires."""
        if not await self._forget(job):
            await job.cancel()
            with suppress(LlorchError, TimeoutError):
                await job.result(FORGET_WAIT_S)
            await self._forget(job)

    async def _forget(self, job: AsyncJob) -> bool:
        with broker_errors(self.settings.redis_url):
            return bool(await run_script_async(self.redis, "gateway/forget", [job.id, NOBODY]))

    async def leave(
        self, caller: Caller, jobs: Iterable[AsyncJob], *, cancel: bool, forget: bool
    ) -> None:
        """Gives the places of ``jobs`` among those of their caller back at once; ``cancel`` if
        nobody waits for them any more, ``forget`` if no text of them may be left."""
        # Whoever hung up has cancelled this task already.
        with anyio.CancelScope(shield=True):
            for job in jobs:
                try:
                    if forget:
                        await self.forget(job)
                    elif cancel:
                        await job.cancel()
                except BrokerUnavailable:
                    what = "cancel" if cancel else "deletion"
                    logger.warning("job %s: Redis did not take its %s", job.id, what)
                else:
                    await self._leave(caller, job.id, self._limits.leave)

    async def _leave(
        self, caller: Caller, job_id: str, how: Callable[[Caller, str], Awaitable[None]]
    ) -> None:
        try:
            await how(caller, job_id)
        except RedisError:
            logger.warning("job %s keeps its place in flight until another needs it", job_id)

    async def ask(self, card: ModelCard, question: TokenQuestion) -> dict[str, Any]:
        """The answer to a question about the tokens of a model.

        Raises:
            LlorchError: InvalidRequest, NoWorker, or QueueFull if too many questions wait.
        """
        answer = await self._tokenizers.own_answer(card, question)
        if answer is None:
            await self.require_worker(card.name)
            answer = await self._tokenizers.workers_answer(card, question)
        return answer

    async def require_worker(self, model: str | None) -> None:
        """Raises ``NoWorker`` if the model is known but no live worker serves it."""
        if time.monotonic() - self._served_at_s > WORKERS_FRESH_S or not self._serves(model):
            self._served = frozenset(
                model for card in await self.client.workers() for model in card.served
            )
            self._served_at_s = time.monotonic()
        if not self._serves(model):
            known = {card.name for card in await self.client.models()}
            if model is None or model in known:
                raise NoWorker(f"no worker serves {model or 'any model'} now; try again later")
            # An unknown model is refused at the submit, which names the known ones.

    def _serves(self, model: str | None) -> bool:
        return bool(self._served) if model is None else model in self._served


def owned(request: Asked, owner: str) -> Asked:
    """``request`` in the owner's line of jobs, and with an idempotency key that no other caller can
    use to read its answer."""
    if not owner:
        return request
    changed: dict[str, Any] = {"tenant": owner}
    if request.idempotency_key is not None:
        name = f"{owner} {request.idempotency_key}".encode("utf-8", "surrogatepass")
        changed["idempotency_key"] = hashlib.sha256(name).hexdigest()
    return request.model_copy(update=changed)


# Coroutines, because FastAPI hands plain functions to a thread, for each request.


async def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


TheGateway = Annotated[Gateway, Depends(_gateway)]


async def known_caller(request: Request, gateway: TheGateway) -> Caller:
    """Every route but those of health depends on this, which refuses unknown keys."""
    request.state.caller = caller = gateway.caller(request.headers)
    return caller


TheCaller = Annotated[Caller, Depends(known_caller)]
