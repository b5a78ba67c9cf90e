"""The engine's process: runs an engine for the keeper at the other end of a socket."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any, Final, NoReturn

from llorch_worker.allocator import use_one_arena
from llorch_worker.contract import (
    TERMINAL_EVENTS,
    Event,
    InternalError,
    LlorchError,
    ModelLoadFailed,
    Started,
)
from llorch_worker.contract.installing import install_command
from llorch_worker.engine.process.engine_process import INTAKE_THREADS, most_handles
from llorch_worker.engine.process.messages import (
    Answer,
    Around,
    Call,
    Cancel,
    ErrorMessage,
    EventTold,
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
    ToKeeper,
    decode_to_engine,
    encode,
    result_document,
)
from llorch_worker.engine.told import TokensTold
from llorch_worker.engine_options import EngineOptions
from llorch_worker.processes.board import Board
from llorch_worker.processes.child import EndLabel
from llorch_worker.processes.frames import Frames, FrameTooLarge
from llorch_worker.processes.stacks import stacks
from llorch_worker.text.control_tokens import AroundTurns

logger = logging.getLogger(__name__)

EX_SOFTWARE: Final = 70
_ANSWERING_THREADS: Final = 2
_CHECKING_THREADS: Final = 4
"""How many results are checked at once: each in a process that computes for seconds at most."""


def main(connection: int, board: int, trace: int, *_: int) -> None:
    """Runs the engine that the first message asks for, until the keeper closes the connection.

    ``connection``, ``board`` and ``trace`` are descriptors: a stream socket, the memory of a
    :class:`.Board`, and a file for where the threads were when a signal ended the process.
    """
    faulthandler.enable(trace)
    # Before the engine's threads.
    use_one_arena()
    Server(socket.socket(fileno=connection), board).run()


class Server:
    """Answers the keeper's messages. It is the engine's ``Outlet``, too."""

    def __init__(self, connection: socket.socket, board: int) -> None:
        self._board_descriptor = board
        self._frames = Frames(connection)
        self._told: list[TokensTold | EventTold] = []
        self._taken: deque[int] = deque()
        """The requests that were taken in since the last message."""
        self._beginning: set[int] = set()
        """The generations that have told no token."""
        self._is_urgent = False
        """Whether some of what was told waits for no other step."""
        self._told_every_s = self._told_at_s = 0.0
        self._generations: dict[int, Future[Any]] = {}
        self._intake = ThreadPoolExecutor(INTAKE_THREADS, "llorch-intake")
        # A grammar may take seconds: only requests with others wait for it.
        self._compiling = ThreadPoolExecutor(INTAKE_THREADS, "llorch-compiling")
        self._answering = ThreadPoolExecutor(_ANSWERING_THREADS, "llorch-answering")
        # Results that are checked keep only each other waiting.
        self._checking = ThreadPoolExecutor(_CHECKING_THREADS, "llorch-checking")

    def run(self) -> NoReturn:
        try:
            first = self._receive()
            if not isinstance(first, Load):
                os._exit(EX_SOFTWARE)
            self._load(first)
            while (message := self._receive()) is not None:
                match message:
                    case Submit():
                        self._board.take_in(message.handle)
                        self._generations[message.handle] = Future()
                        if message.is_quick:
                            # Told after the first step: it would wake the keeper amid that.
                            self._taken.append(message.handle)
                            self._take_in(message)
                        else:
                            pool = self._compiling if message.has_grammar else self._intake
                            pool.submit(self._take_in, message)
                    case Cancel(handle):
                        if (found := self._generations.get(handle)) is not None:
                            # Once it is taken in.
                            found.add_done_callback(lambda each: each.result().cancel())
                    case Call():
                        self._answering.submit(self._answer, message)
                    case Pace(told_every_s):
                        self._told_every_s = told_every_s
                    case _:
                        self._close()
        except OSError:
            # The keeper is gone.
            os._exit(0)
        except BaseException as error:
            logger.exception("the engine's process cannot go on")
            self._die("exit", f"{type(error).__name__} in the engine's process")
        os._exit(0)

    # Of the engine's thread ------------------------------------------------------------------

    def turned(self) -> None:
        if not (self._told or self._taken):
            return
        if self._beginning and not self._is_urgent:
            self._is_urgent = any(each.handle in self._beginning for each in self._told)
        is_due = time.monotonic() >= self._told_at_s + self._told_every_s
        if is_due or self._is_urgent or self._taken:
            self._tell_keeper()

    def hurry(self) -> None:
        # What was only taken in is told with the first token.
        if self._told:
            self._tell_keeper()

    def _tell_keeper(self) -> None:
        if self._beginning:
            told = {each.handle for each in self._told if isinstance(each, TokensTold)}
            self._beginning -= told
        step = encode(Step(self._told, [self._taken.popleft() for _ in range(len(self._taken))]))
        self._told.clear()
        self._is_urgent = False
        # A keeper that reads nothing is not a step that hangs.
        self._board.rest()
        self._frames.send(step)
        self._board.beat()
        self._told_at_s = time.monotonic()

    def broken(self, error: BaseException) -> NoReturn:
        self.hurry()
        if "torch" in sys.modules:
            from llorch_worker.engine.device.step_errors import is_device_lost

            if is_device_lost(error):
                self._die("device", str(error).partition("\n")[0])
        self._die("exit", f"{type(error).__name__} in the engine's thread")

    def _tell(self, handle: int, event: Event) -> None:
        self._told.append(EventTold.of(handle, event))
        self._is_urgent = True
        if isinstance(event, Started):
            self._beginning.add(handle)
        elif isinstance(event, TERMINAL_EVENTS):
            self._beginning.discard(handle)
            self._answering.submit(self._end, handle)

    def _tell_at_once(self, told: TokensTold) -> None:
        self._told.append(told)
        self._is_urgent = True

    # Of the other threads --------------------------------------------------------------------

    def _load(self, asked: Load) -> None:
        root = logging.getLogger()
        root.setLevel(asked.log_level)
        root.addHandler(_KeepersLog(self._send))
        self._told_every_s = asked.told_every_s
        options = EngineOptions(**asked.options)
        self._board = Board(most_handles(options), self._board_descriptor)
        os.close(self._board_descriptor)
        module, _, name = asked.engine_class.partition(":")
        found = {"around": self._around} if asked.around_follows else {}
        try:
            self._engine = getattr(import_module(module), name).load(
                asked.path,
                options,
                model_name=asked.model_name,
                **asked.others,
                progress=lambda done, total: self._send(Progress(done, total)),
                board=self._board,
                outlet=self,
                **found,
            )
        except ModuleNotFoundError as error:
            missing = f"{error.name} is missing: {install_command('worker')}"
            self._fail_load(ModelLoadFailed(missing))
        except LlorchError as error:
            self._fail_load(error)
        self._send(Loaded(self._engine.facts, self._engine.stats()))

    def _around(self) -> AroundTurns:
        message = self._receive()
        if not isinstance(message, Around):
            os._exit(EX_SOFTWARE)
        return AroundTurns(message.before, message.after)

    def _fail_load(self, error: LlorchError) -> NoReturn:
        self._send(NotLoaded(ErrorMessage.of(error)))
        os._exit(1)

    def _take_in(self, asked: Submit) -> None:
        handle = asked.handle
        try:
            generation = self._engine.submit(
                **asked.arguments(),
                on_event=partial(self._tell, handle),
                # If an earlier attempt ended an engine, its journal soon shows how far this gets.
                on_tokens=self._told.append if asked.attempt == 1 else self._tell_at_once,
                handle=handle,
            )
        except BaseException as error:  # noqa: BLE001 - the keeper is told of any
            del self._generations[handle]
            self._send(Refused(handle, ErrorMessage.of(error)))
        else:
            if not asked.is_quick:
                self._taken.append(handle)
            self._generations[handle].set_result(generation)
        self._board.taken_in(handle)

    def _end(self, handle: int) -> None:
        generation = self._generations[handle].result()
        if generation.is_checked:
            self._checking.submit(self._tell_result, handle, generation)
        else:
            self._tell_result(handle, generation)

    def _tell_result(self, handle: int, generation: Any) -> None:
        try:
            message: ToKeeper = Result(handle, result_document(generation.result()))
        except BaseException as error:  # noqa: BLE001 - the keeper is told of any
            message = Failure(handle, ErrorMessage.of(error))
        del self._generations[handle]
        try:
            self._send(message)
        except FrameTooLarge as error:
            failed = InternalError(f"the result is too large: {error}")
            self._send(Failure(handle, ErrorMessage.of(failed)))

    def _answer(self, call: Call) -> None:
        try:
            answer = Answer(call.number, _METHODS[call.name](self._engine, *call.arguments))
            self._send(answer)
        except BaseException as error:  # noqa: BLE001 - the keeper is told of any
            failed = Answer(call.number, error=ErrorMessage.of(error))
            self._send(failed)

    def _close(self) -> NoReturn:
        """Cancels all generations, once they are taken in, and tells so."""
        self._intake.shutdown()
        self._compiling.shutdown()
        self._engine.close()
        self._answering.shutdown()
        self._checking.shutdown()
        os._exit(0)

    def _die(self, label: EndLabel, reason: str) -> NoReturn:
        try:
            self._send(LastWords(label, reason))
        finally:
            os._exit(EX_SOFTWARE)

    def _receive(self) -> Any:
        frame = self._frames.receive()
        return None if frame is None else decode_to_engine(frame)

    def _send(self, message: ToKeeper) -> None:
        self._frames.send(encode(message))


def _warm_up(engine: Any) -> None:
    engine.warm_up()
    # A full collection over torch's objects would delay every job.
    gc.collect()
    gc.freeze()


def _logits(engine: Any, token_ids: list[int]) -> tuple[list[int], bytes]:
    logits = engine.logits(token_ids)
    return list(logits.shape), logits.numpy().tobytes()


_METHODS: Final[dict[str, Callable[..., Any]]] = {
    "warm_up": _warm_up,
    "logits": _logits,
    "stats": lambda engine: engine.stats(),
    "step_figures": lambda engine: engine.step_figures(),
    "misplaced_tensors": lambda engine: engine.misplaced_tensors(),
    "stacks": lambda _: stacks("of the engine"),
}


class _KeepersLog(logging.Handler):
    """Sends what is logged to the keeper, whose log has the form that its operator chose."""

    def __init__(self, send: Callable[[ToKeeper], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            place = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            self._send(LogLine(record.name, record.levelno, record.getMessage(), place or None))
        except OSError:
            os._exit(0)  # the keeper is gone
        except Exception:  # noqa: BLE001 - as of every handler
            self.handleError(record)
