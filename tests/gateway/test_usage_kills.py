"""What was counted equals the sum of the results, though workers and gateways are killed.

The engine is the toy: one token a step. A run of full size sends 10,000 jobs.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from llorch_worker.gateway.keys import new_key
from tests.gateways import GatewayProcess, running_gateway
from tests.services import WorkerProcess, own_redis, running_worker
from tests.sizes import sized

JOBS = sized(usual=50, full=10_000)
KILL_EVERY_S = sized(usual=0.3, full=1.0)
KEYS, CALLERS, POLL_S = 5, 32, 0.2
KINDS = ("prompt", "cached", "completion")
Usage = defaultdict[str, Counter[str]]
"""By tenant: tokens of each kind, and jobs."""


class Fleet:
    """Processes that are killed and replaced."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self._url, self._folder, self._stack = url, folder, stack
        self._http = stack.enter_context(httpx.Client(timeout=60))
        self._keys, entries = zip(*(new_key(f"key{n}") for n in range(KEYS)), strict=True)
        self._operator, operators = new_key("operator")
        self._file = folder / "keys.toml"
        self._file.write_text("".join(entries) + operators + "operator = true\n")
        self._born = 0
        self.kills: Counter[str] = Counter()
        self._workers = [self._worker() for _ in range(2)]
        self._gateways = [self._gateway() for _ in range(2)]

    def _worker(self) -> WorkerProcess:
        self._born += 1
        worker = running_worker(
            self._url, self._folder, name=f"w{self._born}", model_name="toy",
            max_sequences=16, lease_s=1, sweep_s=0.5, max_deaths=1000, TOY_STEP_MS=10,
        )  # fmt: skip
        return self._stack.enter_context(worker)

    def _gateway(self) -> GatewayProcess:
        self._born += 1
        folder = self._folder / f"g{self._born}"
        folder.mkdir()
        return self._stack.enter_context(running_gateway(self._url, folder, keys=self._file))

    def strike(self) -> None:
        """Kills a worker, and every second time a gateway as well; then starts others."""
        place = random.randrange(2)
        with_gateway = self.kills["workers"] % 2 == 0
        self._workers[place].process.kill()
        self.kills["workers"] += 1
        if with_gateway:
            self._gateways[place].kill()
            self.kills["gateways"] += 1
            self._gateways[place] = self._gateway()
        self._workers[place] = self._worker()

    def run(self, number: int) -> tuple[str, dict[str, Any]]:
        """Sends job ``number``, again with the same idempotency key if its gateway dies, until a
        gateway has its end; returns the name of its key, and the result."""
        key = number % KEYS
        headers = {"Authorization": f"Bearer {self._keys[key]}", "Idempotency-Key": f"{number}"}
        body = {"prompt": f"battle {number}", "max_tokens": 1 + number * 7 % 60, "seed": number}
        while True:
            with suppress(httpx.HTTPError):
                url = random.choice(self._gateways).url
                sent = self._http.post(f"{url}/v1/jobs", json=body, headers=headers)
                while sent.status_code < 400:
                    path = sent.json()["urls"]["job"]
                    found = self._http.get(f"{url}{path}", headers=headers).json()
                    if found["status"] in ("succeeded", "failed", "cancelled"):
                        return f"key{key}", found["result"]
                    time.sleep(POLL_S)
            time.sleep(POLL_S)

    def usage(self) -> Usage:
        headers = {"Authorization": f"Bearer {self._operator}"}
        answer = self._http.get(f"{self._gateways[0].url}/v1/usage", headers=headers)
        found = Usage(Counter)
        for row in answer.raise_for_status().json()["data"]:
            counts = {kind: row[f"{kind}_tokens"] for kind in KINDS}
            found[row["tenant"]].update(counts | {"jobs": row["jobs"]})
        return found


def summed(run: Callable[[int], tuple[str, dict[str, Any]]], sums: Usage) -> None:
    """Runs all jobs and adds up their results."""
    with ThreadPoolExecutor(CALLERS) as pool:
        for key, result in pool.map(run, range(JOBS)):
            counts = {kind: result["usage"].get(kind, 0) for kind in KINDS}
            sums[key].update(counts | {"jobs": 1})


def test_usage_equals_the_results_while_workers_and_gateways_are_killed(tmp_path: Path) -> None:
    sums = Usage(Counter)
    with own_redis() as server, ExitStack() as stack:
        fleet = Fleet(server.url, tmp_path, stack)
        sender = threading.Thread(target=summed, args=(fleet.run, sums), daemon=True)
        sender.start()
        # On this thread: processes are tethered to the one that started them.
        while sender.is_alive():
            sender.join(KILL_EVERY_S)
            fleet.strike()
        assert fleet.usage() == sums
        assert sum(each["jobs"] for each in sums.values()) == JOBS
        assert fleet.kills.keys() == {"workers", "gateways"}
