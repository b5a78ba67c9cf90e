"""An intake in a process of its own, seen from the process that asks it. Imports no tokenizer."""

from __future__ import annotations

import itertools
import json
import logging
import signal
import socket
import subprocess
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from llorch_worker.contract import (
    Fault,
    GenerationRequest,
    InternalError,
    InvalidRequest,
    describe,
)
from llorch_worker.contract.request import PROMPT_FIELDS
from llorch_worker.contract.token_questions import TokenQuestion
from llorch_worker.intake.asking import Bounds, Phase, body_of, error_of, frame, header_of
from llorch_worker.intake.constraints.grammar import asked_for
from llorch_worker.intake.prepared import Limits, PreparedRequest
from llorch_worker.processes.frames import Frames, NoFrame
from llorch_worker.processes.spawn import spawn
from llorch_worker.text.control_tokens import AroundTurns

logger = logging.getLogger(__name__)

_MOST_TRIES: Final = 3
"""How often a request is asked again because the intake's process, not its fork, has ended."""


@dataclass
class _Asked:
    frame: bytes
    answer: Future[bytes] = field(default_factory=Future)
    tries: int = 0


class _ForkEnded(Exception):
    """What prepared the request has ended."""

    def __init__(self, code: int, phase: int) -> None:
        self.code = code
        self.phase = phase


class IntakeProcess:
    """Prepares requests and answers questions for one model.

    Any thread may call any method. A request that takes too much is refused, and costs no other one
    anything. If the whole process ends for another reason, it starts again, and what it was asked
    is asked again.
    """

    def __init__(self, path: Path, bounds: Bounds = Bounds()) -> None:  # noqa: B008 it is frozen
        """Starts the process, which loads the vocabulary at ``path``."""
        self._path = path
        self._bounds = bounds
        self._changing = threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._closed = self._was_loaded = False
        self._frames: Frames | None = None
        self._start()

    def around(self) -> AroundTurns:
        """What the chat template writes around turns, for :func:`.load_tokenizer`.

        Waits until the vocabulary is loaded. Raises ModelLoadFailed if it cannot be used.
        """
        return self._loaded.result()

    def prepare(
        self, request: GenerationRequest, limits: Limits, generated: int = 0
    ) -> PreparedRequest:
        """See :meth:`.Intake.prepare`. Raises InternalError if the process cannot go on."""
        document = self.prepare_document(request, limits, generated)
        return PreparedRequest.from_document(json.loads(document))

    def prepare_document(
        self, request: GenerationRequest, limits: Limits, generated: int = 0
    ) -> bytes:
        """:meth:`.PreparedRequest.document` as JSON, for an engine in another process."""
        header = {
            "ask": "prepare",
            "limits": astuple(limits),
            "generated": generated,
            "has_grammar": asked_for(request) is not None,
        }
        body = request.model_dump_json(exclude_defaults=True, by_alias=True).encode()
        try:
            return self._ask(header, body)
        except _ForkEnded as ended:
            broken = self._bounds.broken(ended.code, len(body))
            if ended.phase == Phase.COMPILES and (asked := asked_for(request)) is not None:
                field, source = asked
                raise _refusal(field, f"must compile: its compiler {broken}", source) from None
            field = next(name for name in PROMPT_FIELDS if getattr(request, name) is not None)
            raise _prompt_refusal(field, broken, getattr(request, field)) from None

    def answer(self, question: TokenQuestion) -> dict[str, Any]:
        """See :func:`.questions.answer`. Raises InternalError if the process cannot go on."""
        body = question.model_dump_json(exclude_none=True).encode()
        try:
            answer: dict[str, Any] = json.loads(self._ask({"ask": "answer"}, body))
        except _ForkEnded as ended:
            names = [name for name in ("messages", "prompt", "tokens") if hasattr(question, name)]
            field = next(iter(names), "ask")
            broken = self._bounds.broken(ended.code, len(body))
            raise _prompt_refusal(field, broken, getattr(question, field)) from None
        return answer

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid

    def close(self) -> None:
        """Ends the process; a second call does nothing."""
        with self._changing:
            self._closed = True
            if self._frames is not None:
                self._frames.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, header: dict[str, Any], body: bytes) -> bytes:
        number = next(self._numbers)
        asked = _Asked(frame({"number": number, **header}, body))
        with self._changing:
            if self._closed:
                raise InternalError("the intake is closed")
            frames = self._frames or self._start()
            self._asked[number] = asked
        # If it has ended, what starts it again asks again.
        with suppress(OSError):
            frames.send(asked.frame)
        return asked.answer.result()

    def _start(self) -> Frames:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = spawn("llorch_worker.intake.serving", [theirs.fileno()])
        self._loaded: Future[AroundTurns] = Future()
        frames = self._frames = Frames(ours)
        level = logging.getLogger("llorch_worker").getEffectiveLevel()
        first = {"path": str(self._path), "bounds": asdict(self._bounds), "log_level": level}
        with suppress(OSError):  # it has ended, as the thread will see
            frames.send(json.dumps(first).encode())
        of_it = (self._process, frames, self._loaded)
        threading.Thread(target=self._read, args=of_it, name="llorch-intake", daemon=True).start()
        return frames

    def _read(
        self, process: subprocess.Popen[bytes], frames: Frames, loaded: Future[AroundTurns]
    ) -> None:
        with suppress(NoFrame, OSError):
            while (heard := frames.receive()) is not None:
                header = header_of(heard)
                if "log" in header:
                    name, severity, line = header["log"]
                    logging.getLogger(name).log(severity, "%s", line)
                elif "around" in header:
                    self._was_loaded = True
                    loaded.set_result(AroundTurns(**header["around"]))
                elif "number" in header:
                    self._hear(header, heard)
                else:
                    loaded.set_exception(error_of(header["error"]))
        frames.close()
        code = process.wait()
        if not loaded.done():
            loaded.set_exception(InternalError(f"the intake {_how(code)} while it loaded"))
        self._has_ended(code, loaded.exception())

    def _hear(self, header: dict[str, Any], heard: bytes) -> None:
        answer = self._asked.pop(header["number"]).answer
        if "code" in header:
            answer.set_exception(_ForkEnded(header["code"], header["phase"]))
        elif "error" in header:
            answer.set_exception(error_of(header["error"]))
        else:
            answer.set_result(body_of(heard))

    def _has_ended(self, code: int, error: BaseException | None) -> None:
        with self._changing:
            self._frames = None
            if self._closed:
                error = InternalError("the intake is closed")
            elif error is None:
                logger.warning("the intake %s; it starts again", _how(code))
                try:
                    again = self._start()
                except Exception as refused:  # noqa: BLE001 - whoever asked must hear of any
                    self._frames = None
                    error = InternalError(f"the intake cannot start again: {refused}")
            elif self._was_loaded:
                # Not the request's fault, nor the model's: another worker may serve it.
                error = InternalError(f"the intake cannot start again: {error}")
            for number, asked in [*self._asked.items()]:
                asked.tries += 1
                if error is not None or asked.tries == _MOST_TRIES:
                    del self._asked[number]
                    asked.answer.set_exception(error or InternalError(f"the intake {_how(code)}"))
            left = [asked.frame for asked in self._asked.values()]
        if error is None:
            with suppress(OSError):
                for request in left:
                    again.send(request)


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _prompt_refusal(field: str, broken: str, got: Any) -> InvalidRequest:
    what = "chat template or tokenizer" if field == "messages" else "tokenizer"
    return _refusal(field, f"the model's {what} {broken} for it", got)


def _refusal(field: str, rule: str, got: Any) -> InvalidRequest:
    return InvalidRequest.from_faults([Fault(field=field, rule=rule, got=describe(got))])
