"""The workers: real processes, each behind its own proxy and replaced when it ends."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.battle.ledger import Kill, Ledger
from benches.battle.schedule import ENGINE, NETWORK, SIGKILL, Strike
from benches.battle.watch import StreamReader
from llorch_worker.broker.queues import normal_queue
from tests.faults.proxy import LOCALHOST, FaultProxy
from tests.services import QUICK_START, TOY_APP, WorkerProcess

MODEL = "toy"
QUEUE = normal_queue(MODEL)
OURS = "llorch"
QUIET_S = 30.0
"""A battle ends when nothing has changed for this long: twice the lease plus sweep, and twice the
control's visibility timeout."""
DRAIN_TIMEOUT_S = 20.0
"""A worker that takes longer to stop is killed, as an orchestrator would do."""
DELIVERY_TIMEOUT_S = 1.0
POISONED = "the engine died: exit code 9"
"""What a worker says of an engine that a toy job killed: see :mod:`tests.toy_engine`."""
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGQUIT": signal.SIGQUIT, SIGKILL: signal.SIGKILL}


@dataclass(frozen=True)
class Terms:
    """The parameters of a battle."""

    minutes: float
    kills: int
    workers: int = 3
    max_sequences: int = 4
    step_ms: float = 8.0
    """The time of a token for all running sequences."""
    rate_per_s: float = 4.0
    """Jobs a second."""
    seed: int = 1
    quiet_s: float = QUIET_S
    mixed: bool = False
    """Whether ours also gets countdowns, chords, chains, cancels, poison and control commands."""


@dataclass(frozen=True)
class Contestant:
    """A name, and what :class:`WorkerProcess` gets to start its workers."""

    name: str
    app: str
    options: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


def ours(terms: Terms) -> Contestant:
    settings = {"model_name": MODEL, "max_sequences": terms.max_sequences}
    return Contestant(OURS, TOY_APP, settings=settings | {"TOY_STEP_MS": terms.step_ms})


def stock(terms: Terms) -> Contestant:
    options = (*QUICK_START, "-P", "threads", "-c", str(terms.max_sequences), "-Q", QUEUE)
    settings = {"TOY_STEP_MS": terms.step_ms}
    return Contestant("stock threads", "benches.battle.stock_app", options, settings)


class Worker(WorkerProcess):
    """One worker process with its own process group, and the proxy between it and Redis."""

    def __init__(self, contestant: Contestant, name: str, redis_port: int, folder: Path) -> None:
        self.proxy = FaultProxy(LOCALHOST, redis_port).start()
        self.started_s = time.monotonic()
        self.ready = False
        self.struck: Strike | None = None
        self.struck_s = 0.0
        self.heal_s: float | None = None
        super().__init__(
            self.proxy.url, folder / f"{name}.log", app=contestant.app, name=name,
            options=contestant.options, fresh=True, **contestant.settings,
        )  # fmt: skip

    @property
    def gone(self) -> bool:
        return self.process.poll() is not None

    def look_ready(self) -> bool:
        if not self.ready and f"{self.hostname} ready." in self.text():
            self.ready = True
            return True
        return False

    def signal(self, number: signal.Signals) -> None:
        """SIGKILL goes to the whole group, as when a machine dies; other signals to the parent."""
        with suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    def bury(self) -> None:
        """Cleans up after its death: leaves no process, and lets everything it sent arrive."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        give_up_s = time.monotonic() + DELIVERY_TIMEOUT_S
        while self.proxy.open_connections and time.monotonic() < give_up_s:
            time.sleep(0.005)
        self.proxy.stop()


class Fleet:
    """A fixed number of slots with a worker in each; a worker that ends is replaced at once.

    Call everything here on the main thread: processes are tethered to the thread that started
    them.
    """

    def __init__(
        self,
        contestant: Contestant,
        size: int,
        *,
        redis_port: int,
        folder: Path,
        ledger: Ledger,
        reader: StreamReader,
    ) -> None:
        self._contestant = contestant
        self._redis_port = redis_port
        self._folder = folder
        self._ledger = ledger
        self._reader = reader
        self._born_total = 0
        self._slots: list[Worker] = [self._spawn(slot) for slot in range(size)]
        self._leaving: list[Worker] = []
        self.start_up_s: list[float] = []
        self.escalated_total = 0
        self.unexpected_exits: list[str] = []

    def _spawn(self, slot: int) -> Worker:
        self._born_total += 1
        name = f"w{slot}-{self._born_total}"
        return Worker(self._contestant, name, self._redis_port, self._folder)

    @property
    def all_ready(self) -> bool:
        return all(worker.ready for worker in self._slots)

    def tick(self) -> None:
        """Notices workers that became ready or ended, and network faults that are over."""
        now_s = time.monotonic()
        for slot, worker in enumerate(self._slots):
            if worker.look_ready():
                self.start_up_s.append(now_s - worker.started_s)
            if worker.heal_s is not None and now_s >= worker.heal_s:
                worker.heal_s = None
                worker.proxy.heal()
            if worker.gone:
                self.unexpected_exits.append(f"{worker.hostname}: {worker.process.returncode}")
                self._slots[slot] = self._spawn(slot)
                self._record(worker, "unexpected exit", now_s)
                self._bury(worker)
        for worker in tuple(self._leaving):
            if not worker.gone and now_s - worker.struck_s > DRAIN_TIMEOUT_S:
                self.escalated_total += 1
                worker.signal(signal.SIGKILL)
                worker.process.wait()
            if worker.gone:
                self._leaving.remove(worker)
                self._mourn(worker)

    def strike(self, strike: Strike) -> bool:
        """Strikes a worker that is ready and without a fault; False if there is none."""
        targets = [slot for slot, one in enumerate(self._slots) if one.ready and not one.heal_s]
        if not targets:
            return False
        slot = targets[int(strike.aim * len(targets))]
        worker = self._slots[slot]
        if strike.kind == NETWORK:
            self._cut_off(worker, strike)
            return True
        if strike.kind == ENGINE:
            return self._kill_engine(worker, strike)
        worker.struck, worker.struck_s = strike, time.monotonic()
        worker.signal(SIGNALS[strike.kind])
        if strike.kind == SIGKILL:
            worker.process.wait()
            self._slots[slot] = self._spawn(slot)
            self._mourn(worker)
        else:
            self._leaving.append(worker)
            self._slots[slot] = self._spawn(slot)
        return True

    def heal(self) -> None:
        """Ends every network fault."""
        for worker in self._slots:
            if worker.heal_s is not None:
                worker.heal_s = None
                worker.proxy.heal()

    def stop(self) -> None:
        """Stops all workers; on return none is left, even after an error."""
        everyone = [*self._slots, *self._leaving]
        for worker in everyone:
            worker.proxy.heal()
            worker.signal(signal.SIGTERM)
        give_up_s = time.monotonic() + DRAIN_TIMEOUT_S
        while not all(worker.gone for worker in everyone) and time.monotonic() < give_up_s:
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """Kills all workers at once."""
        for worker in (*self._slots, *self._leaving):
            worker.signal(signal.SIGKILL)
            self._bury(worker)
        self._slots, self._leaving = [], []

    def _cut_off(self, worker: Worker, strike: Strike) -> None:
        gone_s = time.monotonic()
        {
            "reset": worker.proxy.reset,
            "blackhole": worker.proxy.blackhole,
            "hold": worker.proxy.hold,
            "isolate": worker.proxy.isolate,
        }[strike.fault]()
        if strike.duration_s:
            worker.heal_s = gone_s + strike.duration_s
        self._record(worker, strike.kind, gone_s, f"{strike.fault} {strike.duration_s:.1f} s")

    def _mourn(self, worker: Worker) -> None:
        assert worker.struck is not None
        kind = worker.struck.kind
        gone_s = worker.struck_s if kind == SIGKILL else time.monotonic()
        self._bury(worker)
        self._record(worker, kind, gone_s)

    def _kill_engine(self, worker: Worker, strike: Strike) -> bool:
        """False if it has none now."""
        pid = worker.find_engine()
        if pid is None:
            return False
        gone_s = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[strike.fault])
        self._record(worker, strike.kind, gone_s, strike.fault)
        return True

    def _bury(self, worker: Worker) -> None:
        worker.bury()
        for _ in range(worker.text().count(POISONED)):
            self._ledger.kills.append(Kill("poison", "", worker.hostname, time.monotonic(), {}))

    def _record(self, worker: Worker, kind: str, gone_s: float, detail: str = "") -> None:
        held = self._reader.held_by(worker.hostname)
        self._ledger.kills.append(Kill(kind, detail, worker.hostname, gone_s, held))
