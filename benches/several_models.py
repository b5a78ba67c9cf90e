"""What two workers of three models end that change them as jobs ask, beside two that keep theirs.

    python -m benches.several_models [--minutes 20] [--favourite-s 120] [--load 1.3] [--load-s 5]

Jobs come at random, of the models by Zipf's law, and the favourite is another one every
``favourite_s``. The same jobs come to workers that change, to two that keep the pair of models with
most work, and to workers that change while an engine, a keeper or Redis is killed amid a change
every ``kill_s``, all at the same time. An engine is one that waits instead of computing, for one
job at a time: the times are then those of a simulation, in which a policy that knows all jobs
beforehand decides too, and a busy machine matters little. A pair of three models never serves more
than its share of the jobs, here about two thirds, so the ratio cannot reach 1.5.

Exits with 1 if a job of the workers that change is lost, or has other tokens than it should, or if
a keeper grows by 2% once it has had each model. An engine's memory goes with its process, of
which a worker has one at a time.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
from redis.exceptions import RedisError

from benches.command import heading, main, row
from llorch_worker.client import Client
from llorch_worker.client import Job as ClientJob
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.worker.which_model import Terms
from tests.services import RedisServer, WorkerProcess, own_redis, running_worker, token_ids
from tests.toy_generation import token_id
from tests.waiting import wait_until
from tests.worker.fleet_of_models import (
    TICK_S,
    Farsighted,
    Job,
    Policy,
    Simulation,
    fixed_to,
    zipf_arrivals,
)

MODELS: Final = "abc"
STEP_S: Final = 0.05
LAST_S: Final = 600.0
"""How long the last jobs may take that wait at the end."""
MOST_GROWTH: Final = 0.02
KILLED: Final = ("engine", "keeper", "redis")
BEGINS: Final = "changes from "
ENDS: Final = (" is resident after ", " is set aside ", "stays with ")


@dataclass
class Memory:
    """Of a worker's keeper, in MiB."""

    before: float = 0.0
    """While it loads its first engine."""
    after: list[tuple[int, float]] = field(default_factory=list)
    """Once a second: after how many changes, and how much."""
    most_engines: int = 0

    def medians(self) -> dict[int, float]:
        """By the number of changes."""
        of_changes: defaultdict[int, list[float]] = defaultdict(list)
        for count, mib in self.after:
            of_changes[count].append(mib)
        return {count: median(found) for count, found in sorted(of_changes.items()) if count}

    @property
    def growth(self) -> float:
        """From when each model has been resident to the last change, as a share."""
        found = [mib for count, mib in self.medians().items() if count >= len(MODELS)]
        return found[-1] / found[0] - 1 if found else 0.0


@dataclass
class Ran:
    """What a fleet did with the jobs."""

    ended: int = 0
    """Within the time of the trace."""
    waits_s: list[float] = field(default_factory=list)
    """From each job's coming to its first step."""
    faults: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    kills: Counter[str] = field(default_factory=Counter)


def several_models(
    minutes: float = 20.0,
    favourite_s: float = 120.0,
    load: float = 1.3,
    load_s: float = 5.0,
    kill_s: float = 30.0,
) -> int:
    """Compare workers that change their models with a fixed pair. ``load``: seconds of work that
    come a second."""
    run_s, terms = 60 * minutes, Terms(max_wait_s=60.0, min_resident_s=10.0, look_s=TICK_S)
    trace = zipf_arrivals(
        random.Random(1), MODELS, round(run_s * load), load=load, favourite_s=favourite_s
    )

    def simulated(policy: Policy | None) -> Ran:
        jobs = [Job(job.model, job.came_s, job.left_s) for job in trace]
        took = dict.fromkeys(MODELS, load_s)
        done = Simulation(jobs, 2, took, terms, policy=policy).run(run_s).ended
        return Ran(len(done), [(job.began_s or 0.0) - job.came_s for job in done])

    work_s: defaultdict[str, float] = defaultdict(float)
    for job in trace:
        work_s[job.model] += job.left_s
    pair = max(combinations(MODELS, 2), key=lambda each: sum(work_s[name] for name in each))
    with ThreadPoolExecutor() as at_once:
        runs = [
            at_once.submit(
                through_workers, trace, run_s, served, load_s, kill_s=every_s, fresh=True
            )
            for served, every_s in (([MODELS] * 2, None), (pair, None), ([MODELS] * 2, kill_s))
        ]
        changing, fixed, killed = (run.result() for run in runs)
    came = sum(job.came_s < run_s for job in trace)
    heading("workers", "jobs ended", "jobs/s", "p95 wait, s", "lost or doubled")
    for name, ran in (
        ("that change", changing),
        (f"that keep {pair[0]} and {pair[1]}", fixed),
        ("that change, simulated", simulated(None)),
        (f"that keep {pair[0]} and {pair[1]}, simulated", simulated(fixed_to(pair))),
        ("that know all jobs, simulated", simulated(Farsighted())),
        (f"that change amid kills ({_counted(killed.kills)})", killed),
    ):
        p95_s = f"{_p95(ran.waits_s):.1f}" if ran.waits_s else ""
        rate = f"{ran.ended / run_s:.3f}"
        row(name, f"{ran.ended} of {came}", rate, p95_s, len(ran.faults))
    print(f"ratio to the fixed pair: {changing.ended / max(1, fixed.ended):.2f}")
    memory, medians = changing.memory, changing.memory.medians()
    if medians:
        after = ", ".join(
            f"{mib:.1f} after {count}"
            for count, mib in medians.items()
            if count in (1, len(MODELS), max(medians))
        )
        print(
            f"RSS of a keeper, MiB: {memory.before:.1f} before the first load, {after} changes "
            f"({memory.growth:+.2%}); engines at a time: at most {memory.most_engines}"
        )
    for fault in (*changing.faults, *killed.faults):
        print(fault)
    has_grown = memory.growth > MOST_GROWTH or memory.most_engines > 1
    return int(bool(changing.faults or killed.faults or has_grown))


def through_workers(
    trace: Sequence[Job],
    run_s: float,
    served: Sequence[str],
    load_s: float,
    *,
    min_resident_s: float = 10.0,
    kill_s: float | None = None,
    fresh: bool = False,
) -> Ran:
    """Sends the jobs when they come to workers of these models, each a letter. If all are served,
    looks at each job's tokens once it has ended. ``kill_s``: how often something is killed;
    ``fresh``: see :class:`.WorkerProcess`."""
    settings = {
        "max_sequences": 1,
        "max_wait_s": 60,
        "min_resident_s": min_resident_s,
        "TOY_LOAD_S": load_s,
        "TOY_STEP_MS": 1e3 * STEP_S,
    }
    with running_fleet(served, fresh=fresh, durable=kill_s is not None, **settings) as fleet:
        began_s, look_s, kill_at_s, now_s = time.monotonic(), 0.0, kill_s or float("inf"), 0.0
        to_come = deque(trace)
        while now_s < run_s:
            now_s = time.monotonic() - began_s
            while to_come and to_come[0].came_s <= min(now_s, run_s):
                due = to_come.popleft()
                fleet.submit(due.model, max(1, round(due.left_s / STEP_S)))
            if now_s >= look_s:
                look_s = now_s + min(1.0, load_s / 4)
                fleet.measure()
                if now_s >= kill_at_s and fleet.kill_amid_a_change():
                    kill_at_s = now_s + (kill_s or 0.0)
            time.sleep(0.01)
        fleet.ran.ended = sum(job.status().ended for job, _ in fleet.sent)
        if {*"".join(served)} == {*MODELS}:
            fleet.look_at_results()
    return fleet.ran


class Fleet:
    """Workers of these models on a Redis of their own. Keepers and a Redis that are killed start
    again."""

    def __init__(
        self, redis: RedisServer, folder: Path, served: Sequence[str], settings: dict[str, Any]
    ) -> None:
        self.ran = Ran()
        self.sent: list[tuple[ClientJob[Any], int]] = []
        """Each job with its tokens."""
        self._redis = redis
        self._folder = folder
        self._served = served
        self._settings = settings
        self._client = Client(redis.url)
        self._starts: Counter[int] = Counter()
        self.workers = [self._start(number) for number in range(len(served))]
        first = self.workers[0]
        wait_until(first.find_engine)
        self.ran.memory.before = _rss_mib(first.process.pid)

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
        self._client.close()

    def _start(self, number: int) -> WorkerProcess:
        self._starts[number] += 1
        names = self._served[number]
        models = (
            {"model_name": names}
            if len(names) == 1
            else {"models": ",".join(f"{name}.gguf" for name in names)}
        )
        log = self._folder / f"w{number}-{self._starts[number]}.log"
        return WorkerProcess(self._redis.url, log, name=f"w{number}", **(models | self._settings))

    def submit(self, model: str, tokens: int) -> None:
        """Sends a job once, however often Redis ends meanwhile."""
        key = f"{len(self.sent)}"
        while True:
            try:
                job = self._client.submit(
                    model=model, prompt="x", max_tokens=tokens, idempotency_key=key
                )
            except (BrokerUnavailable, RedisError):
                time.sleep(0.1)
            else:
                self.sent.append((job, tokens))
                return

    def look_at_results(self) -> None:
        """Waits for the jobs' ends, and notes which are lost or have other tokens than they
        should."""
        for job, tokens in self.sent:
            try:
                result = job.result(timeout=LAST_S)
            except Exception as error:  # noqa: BLE001 - the others are looked at, too
                self.ran.faults.append(f"{job.id}: {type(error).__name__}")
                continue
            self.ran.waits_s.append(result.timings.queue_ms / 1e3)
            wanted = [token_id(result.seed, place) for place in range(tokens)]
            if token_ids(job.stream()) != wanted:
                self.ran.faults.append(f"{job.id}: not its {tokens} tokens, once each")

    def measure(self) -> None:
        """Notes the memory of the first worker."""
        worker, memory = self.workers[0], self.ran.memory
        memory.most_engines = max(memory.most_engines, len([*worker.engines()]))
        count = worker.text().count(ENDS[0])
        memory.after.append((count, _rss_mib(worker.process.pid)))

    def kill_amid_a_change(self) -> bool:
        """Kills one of :data:`KILLED` in turn; False if no worker changes its model now."""
        changing = [number for number in range(len(self.workers)) if self._changes(number)]
        if not changing:
            return False
        [number, *_] = changing
        worker, what = self.workers[number], KILLED[self.ran.kills.total() % len(KILLED)]
        if what == "engine":
            if (pid := worker.find_engine()) is None:
                return False
            os.kill(pid, signal.SIGKILL)
        elif what == "keeper":
            worker.process.kill()
            worker.wait_exit()
            self.workers[number] = self._start(number)
        else:
            self._redis.kill()
            self._redis.start()
        self.ran.kills[what] += 1
        return True

    def _changes(self, number: int) -> bool:
        text = self.workers[number].text()
        return text.rfind(BEGINS) > max(map(text.rfind, ENDS))


@contextmanager
def running_fleet(served: Sequence[str], *, durable: bool, **settings: Any) -> Iterator[Fleet]:
    """Workers that are ready. ``durable``: Redis keeps what it has replied to."""
    options = ("--appendfsync", "always") if durable else ()
    with ExitStack() as stack:
        server = stack.enter_context(own_redis(append_only=durable, options=options))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = Fleet(server, folder, served, settings)
        stack.callback(fleet.close)
        for worker in fleet.workers:
            worker.wait_ready()
        for model in set(MODELS) - set("".join(served)):
            # Announced once, so that its jobs may be sent.
            with running_worker(server.url, folder, name=f"once-{model}", model_name=model):
                pass
        yield fleet


def _rss_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 2**20


def _counted(kills: Counter[str]) -> str:
    return ", ".join(f"{count} of {what}" for what, count in kills.items()) or "none"


def _p95(waits_s: Sequence[float]) -> float:
    return sorted(waits_s)[int(0.95 * len(waits_s))]


if __name__ == "__main__":
    main(several_models, "several_models")
