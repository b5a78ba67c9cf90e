"""Answers questions about tokens, also while all sequences of the engine are taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, Final

import redis
from celery.utils import uuid
from celery.utils.log import get_logger
from redis.exceptions import RedisError

from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.fleet import token_questions
from llorch_worker.contract import LlorchError
from llorch_worker.contract.errors import as_told
from llorch_worker.contract.token_questions import TokenQuestion

logger = get_logger(__name__)

LISTEN_S = 5.0
_AT_ONCE: Final = 4
"""How many questions are answered at once: none waits for one that takes long."""


class TokenDesk(Repeater):
    """A thread that takes the questions for the model, and some that answer. It logs no text."""

    def __init__(
        self, client: redis.Redis, model: str, answer: Callable[[TokenQuestion], dict[str, Any]]
    ) -> None:
        self._redis = client
        self._model = model
        self._id = uuid()
        self._find_answer = answer
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "llorch-tokens")
        super().__init__("tokens", "hear questions about tokens", self._serve)

    def close(self) -> None:
        self.closing.set()
        # While Redis is away, the thread gets no reply either.
        with suppress(RedisError):
            token_questions.wake(self._redis, self._id)
        super().close()
        self._threads.shutdown(wait=False)

    def _serve(self) -> None:
        if not self._places.acquire(timeout=LISTEN_S):
            return
        with ExitStack() as place:
            place.callback(self._places.release)
            taken = token_questions.take(self._redis, self._model, self._id, LISTEN_S)
            if taken is not None:
                self._threads.submit(self._reply, *taken, place.pop_all())

    def _reply(self, question_id: str, question: TokenQuestion, place: ExitStack) -> None:
        # Without Redis, whoever asked hears that nobody answers.
        with place, suppress(RedisError):
            token_questions.reply(self._redis, question_id, self._answer(question))

    def _answer(self, question: TokenQuestion) -> dict[str, Any] | LlorchError:
        try:
            return self._find_answer(question)
        except Exception as error:
            told = as_told(error, "worker")
            if told is not error:
                logger.error("a question about tokens failed", exc_info=told)
            return told
