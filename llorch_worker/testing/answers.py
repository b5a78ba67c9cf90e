"""What a test scripts: texts, failures, and jobs that wait for their cancel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from llorch_worker.contract import GenerationRequest, InternalError, LlorchError
from llorch_worker.contract.result import FinishReason


@dataclass(frozen=True)
class Answer:
    """A generated text. Each word is one token."""

    text: str
    finish_reason: FinishReason | None = None
    """By default ``stop``, or ``length`` if the text has more words than ``max_tokens``."""
    until_cancelled: bool = False
    """Whether the job, once it has streamed the text, runs on until its cancel or deadline."""


Reply = str | Answer | LlorchError
"""A text, an :class:`Answer`, or the error with which the job fails."""
Script = Callable[[GenerationRequest], Reply]


class Answers:
    """The replies to come. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._script: Script | None = None
        self._replies: list[Reply] = []

    def set(self, *replies: Reply | Script) -> None:
        """See :meth:`.Stub.answer`."""
        scripts = [reply for reply in replies if callable(reply)]
        if scripts and len(replies) > 1:
            raise TypeError("answer() takes one function, or replies one by one")
        texts = [reply for reply in replies if not callable(reply)]
        with self._lock:
            self._script = scripts[0] if scripts else None
            if len(texts) == 1:
                self._script = lambda _: texts[0]
            self._replies = texts

    def to(self, request: GenerationRequest) -> Answer:
        """The answer to the next job.

        Raises:
            LlorchError: the scripted one; INTERNAL if no answer is left, or the function raised.
        """
        reply = self._next(request)
        if isinstance(reply, LlorchError):
            raise reply
        return reply if isinstance(reply, Answer) else Answer(reply)

    def _next(self, request: GenerationRequest) -> Reply:
        with self._lock:
            if self._script is None:
                if not self._replies:
                    raise InternalError("the test has no answer for this job: call llorch.answer()")
                return self._replies.pop(0)
            script = self._script
        try:
            return script(request)
        except LlorchError:
            raise
        except Exception as error:
            raise InternalError(f"the scripted answer raised {error!r}") from error
