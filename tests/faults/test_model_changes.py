"""Keepers, engines and Redis die while workers change their models: no job is lost or doubled."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from llorch_worker.client import Client, Job
from tests.services import WorkerProcess, own_redis, running_worker, token_ids, wait_until
from tests.toy_generation import token_id

MODELS = "abc"
WAVES = 3
JOBS_A_WAVE = 8
TOKENS = 5
WAIT_S = 240


@contextmanager
def running(url: str, folder: Path, name: str) -> Iterator[WorkerProcess]:
    with running_worker(
        url, folder, name=name, models="a.gguf,b.gguf,c.gguf", min_resident_s=0, max_wait_s=5,
        lease_s=2, sweep_s=1, TOY_LOAD_S=0.3, TOY_STEP_MS=5,
    ) as worker:  # fmt: skip
        yield worker


def wave(client: Client, chance: random.Random, favourite: int) -> list[Job]:
    """Jobs of all models, so that two workers have to change, and most of one."""
    in_order = [*MODELS[favourite:], *MODELS[:favourite]]
    models = [*MODELS, *chance.choices(in_order, [6, 3, 2], k=JOBS_A_WAVE - len(MODELS))]
    return [client.submit(model=model, prompt="x", max_tokens=TOKENS) for model in models]


def changes(worker: WorkerProcess) -> int:
    return worker.text().count(" changes from ")


def first_to_change(before: Mapping[WorkerProcess, int]) -> WorkerProcess:
    """Waits for a worker that has begun to change: two keep two of the three models."""
    workers = wait_until(
        lambda: [worker for worker, count in before.items() if changes(worker) > count],
        timeout_s=WAIT_S,
    )
    return workers[0]


def test_deaths_during_changes_cost_no_job(tmp_path: Path) -> None:
    chance = random.Random(1)
    with own_redis(append_only=True) as server, ExitStack() as stack:
        workers = [
            stack.enter_context(running(server.url, tmp_path, name)) for name in ("w1", "w2")
        ]
        client = stack.enter_context(Client(server.url))
        jobs: list[Job] = []
        for number in range(WAVES):
            before = {worker: changes(worker) for worker in workers}
            jobs += wave(client, chance, number % len(MODELS))
            changed = first_to_change(before)
            match number:
                case 0:
                    if (pid := changed.find_engine()) is not None:
                        psutil.Process(pid).kill()
                case 1:
                    psutil.Process(changed.process.pid).kill()
                    workers.remove(changed)
                    workers.append(stack.enter_context(running(server.url, tmp_path, "w3")))
                case 2:
                    server.kill()
                    server.start()
        for job in jobs:
            result = job.result(timeout=WAIT_S)
            ids = [token_id(result.seed, place) for place in range(TOKENS)]
            assert token_ids(job.stream()) == ids
