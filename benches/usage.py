"""Does what was counted equal the sum of the results, though workers and gateways are killed?

    python -m benches.usage [--jobs 10000] [--workers 3] [--gateways 2] [--seed 1]

Callers with several keys send jobs over HTTP to gateways that share one Redis, and read their
results. Every second or so a worker or a gateway dies by SIGKILL and is replaced; a caller whose
gateway died sends its job again, with the same idempotency key. Then the results are added up by
key and compared with ``/v1/usage``. The engine is the tests' toy: one token a step.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benches.command import main
from llorch_worker.gateway.keys import new_key
from tests.gateways import GatewayProcess, running_gateway
from tests.services import WorkerProcess, own_redis, running_worker

KEYS = 5
CALLERS = 32
POLL_S = 0.2
COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens", "jobs")
ENDED = ("succeeded", "failed", "cancelled")


class Battle:
    """Processes that are killed and replaced until :meth:`close`."""

    def __init__(self, url: str, folder: Path, workers: int, gateways: int, seed: int) -> None:
        self._url, self._folder, self._stack = url, folder, ExitStack()
        self._dice = random.Random(seed)
        self._http = self._stack.enter_context(httpx.Client(timeout=10))
        self.keys, entries = zip(*(new_key(f"key{n}") for n in range(KEYS)), strict=True)
        self.operator, operators = new_key("operator")
        self._file = folder / "keys.toml"
        self._file.write_text("".join(entries) + operators + "operator = true\n")
        self._born = 0
        self.kills: Counter[str] = Counter()
        self._workers = [self._worker() for _ in range(workers)]
        self.gateways = [self._gateway() for _ in range(gateways)]

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
        """Kills one of them and starts another: two workers, then a gateway."""
        if self.kills.total() % 3 < 2:
            place = self._dice.randrange(len(self._workers))
            self._workers[place].process.kill()
            self._workers[place] = self._worker()
            self.kills["workers"] += 1
        else:
            place = self._dice.randrange(len(self.gateways))
            self.gateways[place].kill()
            self.gateways[place] = self._gateway()
            self.kills["gateways"] += 1

    def run(self, number: int) -> tuple[str, dict[str, Any]]:
        """Sends job ``number`` until a gateway has its end; returns the key and the end."""
        key = number % KEYS
        headers = {"Authorization": f"Bearer {self.keys[key]}", "Idempotency-Key": f"{number}"}
        body = {"prompt": f"battle {number}", "max_tokens": 1 + number * 7 % 60, "seed": number}
        while True:
            with suppress(httpx.HTTPError):
                url = random.choice(self.gateways).url
                sent = self._http.post(f"{url}/v1/jobs", json=body, headers=headers)
                while sent.status_code < 400:
                    path = sent.json()["urls"]["job"]
                    found = self._http.get(f"{url}{path}", headers=headers).json()
                    if found["status"] in ENDED:
                        return f"key{key}", found
                    time.sleep(POLL_S)
            time.sleep(POLL_S)

    def usage(self) -> dict[str, Counter[str]]:
        """What was counted, by key."""
        headers = {"Authorization": f"Bearer {self.operator}"}
        answer = self._http.get(f"{self.gateways[0].url}/v1/usage", headers=headers, timeout=60)
        found: dict[str, Counter[str]] = {}
        for row in answer.raise_for_status().json()["data"]:
            counts = {name: row[name] for name in COUNTED}
            found.setdefault(row["key"], Counter()).update(counts)
        return found

    def close(self) -> None:
        self._stack.close()


def fight(
    folder: Path, jobs: int, workers: int = 3, gateways: int = 2, every_s: float = 1, seed: int = 1
) -> tuple[dict[str, Counter[str]], dict[str, Counter[str]], Counter[str]]:
    """What was counted, and the sums of the results, both by key; and how many were killed."""
    with own_redis() as server:
        battle = Battle(server.url, folder, workers, gateways, seed)
        results: dict[str, Counter[str]] = {}
        over = threading.Event()

        def send_all() -> None:
            with ThreadPoolExecutor(CALLERS) as pool:
                for done, (key, end) in enumerate(pool.map(battle.run, range(jobs)), 1):
                    used = end["result"]["usage"]
                    counts = {f"{name}_tokens": used.get(name, 0) for name in
                              ("prompt", "cached", "completion")}  # fmt: skip
                    results.setdefault(key, Counter()).update(counts | {"jobs": 1})
                    if done % 500 == 0:
                        print(f"{done} jobs, {dict(battle.kills)}", file=sys.stderr)
            over.set()

        sender = threading.Thread(target=send_all, daemon=True)
        sender.start()
        try:
            # On this thread: processes are tethered to the one that started them.
            while not over.wait(every_s) and sender.is_alive():
                battle.strike()
            return battle.usage(), results, battle.kills
        finally:
            battle.close()


def run(
    jobs: Annotated[int, typer.Option(min=1)] = 10_000,
    workers: int = 3,
    gateways: int = 2,
    seed: int = 1,
) -> int:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counted, results, kills = fight(Path(folder), jobs, workers, gateways, seed=seed)
    total: Counter[str] = Counter()
    for each in results.values():
        total.update(each)
    print(f"{total['jobs']} jobs in {time.monotonic() - began_s:.0f} s; killed {dict(kills)}")
    print(f"results {dict(total)}")
    print("usage equals the results" if counted == results else f"usage differs: {counted}")
    return int(counted != results)


if __name__ == "__main__":
    main(run, "usage")
