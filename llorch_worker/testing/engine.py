"""An engine that gives scripted answers, in place of the one that loads a model."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

from llorch_worker.contract import (
    Cancelled,
    CancelledEvent,
    Choice,
    ContextLengthExceeded,
    Event,
    Failed,
    Fault,
    Finished,
    GenerationRequest,
    GenerationResult,
    LlorchError,
    ModelNotServed,
    Started,
    Timings,
    Tokens,
    Usage,
    check_task,
)
from llorch_worker.contract.result import FinishReason
from llorch_worker.engine.interface import ModelFacts
from llorch_worker.testing.answers import Answer, Answers
from llorch_worker.text.calls import CallReader, reader_of
from llorch_worker.text.dialects import HERMES

MAX_CONTEXT = 4096
NO_TIME = Timings(queue_ms=0, prefill_ms=0, first_token_ms=0, decode_ms=0)


class StubEngine:
    """What :class:`.JobRunner` needs of an engine."""

    healthy = True

    def __init__(self, model_name: str, answers: Answers) -> None:
        self.facts = ModelFacts(model_name, max_context=MAX_CONTEXT)
        self.model_name = model_name
        self.requests: list[GenerationRequest] = []
        self._answers = answers

    def submit(
        self,
        request: GenerationRequest,
        *,
        job_id: str,
        worker: str,
        queued_at: float,
        on_event: Callable[[Event], None],
        **_: Any,
    ) -> StubGeneration:
        """Raises ModelNotServed and ContextLengthExceeded, as far as no tokenizer is needed."""
        if request.model not in (None, self.model_name):
            raise ModelNotServed(
                f"this stub serves {self.model_name!r}, not {request.model!r}", retriable=False
            )
        check_task(request, self.model_name, self.facts.tasks)
        least = 1 if request.prompt_token_ids is None else len(request.prompt_token_ids)
        new = request.least_tokens
        if least + new > MAX_CONTEXT:
            rule = f"must not exceed the context of {MAX_CONTEXT} tokens"
            got = f"at least {least} + {new}"
            fault = Fault(field="prompt + max_tokens", rule=rule, got=got)
            raise ContextLengthExceeded.of(MAX_CONTEXT, least, new, at_least=True, fault=fault)
        self.requests.append(request)
        return StubGeneration(self, request, job_id, worker, queued_at, on_event)

    def answer(self, request: GenerationRequest) -> Answer:
        return self._answers.to(request)


class StubGeneration:
    """One job. It runs in the thread that waits for its result."""

    def __init__(
        self,
        engine: StubEngine,
        request: GenerationRequest,
        job_id: str,
        worker: str,
        queued_at: float,
        on_event: Callable[[Event], None],
    ) -> None:
        self._engine = engine
        self._request = request
        self._id = job_id
        self._worker = worker
        self._deadline_s = None if request.deadline_s is None else queued_at + request.deadline_s
        self._emit = on_event
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def note_read(self, is_read: bool) -> None:
        """It tells each word at once, whoever reads."""

    def result(self) -> GenerationResult:
        """Raises LlorchError if the job fails, Cancelled after a cancel."""
        try:
            result = self._run()
        except Cancelled:
            self._emit(CancelledEvent())
            raise
        except LlorchError as error:
            self._emit(Failed(error=error.document()))
            raise
        reason = result.choices[0].finish_reason
        self._emit(Finished(finish_reason=reason, usage=result.usage, timings=result.timings))
        return result

    def _run(self) -> GenerationResult:
        request = self._request
        answer = self._engine.answer(request)
        words = re.findall(r"\s*\S+|\s+$", answer.text)
        pieces = words[: request.most_tokens]
        ended: FinishReason = "length" if len(words) > len(pieces) else "stop"
        prompt = self._prompt_tokens()
        name = self._engine.model_name
        self._emit(Started(worker=self._worker, model=name, prompt_tokens=prompt, queue_ms=0))
        texts = [_Text(reader_of(request, HERMES, self._id, i)) for i in range(request.n)]
        for index, piece in enumerate(pieces):
            self._check_cancelled()
            for choice, text in enumerate(texts):
                self._emit(
                    Tokens(
                        choice=choice,
                        index=index,
                        ids=(index,),
                        text=text.push(piece, last=index == len(pieces) - 1),
                        tool_calls=text.reader.take() or None if text.reader else None,
                    )
                )
        if answer.until_cancelled:
            left_s = None if self._deadline_s is None else self._deadline_s - time.time()
            self._cancelled.wait(left_s)
            ended = "deadline"
        self._check_cancelled()
        return GenerationResult(
            id=self._id,
            model=name,
            choices=tuple(
                text.choice(index, len(pieces), answer.finish_reason or ended)
                for index, text in enumerate(texts)
            ),
            usage=Usage(prompt=prompt, completion=len(pieces) * request.n),
            seed=request.seed or 0,
            timings=NO_TIME,
            worker=self._worker,
            metadata=request.metadata,
        )

    def _prompt_tokens(self) -> int:
        """Words, as in an answer."""
        request = self._request
        if request.prompt_token_ids is not None:
            return len(request.prompt_token_ids)
        texts = [request.prompt or ""]
        texts += [str(message.content or "") for message in request.messages or ()]
        return max(1, sum(len(text.split()) for text in texts))

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled("the job was cancelled")


class _Text:
    """The text of one choice, and its calls."""

    def __init__(self, reader: CallReader | None) -> None:
        self.reader = reader
        self._shown = ""

    def push(self, piece: str, *, last: bool) -> str:
        """What of the text is new."""
        new = piece
        if self.reader is not None:
            new = self.reader.push(piece) + (self.reader.flush() if last else "")
        self._shown += new
        return new

    def choice(self, index: int, tokens: int, ended: FinishReason) -> Choice:
        calls = (self.reader.calls or None) if self.reader is not None else None
        return Choice(
            index=index,
            text=self._shown,
            token_ids=tuple(range(tokens)),
            finish_reason="tool_calls" if calls and ended == "stop" else ended,
            tool_calls=calls,
        )
