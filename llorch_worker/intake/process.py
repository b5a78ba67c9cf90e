"""An intake in a process of its own, seen from the process that asks it. Imports no tokenizer."""

from __future__ import annotations

import itertools
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from llorch_worker.contract import (
    Cancelled,
    DeadlineExceeded,
    GenerationRequest,
    InternalError,
    InvalidRequest,
    JobRequest,
    OutOfMemory,
    describe,
)
from llorch_worker.contract.request import PROMPT_FIELDS
from llorch_worker.contract.texts_request import TEXT_FIELDS
from llorch_worker.contract.token_questions import TokenQuestion
from llorch_worker.intake.asking import Bounds, Phase, body_of, error_of, frame, header_of
from llorch_worker.intake.constraints.grammar import asked_for
from llorch_worker.intake.prepared import Limits, PreparedRequest
from llorch_worker.processes.child import Child, End
from llorch_worker.processes.frames import FrameTooLarge
from llorch_worker.processes.standstill import LOOK_S
from llorch_worker.text.control_tokens import AroundTurns

logger = logging.getLogger(__name__)

_MOST_TRIES: Final = 3
"""How often a request is asked again because the intake's process, not its fork, has ended."""
_MOST_STARTS: Final = 5
"""How often in a row a process that is killed while it loads starts again. No request is to blame:
it has read none."""
_MOST_IDLE_ENDS: Final = 5
"""Whose process ends so often before it has answered anything, while nobody asks, starts the next
one when it is asked: it might load all the time."""
_IDLE_S: Final = 30.0
"""A process that is asked something and does nothing for so long, also because it gets no
processor, is killed and starts again."""
_SILENT_S: Final = 900.0
"""And one that answers nobody for so long, whatever it does. It ends a request that gets too little
processor time before."""
_STACKS_S: Final = 5.0
"""How long a question where it is waits for an answer."""
_EXIT_S: Final = 2.0
"""How long a process that has nothing more to do may take to end."""


@dataclass
class _Asked:
    frame: bytes
    answer: Future[bytes] = field(default_factory=Future)
    tries: int = 0


class _ForkEnded(Exception):
    """What prepared the request has ended for the request's own fault."""

    def __init__(self, code: int, phase: int) -> None:
        self.code = code
        self.phase = phase


def _end_of(code: int, phase: int, *, out_of_memory: bool) -> Exception:
    """What a request ends with whose fork has ended twice, or by its limits."""
    if code != -signal.SIGKILL:
        return _ForkEnded(code, phase)
    # None of the limits does that.
    if out_of_memory:
        return OutOfMemory("the machine had no memory left for preparing the request")
    return InternalError("what prepared the request was killed twice")


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

    def __init__(
        self,
        path: Path,
        bounds: Bounds = Bounds(),  # noqa: B008 it is frozen
        *,
        idle_s: float = _IDLE_S,
    ) -> None:
        """Starts the process, which loads the vocabulary at ``path``. ``idle_s``: one that is asked
        something, and does nothing for so long, is killed and starts again."""
        self._path = path
        self._bounds = bounds
        self._idle_s = idle_s
        self._changing = threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._closed = self._was_loaded = False
        self._failed_starts = self._idle_ends = 0
        self._runs = False
        with self._changing:
            self._start()

    def around(self, meanwhile: Callable[[], None] = lambda: None) -> AroundTurns:
        """What the chat template writes around turns, for :func:`.load_tokenizer`.

        Waits until the vocabulary is loaded, and calls ``meanwhile`` about once a second. Raises
        ModelLoadFailed if it cannot be used.
        """
        with self._changing:
            if not (self._runs or self._closed):
                self._start()
            loaded = self._loaded
        while True:
            try:
                return loaded.result(LOOK_S)
            except TimeoutError:
                meanwhile()
                self._child.look()

    def prepare(
        self, request: GenerationRequest, limits: Limits, generated: int = 0
    ) -> PreparedRequest:
        """See :meth:`.Intake.prepare`. Raises InternalError if the process cannot go on."""
        document = self.prepare_document(request, limits, generated)
        return PreparedRequest.from_document(json.loads(document))

    def prepare_document(
        self,
        request: JobRequest,
        limits: Limits,
        generated: int = 0,
        *,
        within_s: float | None = None,
        on_asked: Callable[[Preparation], None] = lambda _: None,
    ) -> bytes:
        """:meth:`.PreparedRequest.document`, or :meth:`.PreparedTexts.document`, as JSON, for an
        engine in another process. ``on_asked``
        gets what withdraws the request, which then raises Cancelled. After ``within_s``, the time
        to its deadline, it raises DeadlineExceeded; where memory is short, OutOfMemory."""
        grammar = asked_for(request) if isinstance(request, GenerationRequest) else None
        header = {
            "ask": "prepare",
            "task": request.task,
            "limits": astuple(limits),
            "generated": generated,
            "has_grammar": grammar is not None,
        }
        body = request.model_dump_json(exclude_defaults=True, by_alias=True).encode()
        try:
            return self._ask(header, body, within_s, on_asked)
        except _ForkEnded as ended:
            broken = self._bounds.broken(ended.code, len(body))
            if ended.phase == Phase.COMPILES and grammar is not None:
                field, source = grammar
                rule = f"must compile: its compiler {broken}"
                raise InvalidRequest.from_fault(field, rule, describe(source)) from None
            names = (*PROMPT_FIELDS, *TEXT_FIELDS)
            field = next(name for name in names if getattr(request, name, None) is not None)
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

    def stacks(self) -> str:
        """Where the process is, and what its forks do. Raises DeadlineExceeded if it does not
        answer soon."""
        return self._ask({"ask": "stacks"}, b"", _STACKS_S).decode()

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._child.pid

    def close(self) -> None:
        """Ends the process; a second call does nothing."""
        with self._changing:
            self._closed = True
        self._child.hang_up()
        self._child.leave(_EXIT_S)

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
            if not self._runs:
                try:
                    self._start()
                except Exception as error:  # noqa: BLE001 - no room for a process, or a thread
                    raise _cannot_start(error) from None
            if not self._asked:
                self._child.heard()
            self._asked[number] = asked
            try:
                # If it ends before, what starts it again asks again.
                self._child.send(asked.frame)
            except FrameTooLarge as error:
                del self._asked[number]
                rule = "must fit into a message to the intake"
                raise InvalidRequest.from_fault("request", rule, str(error)) from None

        def withdraw() -> None:
            self._withdraw(number, Cancelled("the job was cancelled while it was prepared"))

        on_asked(Preparation(withdraw))
        give_up_s = math.inf if within_s is None else time.monotonic() + within_s
        while True:
            try:
                return asked.answer.result(min(LOOK_S, max(0.0, give_up_s - time.monotonic())))
            except TimeoutError:
                self._child.look()
            if time.monotonic() >= give_up_s:
                late = DeadlineExceeded("the deadline passed while the request was prepared")
                self._withdraw(number, late)

    def _withdraw(self, number: int, end: BaseException) -> None:
        """Ends a request at once, and what prepares it. Amid a signal's handler, too: no lock."""
        if self._end(number, end):
            self._child.send(frame({"ask": "withdraw", "number": number}))

    def _end(self, number: int, end: bytes | BaseException) -> bool:
        """Answers a request, unless it has an answer. Returns whether it had none."""
        if (asked := self._asked.pop(number, None)) is None:
            return False
        if isinstance(end, bytes):
            asked.answer.set_result(end)
        else:
            asked.answer.set_exception(end)
        return True

    def _start(self) -> None:
        """Starts a process, in the place of one that has ended."""
        child = Child(
            "llorch_worker.intake.serving",
            name="llorch-intake",
            idle_s=self._idle_s,
            silent_s=_SILENT_S,
        )
        loaded = Future[AroundTurns]()
        try:
            level = logging.getLogger("llorch_worker").getEffectiveLevel()
            first = {"path": str(self._path), "bounds": asdict(self._bounds), "log_level": level}
            child.send(json.dumps(first).encode())
            reading = threading.Thread(
                target=self._read, args=(child, loaded), name="llorch-intake", daemon=True
            )
            self._child, self._loaded = child, loaded
            reading.start()
        except BaseException:
            child.discard()
            raise
        self._runs = True

    def _read(self, child: Child, loaded: Future[AroundTurns]) -> None:
        end = child.read(lambda heard: self._take(heard, loaded))
        if not loaded.done():
            loaded.set_exception(InternalError(f"the intake died while it loaded: {end.reason}"))
        self._has_ended(end, loaded.exception())

    def _take(self, heard: bytes, loaded: Future[AroundTurns]) -> None:
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

    def _hear(self, header: dict[str, Any], heard: bytes) -> None:
        number, self._idle_ends = header["number"], 0
        if "code" in header:
            out_of_memory = header["out_of_memory"]
            self._end(number, _end_of(header["code"], header["phase"], out_of_memory=out_of_memory))
        elif "error" in header:
            self._end(number, error_of(header["error"]))
        else:
            self._end(number, body_of(heard))

    def _has_ended(self, end: End, error: BaseException | None) -> None:
        with self._changing:
            self._runs = False
            loaded = error is None
            self._idle_ends += loaded and not self._asked
            if self._closed:
                error = InternalError("the intake is closed")
            elif loaded and not self._asked and self._idle_ends >= _MOST_IDLE_ENDS:
                logger.warning("the intake died: %s; it starts again when it is asked", end.reason)
            elif loaded or self._may_start_again(end):
                logger.warning("the intake died: %s; it starts again", end.reason)
                try:
                    self._start()
                    error = None
                except Exception as refused:  # noqa: BLE001 - whoever asked must hear of any
                    error = _cannot_start(refused)
            elif self._was_loaded:
                error = _cannot_start(error)
            for number, asked in [*self._asked.items()]:
                asked.tries += loaded
                if error is not None or asked.tries == _MOST_TRIES:
                    self._end(number, error or InternalError(f"the intake died: {end.reason}"))
                else:
                    self._child.send(asked.frame)

    def _may_start_again(self, end: End) -> bool:
        """Whether one that was killed while it loaded has loaded before, and not failed often."""
        self._failed_starts += 1
        return self._was_loaded and end.exit_code < 0 and self._failed_starts < _MOST_STARTS


def _cannot_start(error: BaseException | None) -> InternalError:
    # Not the request's fault, nor the model's: another worker may serve it.
    return InternalError(f"the intake cannot start again: {error}")


def _prompt_refusal(field: str, broken: str, got: Any) -> InvalidRequest:
    what = "chat template or tokenizer" if field == "messages" else "tokenizer"
    return InvalidRequest.from_fault(field, f"the model's {what} {broken} for it", describe(got))
