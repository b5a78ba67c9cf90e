"""What two workers of three models end that change them as jobs ask, beside two that keep theirs.

    python -m benches.several_models [--minutes 20] [--favourite-s 120] [--load 1.3] [--load-s 5]

Jobs come at random, of the models by Zipf's law, and the favourite is another one every
``favourite_s``. The same jobs come to workers that change, and then to two that keep the pair of
models with most work. An engine is one that waits instead of computing, for one job at a time: the
times are then those of a simulation, in which a policy that knows all jobs beforehand decides too,
and a busy machine matters little. A pair of three models never serves more than its share of the
jobs, here about two thirds, so the ratio cannot reach 1.5.

Exits with 1 if a job of the workers that change is lost, or has other tokens than it should. The
memory is that of a worker and all its processes, while its engine is there.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benches.command import heading, main, row
from llorch_worker.client import Client
from llorch_worker.client import Job as ClientJob
from llorch_worker.worker.which_model import Terms
from tests.services import WorkerProcess, own_redis, running_worker, token_ids
from tests.toy_generation import token_id
from tests.worker.fleet_of_models import (
    TICK_S,
    Farsighted,
    Job,
    Policy,
    Simulation,
    fixed_to,
    zipf_arrivals,
)

MODELS = "abc"
STEP_S = 0.05
LAST_S = 600.0
"""How long the last jobs may take that wait at the end."""


@dataclass
class Ran:
    """What a fleet did with the jobs."""

    ended: int
    """Within the time of the trace."""
    waits_s: list[float] = field(default_factory=list)
    """From each job's coming to its first step."""
    faults: list[str] = field(default_factory=list)
    memory_mib: list[tuple[int, float]] = field(default_factory=list)
    """Of one worker, once a second: after how many changes, and how much."""


def several_models(
    minutes: float = 20.0, favourite_s: float = 120.0, load: float = 1.3, load_s: float = 5.0
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
    heading("workers", "jobs ended", "p95 wait, s")
    changing = through_workers(trace, run_s, [MODELS, MODELS], load_s)
    fixed = through_workers(trace, run_s, pair, load_s)
    came = sum(job.came_s < run_s for job in trace)
    for name, ran in (
        ("that change", changing),
        (f"that keep {pair[0]} and {pair[1]}", fixed),
        ("that change, simulated", simulated(None)),
        (f"that keep {pair[0]} and {pair[1]}, simulated", simulated(fixed_to(pair))),
        ("that know all jobs, simulated", simulated(Farsighted())),
    ):
        row(name, f"{ran.ended} of {came}", f"{_p95(ran.waits_s):.1f}")
    print(f"ratio to the fixed pair: {changing.ended / max(1, fixed.ended):.2f}")
    of_changes: defaultdict[int, list[float]] = defaultdict(list)
    for count, mib in changing.memory_mib:
        of_changes[count].append(mib)
    if changed := sorted(filter(None, of_changes)):
        first, last = changed[0], changed[-1]
        before, after = median(of_changes[first]), median(of_changes[last])
        print(
            f"memory after {first} changes {before:.1f} MiB, after {last} {after:.1f} MiB: "
            f"{after / before - 1:+.1%}"
        )
    for fault in changing.faults:
        print(fault)
    return int(bool(changing.faults))


def through_workers(
    trace: Sequence[Job],
    run_s: float,
    served: Sequence[str],
    load_s: float,
    *,
    min_resident_s: float = 10.0,
) -> Ran:
    """Sends the jobs when they come to workers of these models, each a letter. If all are served,
    looks at each job's tokens once it has ended."""
    ran = Ran(0)
    with own_redis() as server, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        workers = [
            stack.enter_context(
                running_worker(
                    server.url,
                    Path(folder),
                    name=f"w{number}",
                    max_sequences=1,
                    max_wait_s=60,
                    min_resident_s=min_resident_s,
                    TOY_LOAD_S=load_s,
                    TOY_STEP_MS=1e3 * STEP_S,
                    **_models(names),
                )
            )
            for number, names in enumerate(served)
        ]
        client = stack.enter_context(Client(server.url))
        for model in set(MODELS) - set("".join(served)):
            # Announced once, so that its jobs may be sent.
            with running_worker(server.url, Path(folder), name=f"once-{model}", model_name=model):
                pass
        sent: list[tuple[ClientJob[Any], int]] = []
        began_s, look_s, now_s = time.monotonic(), 0.0, 0.0
        while now_s < run_s:
            now_s = time.monotonic() - began_s
            while len(sent) < len(trace) and trace[len(sent)].came_s <= min(now_s, run_s):
                due = trace[len(sent)]
                tokens = max(1, round(due.left_s / STEP_S))
                submitted = client.submit(model=due.model, prompt="x", max_tokens=tokens)
                sent.append((submitted, tokens))
            if now_s >= look_s:
                look_s = now_s + 1.0
                ran.memory_mib += _memory(workers[0])
            time.sleep(0.01)
        ran.ended = sum(job.status().ended for job, _ in sent)
        if len(set("".join(served))) < len(MODELS):
            return ran
        for job, tokens in sent:
            try:
                result = job.result(timeout=LAST_S)
            except Exception as error:  # noqa: BLE001 - the others are looked at, too
                ran.faults.append(f"{job.id}: {type(error).__name__}")
                continue
            ran.waits_s.append(result.timings.queue_ms / 1e3)
            wanted = [token_id(result.seed, place) for place in range(tokens)]
            if token_ids(job.stream()) != wanted:
                ran.faults.append(f"{job.id}: not its {tokens} tokens, once each")
    return ran


def _models(names: str) -> dict[str, str]:
    """The settings of a worker of these models."""
    if len(names) == 1:
        return {"model_name": names}
    return {"models": ",".join(f"{name}.gguf" for name in names)}


def _memory(worker: WorkerProcess) -> list[tuple[int, float]]:
    if worker.find_engine() is None:
        return []
    try:
        held = psutil.Process(worker.process.pid)
        parts = [held, *held.children(recursive=True)]
        mib = sum(each.memory_info().rss for each in parts) / 2**20
    except psutil.Error:  # it has just ended
        return []
    return [(worker.text().count(" is resident after "), mib)]


def _p95(waits_s: Sequence[float]) -> float:
    return sorted(waits_s)[int(0.95 * len(waits_s))] if waits_s else 0.0


if __name__ == "__main__":
    main(several_models, "several_models")
