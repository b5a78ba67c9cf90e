"""An engine in a process of its own, with the interface of one in the caller's.

Imports no torch."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar, Unpack

import msgspec

from llorch_worker.contract import (
    Event,
    Failed,
    InternalError,
    InvalidRequest,
    LlorchError,
    check_task,
)
from llorch_worker.contract.events import TERMINAL_EVENTS
from llorch_worker.contract.kinds import Asked
from llorch_worker.engine.handle import GenerationHandle
from llorch_worker.engine.interface import (
    Attempt,
    Death,
    EngineDied,
    EngineStats,
    ModelFacts,
    StepFigures,
)
from llorch_worker.engine.mortal import Mortal
from llorch_worker.engine.process.messages import (
    Answer,
    Around,
    Call,
    Cancel,
    Close,
    Failure,
    LastWords,
    Load,
    Loaded,
    LogLine,
    NotLoaded,
    Pace,
    Progress,
    Refused,
    Result,
    Step,
    Submit,
    ToEngine,
    ToKeeper,
    decode_to_keeper,
    encode,
    result_of,
)
from llorch_worker.engine.told import TokensTold
from llorch_worker.engine_options import SEQUENCES, EngineOptions
from llorch_worker.intake.process import IntakeProcess, Preparation
from llorch_worker.intake.request_checks import check_model
from llorch_worker.processes.board import Board
from llorch_worker.processes.child import Child, End, EndLabel
from llorch_worker.processes.frames import FrameTooLarge
from llorch_worker.processes.spawn import memory_file
from llorch_worker.processes.standstill import LOOK_S
from llorch_worker.settings import default_model_name

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENGINE: Final = "llorch_worker.engine.any_engine:AnyEngine"
INTAKE_THREADS: Final = 4
"""How many requests the engine's process takes in at once, and as many with grammars."""
ANSWER_S: Final = 0.5
"""How long a question about figures waits for the engine."""
STACKS_S: Final = 5.0
"""How long a question where its threads are waits."""
CLOSE_S: Final = 10.0
"""How long a close waits until the engine has cancelled its generations."""
LOAD_IDLES: Final = 5
"""A load that does nothing for so many times the watchdog's limit is given up. It may wait for a
disk, or for a compiler of another process."""
LOAD_IS_SILENT: Final = 30
"""And one that tells nothing for so many times, whatever it does. It may compile."""
MOST_TRACE_BYTES: Final = 2**16
GATHER_S: Final = 0.2
"""For how long new tokens may wait for others while nobody reads any: the process is woken for
each message, which takes the engine's processors."""
SOON_S: Final = 1.0
"""A job is prepared for so long at least, however late it is."""


def most_handles(options: EngineOptions) -> int:
    """How many jobs an engine has in hand at most: two steps of them, and those taken in."""
    # The process may be on a card, and choose.
    return 2 * (options.max_sequences or SEQUENCES["cuda"]) + 2 * INTAKE_THREADS


class EngineProcess(Mortal):
    """An ``EngineInterface``. Any thread may call any method.

    The process ends with this one, whatever ends this one. ``on_event`` of a generation is called
    on the thread that reads the connection: it must not block, and must ask the engine nothing.
    While this process reads nothing, the engine's steps wait.
    """

    def __init__(
        self,
        child: Child,
        board: Board,
        trace: int,
        intake: IntakeProcess | None,
        meanwhile: Callable[[], None],
    ) -> None:
        """Made by :meth:`load`."""
        super().__init__()
        self._intake = intake
        self._child = child
        self._board = board
        self._trace = trace
        self._meanwhile = meanwhile
        self._last_beat = 0
        self._told_every_s = 0.0
        self._gathers = False
        """Whether the engine was told to let tokens gather for :data:`GATHER_S`."""
        self._numbers = itertools.count(1)
        self._generations: dict[int, RemoteGeneration[Any]] = {}
        self._accepting: dict[int, float] = {}
        """Since when the engine has to take them in, in monotonic seconds."""
        self._answers: dict[int, Future[Any]] = {}

    @classmethod
    def load(
        cls,
        path: str | Path,
        options: EngineOptions | None = None,
        *,
        model_name: str | None = None,
        num_threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        engine_class: str = ENGINE,
        kept: Iterable[int] = (),
        intake: IntakeProcess | None = None,
        watchdog_s: float = math.inf,
        meanwhile: Callable[[], None] = lambda: None,
        told_every_s: float = 0.0,
        **changed: Any,
    ) -> Self:
        """Starts a process and lets it load a model.

        Args:
            changed, num_threads: as of :meth:`.Engine.load`.
            progress: called on this thread with the bytes loaded and the bytes in total. If it
                raises, the process is killed.
            engine_class: ``module:Class`` with the interface of ``Engine``.
            kept: descriptors that the process keeps open for as long as it lives, such as the lock
                of its card.
            intake: one for the same file, which prepares requests for as long as it is open. Else
                the engine's process does, and a chat template may hang it.
            watchdog_s: a process that does nothing for :data:`LOAD_IDLES` times as long while it
                loads or warms up, or tells nothing for :data:`LOAD_IS_SILENT` times, is killed.
            meanwhile: called about once a second on the threads that wait for the load and the
                warm-up. If it raises, the process is killed.
            told_every_s: for how long new tokens of a generation may wait for others, so that the
                engine wakes this process less often than at each step; :data:`GATHER_S` while
                nobody reads any: see :meth:`.GenerationHandle.note_read`. The first ones do not,
                nor those of a second attempt, nor before a step that may take long.

        Raises:
            ModelLoadFailed: see :meth:`.Engine.load`.
            EngineDied: the process died while it loaded.
        """
        options = replace(options or EngineOptions(), **changed)
        level = logging.getLogger("llorch_worker").getEffectiveLevel()
        named = model_name or default_model_name(Path(path))
        others = {} if num_threads is None else {"num_threads": num_threads}
        asked = Load(
            str(path),
            asdict(options),
            named,
            engine_class,
            level,
            others,
            told_every_s=told_every_s,
            around_follows=intake is not None,
        )
        with ExitStack() as undo:
            board, board_descriptor = Board.shared(most_handles(options))
            undo.callback(board.close)
            trace = memory_file("llorch-trace")
            undo.callback(os.close, trace)
            try:
                child = Child(
                    "llorch_worker.engine.process.server",
                    [board_descriptor, trace],
                    name="llorch-engine",
                    idle_s=LOAD_IDLES * watchdog_s,
                    silent_s=LOAD_IS_SILENT * watchdog_s,
                    kept=kept,
                )
            finally:
                os.close(board_descriptor)
            undo.callback(child.discard)
            engine = cls(child, board, trace, intake, meanwhile)
            engine._load(asked, progress)
            undo.pop_all()
        return engine

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._child.pid

    @property
    def open_jobs(self) -> tuple[str, ...]:
        """The ids of the jobs that it has, those that it takes in among them."""
        with self._lock:
            return tuple(generation.id for generation in self._generations.values())

    def warm_up(self) -> None:
        self._child.heard()
        answer = self._call("warm_up")
        while True:
            try:
                answer.result(LOOK_S)
            except TimeoutError:
                self.look()
            else:
                return

    def look(self) -> None:
        """Kills a process that does not get on with its load, its warm-up or what it is asked
        before it serves. For one that waits for it, about once a second."""
        try:
            self._meanwhile()
        except BaseException:
            self._child.kill("killed", "the load was given up")
            raise
        with self._lock:
            if not self.healthy:
                return
            beat = self._board.last_beat
        if beat != self._last_beat:
            self._last_beat = beat
            self._child.heard()
        self._child.look()

    def submit(
        self,
        request: Asked,
        *,
        on_asked: Callable[[Preparation], None] = lambda _: None,
        **attempt: Unpack[Attempt],
    ) -> RemoteGeneration[Asked]:
        """As :meth:`.Engine.submit`; raises ``EngineDied`` too. It waits for no answer: if the
        engine refuses what the intake did not, the generation fails with that. ``on_asked``: see
        :meth:`.IntakeProcess.prepare_document`."""
        journal = attempt.pop("journal", None)
        callbacks = attempt.pop("on_event", None), attempt.pop("on_tokens", None)
        attempt["job_id"] = job_id = attempt.get("job_id") or str(uuid.uuid4())
        with self._lock:
            self._require_open()
        prepared = None
        if self._intake is not None:
            check_model(request, self.facts.model_name)
            check_task(request, self.facts.model_name, self.facts.tasks)
            generated = 0 if journal is None else journal.most_tokens
            limits = self.facts.limits
            within_s = None
            if request.deadline_s is not None and not journal:
                # A late job that is prepared soon ends in the engine, as one that has tokens does.
                now = time.time()
                queued_at = attempt.get("queued_at") or now
                within_s = max(SOON_S, queued_at + request.deadline_s - now)
            prepared = self._intake.prepare_document(
                request, limits, generated, within_s=within_s, on_asked=on_asked
            )
        handle = next(self._numbers)
        generation = RemoteGeneration(self, handle, job_id, request, *callbacks)
        message = Submit.of(handle, request, prepared, journal, **attempt)
        with self._lock:
            self._require_open()
            self._generations[handle] = generation
            self._accepting[handle] = time.monotonic()
        self._pace()
        try:
            self._send(message)
        except FrameTooLarge as error:
            self._forget(handle)
            rule = "must fit into a message to the engine"
            raise InvalidRequest.from_fault("request", rule, str(error)) from None
        return generation

    def continues(self, *_: object) -> bool:
        """Whether a job can go on after the tokens of its journal: always, they are replayed."""
        return True

    def logits(self, token_ids: Ids[int]) -> memoryview[float]:
        """[tokens, vocab] float32."""
        shape, data = self._call("logits", list(token_ids)).result()
        return memoryview(data).cast("f", shape)

    def stats(self) -> EngineStats:
        return self._stats.read(lambda: self._call("stats"))

    def step_figures(self) -> StepFigures:
        return self._steps.read(lambda: self._call("step_figures"))

    def misplaced_tensors(self) -> tuple[str, ...]:
        return tuple(self._call("misplaced_tensors").result(ANSWER_S))

    def stacks(self) -> str:
        """Where its threads are. Raises TimeoutError if it does not answer soon."""
        found: str = self._call("stacks").result(STACKS_S)
        return found

    def stalled_for_s(self) -> float:
        """Seconds without a sign of life.

        One that hangs while it has no job is at rest on the board. So it counts too how long a job
        has waited to be taken in, while this process waited for what the engine sends.
        """
        with self._lock:
            if not self.healthy:
                return 0.0
            stalled_s = self._board.stalled_for_s()
        waits_since_s = self._child.reads_since_s
        owed = [*self._accepting.values()]
        if waits_since_s is None or not owed:
            return stalled_s
        since_s = max(waits_since_s, min(owed))
        return max(stalled_s, time.monotonic() - since_s)

    def kill(self, label: EndLabel, reason: str) -> None:
        """Kills the process, for a watchdog: a death with these words follows."""
        self._child.kill(label, reason)

    def close(self) -> None:
        """Cancels running generations and ends the process; a second call does nothing."""
        if self._begin_close():
            self._send(Close())
            if not self._child.leave(CLOSE_S):
                logger.warning("the engine did not end within %.0f s and was killed", CLOSE_S)
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Sending ----------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        """Never waits, even if the engine reads nothing. Raises ``FrameTooLarge``."""
        self._child.send(encode(message))

    def _call(self, name: str, *arguments: Any) -> Future[Any]:
        number, answer = next(self._numbers), Future[Any]()
        with self._lock:
            self._require_open()
            self._answers[number] = answer
        try:
            self._send(Call(number, name, arguments))
        except FrameTooLarge:
            del self._answers[number]
            raise
        return answer

    def _cancel(self, handle: int) -> None:
        self._send(Cancel(handle))

    def _forget(self, handle: int) -> None:
        with self._lock:
            self._generations.pop(handle, None)
            self._accepting.pop(handle, None)
        self._pace()

    # Reading ----------------------------------------------------------------------------------

    def _load(self, asked: Load, progress: Callable[[int, int], None] | None) -> None:
        """Reads until the engine is there."""
        self._told_every_s = asked.told_every_s
        self._send(asked)
        if self._intake is not None:
            around = self._intake.around(self._meanwhile)
            self._send(Around(around.before, around.after))
        while not isinstance(message := self._receive_while_loading(), Loaded):
            match message:
                case Progress(done, total):
                    if progress is not None:
                        progress(done, total)
                case NotLoaded(error):
                    raise error.error()
                case None:
                    raise EngineDied(self._autopsy(self._child.end()))
                case _:
                    self._take(message)
        self.facts: ModelFacts = message.facts
        self._stats = _Figures(message.stats)
        self._steps = _Figures(StepFigures())
        self._reader = threading.Thread(target=self._read, name="llorch-engine", daemon=True)
        self._reader.start()

    def _receive_while_loading(self) -> ToKeeper | None:
        while True:
            try:
                frame = self._child.receive(LOOK_S)
            except TimeoutError:
                self.look()
            else:
                return None if frame is None else decode_to_keeper(frame)

    def _read(self) -> None:
        self._bury(self._child.read(lambda frame: self._take(decode_to_keeper(frame))))

    def _take(self, message: ToKeeper) -> None:
        match message:
            case Step(told, taken):
                for handle in taken:
                    self._accepting.pop(handle, None)
                for each in told:
                    if (generation := self._generations.get(each.handle)) is None:
                        continue
                    if isinstance(each, TokensTold):
                        generation.told_tokens(each)
                    else:
                        generation.told(each.event())
                        self._forget_if_done(each.handle, generation)
            case Refused(handle, error):
                refused = self._generations[handle]
                self._forget(handle)
                refused.fail(error.error())
            case Result(handle, document):
                self._end(handle, document)
            case Failure(handle, error):
                self._end(handle, error.error())
            case Answer(number, value, None):
                self._answers.pop(number).set_result(value)
            case Answer(number, _, failed):
                assert failed is not None
                answered = failed.error()
                _log_defect("a call of the engine", answered)
                self._answers.pop(number).set_exception(answered)
            case LastWords(label, reason):
                self._child.explain(label, reason)
            case LogLine():
                _log(message)
            case _:
                raise TypeError(f"{type(message).__name__} is not expected")

    def _pace(self) -> None:
        """Lets tokens gather while nobody reads any."""
        with self._lock:
            is_read = any(each.is_read for each in self._generations.values())
            # Without any generation, the next one decides.
            if self._generations and self._gathers == is_read:
                self._gathers = not self._gathers
                self._send(Pace(GATHER_S if self._gathers else self._told_every_s))

    def _end(self, handle: int, end: bytes | LlorchError) -> None:
        generation = self._generations[handle]
        generation.end(end)
        self._forget_if_done(handle, generation)

    def _forget_if_done(self, handle: int, generation: RemoteGeneration[Any]) -> None:
        # The last event and the result cross in messages of their own, in any order.
        if generation.done:
            self._forget(handle)

    def _bury(self, end: End) -> None:
        death = self._autopsy(end)
        os.close(self._trace)
        error = (
            EngineDied(death) if self._note_death(death) else InternalError("the engine is closed")
        )
        with self._lock:
            self._board.close()
            generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.fail(error)
        for answer in self._answers.values():
            answer.set_exception(error)

    def _autopsy(self, end: End) -> Death:
        in_hand = (self._generations.get(handle) for handle in self._board.in_hand())
        suspects = tuple(generation.id for generation in in_hand if generation is not None)
        if trace := os.pread(self._trace, MOST_TRACE_BYTES, 0).decode(errors="replace"):
            # Of files, lines and names alone.
            _log(LogLine(__name__, logging.ERROR, "where the engine was when it died", trace))
        return Death(end.label, end.reason, suspects, end.exit_code)


class RemoteGeneration(GenerationHandle[Asked, Any]):
    """A generation of an engine in another process."""

    def __init__(
        self,
        engine: EngineProcess,
        handle: int,
        id: str,
        request: Asked,
        on_event: Callable[[Event], None] | None,
        on_tokens: Callable[[TokensTold], None] | None,
    ) -> None:
        super().__init__(id, request, on_event, on_tokens)
        self._engine = engine
        self._handle = handle
        self._document = b""
        self._ended = self._last_told = self._is_logged = False

    def note_read(self, is_read: bool) -> None:
        super().note_read(is_read)
        self._engine._pace()

    def told_tokens(self, told: TokensTold) -> None:
        self._tell_tokens(told)

    def told(self, event: Event) -> None:
        """Any other event of the engine."""
        self._emit(event)
        if isinstance(event, TERMINAL_EVENTS):
            self._last_told = True
            self._finish_if_ended()

    def end(self, end: bytes | LlorchError) -> None:
        """The result as :func:`.result_document` writes it, or what the generation failed with."""
        if isinstance(end, bytes):
            self._document = end
        else:
            self._error = end
        self._ended = True
        self._finish_if_ended()

    def fail(self, error: LlorchError) -> None:
        """Ends with ``error``, of which the engine can tell nothing more."""
        self.end(error)
        if not self._last_told:
            self.told(Failed(error=error.document()))

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        except LlorchError as error:
            # On this thread, which knows the job's trace.
            if error is self._error and not self._is_logged:
                self._is_logged = True
                _log_defect(f"job {self.id}", error)
            raise

    def _finish_if_ended(self) -> None:
        if self._ended and self._last_told:
            self._finished.set()

    def _request_cancel(self) -> None:
        self._engine._cancel(self._handle)

    def _read_result(self) -> Any:
        return result_of(self._document, self.request)


class _Figures(Generic[T]):
    """The last that the engine has told. A read asks for newer ones, and waits for them unless the
    engine owes an answer for longer than :data:`ANSWER_S`."""

    def __init__(self, last: T) -> None:
        self._last = last
        self._asked: Future[Any] | None = None
        self._asked_s = 0.0
        self._asking = threading.Lock()

    def read(self, ask: Callable[[], Future[Any]]) -> T:
        try:
            with self._asking:
                if self._asked is None or self._asked.done():
                    self._asked, self._asked_s = ask(), time.monotonic()
                asked, waited_s = self._asked, time.monotonic() - self._asked_s
            answer = asked.result(max(0.0, ANSWER_S - waited_s))
            self._last = msgspec.convert(answer, type(self._last))
        except (TimeoutError, LlorchError):
            logger.debug("the engine does not tell its figures", exc_info=True)
        return self._last


def _log_defect(what: str, error: LlorchError) -> None:
    """Logs where a defect was raised, if ``error`` is one."""
    if notes := getattr(error, "__notes__", None):
        _log(LogLine(__name__, logging.ERROR, f"{what} failed", "\n".join(notes)))


def _log(line: LogLine) -> None:
    target = logging.getLogger(line.logger)
    if target.isEnabledFor(line.level):
        record = target.makeRecord(line.logger, line.level, "engine", 0, line.text, (), None)
        record.exc_text = line.place
        target.handle(record)
