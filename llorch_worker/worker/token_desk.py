"""Answers questions about tokens, also while all sequences of the engine are taken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import redis
from celery.utils import uuid
from celery.utils.log import get_logger
from redis.exceptions import RedisError

from llorch_worker.broker import token_questions
from llorch_worker.broker.repeater import Repeater
from llorch_worker.contract import InternalError, LlorchError
from llorch_worker.contract.token_questions import TokenQuestion

if TYPE_CHECKING:
    from llorch_worker.text import Tokenizer

logger = get_logger(__name__)

LISTEN_S = 5.0


class TokenDesk(Repeater):
    """A thread that takes the questions for the model, one at a time. It logs no text."""

    def __init__(self, client: redis.Redis, model: str, tokenizer: Callable[[], Tokenizer]) -> None:
        self._redis = client
        self._model = model
        self._id = uuid()
        self._tokenizer = tokenizer
        super().__init__("tokens", "hear questions about tokens", self._serve)

    def close(self) -> None:
        self.closing.set()
        # While Redis is away, the thread gets no reply either.
        with suppress(RedisError):
            token_questions.wake(self._redis, self._id)
        super().close()

    def _serve(self) -> None:
        taken = token_questions.take(self._redis, self._model, self._id, LISTEN_S)
        if taken is not None:
            question_id, question = taken
            token_questions.reply(self._redis, question_id, self._answer(question))

    def _answer(self, question: TokenQuestion) -> dict[str, Any] | LlorchError:
        # Late, because the worker's own imports come before the device is chosen.
        from llorch_worker.text.questions import answer

        try:
            return answer(self._tokenizer(), question)
        except LlorchError as error:
            return error
        except Exception as error:
            # The message may quote the text, so only the type and the place are logged.
            defect = InternalError(f"a defect of the worker: {type(error).__name__}")
            place = (type(defect), defect, error.__traceback__)
            logger.error("a question about tokens failed", exc_info=place)
            return defect
