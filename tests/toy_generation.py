"""A generation of the toy engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llorch_worker.contract import (
    Cancelled,
    CancelledEvent,
    Choice,
    Event,
    Finished,
    GenerationRequest,
    GenerationResult,
    LlorchError,
    Started,
    Timings,
    Usage,
)
from llorch_worker.engine.told import TokensTold

if TYPE_CHECKING:
    from tests.toy_engine import ToyEngine


def token_id(seed: int | None, position: int) -> int:
    """The id of the token at ``position`` of a request with ``seed``; no two seeds share ids."""
    return ((seed or 0) << 16) + position


class ToyGeneration:
    """Emits tokens, and does what its prompt asks; see :mod:`tests.toy_engine`."""

    is_checked = False

    def __init__(
        self,
        engine: ToyEngine,
        id: str,
        request: GenerationRequest,
        emit: Callable[[Event], None],
        tell: Callable[[TokensTold], None],
        worker: str,
        attempt: int,
        queued_at: float | None,
        known: int,
    ) -> None:
        self.id = id
        self.request = request
        self.worker = worker
        self.attempt = attempt
        self.emit = emit
        self.tell = tell
        self.handle = 0
        self.suspect = False
        self.tokens = known
        self.words: list[str] = []
        """The text so far."""
        self.arithmetic: tuple[str, ...] = (engine.arithmetic,)
        words = (request.prompt or "").split(" ", 2)
        self.dies_at = int(words[2]) if words[:2] == ["die", "at"] else None
        self.waits = (int(words[1]), Path(words[2])) if words[:1] == ["wait"] else None
        self.started = False
        self.cancelled = False
        self.queue_ms = max(0.0, time.time() - queued_at) * 1e3 if queued_at else 0.0
        self._engine = engine
        self._done = threading.Event()
        self._end: GenerationResult | LlorchError | None = None

    def cancel(self) -> None:
        self.cancelled = True
        self._engine.wake()

    def result(self, timeout: float | None = None) -> GenerationResult:
        if not self._done.wait(timeout):
            raise TimeoutError(self.id)
        if isinstance(self._end, LlorchError):
            raise self._end
        assert self._end is not None
        return self._end

    def end(self, value: GenerationResult | LlorchError, event: Event) -> None:
        self.emit(event)
        self._end = value
        self._done.set()
        if self.waits:
            _, path = self.waits
            path.with_name(f"{path.name}.ended-{self.id}").touch()
        if self.request.prompt == "break after":
            threading.Timer(0.1, self._engine.fall_ill).start()

    def used(self) -> tuple[Usage, Timings]:
        took = Timings(queue_ms=self.queue_ms, prefill_ms=0, first_token_ms=0, decode_ms=0)
        return Usage(prompt=1, completion=self.tokens), took

    def step(self) -> bool:
        """Emits one token; returns whether the generation goes on."""
        if self.cancelled:
            cancelled = Cancelled("cancelled")
            if self.started:
                cancelled.spent = self.used()
            self.end(cancelled, CancelledEvent())
            return False
        prompt = self.request.prompt or ""
        if prompt == "hang always" or (prompt == "hang" and self.attempt == 1):
            threading.Event().wait()
        if not self.started:
            self.started = True
            self.emit(
                Started(
                    worker=self.worker,
                    model=self._engine.model_name,
                    model_fingerprint=self._engine.fingerprint,
                    arithmetic=self._engine.arithmetic,
                    attempt=self.attempt,
                    prompt_tokens=len(prompt.split()),
                    queue_ms=self.queue_ms,
                )
            )
        if self.tokens == self.dies_at:
            os._exit(9)
        if self.waits and self.tokens >= self.waits[0] and not self.waits[1].exists():
            return True
        if self.tokens < (self.request.max_tokens or 0):
            self.words.append(f"{self._engine.fingerprint}{self.tokens}")
            ids = [token_id(self.request.seed, self.tokens)]
            self.tell(TokensTold(self.handle, 0, self.tokens, ids, f"{self.words[-1]} "))
            self.tokens += 1
        if self.tokens < (self.request.max_tokens or 0):
            return True
        usage, timings = self.used()
        choice = Choice(
            index=0,
            text="".join(f"{word} " for word in self.words),
            token_ids=tuple(token_id(self.request.seed, i) for i in range(self.tokens)),
            finish_reason="length",
        )
        result = GenerationResult(
            id=self.id,
            model=self._engine.model_name,
            model_fingerprint=self._engine.fingerprint,
            arithmetic=tuple(dict.fromkeys(self.arithmetic)),
            choices=(choice,),
            usage=usage,
            seed=self.request.seed or 0,
            timings=timings,
            worker=self.worker,
            attempts=self.attempt,
            metadata=self.request.metadata,
            generation_config=self.request.taken_config or None,
        )
        self.end(result, Finished(finish_reason="length", usage=usage, timings=timings))
        return False
