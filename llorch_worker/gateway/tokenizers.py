"""Answers questions about tokens: from the tokenizer's files if they are here, else by a worker."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

import redis.asyncio

from llorch_worker.broker import token_questions
from llorch_worker.broker.connection import broker_errors
from llorch_worker.broker.registry import ModelCard
from llorch_worker.contract import ModelLoadFailed, ModelNotServed
from llorch_worker.contract.token_questions import TokenQuestion
from llorch_worker.openai_api.errors import NoWorker
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from llorch_worker.text import Tokenizer

logger = logging.getLogger(__name__)


class Tokenizers:
    """The tokenizer of the model whose path the settings name, and the workers' own."""

    def __init__(self, settings: Settings, client: redis.asyncio.Redis) -> None:
        self._settings = settings
        self._redis = client
        self._model = settings.served_name if "model" in settings.model_fields_set else None
        self._loading = threading.Lock()
        self._tokenizer: Tokenizer | None = None

    async def own_answer(self, card: ModelCard, question: TokenQuestion) -> dict[str, Any] | None:
        """The answer without a worker; None if the model's files are not here.

        Raises InvalidRequest, see :func:`llorch_worker.text.questions.answer`.
        """
        if card.name != self._model:
            return None
        return await asyncio.to_thread(self._answer, question)

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

    def _answer(self, question: TokenQuestion) -> dict[str, Any] | None:
        tokenizer = self._loaded()
        if tokenizer is None:
            return None
        from llorch_worker.text.questions import answer

        return answer(tokenizer, question)

    def _loaded(self) -> Tokenizer | None:
        with self._loading:
            if self._tokenizer is None and self._model is not None:
                try:
                    from llorch_worker.text import load_tokenizer
                    from llorch_worker.text.vocabulary_file import open_vocabulary

                    self._tokenizer = load_tokenizer(open_vocabulary(self._settings.model))
                except (ModelLoadFailed, ModuleNotFoundError) as error:
                    logger.warning("workers will answer /tokenize, because here: %s", error)
                    self._model = None
            return self._tokenizer
