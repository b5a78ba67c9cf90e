"""Questions about tokens on their way to a worker of the model, and the answers.

A list in Redis rather than Celery's remote control: that sends every text to all workers, shows it
in their debug logs, and is answered on the thread that takes jobs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import redis
import redis.asyncio
from celery.utils import uuid
from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import longest_wait_s
from llorch_worker.contract import (
    ERROR_CLASSES,
    ErrorDocument,
    InternalError,
    LlorchError,
    ModelNotServed,
    QueueFull,
)
from llorch_worker.contract.token_questions import TokenQuestion

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 6.0
KEPT_S = 30
MOST_WAITING = 256
"""Questions for one model that may wait; with texts of the largest size, 256 MB."""


class _Asked(BaseModel):
    model_config = ConfigDict(frozen=True)

    id: str
    question: TokenQuestion


class _Answered(BaseModel):
    model_config = ConfigDict(frozen=True)

    answer: dict[str, Any] | None = None
    error: ErrorDocument | None = None


async def ask(client: redis.asyncio.Redis, model: str, question: TokenQuestion) -> dict[str, Any]:
    """The answer of any live worker of ``model``.

    Raises:
        LlorchError: what the worker answers instead; also QueueFull if too many questions wait, and
            ModelNotServed if no worker answers in time.
    """
    # redis-py's annotations cover all its clients at once.
    commands: Any = client
    asked = _Asked(id=uuid(), question=question)
    # In two steps, beside the event loop: a million ids in one would stop it for 50 ms.
    document = await asyncio.to_thread(lambda: to_json(asked.model_dump(exclude_none=True)))
    questions = keys.token_questions(model)
    async with commands.pipeline(transaction=False) as pipe:
        pipe.rpush(questions, document)
        pipe.expire(questions, KEPT_S)
        waiting, _ = await pipe.execute()
    reply = None
    if waiting <= MOST_WAITING:
        reply = await _answer_of(commands, keys.token_answer(asked.id))
    if reply is None:
        await commands.lrem(questions, 0, document)
        if waiting > MOST_WAITING:
            raise QueueFull("too many questions about tokens wait; try again later")
        raise ModelNotServed(f"no worker of {model} answered in time; try again later")
    answered = await asyncio.to_thread(_Answered.model_validate_json, reply[1])
    if answered.error is not None:
        kind = ERROR_CLASSES.get(answered.error.code, InternalError)
        raise kind(answered.error.message, faults=answered.error.faults)
    return answered.answer or {}


async def _answer_of(commands: Any, key: str) -> Any:
    until_s = time.monotonic() + ANSWER_TIMEOUT_S
    while (left_s := until_s - time.monotonic()) > 0:
        # Redis waits for ever if it is to wait for 0 s.
        wait_s = max(longest_wait_s(commands, left_s), 0.01)
        if (reply := await commands.blpop([key], wait_s)) is not None:
            return reply
    return None


def take(
    client: redis.Redis, model: str, taker: str, timeout_s: float
) -> tuple[str, TokenQuestion] | None:
    """The next question and its id; None if none comes for at most ``timeout_s``, if it cannot be
    read, or if :func:`wake` is called for this ``taker``."""
    questions = keys.token_questions(model)
    wait_s = longest_wait_s(client, timeout_s)
    popped: Any = client.blpop([questions, keys.token_answer(taker)], wait_s)
    if popped is None or popped[0] != questions:
        return None
    try:
        asked = _Asked.model_validate_json(popped[1])
    except (ValueError, TypeError):
        # Perhaps a newer gateway's. Whoever asks waits in vain, as if no worker were there.
        logger.warning("dropped a question about tokens that cannot be read")
        return None
    return asked.id, asked.question


def wake(client: redis.Redis, taker: str) -> None:
    """Ends the wait of :func:`take`."""
    _push(client, taker, "")


def reply(client: redis.Redis, question_id: str, answer: dict[str, Any] | LlorchError) -> None:
    """Answers a question."""
    if isinstance(answer, LlorchError):
        answered = _Answered(error=answer.document())
    else:
        answered = _Answered(answer=answer)
    _push(client, question_id, answered.model_dump_json(exclude_none=True))


def _push(client: redis.Redis, waits: str, document: str) -> None:
    key = keys.token_answer(waits)
    with client.pipeline(transaction=True) as pipe:
        pipe.rpush(key, document)
        pipe.expire(key, KEPT_S)
        pipe.execute()
