"""A rolling update from model A to model B under load: is every text whole, and whose is it?

    python -m benches.rolling_update [--jobs 200] [--workers 4] [--seed 1]

Starts a redis-server and workers with model A. So many jobs run at all times. One worker after the
other is replaced by one with model B under the same name of the model, with SIGTERM (and no time
to drain) or SIGKILL by turns. Each result is compared with the text that its model alone gives,
and each job's stream with its result. Both models are the story model, in Q8_0 and in Q4_0; all
computes in float32, so that equal means equal.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benches.command import main
from llorch_worker.broker.connection import connect
from llorch_worker.client import Client, Job
from llorch_worker.contract import TERMINAL_EVENTS, GenerationRequest, Restarted, Started, Tokens
from llorch_worker.engine import Engine
from llorch_worker.weights import fingerprint, open_checkpoint
from tests.made_models import made, make_trained_model
from tests.services import REAL_APP, WorkerProcess, own_redis, running_worker, wait_until
from tests.store import held_ids

NAMES = ("Lily", "Tom", "Sam", "Anna", "Max", "Mia", "Ben", "Sue")
PLACES = ("park", "house", "shop", "forest", "beach", "school", "garden", "farm")
THINGS = ("ball", "dog", "cake", "boat", "hat", "book", "bird", "kite")
TOKENS = 200
SETTLE_S = 300.0
BETWEEN_S = 4.0
"""Between the start of a worker with B and the end of one with A."""


@dataclass
class Ends:
    """Final results as they are published, by job: two for one job would show."""

    url: str
    found: Counter[str] = field(default_factory=Counter)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with connect(self.url) as store, store.pubsub() as heard:
            heard.psubscribe("celery-task-meta-*")
            while not self.stop.is_set():
                message = heard.get_message(ignore_subscribe_messages=True, timeout=0.2)
                if message is not None:
                    document = json.loads(message["data"])
                    if document["status"] in ("SUCCESS", "FAILURE", "REVOKED"):
                        self.found[document["task_id"]] += 1


def prompts(seed: int) -> list[str]:
    every = [
        f"{name} went to the {place} with a {thing}."
        for name in NAMES
        for place in PLACES
        for thing in THINGS
    ]
    random.Random(seed).shuffle(every)
    return every


def texts(model: Path, asked: list[str]) -> dict[str, str]:
    """What the model alone answers to each prompt."""
    with Engine.load(model, dtype="float32", device="cpu", max_sequences=64) as engine:
        running = {prompt: engine.submit(request(prompt)) for prompt in asked}
        return {prompt: generation.result().text for prompt, generation in running.items()}


def request(prompt: str) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True)


def update(
    client: Client,
    url: str,
    folder: Path,
    models: dict[str, Path],
    *,
    at_once: int,
    workers: int,
    seed: int,
) -> list[tuple[Job, str]]:
    """Runs the update; returns all jobs with their prompts, after their ends."""
    jobs: list[tuple[Job, str]] = []
    under_way: list[Job] = []
    asked = prompts(seed)
    options: dict[str, Any] = {
        "app": REAL_APP, "model_name": "stories", "dtype": "float32", "device": "cpu",
        "max_sequences": -(-at_once // workers), "drain_s": 0, "lease_s": 3, "sweep_s": 1,
    }  # fmt: skip

    def keep_full() -> None:
        under_way[:] = [job for job in under_way if not job.status().ended]
        while len(under_way) < at_once:
            prompt = asked[len(jobs) % len(asked)]
            under_way.append(client.submit(request(prompt)))
            jobs.append((under_way[-1], prompt))

    with ExitStack() as stack:

        def start(number: int, letter: str) -> WorkerProcess:
            name = f"{letter}{number}"
            worker = running_worker(url, folder, name=name, model=models[letter], **options)
            return stack.enter_context(worker)

        old = [start(number, "a") for number in range(workers)]
        keep_full()
        wait_until(lambda: len(held_ids(client.redis)) >= at_once, timeout_s=SETTLE_S)
        for number, worker in enumerate(old):
            start(number, "b")
            until_s = time.monotonic() + BETWEEN_S
            while time.monotonic() < until_s:
                keep_full()
                time.sleep(0.1)
            kills = number % 2
            worker.process.kill() if kills else worker.process.terminate()
            how = "SIGKILL" if kills else "SIGTERM"
            held = len(held_ids(client.redis))
            print(f"{how} to {worker.hostname}: {held} jobs run", file=sys.stderr)
        began_s = time.monotonic()
        for job, _ in jobs:
            job.result(SETTLE_S)
        print(f"all had ended {time.monotonic() - began_s:.0f} s later", file=sys.stderr)
    return jobs


def judge(
    jobs: list[tuple[Job, str]],
    texts_of: dict[str, dict[str, str]],
    letters: dict[str, str],
    ends: Counter[str],
) -> tuple[Counter[str], Counter[str]]:
    """How often each promise is broken; and what became of the jobs. ``letters``: of the models, by
    fingerprint."""
    broken: Counter[str] = Counter()
    became: Counter[str] = Counter()
    for job, prompt in jobs:
        result = job.result(1)
        letter = letters.get(result.model_fingerprint, "?")
        became[f"whole {letter.upper()}"] += 1
        broken["not the text of its model"] += texts_of[letter][prompt] != result.text
        events = [entry.event for entry in job.stream(timeout=5)]
        streamed = "".join(event.text for event in events if isinstance(event, Tokens))
        broken["stream is not the result"] += streamed != result.text
        last = sum(isinstance(event, TERMINAL_EVENTS) for event in events)
        broken["doubled"] += last != 1 or ends[job.id] != 1
        began = [event for event in events if isinstance(event, Started)]
        became["of them, begun again"] += any(isinstance(event, Restarted) for event in events)
        became["of them, resumed by another worker"] += len({e.worker for e in began}) > 1
    return broken, became


def rolling_update(
    jobs: Annotated[int, typer.Option(help="That run at any time.")] = 200,
    workers: int = 4,
    seed: int = 1,
) -> int:
    """Replace the workers of model A by those of model B under load, and judge every text."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    with tempfile.TemporaryDirectory() as name, own_redis() as server:
        folder = Path(name)
        trained = made(folder, "trained", make_trained_model)
        models = {
            letter: trained / f"{kind}.gguf" for letter, kind in (("a", "q8_0"), ("b", "q4_0"))
        }
        ends = Ends(server.url)
        hearing = threading.Thread(target=ends.run, daemon=True)
        hearing.start()
        with Client(server.url) as client:
            sent = update(
                client, server.url, folder, models, at_once=jobs, workers=workers, seed=seed
            )
            ends.stop.set()
            hearing.join()
            asked = sorted({prompt for _, prompt in sent})
            texts_of = {letter: texts(model, asked) for letter, model in models.items()}
            letters = {fingerprint(open_checkpoint(path)): it for it, path in models.items()}
            broken, became = judge(sent, texts_of, letters, ends.found)
    differ = sum(texts_of["a"][prompt] != texts_of["b"][prompt] for prompt in asked)
    print(f"{len(sent)} jobs; {differ} of {len(asked)} prompts have other texts of A and of B")
    for what, count in (*became.items(), *broken.items()):
        print(f"  {count:5} {what}")
    return int(broken.total() > 0)


if __name__ == "__main__":
    main(rolling_update, "rolling_update")
