"""Answers questions about tokens: from the tokenizer's files if they are here, else by a worker."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import redis.asyncio

from llorch_worker.broker.connections.connection import broker_errors
from llorch_worker.broker.fleet import token_questions
from llorch_worker.broker.fleet.registry import ModelCard
from llorch_worker.contract import (
    InternalError,
    LlorchError,
    ModelLoadFailed,
    ModelNotServed,
    OutOfMemory,
)
from llorch_worker.contract.token_questions import TokenQuestion
from llorch_worker.intake.process import IntakeProcess
from llorch_worker.model_files.hub import local_path
from llorch_worker.openai_api.errors import NoWorker
from llorch_worker.settings import Settings

logger = logging.getLogger(__name__)

_TRIES_AGAIN_S: Final = 60.0
"""How long workers answer after an intake that died while it loaded."""
_AT_ONCE: Final = 16
"""How many questions wait for the intake in threads, apart from those of the event loop."""


class Tokenizers:
    """An intake for the model whose path the settings name, and the workers' own."""

    def __init__(self, settings: Settings, client: redis.asyncio.Redis) -> None:
        self._settings = settings
        self._redis = client
        self._model = settings.served_name if "model" in settings.model_fields_set else None
        self._threads = ThreadPoolExecutor(_AT_ONCE, "llorch-tokens")
        self._starting = threading.Lock()
        self._intake: IntakeProcess | None = None
        self._loading: IntakeProcess | None = None
        self._starts_from_s = 0.0

    async def own_answer(self, card: ModelCard, question: TokenQuestion) -> dict[str, Any] | None:
        """The answer without a worker; None if the model's files are not here, or cannot be used
        now.

        Raises InvalidRequest, see :meth:`.IntakeProcess.answer`.
        """
        if card.name != self._model:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._answer, question)

    async def workers_answer(self, card: ModelCard, question: TokenQuestion) -> dict[str, Any]:
        """The answer of a live worker.

        Raises:
            LlorchError: see :func:`token_questions.ask`; NoWorker if none answers.
        """
        try:
            with broker_errors(self._settings.redis_url):
                return await token_questions.ask(self._redis, card.name, question)
        except ModelNotServed as error:
            raise NoWorker(error.message) from None

    def close(self) -> None:
        """Ends the intake, also one that loads. A question that it has not answered fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for intake in (self._intake, self._loading):
            if intake is not None:
                intake.close()

    def _answer(self, question: TokenQuestion) -> dict[str, Any] | None:
        intake = self._started()
        if intake is None:
            return None
        try:
            return intake.answer(question)
        except (InternalError, OutOfMemory) as error:
            logger.warning("a worker answers, because here: %s", error)
            return None

    def _started(self) -> IntakeProcess | None:
        with self._starting:
            wanted = self._intake is None and self._model is not None
            if wanted and time.monotonic() >= self._starts_from_s:
                self._start()
            return self._intake

    def _start(self) -> None:
        intake = None
        try:
            self._loading = intake = IntakeProcess(local_path(self._settings.model, download=False))
            intake.around()
        except (LlorchError, OSError, RuntimeError) as error:
            logger.warning("workers will answer /tokenize, because here: %s", error)
            self._starts_from_s = time.monotonic() + _TRIES_AGAIN_S
            if isinstance(error, ModelLoadFailed):
                self._model = None
            if intake is not None:
                intake.close()
        else:
            self._intake = intake
