"""An intake in a process of its own, seen from the process that asks it. Imports no tokenizer."""

from __future__ import annotations

import itertools
import json
import logging
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from llorch_worker.contract import (
    Cancelled,
    DeadlineExceeded,
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
_MOST_STARTS: Final = 5
"""How often in a row a process that is killed while it loads starts again. No request is to blame:
it has read none."""
_EXIT_S: Final = 2.0
"""How long a process that has nothing more to do may take to end."""


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


class Preparation:
    """A request that is being prepared."""

    def __init__(self, withdraw: Callable[[], None]) -> None:
        self.cancel = withdraw
        """Has the one who waits for it get Cancelled, at once. Any thread may call it, also amid a
        signal's handler; does nothing once there is an answer."""


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
        self._failed_starts = 0
        self._frames: Frames | None = None
        self._start()

    def around(self) -> AroundTurns:
        """What the chat template writes around turns, for :func:`.load_tokenizer`.

        Waits until the vocabulary is loaded. Raises ModelLoadFailed if it cannot be used.
        """
        with self._changing:
            if self._frames is None and not self._closed:
                self._start()
            loaded = self._loaded
        return loaded.result()

    def prepare(
        self, request: GenerationRequest, limits: Limits, generated: int = 0
    ) -> PreparedRequest:
        """See :meth:`.Intake.prepare`. Raises InternalError if the process cannot go on."""
        document = self.prepare_document(request, limits, generated)
        return PreparedRequest.from_document(json.loads(document))

    def prepare_document(
        self,
        request: GenerationRequest,
        limits: Limits,
        generated: int = 0,
        *,
        within_s: float | None = None,
        on_asked: Callable[[Preparation], None] = lambda _: None,
    ) -> bytes:
        """:meth:`.PreparedRequest.document` as JSON, for an engine in another process. ``on_asked``
        gets what withdraws the request, which then raises Cancelled. After ``within_s``, the time
        to its deadline, it raises DeadlineExceeded."""
        header = {
            "ask": "prepare",
            "limits": astuple(limits),
            "generated": generated,
            "has_grammar": asked_for(request) is not None,
        }
        body = request.model_dump_json(exclude_defaults=True, by_alias=True).encode()
        try:
            return self._ask(header, body, within_s, on_asked)
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
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self,
        header: dict[str, Any],
        body: bytes,
        within_s: float | None = None,
        on_asked: Callable[[Preparation], None] = lambda _: None,
    ) -> bytes:
        number = next(self._numbers)
        asked = _Asked(frame({"number": number, **header}, body))
        with self._changing:
            if self._closed:
                raise InternalError("the intake is closed")
            try:
                frames = self._frames or self._start()
            except OSError as error:
                raise _cannot_start(error) from None
            self._asked[number] = asked

        def withdraw() -> None:
            self._end(number, Cancelled("the job was cancelled while it was prepared"))

        on_asked(Preparation(withdraw))
        # If it has ended, what starts it again asks again.
        with suppress(OSError):
            frames.send(asked.frame)
        try:
            return asked.answer.result(within_s)
        except TimeoutError:
            late = DeadlineExceeded("the deadline passed while the request was prepared")
            self._end(number, late)
            return asked.answer.result()

    def _end(self, number: int, end: bytes | BaseException) -> None:
        """Answers a request, unless it has an answer."""
        if (asked := self._asked.pop(number, None)) is None:
            return
        if isinstance(end, bytes):
            asked.answer.set_result(end)
        else:
            asked.answer.set_exception(end)

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
                    self._was_loaded, self._failed_starts = True, 0
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
        number = header["number"]
        if "code" in header:
            self._end(number, _ForkEnded(header["code"], header["phase"]))
        elif "error" in header:
            self._end(number, error_of(header["error"]))
        else:
            self._end(number, body_of(heard))

    def _has_ended(self, code: int, error: BaseException | None) -> None:
        with self._changing:
            self._frames, again = None, None
            loaded = error is None
            if self._closed:
                error = InternalError("the intake is closed")
            elif loaded or self._may_start_again(code):
                logger.warning("the intake %s; it starts again", _how(code))
                try:
                    again, error = self._start(), None
                except Exception as refused:  # noqa: BLE001 - whoever asked must hear of any
                    error = _cannot_start(refused)
            elif self._was_loaded:
                error = _cannot_start(error)
            for number, asked in [*self._asked.items()]:
                asked.tries += loaded
                if error is not None or asked.tries == _MOST_TRIES:
                    self._end(number, error or InternalError(f"the intake {_how(code)}"))
            left = [asked.frame for asked in [*self._asked.values()]]
        if again is not None:
            with suppress(OSError):
                for request in left:
                    again.send(request)

    def _may_start_again(self, code: int) -> bool:
        """Whether one that was killed while it loaded has loaded before, and not failed often."""
        self._failed_starts += 1
        return self._was_loaded and code < 0 and self._failed_starts < _MOST_STARTS


def _cannot_start(error: BaseException | None) -> InternalError:
    # Not the request's fault, nor the model's: another worker may serve it.
    return InternalError(f"the intake cannot start again: {error}")


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _prompt_refusal(field: str, broken: str, got: Any) -> InvalidRequest:
    what = "chat template or tokenizer" if field == "messages" else "tokenizer"
    return _refusal(field, f"the model's {what} {broken} for it", got)


def _refusal(field: str, rule: str, got: Any) -> InvalidRequest:
    return InvalidRequest.from_faults([Fault(field=field, rule=rule, got=describe(got))])
