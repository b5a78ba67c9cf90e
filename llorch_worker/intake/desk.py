"""The intake's own process: prepares requests in forks of itself, each of which may be killed.

A template is a program, and one expression of it may compute for ever or take all memory where
nothing in Python can stop it. So this process runs none: it has one thread, loads the vocabulary,
and forks. A fork starts within milliseconds, shares what is loaded, and prepares one request at a
time under limits of processor time and memory that the kernel holds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import mmap
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import format_exception_only
from typing import Any, Final, NoReturn

from pydantic import TypeAdapter

from llorch_worker.allocator import return_freed_memory
from llorch_worker.contract import REQUESTS, AnyTextsRequest, GenerationRequest, LlorchError
from llorch_worker.contract.errors import as_told
from llorch_worker.contract.token_questions import TokenQuestion
from llorch_worker.intake.asking import Bounds, Phase, body_of, frame, header_of
from llorch_worker.intake.intake import Intake
from llorch_worker.intake.prepared import Limits
from llorch_worker.intake.texts import prepare_texts
from llorch_worker.processes.frames import Frames, NoFrame
from llorch_worker.processes.oom import oom_kills
from llorch_worker.processes.stacks import stacks
from llorch_worker.processes.started import PR_SET_PDEATHSIG
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.chat_templates import ChatTemplates
from llorch_worker.text.control_tokens import AroundTurns, around_turns
from llorch_worker.text.questions import answer
from llorch_worker.text.vocabulary_file import open_vocabulary

logger = logging.getLogger(__name__)

MOST_FORKS: Final = 4
"""How many requests are prepared at once."""
LONG_S: Final = 0.1
"""A request that takes more processor time gives way to the engine and to other requests."""
LONG_BYTES: Final = 2**17
"""So does a longer one from its beginning: SmolLM2's vocabulary takes 0.1 s for 0.2 MiB."""
_NICE: Final = 10
_CPUCLOCK_SCHED: Final = 2
"""Of Linux' ``posix-timers.h``: with it, the number of a process' clock of processor time is made
of its pid, as ``clock_getcpuclockid`` does."""
_MOST_WALL_S: Final = 600.0
"""For a fork that gets no processor."""
_QUESTIONS: TypeAdapter[TokenQuestion] = TypeAdapter(TokenQuestion)


def serve(keeper: Frames, connection: int, first: dict[str, Any]) -> None:
    """Loads what the ``first`` message names, and prepares what the ``keeper`` asks for at the
    other end of the socket ``connection``."""
    log = Forwarding(keeper.send)
    logging.getLogger("llorch_worker").setLevel(first["log_level"])
    logging.getLogger().addHandler(log)
    bounds, found = Bounds(**first["bounds"]), AroundTurns()

    def find(templates: ChatTemplates) -> AroundTurns:
        nonlocal found
        found = found_in_a_fork(templates, bounds, log)
        return found

    # Once for all forks.
    import llguidance.numpy  # noqa: F401
    import transformers.utils.chat_template_utils  # noqa: F401

    try:
        tokenizer = load_tokenizer(open_vocabulary(Path(first["path"])), find)
    except LlorchError as error:
        keeper.send(frame({"error": error.args}))
        return
    # What the first text needs, for all forks: in a large vocabulary it takes each 0.1 s.
    tokenizer.encode("a", at_most=1)
    gc.collect()
    return_freed_memory()
    gc.freeze()
    keeper.send(frame({"around": asdict(found)}))
    _Desk(keeper, connection, tokenizer, bounds, log).run()


class Forwarding(logging.Handler):
    """Sends what is logged to the keeper."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self.send = send

    def emit(self, record: logging.LogRecord) -> None:
        self.send(frame({"log": [record.name, record.levelno, record.getMessage()]}))


@dataclass
class _Job:
    number: int
    frame: bytes
    tries: int = 0
    oom_kills: int = 0
    """What :func:`.oom_kills` said when the last try began."""


class _Fork:
    """A fork and what it does."""

    def __init__(self, run: Callable[[Frames, mmap.mmap], None], others: list[int]) -> None:
        """``others``: descriptors that the fork closes."""
        self.phase = mmap.mmap(-1, 1)
        """The fork writes it."""
        self.socket, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _begin(parent, [self.socket.fileno(), *others])
                run(Frames(theirs), self.phase)
                os._exit(0)
            except OSError:
                os._exit(0)  # the parent is gone
            except BaseException as error:  # noqa: BLE001 nothing of the parent may run on here
                # Its message may quote a text.
                print(f"the intake failed with {type(error).__name__}", file=sys.stderr)
                os._exit(os.EX_SOFTWARE)
        with suppress(OSError):
            # As the fork does, which may get no processor before it has to give way.
            os.setpgid(self.pid, self.pid)
        theirs.close()
        self.frames = Frames(self.socket)
        self.job: _Job | None = None
        self._since_s = self._computed_before_s = 0.0
        self.gives_way = False
        self.is_last = False
        """Whether no other request is for it."""

    def receive(self) -> bytes | None:
        """None once it has ended."""
        try:
            return self.frames.receive()
        except (NoFrame, OSError):
            return None

    def begin(self, job: _Job) -> None:
        self.job, self._since_s = job, time.monotonic()
        self._computed_before_s = self._computed_s()

    def busy_s(self) -> float:
        return 0.0 if self.job is None else time.monotonic() - self._since_s

    @property
    def takes_long(self) -> bool:
        """Whether its request has taken much of a processor, however long it waited for one."""
        return self.job is not None and self._computed_s() - self._computed_before_s > LONG_S

    def _computed_s(self) -> float:
        """The processor time that it has taken so far."""
        if sys.platform != "linux":
            return time.monotonic()  # it then counts from the beginning of its request
        try:
            return time.clock_gettime(~self.pid << 3 | _CPUCLOCK_SCHED)
        except OSError:  # it has ended
            return self._computed_before_s

    def give_way(self) -> None:
        # For good: a process may not raise its own priority again.
        self.gives_way = self.is_last = True
        # Each fork is a group of its own, so that this is for all its threads.
        os.setpriority(os.PRIO_PGRP, self.pid, _NICE)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> int:
        """How it ended, as ``Popen.returncode``."""
        self.frames.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _begin(parent: int, others: list[int]) -> None:
    """The first lines of a fork."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    for descriptor in others:
        os.close(descriptor)
    with suppress(OSError):
        # The first to be killed where memory is short: it costs one request.
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Limiter:
    """Limits what a fork does from now on. Python then raises MemoryError; libraries abort, and
    beyond the time the kernel ends the process."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._loaded_bytes = 0
        if sys.platform == "linux":
            pages = int(Path("/proc/self/statm").read_text().split()[5])
            self._loaded_bytes = pages * mmap.PAGESIZE

    def begin(self, request_bytes: int) -> None:
        most = self._loaded_bytes + self._bounds.memory_bytes_of(request_bytes)
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, self._bounds.cpu_s_of(request_bytes))

    @staticmethod
    def end() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def found_in_a_fork(templates: ChatTemplates, bounds: Bounds, log: Forwarding) -> AroundTurns:
    """:func:`around_turns` within ``bounds``."""

    def find(frames: Frames, _: mmap.mmap) -> None:
        log.send = frames.send
        _Limiter(bounds).begin(0)
        frames.send(frame({"around": asdict(around_turns(templates))}))

    if not templates.named:
        return AroundTurns()
    fork = _Fork(find, [])
    while (reply := fork.receive()) is not None:
        header = header_of(reply)
        if "around" in header:
            fork.ended()
            return AroundTurns(**header["around"])
        log.send(reply)
    broken = bounds.broken(fork.ended(), 0)
    logger.warning("a plain chat is refused: the model's chat template %s", broken)
    return AroundTurns()


class _Desk:
    """Hands requests to forks, in the order in which they come."""

    def __init__(
        self,
        keeper: Frames,
        connection: int,
        tokenizer: Tokenizer,
        bounds: Bounds,
        log: Forwarding,
    ) -> None:
        self._keeper = keeper
        self._connection = connection
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._log = log
        self._waiting: deque[_Job] = deque()
        self._forks: list[_Fork] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._intakes: dict[Limits, Intake] = {}

    def run(self) -> NoReturn:
        self._fork()
        if self._keeper.has_frame:
            # It asked while this process loaded.
            self._hear_keeper()
            self._hand_out()
        while True:
            for key, _ in self._selector.select(self._patience_s()):
                if key.data is None:
                    self._hear_keeper()
                elif key.data in self._forks:  # it may have been buried just now
                    self._hear(key.data)
            for fork in self._forks:
                if fork.busy_s() > _MOST_WALL_S:
                    fork.kill()
                elif fork.takes_long and not fork.gives_way:
                    fork.give_way()
            self._hand_out()

    def _patience_s(self) -> float | None:
        busy = [fork for fork in self._forks if fork.job is not None]
        if not busy:
            return None
        return 1.0 if all(fork.gives_way for fork in busy) else LONG_S / 2

    def _hear_keeper(self) -> None:
        while True:
            request = self._keeper.receive()
            if request is None:
                for fork in self._forks:
                    fork.kill()
                    fork.ended()
                os._exit(0)
            header = header_of(request)
            if header["ask"] == "withdraw":
                self._withdraw(header["number"])
            elif header["ask"] == "stacks":
                answer = frame({"number": header["number"]}, self._stacks().encode())
                self._keeper.send(answer)
            else:
                if header.get("has_grammar"):
                    self._prepare_grammars(Limits(*header["limits"]))
                self._waiting.append(_Job(header["number"], request))
            if not self._keeper.has_frame:
                return

    def _stacks(self) -> str:
        forks = [
            f"Fork {fork.pid}: {Phase(fork.phase[0]).name} for {fork.busy_s():.1f} s\n"
            for fork in self._forks
            if fork.job is not None
        ]
        return "".join([stacks("of the intake"), *forks])

    def _withdraw(self, number: int) -> None:
        """Ends what nobody waits for any more: others get its place."""
        self._waiting = deque(job for job in self._waiting if job.number != number)
        for fork in [*self._forks]:
            if fork.job is not None and fork.job.number == number:
                fork.job = None
                fork.kill()
                self._bury(fork)

    def _prepare_grammars(self, limits: Limits) -> None:
        """Builds what all grammars share, once for all forks from now on: in each it would take as
        long again."""
        if limits in self._intakes:
            return
        self._intakes[limits] = intake = self._intake(limits)
        intake.compiler.prepare()
        for fork in [*self._forks]:
            fork.is_last = True
            if fork.job is None:
                fork.kill()
                self._bury(fork)

    def _hear(self, fork: _Fork) -> None:
        while True:
            reply = fork.receive()
            if reply is None:
                self._bury(fork)
                return
            self._keeper.send(reply)
            if "log" not in header_of(reply):
                break
            # The answer may have come with what was logged, and its socket then says nothing more.
            if not fork.frames.has_frame:
                return
        fork.job = None
        if fork.is_last or sum(each.job is None for each in self._forks) > 1:
            fork.kill()
            self._bury(fork)

    def _bury(self, fork: _Fork) -> None:
        self._selector.unregister(fork.socket)
        self._forks.remove(fork)
        overdue = fork.busy_s() > _MOST_WALL_S
        code, job = fork.ended(), fork.job
        if job is None:
            return
        if overdue:
            code = -signal.SIGALRM
        job.tries += 1
        if code == -signal.SIGKILL and job.tries == 1:
            # Perhaps for the memory that others take.
            self._waiting.appendleft(job)
        else:
            end = {"number": job.number, "code": code, "phase": fork.phase[0]}
            end["out_of_memory"] = oom_kills() > job.oom_kills
            self._keeper.send(frame(end))

    def _hand_out(self) -> None:
        while self._waiting:
            fork = next((fork for fork in self._forks if fork.job is None), None)
            if fork is None:
                if len(self._forks) == MOST_FORKS:
                    return
                try:
                    fork = self._fork()
                except OSError:
                    if not self._forks:
                        raise
                    return  # the system refuses one more; those that there are go on
            job = self._waiting.popleft()
            fork.begin(job)
            if job.tries:
                job.oom_kills = oom_kills()
            if len(job.frame) > LONG_BYTES:
                fork.give_way()
            with suppress(OSError):  # it has ended, which its socket says next
                fork.frames.send(job.frame)

    def _intake(self, limits: Limits) -> Intake:
        # The kernel's limit is the one that ends a compilation.
        return Intake(self._tokenizer, limits, patience_s=None)

    def _fork(self) -> _Fork:
        others = [self._connection, self._selector.fileno()]
        fork = _Fork(self._work, [*others, *(each.socket.fileno() for each in self._forks)])
        self._forks.append(fork)
        self._selector.register(fork.socket, selectors.EVENT_READ, fork)
        return fork

    # In a fork --------------------------------------------------------------------------------

    def _work(self, frames: Frames, phase: mmap.mmap) -> None:
        self._log.send = frames.send
        limiter = _Limiter(self._bounds)
        while (request := frames.receive()) is not None:
            limiter.begin(len(request))
            header = header_of(request)
            number = {"number": header["number"]}
            phase[0] = Phase.READS
            try:
                reply = frame(number, self._answer(header, body_of(request), phase))
            except Exception as error:  # noqa: BLE001 it is told where the request came from
                told = as_told(error, "intake")
                if told is not error:
                    place = "".join(format_exception_only(told))
                    logger.error("a request could not be prepared: %s", place)
                reply = frame({**number, "error": told.args})
            limiter.end()
            frames.send(reply)

    def _answer(self, header: dict[str, Any], body: bytes, phase: mmap.mmap) -> bytes:
        if header["ask"] == "answer":
            question = _QUESTIONS.validate_json(body)
            phase[0] = Phase.ENCODES
            return json.dumps(answer(self._tokenizer, question)).encode()
        request = REQUESTS[header["task"]].model_validate_json(body)
        limits = Limits(*header["limits"])
        if not isinstance(request, GenerationRequest):
            assert isinstance(request, AnyTextsRequest)
            phase[0] = Phase.ENCODES
            return json.dumps(prepare_texts(request, self._tokenizer, limits).document()).encode()
        if limits not in self._intakes:
            self._intakes[limits] = self._intake(limits)
        intake = self._intakes[limits]

        def doing(done: Phase) -> None:
            phase[0] = done

        prepared = intake.prepare(request, header["generated"], doing)
        return json.dumps(prepared.document()).encode()
