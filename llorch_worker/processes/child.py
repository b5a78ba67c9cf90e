"""A process that this one starts, talks with, watches and replaces."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from llorch_worker.processes.frames import Frames, NoFrame
from llorch_worker.processes.oom import let_die_first, oom_kills
from llorch_worker.processes.outbox import Outbox
from llorch_worker.processes.signals import signal_name
from llorch_worker.processes.spawn import spawn
from llorch_worker.processes.standstill import LOOK_S, Standstill

logger = logging.getLogger(__name__)

EndLabel = Literal[
    "segfault", "abort", "killed", "out_of_memory", "exit", "stalled", "protocol", "device"
]
"""Why a process ended, for metrics. ``protocol``: what came over its socket was no frame, or no
message. ``device``: its card failed."""
EXIT_S: Final = 5.0
"""How long a process that has closed its connection may take to end."""
_SIGNALS: Final[dict[int, EndLabel]] = {
    signal.SIGSEGV: "segfault",
    signal.SIGBUS: "segfault",
    signal.SIGILL: "segfault",
    signal.SIGFPE: "segfault",
    signal.SIGABRT: "abort",
}


@dataclass(frozen=True)
class End:
    """How a process ended."""

    label: EndLabel
    reason: str
    """In a few words, such as ``signal SIGSEGV``."""
    exit_code: int
    """As of ``Popen``: negative for a signal."""


class Child:
    """It ends with this process, whatever ends this one, and is the first to be killed where memory
    is short. Any thread may call :meth:`send`, :meth:`look` and :meth:`kill`; one reads.
    """

    def __init__(
        self,
        module: str,
        descriptors: Iterable[int] = (),
        *,
        name: str,
        idle_s: float,
        silent_s: float,
        kept: Iterable[int] = (),
    ) -> None:
        """Starts ``main(connection, *descriptors)`` of ``module``; see :func:`.spawn`.

        ``idle_s`` and ``silent_s``: see :class:`.Standstill`.
        """
        ours, theirs = socket.socketpair()
        self._frames = Frames(ours)
        try:
            with theirs:
                self._process = spawn(module, [theirs.fileno(), *descriptors], kept=kept)
            try:
                self._standstill = Standstill(self.pid, idle_s=idle_s, silent_s=silent_s)
                let_die_first(self.pid)
                self._oom_kills = oom_kills()
                # Last, because nobody ends its thread.
                self._outbox = Outbox(self._frames, f"{name}-writer")
            except BaseException:
                self._process.kill()
                self._process.wait()
                raise
        except BaseException:
            self._frames.close()
            raise
        self._looking = threading.Lock()
        self._next_look_s = 0.0
        self._said: tuple[EndLabel, str] | None = None
        self.reads_since_s: float | None = None
        """Since when a thread waits for what it sends; None while none does."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, payload: bytes) -> None:
        """See :meth:`.Outbox.send`."""
        self._outbox.send(payload)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Waits for what it sends next; None once it sends nothing more. Raises TimeoutError."""
        self.reads_since_s = time.monotonic()
        try:
            frame = self._frames.receive(timeout_s)
        except TimeoutError:
            raise
        except OSError:  # it died before it had read all, or amid a frame
            return None
        except NoFrame as error:
            self.kill("protocol", f"no message came from it: {error}")
            return None
        finally:
            self.reads_since_s = None
        if frame is not None:
            self._standstill.heard()
        return frame

    def read(self, take: Callable[[bytes], None]) -> End:
        """Hands over what it sends until it ends. A message that cannot be taken ends it."""
        try:
            while (frame := self.receive()) is not None:
                take(frame)
        except BaseException as error:
            logger.exception("what process %d sent cannot be taken", self.pid)
            self.kill("protocol", f"{type(error).__name__} at a message from it")
        return self.end()

    def heard(self) -> None:
        """It has given a sign of life, or begins to have work."""
        self._standstill.heard()

    def look(self) -> None:
        """Kills it if it stands still. Those that wait for it call this about once a second."""
        if not self._looking.acquire(blocking=False):
            return  # another thread looks
        try:
            if (now_s := time.monotonic()) >= self._next_look_s:
                self._next_look_s = now_s + LOOK_S / 2
                reason = self._standstill.reason()
                # One that has ended stands still, too.
                if reason is not None and self._process.poll() is None:
                    self.kill("stalled", reason)
        finally:
            self._looking.release()

    def kill(self, label: EndLabel, reason: str) -> None:
        """Kills it; its end has these words."""
        self.explain(label, reason)
        self._process.kill()

    def explain(self, label: EndLabel, reason: str) -> None:
        """Its end, which comes by itself, has these words."""
        self._said = label, reason

    def hang_up(self) -> None:
        """Closes the connection, at which it ends."""
        self._frames.close()

    def leave(self, within_s: float) -> bool:
        """Waits until it has ended, and kills it after ``within_s``; whether it ended by itself."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def end(self) -> End:
        """How it ended; call it once :meth:`receive` has given None."""
        self._outbox.close()
        self._frames.close()
        if not self.leave(EXIT_S):
            self._said = self._said or ("exit", "it closed its connection and went on")
        code = self._process.returncode
        if self._said is not None:
            label, reason = self._said
        elif code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            label, reason = "out_of_memory", "the kernel killed it, because memory was short"
        elif code < 0:
            label = _SIGNALS.get(-code, "killed")
            reason = f"signal {signal_name(-code)}"
        else:
            label, reason = "exit", f"exit code {code}"
        return End(label, reason, code)

    def discard(self) -> None:
        """Ends one that nobody reads."""
        self._process.kill()
        self.end()
