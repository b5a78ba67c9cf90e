"""Redis, workers, a gateway and Flower, started and stopped together."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from llorch_worker.broker.figures.fleet_client import FleetClient
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.contract.command_errors import CommandError, MissingExtra
from llorch_worker.processes.restarts import Restarts, in_words
from llorch_worker.processors import shares
from llorch_worker.settings import Settings
from llorch_worker.stack import ports, programs
from llorch_worker.stack.children import Child, Program, describe_exit, error_sentence
from llorch_worker.stack.plan import Plan
from llorch_worker.stack.programs import FLOWER, GATEWAY, REDIS, find_redis_server

POLL_S = 0.2
REDIS_START_S = 15.0
STOP_S = 10.0
PORT_RACES = 10
_TAKEN = "Address already in use"


class Stack:
    """The running children of a plan; leaving the block ends them all.

    ``on_line(name, line)`` receives their output. Leaving takes seconds, and callers should not let
    a signal interrupt it.
    """

    def __init__(self, plan: Plan, on_line: Callable[[str, str], None]) -> None:
        self._plan = plan
        self._on_line = on_line
        self._starting = True
        self._stopping = False
        self._held_back: deque[tuple[str, str]] = deque()
        self._children: dict[str, Child] = {}
        self._restarts: defaultdict[str, Restarts] = defaultdict(Restarts)
        self._exits: SimpleQueue[Child] = SimpleQueue()
        self._redis_folder: Path | None = None
        self.redis_url = plan.redis_url or ""
        planned = {FLOWER: plan.flower_port, GATEWAY: plan.gateway_port}
        self._ports = {name: port for name, port in planned.items() if port is not None}
        asked = {FLOWER: plan.flower_port_asked, GATEWAY: plan.gateway_port_asked}
        self._ports_asked = {name for name, chosen in asked.items() if chosen}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_all()
        self._say_held_back(reported=str(error or ""))

    def start(self) -> None:
        """Start the plan's programs. On return Redis answers; the others are still starting.

        Raises:
            CommandError: Redis cannot be started.
            BrokerUnavailable: the given Redis does not answer.
        """
        if self._plan.redis_url is None:
            self._start_redis()
        else:
            with FleetClient(self.redis_url) as client:
                client.ping()
        models = [
            each.model_copy(update={"redis_url": self.redis_url})
            for each in self._plan.models or (self._plan.settings,)
        ]
        own_redis = self._plan.redis_url is None
        on_cpu = [name for name, device in self._plan.workers if device == "cpu"]
        bound: dict[str, str] = {}
        if len(on_cpu) > 1 and models[0].processors is None:
            # Threads of two workers on one core would spend their time waiting for each other.
            bound = dict(zip(on_cpu, shares(len(on_cpu)), strict=True))
        for (name, device), settings in zip(self._plan.workers, cycle(models), strict=False):
            changed = {"device": device, "processors": bound.get(name, settings.processors)}
            its_own = settings.model_copy(update=changed)
            program = programs.worker(name, its_own, own_redis=own_redis)
            environment = {**program.environment, **self._plan.worker_environment}
            self._start(replace(program, environment=environment))
        for name in self._ports:
            self._start(self._server(name))

    def wait_ready(self, timeout_s: float | None = None) -> list[WorkerCard]:
        """Return the workers' announcements once every worker takes jobs.

        Raises:
            CommandError: a child ends, or ``timeout_s`` passes; the message has its last words.
        """
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        with FleetClient(self.redis_url) as client:
            names = [name for name, _ in self._plan.workers]
            waiting = set(names)
            while waiting:
                self._fail_if_ended()
                cards = self._cards(client.workers())
                waiting = set(names) - set(cards)
                if not waiting:
                    answering = client.answering({card.hostname for card in cards.values()})
                    waiting = {name for name in names if cards[name].hostname not in answering}
                if give_up_s is not None and time.monotonic() > give_up_s and waiting:
                    raise CommandError(
                        "NOT_READY",
                        f"{', '.join(sorted(waiting))} is not ready after {timeout_s:.0f} s: "
                        f"{self._children[min(waiting)].last_words()}",
                    )
        self._starting = False
        self._say_held_back()
        return [cards[name] for name in names]

    @property
    def flower_url(self) -> str | None:
        """Flower's address; None if there is no Flower."""
        return self._url(FLOWER)

    @property
    def gateway_url(self) -> str | None:
        """The gateway's address; None if there is no gateway."""
        return self._url(GATEWAY)

    def wait_for_servers(self, timeout_s: float) -> None:
        """Return once Flower and the gateway listen, as far as they were planned.

        Raises:
            CommandError: one of them ends, or ``timeout_s`` passes.
        """
        give_up_s = time.monotonic() + timeout_s
        for name in self._ports:
            # Ask the process, not the port, on which another user's server may answer.
            while not self._children[name].listens_on(self._ports[name]):
                self._fail_if_ended()
                if time.monotonic() > give_up_s:
                    raise CommandError(
                        "NOT_READY",
                        f"{name} is not ready after {timeout_s:.0f} s; llorch up --no-{name} "
                        "omits it",
                    )

    def keep_up(self, say: Callable[[str], None]) -> None:
        """Restart children that die, until interrupted; ``say`` receives a sentence for each.

        Raises:
            CommandError: the stack's own Redis died, and with it the jobs.
        """
        starts_at_s: dict[str, float] = {}
        while True:
            for child in self._ended(POLL_S):
                if child.name == REDIS:
                    raise _redis_died(child)
                now_s = time.monotonic()
                pause_s = self._restarts[child.name].pause_s(now_s - child.started_at_s)
                starts_at_s[child.name] = now_s + pause_s
                say(
                    f"{child.name} ended ({describe_exit(child.exit_code)}); "
                    f"restarting {in_words(pause_s)}"
                )
            for name, at_s in [*starts_at_s.items()]:
                if at_s <= time.monotonic():
                    del starts_at_s[name]
                    self._start(self._children[name].program)

    def drain(self) -> None:
        """Stop the workers once they have finished their jobs, without a time limit."""
        workers = self._workers()
        for child in workers:
            child.terminate()
        for child in workers:
            # In slices, so that a second Ctrl-C interrupts at once.
            while not child.wait(POLL_S):
                pass

    def kill(self, name: str) -> None:
        """Kill a worker with SIGKILL; :meth:`keep_up` restarts it."""
        self._children[name].kill()

    def jobs_lost_with_redis(self) -> int:
        """The number of jobs that wait in the stack's own Redis and will be lost; call after a
        drain."""
        if self._plan.redis_url is not None:
            return 0
        with FleetClient(self.redis_url) as client:
            fleet = client.fleet()
        of_models = sum(model.waiting + model.scheduled for model in fleet.models)
        return of_models + sum(fleet.unserved.values())

    def _settings(self) -> Settings:
        return self._plan.settings.model_copy(update={"redis_url": self.redis_url})

    def _url(self, name: str) -> str | None:
        port = self._ports.get(name)
        return None if port is None else f"http://localhost:{port}"

    def _server(self, name: str) -> Program:
        port, settings = self._ports[name], self._settings()
        if name == FLOWER:
            return programs.flower(port, settings, self._plan.flower_login)
        return programs.gateway(port, settings)

    def _fail_if_ended(self) -> None:
        for child in self._ended(POLL_S):
            if not self._move(child):
                raise _did_not_start(child)

    def _move(self, child: Child) -> bool:
        """Start a server on another port if the first was taken in the meantime."""
        name = child.name
        taken = any(_TAKEN in line for line in child.tail)
        if name not in self._ports or name in self._ports_asked or not taken:
            return False
        self._ports[name] = ports.next_free(self._ports[name] + 1)
        self._start(self._server(name))
        return True

    def _workers(self) -> list[Child]:
        names = {name for name, _ in self._plan.workers}
        return [child for name, child in self._children.items() if name in names]

    def _start(self, program: Program) -> Child:
        child = Child(program, self._pass_on, self._exits.put)
        self._children[program.name] = child
        return child

    def _pass_on(self, name: str, line: str) -> None:
        # The output of Redis and servers while they start and stop is noise. If one does not start,
        # the error has its last words.
        if name in (REDIS, FLOWER, GATEWAY) and (self._starting or self._stopping):
            return
        # If the worker ends, the error has this sentence; do not print it twice.
        if self._starting and error_sentence(line) is not None:
            self._held_back.append((name, line))
            return
        self._on_line(name, line)

    def _say_held_back(self, reported: str = "") -> None:
        """Pass on lines that were held back, except the sentence with which ``reported`` ends."""
        while self._held_back:
            name, line = self._held_back.popleft()
            if not reported.endswith(f": {error_sentence(line.strip())}"):
                self._on_line(name, line)

    def _ended(self, timeout_s: float) -> list[Child]:
        """Children that ended since the last call; waits up to ``timeout_s`` for the first."""
        ended = []
        try:
            ended.append(self._exits.get(timeout=timeout_s))
            while True:
                ended.append(self._exits.get_nowait())
        except Empty:
            pass
        for child in ended:
            child.wait(None)
        return ended

    def _stop_all(self) -> None:
        self._stopping = True
        # Redis last: a worker that loses Redis waits for it to come back. The gateway is killed,
        # because it keeps nothing and would wait for its clients.
        order = [
            *self._workers(),
            *(self._children[n] for n in (GATEWAY, FLOWER, REDIS) if n in self._children),
        ]
        for child in order:
            if child.name in (FLOWER, REDIS):
                child.terminate()
                child.wait(STOP_S)
            child.kill()
            child.wait(STOP_S)
        if self._redis_folder is not None:
            shutil.rmtree(self._redis_folder, ignore_errors=True)

    def _start_redis(self) -> None:
        server = find_redis_server()
        if server is None:
            raise MissingExtra("embedded")
        self._redis_folder = Path(tempfile.mkdtemp(prefix="llorch-redis-"))
        first = self._plan.redis_port
        for _ in range(PORT_RACES):
            # The port may be taken before Redis listens; then try another.
            port = ports.any_free_port() if first is None else ports.next_free(first)
            self.redis_url = f"redis://{ports.LOCALHOST}:{port}/0"
            child = self._start(programs.redis(server, port, self._redis_folder))
            if self._redis_answers(child, port):
                return
        raise _did_not_start(child)

    def _redis_answers(self, child: Child, port: int) -> bool:
        give_up_s = time.monotonic() + REDIS_START_S
        while time.monotonic() < give_up_s:
            if child in self._ended(0.05):
                return False
            # On a port that was taken meanwhile, another Redis would answer.
            if not child.listens_on(port):
                continue
            with FleetClient(self.redis_url) as client:
                if client.answers():
                    return True
        child.kill()
        return False

    def _cards(self, announced: list[WorkerCard]) -> dict[str, WorkerCard]:
        """The announcements of this stack's workers, by name in the plan. A worker chooses its node
        name after the card that it got."""
        here = f"@{socket.gethostname()}"
        by_pid = {card.pid: card for card in announced if card.hostname.endswith(here)}
        names = {name: self._children[name].pid for name, _ in self._plan.workers}
        return {name: by_pid[pid] for name, pid in names.items() if pid in by_pid}


def _did_not_start(child: Child) -> CommandError:
    words = child.last_words() or describe_exit(child.exit_code)
    return CommandError("DID_NOT_START", f"{child.name} could not start: {words}")


def _redis_died(child: Child) -> CommandError:
    code = child.exit_code
    # If a signal killed it, its last output is not the reason.
    words = "" if code is not None and code < 0 else f": {child.last_words()}"
    return CommandError("REDIS_DIED", f"Redis ended ({describe_exit(code)}){words}")
